"""GSM8K as in configs/gsm8k.py, but with adapters of rank 32, at ten times the learning rate."""

from configs.gsm8k import *

run_dir = "runs/gsm8k-lora-{seed}-{time}"
policy = policy | {"lora_rank": 32, "lr": 1e-5, "warmup_lr": 1e-6}
