"""Qwen3-0.6B on GSM8K, with one GPU shared by engine and trainer.

Two GPUs: --gpu_share 1 --engine.args '{"gpu_memory_utilization": 0.85}'
Data: python launch/make_gsm8k.py FOLDER; FOLDER holds GSM8K's train.jsonl and test.jsonl.
"""

run_dir = "runs/gsm8k-{seed}-{time}"
model = "Qwen/Qwen3-0.6B"
data = {"train": "data/gsm8k/train.jsonl", "val": "data/gsm8k/test.jsonl"}
steps = 200
val_period = 50
save_period = 50

prompts_per_step = 32
group_size = 8
sampling = {
    "max_model_len": 2048,
    "max_response_tokens": 1024,
    "chat_template_kwargs": {"enable_thinking": False},
}

gpu_share = 0.5
engine = {"args": {"gpu_memory_utilization": 0.4}}
policy = {"lr": 1e-6, "warmup_lr": 1e-7, "row_tokens": 8192}
