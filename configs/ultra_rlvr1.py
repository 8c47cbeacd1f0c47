"""RLVR of Nemotron 3 Ultra to step 128, from the SFT model: 123 B200 nodes, 5 for judges."""

from configs._ultra import *

run_dir = "runs/ultra_rlvr"
model = "models/ultra_sft"
data = {
    "train": "data/ultra/rlvr.jsonl",
    "val": "data/ultra/rlvr1/val-split.jsonl",
    "val_samples": 2,
}
steps = 128
save_period = 8
rollout_workers = 64

prompts_per_step = 512
sampling = sampling | {"max_model_len": 49152, "max_response_tokens": 49152}
services = services | {"genrm": services["genrm"] | {"answer_length": 0.25}}
loss = {"skip_zero_advantage": False}
engine = engine | {"count": 86}
policy = policy | {"ranks": 256, "lr": 4e-6, "warmup_lr": 4e-7, "row_tokens": 49152}
