"""Shared values of the RL stages of Nemotron 3 Ultra (docs/ultra.md), on B200 nodes of 8 GPUs."""

seed = 42
val_period = 10000
save_before = 1500
rollout_workers = 32

sampling = {"chat_template_kwargs": {"enable_thinking": True, "truncate_history_thinking": False}}
advantage = {
    "clip": (-20.0, 20.0),
    "penalties": {"tool_call": -5.0},
    "low_effort": {
        "weight": 0.1,
        "tokens": 15000,
        "penalty": 1.0,
        "marker": "{reasoning effort: efficient}",
    },
    "zero_rewards": ("reasoning_is_answer", "empty_answer", "inner_eos", "think_tags"),
}
correction = {"low": 0.2}
engine = {
    "tensor_parallel": 8,
    "args": {
        "gpu_memory_utilization": 0.85,
        "mamba_ssm_cache_dtype": "float32",
        "enable_expert_parallel": True,
    },
}
policy = {
    "kind": "megatron",
    "tp": 8,
    "cp": 8,
    "ep": 64,
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
    "judges": {
        "general": {"model": "general"},
        "safety": {"model": "safety"},
        "genrm": {
            "model": "genrm",
            "sampling": {"temperature": 1.0, "top_p": 0.95, "max_tokens": 24576},
        },
    },
    "genrm": {"style": 0.0},
}
timeouts = {"start": 7200.0, "rollout": 7200.0, "train": 7200.0}
