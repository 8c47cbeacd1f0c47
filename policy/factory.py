"""Opens the network that the settings choose, from policy/fsdp.py or policy/megatron."""

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
    """Opens the network in the folder `model`, frozen if it is the reference of another policy.

    `reference_of` is the policy whose initial weights the reference has. If that policy has
    adapters, the reference shares its memory and offers only `logprobs`. Needs torch's default
    process group, which all trainer ranks have joined. `collective_seconds` is the deadline of a
    collective call.
    """
    if settings.lora_rank and reference_of is not None:
        from policy.fsdp import FSDPPolicy
        from policy.lora import Base

        assert isinstance(reference_of, FSDPPolicy)  # no other policy has adapters
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
    """Opens the network in any folder, such as a teacher's; frozen by default."""
    # Rows differ in length, which would fragment GPU memory: expandable segments prevent that.
    # torch reads the variable at its first allocation on a GPU.
    if not os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}:
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if settings.kind == "megatron":
        from policy.megatron.policy import MegatronPolicy

        return MegatronPolicy(model, settings, temperature, seed, collective_seconds, trainable)
    from policy.fsdp import FSDPPolicy

    return FSDPPolicy(model, settings, temperature, trainable)
