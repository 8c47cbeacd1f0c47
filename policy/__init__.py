"""Defines the interface of the network being trained; its settings are in settings/network.py.

`open_policy` (policy/factory.py) opens a policy. policy/fsdp.py trains any dense Hugging Face
causal LM; policy/megatron trains models that have Mamba layers or experts, or that need tensor,
pipeline, context or expert parallelism.

Axes, as suffixes:  T tokens of a packed row    N sequences in that row
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup


OWNER = "GRPO_ASYNC_ACTOR"  # environment variable: pid of the actor process that runs an engine


class WeightMeta(NamedTuple):
    """Name, shape and type of one tensor of a weight update."""

    name: str  # in the Hugging Face checkpoint
    shape: tuple[int, ...]
    dtype: str  # torch's name: "bfloat16"


class Row(Protocol):
    """A packed row: N sequences end to end; every rank of a replica has the same T tokens."""

    tokens_T: "Tensor"  # int64
    positions_T: "Tensor"  # int64, from 0 in each sequence; keeps sequences apart in attention
    seq_T: "Tensor"  # int64, the index of each token's sequence in the row
    mask_T: "Tensor"  # bool, True for trained tokens; never for the first of a sequence
    # One array [tokens, expert layers, experts] per sequence, as in Sample; None: no replay.
    routes_N: "list[np.ndarray] | None"
    # A row may also have `allowed`, an `Allowed`: logprobs are then computed over each token's set.


AnyRow = TypeVar("AnyRow", bound=Row)
Stats = TypeVar("Stats")


def on(device: "torch.device", row: AnyRow) -> AnyRow:
    """Returns a copy of a row with its tensors on this device."""
    moved = copy.copy(row)
    for name, x in vars(row).items():
        if hasattr(x, "to"):
            vars(moved)[name] = x.to(device)
    return moved


LossFn = Callable[["Tensor", AnyRow], tuple["Tensor", Stats]]  # (logp_T, row) -> (loss, stats)


class Policy(Protocol):
    """The network of one trainer rank.

    Its methods are collective over the trainer ranks, except `weight_metas`.
    """

    device: "torch.device"  # the device that computes rows
    dp_group: "ProcessGroup | None"  # the ranks that train different rows; None: all ranks
    reports: bool  # True on one rank of each replica: the others compute the same rows

    def forward_backward(
        self, rows: Sequence[AnyRow], loss_fn: LossFn[AnyRow, Stats], more: bool = False
    ) -> list[Stats]:
        """Adds up the gradients of `loss_fn(logp_T, row) -> (loss, stats)`; returns all stats.

        `logp_T` [T] are float32 logprobs of the row's own tokens at the sampling temperature, with
        gradient; 0 outside the mask. Every rank passes the same number of rows. `loss_fn` is called
        once per row, in order. A row whose mask is all False adds nothing; it keeps a rank that has
        fewer rows in step with the others. `more` is True if more rows follow before the optimizer
        step.
        """

    def logprobs(self, rows: Sequence[AnyRow]) -> list["Tensor"]:
        """Returns `logp_T` [T] of each row, without gradient."""

    def optimizer_step(self, grad_scale: float = 1.0) -> dict[str, float]:
        """Scales the summed gradients, clips their norm, takes an AdamW step and zeroes gradients.

        Returns metrics. Raises FloatingPointError on every rank if the norm is not finite; no
        weight changes in that case.
        """

    def weight_metas(self) -> list[WeightMeta]:
        """Describes the tensors that `named_weights` yields, in its order; no communication."""

    def named_weights(self) -> Iterator[tuple[str, "Tensor | None"]]:
        """Yields the checkpoint's tensor names and, on rank 0, whole tensors; tied tensors once.

        On other ranks the tensor may be None.
        """

    def save(self, dir: str) -> Callable[[], None]:
        """Copies this rank's share to memory; returns a function that writes it during training."""

    def load(self, dir: str) -> None:
        """Resumes, bitwise, from what `save` wrote, on any number of replicas."""

    def export_hf(self, dir: str) -> Callable[[], None]:
        """Copies a model for transformers and vLLM to memory; returns a function that writes it.

        Each rank may copy only a share of it.
        """
