"""A tiny model learns not to call undeclared tools: three minutes on two cores."""

run_dir = "runs/tiny-dpo-{seed}-{time}"
model = "models/tiny_tools"
data = {
    "train": "data/tiny_tools/train_pairs.jsonl",
    "val": "data/tiny_tools/validation_pairs.jsonl",
}
steps = 160
val_period = 40
save_period = 0

pairs_per_step = 64
loss = {"beta": 0.1}
policy = {"lr": 3e-4, "warmup_lr": 3e-5, "row_tokens": 512, "activation_checkpointing": False}

timeouts = {"start": 180.0, "train": 120.0}
