"""SmolLM2-135M-Instruct learns rules of form by adapters, on a laptop's CPU: about 20 minutes."""

run_dir = "runs/smollm2-{seed}-{time}"
model = "models/smollm2"
data = {"train": "data/form/train.jsonl", "val": "data/form/validation.jsonl"}
steps = 40
val_period = 20
save_period = 20

prompts_per_step = 4
group_size = 8
train_parts = 4
sampling = {"max_model_len": 128, "max_response_tokens": 48}

gpu_share = 0.5
engine = {"args": {"max_num_seqs": 32}}
policy = {
    "lora_rank": 16,
    "lr": 2e-4,
    "warmup_lr": 2e-5,
    "warmup_steps": 3,
    "row_tokens": 512,
    "activation_checkpointing": False,
}
