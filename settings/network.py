"""Declares the settings of the network, its optimizer and its layout over ranks."""

import dataclasses
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass as checked_dataclass

from settings import conflicts

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
Rate = Annotated[float, Field(ge=0, lt=1)]


@checked_dataclass(frozen=True, config=STRICT)
class MegatronSettings:
    """Megatron-Core's own arguments by name, merged last into the run's own."""

    model: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Arguments of TransformerConfig: {"moe_permute_fusion": True}."""
    ddp: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Arguments of DistributedDataParallelConfig: {"grad_reduce_in_fp32": False}."""
    optimizer: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Arguments of OptimizerConfig: {"use_precision_aware_optimizer": True}."""

    def __post_init__(self) -> None:
        """Refuses arguments that the run itself sets. Raises ValueError."""
        conflicts.of_megatron(self)


@checked_dataclass(frozen=True, config=STRICT)
class PolicySettings:
    """The network, its optimizer, and the ranks that share it."""

    kind: Literal["fsdp", "megatron"] = "fsdp"
    """Any dense Hugging Face model under FSDP2, or policy/megatron's families on Megatron-Core."""
    ranks: PositiveInt = 1
    """Number of trainer ranks, each with one process and at most one GPU."""
    lr: PositiveFloat = 3e-6
    """AdamW's learning rate at the end of the warm-up."""
    warmup_lr: NonNegativeFloat = 3e-7
    """Learning rate of the first update."""
    warmup_steps: NonNegativeInt = 10
    """Number of updates of linear warm-up."""
    lr_schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Learning rate after the warm-up; wsd: constant, then linear over wsd_decay_steps."""
    lr_decay_steps: NonNegativeInt = 0
    """First update with rate min_lr, counted from the warm-up's start; unused if constant."""
    wsd_decay_steps: NonNegativeInt = 0
    """Number of updates at the end of lr_decay_steps over which a wsd schedule decays."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of the schedule."""
    betas: tuple[Rate, Rate] = (0.9, 0.999)
    """AdamW's decay rates for the gradient's mean and square."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decoupled weight decay for all weights except norms and biases."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are clipped to this global norm."""
    row_tokens: PositiveInt = 65536
    """Most tokens in a packed row. A longer sample gets its own row; a longer pair is refused."""
    activation_checkpointing: bool | Literal["auto"] = "auto"
    """Recompute activations in backward; auto: if memory is short, and always under Megatron."""
    attention: str = "auto"
    """attn_implementation of transformers, for fsdp; auto: torch's varlen on a GPU, else sdpa."""
    lora_rank: NonNegativeInt = 0
    """Train adapters of this rank, for fsdp; 0: train the whole model."""
    lora_alpha: PositiveFloat = 32.0
    """The output of an adapter is scaled by lora_alpha / lora_rank."""
    lora_targets: tuple[str, ...] = ()
    """Linear layers that get an adapter, such as q_proj; empty: all but the head."""
    tp: PositiveInt = 1
    """Number of ranks that share each matrix, and the sequence between matrices; Megatron only."""
    pp: PositiveInt = 1
    """Number of pipeline stages; Megatron only."""
    cp: PositiveInt = 1
    """Number of ranks that share each sequence; Megatron only."""
    ep: PositiveInt = 1
    """Number of ranks that share the experts, possibly across replicas; Megatron only."""
    replay_routing: bool = False
    """Train with the experts that the engine chose for each token (R3); Megatron only."""
    megatron: MegatronSettings = dataclasses.field(default_factory=MegatronSettings)
    """Additional Megatron-Core arguments."""

    @property
    def recomputes(self) -> bool:
        """True if activations are recomputed, and for "auto" until policy/gpu_memory.py decides."""
        return self.activation_checkpointing is not False

    @property
    def replicas(self) -> int:
        """Number of copies of the policy; each copy's ranks train their own rows."""
        return self.ranks // (self.tp * self.pp * self.cp)

    def replica_of(self, rank: int) -> int:
        """Returns the replica of a trainer rank: tp varies fastest, then cp, replicas, pp."""
        return rank // (self.tp * self.cp) % self.replicas

    def __post_init__(self) -> None:
        """Refuses layouts that cannot work, naming both sides. Raises ValueError."""
        conflicts.of_policy(self)
