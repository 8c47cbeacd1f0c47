"""A tiny model learns to repair three small bugs, with an agent in a container for each answer."""

run_dir = "runs/tiny-swe-{seed}-{time}"
model = "models/tiny_swe"
data = {"train": "data/tiny_swe/train.jsonl", "val": "data/tiny_swe/validation.jsonl"}
steps = 40
val_period = 20
save_period = 0
sample_period = 20

prompts_per_step = 3
group_size = 6
sampling = {"max_model_len": 128, "max_response_tokens": 48}

gpu_share = 0.5
engine = {"args": {"max_num_seqs": 18}}
policy = {"lr": 1.5e-4, "warmup_lr": 1.5e-5, "row_tokens": 256, "activation_checkpointing": False}
services = {"images": "data/tiny_swe/images", "tool_parser": "hermes"}

timeouts = {"start": 180.0, "rollout": 240.0, "train": 120.0, "sync": 60.0}
