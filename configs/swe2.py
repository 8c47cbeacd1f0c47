"""SWE 2 of Nemotron 3 Super, whole episodes of an agent, after SWE 1: 64 B200 nodes."""

from configs.swe1 import *

run_dir = "runs/swe2"
model = "runs/swe1/step_000795/hf"
data = {"train": "data/swe2/train.jsonl", "val": "data/swe2/val.jsonl"}
steps = 80
save_period = 2
val_period = 100

prompts_per_step = 16
group_size = 32
sampling = sampling | {"max_model_len": 196608, "max_response_tokens": 196608}
policy = policy | {"row_tokens": 196608}
