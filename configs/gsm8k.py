"""Qwen3-0.6B on GSM8K, one GPU shared by engine and trainer.

Two GPUs: --generator_gpus 1 --trainer_gpus 1 --gpu_memory_utilization 0.85
Data: python launch/make_gsm8k.py FOLDER; model: any local folder, --model PATH.
"""

run_dir = "runs/gsm8k-{seed}-{time}"
model = "models/Qwen3-0.6B"
train_data = "data/gsm8k/train.jsonl"
val_data = "data/gsm8k/test.jsonl"
steps = 200
val_period = 50
save_period = 50

prompts_per_step = 32
group_size = 8
max_model_len = 2048
max_response_tokens = 1024
thinking = False

generator_gpus = 0.5
trainer_gpus = 0.5
gpu_memory_utilization = 0.4

lr = 1e-6
warmup_lr = 1e-7
row_tokens = 8192
