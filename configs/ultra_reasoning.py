"""The reasoning teacher of Nemotron 3 Ultra, after RLVR: 64 B200 nodes, 2 of them for the judge."""

from configs._ultra import *

run_dir = "runs/ultra_reasoning"
model = "runs/ultra_rlvr/step_000178/hf"
data = {
    "train": "data/ultra/reasoning/train-split.jsonl",
    "val": "data/ultra/reasoning/val-split.jsonl",
    "val_samples": 2,
}
steps = 100
save_period = 5

prompts_per_step = 128
loss = {"skip_zero_advantage": False}
engine = engine | {"count": 30}
policy = policy | {"ranks": 256, "ep": 32}
