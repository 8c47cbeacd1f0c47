"""Which network trains: policy/fsdp.py or policy/megatron, by the settings."""

import os
from typing import TYPE_CHECKING, cast

from policy import Policy

if TYPE_CHECKING:
    from settings.network import PolicySettings


def open_policy(
    model: str,
    settings: "PolicySettings",
    temperature: float = 1.0,
    seed: int = 1,
    collective_seconds: float = 3600.0,
    reference_of: Policy | None = None,
) -> Policy:
    """The network in the folder `model`, or a frozen one: what `reference_of` was before training.

    Needs torch's default process group, which all trainer ranks have joined.
    `collective_seconds` is the deadline of a collective call. Beside adapters the frozen one has
    logprobs alone, and no memory of its own.
    """
    if settings.lora_rank and reference_of is not None:
        from policy.lora import Base

        return cast(Policy, Base(reference_of))
    trainable = reference_of is None
    return network(model, settings, temperature, seed, collective_seconds, trainable)


def network(
    model: str,
    settings: "PolicySettings",
    temperature: float,
    seed: int,
    collective_seconds: float,
    trainable: bool = False,
) -> Policy:
    """The same with a frozen network of any folder: a teacher's."""
    # Rows differ in length: what the allocator reserves grows, so that fragments need not add up.
    # torch reads the variable at its first allocation on a GPU.
    if not os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}:
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if settings.kind == "megatron":
        from policy.megatron.policy import MegatronPolicy

        return MegatronPolicy(model, settings, temperature, seed, collective_seconds, trainable)
    from policy.fsdp import FSDPPolicy

    return FSDPPolicy(model, settings, temperature, trainable)
