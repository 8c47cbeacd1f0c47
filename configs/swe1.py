"""SWE 1 of Nemotron 3 Super, single turns of an agent, after RLVR 3: 64 B200 nodes."""

from configs._super import *

run_dir = "runs/swe1"
model = "runs/rlvr3/step_000415/hf"
data = {"train": "data/swe1/train-split.jsonl", "val": "data/swe1/val-split.jsonl"}
steps = 795
save_period = 5
val_period = 10

prompts_per_step = 64
sampling = sampling | {"max_model_len": 131072, "max_response_tokens": 131072}
advantage = advantage | {"clip": (-100.0, 100.0), "overlong_filtering": True}
engine = engine | {
    "count": 32,
    "tensor_parallel": 8,
    "args": engine["args"] | {"enable_prefix_caching": True},
}
policy = policy | {
    "lr": 1e-6,
    "row_tokens": 131072,
    "tp": 8,
    "cp": 8,
    "ep": 8,
    "megatron": policy["megatron"]
    | {"ddp": policy["megatron"]["ddp"] | {"overlap_param_gather": False}},
}
