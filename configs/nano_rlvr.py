"""RLVR of Nemotron 3 Nano, from the SFT model: synchronous, on 32 H100 nodes."""

run_dir = "runs/nano_rlvr"
model = "models/nano_sft"
data = {
    "train": "data/nano/train/data.jsonl",
    "val": "data/nano/val/data.jsonl",
    "val_samples": 4,
}
seed = 42
steps = 720
val_period = 5
save_period = 10
save_before = 1200
rollout_workers = 16

prompts_per_step = 128
max_lag = 0
sampling = {"max_model_len": 49152, "max_response_tokens": 49152}
advantage = {"clip": (-float("inf"), float("inf")), "overlong_filtering": True}
correction = {"high": float("inf")}
loss = {"skip_zero_advantage": False}
services = {
    "reasoning_parser": "nemotron_v3",
    "tool_parser": "qwen3_coder",
    "workplace": "data/workplace",
}

engine = {
    "count": 32,
    "tensor_parallel": 4,
    "args": {"gpu_memory_utilization": 0.8, "mamba_ssm_cache_dtype": "float32"},
}
policy = {
    "kind": "megatron",
    "ranks": 128,
    "row_tokens": 49152,
    "tp": 2,
    "pp": 2,
    "cp": 4,
    "ep": 8,
    "megatron": {
        "model": {"moe_permute_fusion": True},
        "ddp": {
            "grad_reduce_in_fp32": False,
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
        },
        "optimizer": {"use_precision_aware_optimizer": True},
    },
}
timeouts = {"start": 3600.0, "rollout": 7200.0, "train": 7200.0}
