"""Qwen3-1.7B on a blend of GSM8K and MATH, with one 80 GB GPU shared by engine and trainer.

Two GPUs: --gpu_share 1 --engine.args '{"gpu_memory_utilization": 0.85}'
Data: python launch/make_gsm8k.py data/math_blend/train.jsonl gsm8k=A.jsonl math=B.jsonl, and
the same for test.jsonl.
"""

run_dir = "runs/math_blend-{seed}-{time}"
model = "Qwen/Qwen3-1.7B"
data = {"train": "data/math_blend/train.jsonl", "val": "data/math_blend/test.jsonl"}
steps = 200
val_period = 50
save_period = 50

prompts_per_step = 64
group_size = 8
sampling = {
    "max_model_len": 4096,
    "max_response_tokens": 3072,
    "chat_template_kwargs": {"enable_thinking": False},
}

gpu_share = 0.5
engine = {"args": {"gpu_memory_utilization": 0.5}}
policy = {"lr": 1e-6, "warmup_lr": 1e-7, "row_tokens": 8192}
