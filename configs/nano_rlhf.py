"""RLHF of Nemotron 3 Nano, after its RLVR: 32 H100 nodes, plus 4 for the judge."""

from configs.nano_rlvr import *

run_dir = "runs/nano_rlhf"
model = "runs/nano_rlvr/step_000720/hf"
data = data | {
    "train": "data/nano_rlhf/train-split.jsonl",
    "val": "data/nano_rlhf/val-split.jsonl",
}
steps = 200

services = {
    "judges": {"genrm": {"model": "genrm"}},
    "genrm": {"reasoning_length": 0.5, "answer_length": 0.5, "style": 0.0},
}
