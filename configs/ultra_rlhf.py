"""The RLHF teacher of Nemotron 3 Ultra, after RLVR: 32 B200 nodes, 2 of them for the judge."""

from configs.ultra_ifbench import *

run_dir = "runs/ultra_rlhf"
data = data | {
    "train": "data/ultra/rlhf/train-split.jsonl",
    "val": "data/ultra/rlhf/val-split.jsonl",
}

services = services | {
    "genrm": services["genrm"]
    | {
        "reasoning_bonus": 0.0,
        "answer_bonus": 0.0,
        "reasoning_length": 0.0,
        "answer_length": 0.0,
    }
}
