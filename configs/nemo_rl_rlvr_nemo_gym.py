"""The variant `nemo_gym` of nemo_rl_rlvr: rows of mathematics, code and tool use."""

from configs.nemo_rl_rlvr import *

run_dir = "runs/nemo_rl_rlvr_nemo_gym"
data = {
    "train": "data/nemo_gym/train-split.jsonl",
    "val": "data/nemo_gym/val-split.jsonl",
    "val_samples": 2,
}
prompts_per_step = 16
advantage = {"penalties": {"tool_call": -5.0, "thinking": -5.0}}
loss = {"updates_per_batch": 1}
services = {"tool_parser": "llama3_json"}
