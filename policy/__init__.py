"""The network being trained: its interface. Its settings are in settings/network.py.

`open_policy` (policy/factory.py) makes one: policy/fsdp.py trains any dense Hugging Face causal LM,
policy/megatron those that need tensor, pipeline, context or expert parallelism, Mamba layers or
experts.

Axes, as suffixes:  T tokens of a packed row    N sequences in that row
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup


OWNER = "GRPO_ASYNC_ACTOR"  # the variable that names the process around an engine


class WeightMeta(NamedTuple):
    """What one tensor of a weight update looks like."""

    name: str  # in the Hugging Face checkpoint
    shape: tuple[int, ...]
    dtype: str  # of torch: "bfloat16"


class Row(Protocol):
    """A packed row: N sequences end to end, the same T tokens on every rank of a replica."""

    tokens_T: "Tensor"  # int64
    positions_T: "Tensor"  # int64, from 0 in each sequence: what keeps them apart in attention
    seq_T: "Tensor"  # int64, which sequence of the row
    mask_T: "Tensor"  # bool, trained tokens; never the first of a sequence
    routes_N: "list[Any] | None"  # of each [its tokens, expert layers, experts], as Sample has them
    # It may have `allowed` as well, an `Allowed`: the logprobs are over each token's set then.


AnyRow = TypeVar("AnyRow", bound=Row)


def on(device: "torch.device", row: AnyRow) -> AnyRow:
    """A copy of a row whose tensors are on this device."""
    moved = copy.copy(row)
    vars(moved).update({name: x.to(device) for name, x in vars(row).items() if hasattr(x, "to")})
    return moved


LossFn = Callable[["Tensor", AnyRow], tuple["Tensor", Any]]  # (logp_T, row) -> (loss, stats)


class Policy(Protocol):
    """The network of one trainer rank.

    Its methods are collective over the trainer ranks; `weight_metas` alone is not.
    """

    device: "torch.device"  # where rows are computed
    dp_group: "ProcessGroup | None"  # the ranks with rows of their own; None: all
    reports: bool  # one rank of a replica does; the others computed the same rows

    def forward_backward(
        self, rows: Sequence[AnyRow], loss_fn: LossFn[AnyRow], more: bool = False
    ) -> list[Any]:
        """Adds up the gradients of `loss_fn(logp_T, row) -> (loss, stats)`; returns all stats.

        `logp_T` [T] are float32 logprobs of the row's own tokens at the sampling temperature, with
        gradient; 0 outside its mask. Every rank passes equally many rows. `loss_fn` is called once
        for each row, in order. A row whose mask is all False adds nothing: it keeps a rank with
        fewer rows in step. `more`: other rows follow before the optimizer step.
        """

    def logprobs(self, rows: Sequence[AnyRow]) -> list["Tensor"]:
        """`logp_T` [T] of each row, without gradient."""

    def optimizer_step(self, grad_scale: float = 1.0) -> dict[str, float]:
        """Scales the summed gradients, clips their norm, takes a step of AdamW and zeroes them.

        Returns metrics. Raises FloatingPointError on every rank where the norm is not finite; no
        weight has changed then.
        """

    def weight_metas(self) -> list[WeightMeta]:
        """What `named_weights` yields, in its order; no communication."""

    def named_weights(self) -> Iterator[tuple[str, "Tensor | None"]]:
        """Checkpoint names, one at a time, tied ones once; on rank 0 with the whole tensor.

        On other ranks the tensor may be None.
        """

    def save(self, dir: str) -> Callable[[], object]:
        """Copies this rank's share to memory. What it returns writes it, beside the training."""

    def load(self, dir: str) -> None:
        """Continues from what `save` wrote, bitwise, on any number of replicas."""

    def export_hf(self, dir: str) -> Callable[[], None]:
        """Copies a model for transformers and vLLM to memory. What it returns writes the model.

        Each rank may have a share of it.
        """
