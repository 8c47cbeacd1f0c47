"""The instruction teacher of Nemotron 3 Ultra, after RLVR: 35 B200 nodes, 5 for judges."""

from configs._ultra import *

run_dir = "runs/ultra_ifbench"
model = "runs/ultra_rlvr/step_000178/hf"
data = {
    "train": "data/ultra/ifbench/train-split.jsonl",
    "val": "data/ultra/ifbench/val-split.jsonl",
    "val_samples": 2,
}
steps = 100
save_period = 10
save_before = 2400

prompts_per_step = 128
sampling = sampling | {"max_model_len": 49152, "max_response_tokens": 49152}
loss = {"skip_zero_advantage": False}
engine = engine | {"count": 14}
policy = policy | {"ranks": 128, "lr": 2.5e-6, "warmup_lr": 4e-7, "row_tokens": 49152}
