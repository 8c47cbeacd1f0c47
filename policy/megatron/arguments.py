"""Builds Megatron-Core's configurations from a run's settings; policy.megatron overrides them."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig
from torch import Tensor

if TYPE_CHECKING:
    from settings.network import PolicySettings

# A value of TransformerConfig; a function is an activation.
Field = bool | int | float | str | None | torch.dtype | Callable[[Tensor], Tensor]
Given = TypeVar("Given")


def transformer_config(
    settings: "PolicySettings", fields: dict[str, Field], dtype: torch.dtype
) -> TransformerConfig:
    """Returns a network's configuration: architecture `fields`, layout, and no dropout."""
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
        "calculate_per_token_loss": True,  # else Megatron averages gradients
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
    """Returns the configuration of the wrapper that sums gradients over rows and ranks."""
    ours = {"use_distributed_optimizer": True, "grad_reduce_in_fp32": True}
    return DistributedDataParallelConfig(**ours | settings.megatron.ddp)


def optimizer_config(settings: "PolicySettings", dtype: torch.dtype) -> OptimizerConfig:
    """Returns the configuration of AdamW, with its state spread over the replicas."""
    ours = {
        "optimizer": "adam",
        "lr": settings.lr,
        "weight_decay": settings.weight_decay,
        "adam_beta1": settings.betas[0],
        "adam_beta2": settings.betas[1],
        "clip_grad": settings.max_grad_norm,
        "use_distributed_optimizer": True,
        "bf16": dtype == torch.bfloat16,
        "params_dtype": dtype,
    }
    return OptimizerConfig(**ours | with_dtypes(settings.megatron.optimizer))


def with_dtypes(given: Mapping[str, Given]) -> dict[str, Given | torch.dtype]:
    """Returns the arguments with torch's types in place of their names, such as "bfloat16"."""
    found: dict[str, Given | torch.dtype] = dict(given)
    for name, value in given.items():
        if name.endswith("_dtype") and isinstance(value, str):
            found[name] = getattr(torch, value, value)
    return found
