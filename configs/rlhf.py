"""RLHF of Nemotron 3 Super, after SWE 2: 72 B200 nodes, 8 of them for the judge."""

from configs._super import *

run_dir = "runs/rlhf"
model = "runs/swe2/step_000080/hf"
data = {
    "train": "data/rlhf/train-split.jsonl",
    "val": "data/rlhf/val-split.jsonl",
    "val_samples": 2,
}
steps = 195
save_period = 4

prompts_per_step = 128
sampling = sampling | {"max_model_len": 49152, "max_response_tokens": 49152}
loss = loss | {"kl_coef": 1e-4}
services = services | {"genrm": {"reasoning_length": 0.3, "answer_length": 0.35, "style": 0.05}}
engine = engine | {"count": 64, "tensor_parallel": 4}
policy = policy | {"lr": 1e-6, "row_tokens": 49152, "tp": 4, "cp": 4, "ep": 8}
