"""The SWE teacher of Nemotron 3 Ultra, whole episodes of an agent, after RLVR: 64 B200 nodes."""

from configs._ultra import *

run_dir = "runs/ultra_swe"
model = "runs/ultra_rlvr/step_000178/hf"
data = {"train": "data/ultra/swe/train.jsonl", "val": "data/ultra/swe/val.jsonl", "val_samples": 2}
steps = 960
save_period = 5
save_before = 1800

prompts_per_step = 32
sampling = sampling | {"max_model_len": 196608, "max_response_tokens": 196608}
advantage = advantage | {
    "clip": (-100.0, 100.0),
    "penalties": advantage["penalties"] | {"thinking": -5.0},
}
loss = {"skip_zero_advantage": False}
engine = engine | {
    "count": 32,
    "args": engine["args"] | {"gpu_memory_utilization": 0.8, "enable_expert_parallel": False},
}
policy = policy | {"ranks": 256, "cp": 32, "ep": 32, "row_tokens": 196608}
