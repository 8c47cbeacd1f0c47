"""The default: a 1M-parameter model learns on a laptop CPU, with all components of a cluster."""

run_dir = "runs/tiny-{seed}-{time}"
model = "models/tiny"
data = {"train": "data/tiny/train.jsonl", "val": "data/tiny/validation.jsonl"}
steps = 160
val_period = 40
save_period = 0
sample_period = 40

prompts_per_step = 7
group_size = 16
sampling = {"max_model_len": 128, "max_response_tokens": 64}

gpu_share = 0.5
engine = {"args": {"max_num_seqs": 10}}
policy = {"lr": 1.5e-4, "warmup_lr": 1.5e-5, "row_tokens": 256, "activation_checkpointing": False}

timeouts = {"start": 180.0, "rollout": 60.0, "train": 120.0, "sync": 60.0}
