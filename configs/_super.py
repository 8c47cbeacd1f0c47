"""Shared values of all RL stages of Nemotron 3 Super (docs/recipe.md), on 8-GPU nodes."""

seed = 42
val_period = 10000
save_before = 1800
rollout_workers = 32
train_parts = 8  # a step of RLVR 1 takes 256 s instead of 292: docs/scale.md, training in parts

sampling = {"chat_template_kwargs": {"enable_thinking": True, "truncate_history_thinking": False}}
advantage = {"penalties": {"tool_call": -5.0, "thinking": -5.0}}
loss = {"skip_zero_advantage": False}
engine = {"args": {"gpu_memory_utilization": 0.8, "mamba_ssm_cache_dtype": "float32"}}
policy = {
    "kind": "megatron",
    "ranks": 256,
    "megatron": {
        "model": {"moe_permute_fusion": True},
        "ddp": {"grad_reduce_in_fp32": False, "overlap_param_gather": True},
        "optimizer": {"use_precision_aware_optimizer": True},
    },
}
services = {
    "reasoning_parser": "nemotron_v3",
    "tool_parser": "qwen3_coder",
    "lean": "data/lean",
    "images": "data/images",
    "workplace": "data/workplace",
    "judges": {name: {"model": name} for name in ("general", "safety", "genrm")},
}
timeouts = {"start": 3600.0, "rollout": 7200.0, "train": 7200.0}
