"""Megatron-Core's configurations: the values of a run, overridden by policy.megatron."""

from typing import TYPE_CHECKING, Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig

if TYPE_CHECKING:
    from settings.network import PolicySettings


def transformer_config(
    settings: "PolicySettings", fields: dict[str, Any], dtype: torch.dtype
) -> TransformerConfig:
    """The configuration of a network: `fields` of its architecture, its layout, no dropout."""
    ours = {
        "tensor_model_parallel_size": settings.tp,
        "sequence_parallel": settings.tp > 1,
        "pipeline_model_parallel_size": settings.pp,
        "context_parallel_size": settings.cp,
        "expert_model_parallel_size": settings.ep,
        "expert_tensor_parallel_size": 1,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "variable_seq_lengths": True,
        "calculate_per_token_loss": True,  # or Megatron would average what is to be summed
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "perform_initialization": False,
        "use_cpu_initialization": not torch.cuda.is_available(),
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "apply_rope_fusion": True,
        "moe_token_dispatcher_type": "alltoall",
    }
    return TransformerConfig(**fields | ours | with_dtypes(settings.megatron.model))


def ddp_config(settings: "PolicySettings") -> DistributedDataParallelConfig:
    """The configuration of the wrapper that sums gradients over rows and ranks."""
    ours = {"use_distributed_optimizer": True, "grad_reduce_in_fp32": True}
    return DistributedDataParallelConfig(**ours | settings.megatron.ddp)


def optimizer_config(settings: "PolicySettings", dtype: torch.dtype) -> OptimizerConfig:
    """The configuration of AdamW, with its state spread over the replicas."""
    ours = {"optimizer": "adam", "lr": settings.lr, "weight_decay": settings.weight_decay}
    ours |= {"adam_beta1": settings.betas[0], "adam_beta2": settings.betas[1]}
    ours |= {"clip_grad": settings.max_grad_norm, "use_distributed_optimizer": True}
    ours |= {"bf16": dtype == torch.bfloat16, "params_dtype": dtype}
    return OptimizerConfig(**ours | with_dtypes(settings.megatron.optimizer))


def with_dtypes(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments with torch's types in place of their names, such as "bfloat16"."""
    named = {k: v for k, v in given.items() if k.endswith("_dtype") and isinstance(v, str)}
    return given | {name: getattr(torch, text, text) for name, text in named.items()}
