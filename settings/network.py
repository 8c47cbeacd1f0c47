"""The settings of the network, its optimizer and its layout over ranks."""

import dataclasses
from typing import Any, Literal

from pydantic import ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass as checked_dataclass

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
# Megatron's arguments that the run itself sets: another value would break it.
OWN_MEGATRON_ARGS = {
    "model": (
        "tensor_model_parallel_size",
        "sequence_parallel",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "params_dtype",
        "pipeline_dtype",
        "bf16",
        "variable_seq_lengths",
        "calculate_per_token_loss",
        "perform_initialization",
        "use_cpu_initialization",
    ),
    "ddp": ("use_distributed_optimizer", "average_in_collective"),
    "optimizer": (
        "optimizer",
        "lr",
        "weight_decay",
        "clip_grad",
        "use_distributed_optimizer",
        "bf16",
        "params_dtype",
    ),
}


@checked_dataclass(frozen=True, config=STRICT)
class MegatronSettings:
    """Megatron-Core's own arguments by name, merged last into those of the run."""

    model: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Of TransformerConfig: {"moe_permute_fusion": True}."""
    ddp: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Of DistributedDataParallelConfig: {"grad_reduce_in_fp32": False}."""
    optimizer: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Of OptimizerConfig: {"use_precision_aware_optimizer": True}."""

    def __post_init__(self) -> None:
        """Refuses arguments that the run itself sets. Raises ValueError."""
        for part, names in OWN_MEGATRON_ARGS.items():
            for name in names:
                if name in getattr(self, part):
                    own = "which the run itself sets"
                    raise ValueError(f"policy.megatron.{part} sets {name!r}, {own}")


@checked_dataclass(frozen=True, config=STRICT)
class PolicySettings:
    """The network, its optimizer, and the ranks that share it."""

    kind: Literal["fsdp", "megatron"] = "fsdp"
    """Any dense Hugging Face model under FSDP2, or policy/megatron's families on Megatron-Core."""
    ranks: PositiveInt = 1
    """Trainer ranks, one process and at most one GPU each."""
    lr: PositiveFloat = 3e-6
    """AdamW learning rate, constant after the warm-up."""
    warmup_lr: NonNegativeFloat = 3e-7
    """Learning rate of the first update."""
    warmup_steps: NonNegativeInt = 10
    """Updates of linear warm-up."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW decoupled weight decay."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are clipped to this global norm."""
    row_tokens: PositiveInt = 65536
    """Capacity of a packed row. A longer sample gets a row of its own; a longer pair is refused."""
    activation_checkpointing: bool = True
    """Recompute activations in the backward pass."""
    attention: str = "auto"
    """attn_implementation of transformers, for fsdp; auto: torch's varlen on a GPU, else sdpa."""
    lora_rank: NonNegativeInt = 0
    """Train adapters of this rank on every linear layer, for fsdp; 0: train the whole model."""
    tp: PositiveInt = 1
    """Trainer ranks that share every matrix, and the sequence between them; Megatron only."""
    pp: PositiveInt = 1
    """Pipeline stages of layers; Megatron only."""
    cp: PositiveInt = 1
    """Trainer ranks that share every sequence; Megatron only."""
    ep: PositiveInt = 1
    """Trainer ranks that share the experts; they may belong to several replicas. Megatron only."""
    replay_routing: bool = False
    """Train with the experts that the engine chose for each token (R3); Megatron only."""
    megatron: MegatronSettings = dataclasses.field(default_factory=MegatronSettings)
    """What else Megatron-Core can be told."""

    @property
    def replicas(self) -> int:
        """Groups of trainer ranks that hold one copy of the policy. Each has rows of its own."""
        return self.ranks // (self.tp * self.pp * self.cp)

    def replica_of(self, rank: int) -> int:
        """The replica that a trainer rank belongs to: tp varies fastest, then cp, replicas, pp."""
        return rank // (self.tp * self.cp) % self.replicas

    def __post_init__(self) -> None:
        """Refuses layouts that cannot work, naming both sides. Raises ValueError."""
        shared = self.tp * self.pp * self.cp
        unit = 2 * self.cp * self.tp
        megatron = self.kind == "megatron"
        product = f"tp * pp * cp = {self.tp} * {self.pp} * {self.cp}"
        rules = (
            (
                megatron or shared == self.ep == 1,
                f"{product}, ep = {self.ep} need policy.kind = 'megatron', not 'fsdp'",
            ),
            (
                megatron or not self.replay_routing,
                "replay_routing = True needs policy.kind = 'megatron', not 'fsdp'",
            ),
            (
                megatron or self.megatron == MegatronSettings(),
                "megatron needs policy.kind = 'megatron', not 'fsdp'",
            ),
            (
                not (megatron and self.lora_rank),
                f"lora_rank = {self.lora_rank} needs policy.kind = 'fsdp', not 'megatron'",
            ),
            (self.ranks % shared == 0, f"ranks = {self.ranks} is no multiple of {product}"),
            (
                self.ranks // self.pp % self.ep == 0,
                f"ep = {self.ep} must divide ranks / pp = {self.ranks // self.pp}",
            ),
            (
                self.cp == 1 or self.row_tokens % unit == 0,
                f"row_tokens = {self.row_tokens} is no multiple of 2 * cp * tp = {unit}:"
                f" try {self.row_tokens // unit * unit or unit}",
            ),
        )
        for holds, message in rules:
            if not holds:
                raise ValueError(f"policy: {message}")
