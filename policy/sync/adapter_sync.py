"""Sends updates that carry only adapters: engines add them to the checkpoint that both sides have.

    W = W_0 + scale * left @ right        left [rows, rank], right [rank, columns], float32

W_0 is read from the policy's folder, mapped into memory: the workers of a node share its pages, and
a new engine needs only the next update. The sum equals the weight in an update of merged weights.
So vLLM's layers, the decoding speed and the read-back by `Proof` are the same, and nothing drifts
over updates. vLLM's LoRA requests would cost additional kernels in every layer and engine step.

Norms, biases and other tensors that are not matrices are sent whole. For each matrix the trainer
also sends its product with a few vectors, computed without merging. Engines compare that product
with their own sum's, which reveals a different base, or an adapter that is ignored, stale, or for
another layer, rank or scale (ms-swift#9855 trained for days on ignored adapters). A change to a row
by less than 1.4e-5 of its norm is not noticed: it may be rounding.

Axes, as suffixes:  R rows of a matrix    C its columns    K rank    V vectors
"""

import contextlib
import json
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from policy import WeightMeta
from policy.sync.verification import ROUNDING, vectors

if TYPE_CHECKING:
    from policy import Policy
    from policy.fsdp import FSDPPolicy
    from policy.sync.weight_sync import Source

AT_ONCE = 1 << 24  # matrix elements that are merged at once, in float32: 64 MiB
LEFT, RIGHT, PRODUCT = ":left", ":right", ":product"  # suffixes to a matrix's name, in an update


class Matrices(NamedTuple):
    """A checkpoint's tensors by name, each with the open file that has it."""

    homes: dict[str, safe_open]

    @classmethod
    def of(cls, folder: str, stack: contextlib.ExitStack) -> "Matrices":
        """Opens a folder's tensors for as long as `stack` is open; empty without safetensors files.

        Opens only the files that transformers reads, because others may be older. Raises OSError if
        one of those files is missing.
        """
        index = Path(folder, "model.safetensors.index.json")
        weight_map = json.loads(index.read_text())["weight_map"] if index.exists() else {}
        names = sorted({*weight_map.values()}) or ["model.safetensors"]
        paths = [Path(folder, name) for name in names]
        if not weight_map and not paths[0].exists():  # weights in another format
            return cls({})
        files = [stack.enter_context(safe_open(path, "pt")) for path in paths]
        return cls({name: file for file in files for name in file.keys()})  # noqa: SIM118

    def lacking(self, metas: list[WeightMeta]) -> str | None:
        """Returns the first of these matrices that the folder lacks or has in a different shape."""
        for meta in metas:
            if not is_matrix(meta.shape):
                continue
            home = self.homes.get(meta.name)
            if not home or tuple(home.get_slice(meta.name).get_shape()) != meta.shape:
                return meta.name
        return None


def is_matrix(shape: Sequence[int]) -> bool:
    """Returns True if a tensor is read from the folder; others are sent whole."""
    return len(shape) > 1


def matrix(tensor: Tensor) -> Tensor:
    """Returns a tensor as [R, C]."""
    return tensor.flatten(1)


class AdapterUpdate:
    """The tensors that the trainers send for a policy with adapters; a `Source` of `Sender`."""

    def __init__(self, policy: "FSDPPolicy"):
        self.policy = policy
        self.base = Base(policy.folder, policy.adapters.scale, policy.weight_metas())

    def weight_metas(self) -> list[WeightMeta]:
        """Describes the tensors that `named_weights` yields, in its order."""
        metas = []
        for meta in self.base.metas:
            if not is_matrix(meta.shape):
                metas.append(meta)
                continue
            if sides := self.policy.adapters.sides(meta.name):
                left, right = sides
                metas.append(WeightMeta(meta.name + LEFT, tuple(left.shape), "float32"))
                metas.append(WeightMeta(meta.name + RIGHT, tuple(right.shape), "float32"))
            probe = (meta.shape[0], len(vectors(1, torch.device("cpu"))))
            metas.append(WeightMeta(meta.name + PRODUCT, probe, "float32"))
        return metas

    @torch.no_grad()
    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields adapters, products and tensors that are not matrices, by name; collective."""
        for name, tensor, dtype in self.policy._weights():
            if not is_matrix(tensor.shape):
                yield name, whole(tensor.to(dtype, copy=True))
                continue
            v_VC = vectors(tensor.shape[1:].numel(), tensor.device)  # tensor[0] would be gathered
            product_RV = whole(local_product(tensor, v_VC))
            if sides := self.policy.adapters.sides(name):
                left_RK, right_KC = map(whole, sides)
                yield name + LEFT, left_RK
                yield name + RIGHT, right_KC
                product_RV += self.base.scale * (left_RK @ (right_KC @ v_VC.T))
            yield name + PRODUCT, product_RV


def has_adapters(policy: "Policy") -> "TypeGuard[FSDPPolicy]":
    """Returns True if a policy trains adapters."""
    return bool(getattr(getattr(policy, "adapters", None), "layers", None))


def outgoing(policy: "Policy") -> "Source":
    """Returns the source of a policy's updates: only adapters, if engines can read the rest.

    Engines can if the policy's folder has its matrices, with the same names and shapes.
    """
    if not has_adapters(policy):
        return policy
    update = AdapterUpdate(policy)
    with contextlib.ExitStack() as stack:
        lacking = Matrices.of(policy.folder, stack).lacking(update.base.metas)
    if lacking:
        print(
            f"updates carry merged weights, not adapters alone: {policy.folder} has no "
            f"tensor {lacking} of the same shape",
            flush=True,
        )
        return policy
    return update


def whole(tensor: Tensor) -> Tensor:
    """Gathers all shards of a tensor, on each rank; collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_product(tensor: Tensor, v_VC: Tensor) -> Tensor:
    """Returns the product of a matrix and vectors, [R, V], sharded like the matrix."""
    if not isinstance(tensor, DTensor):
        return matrix(tensor).float() @ v_VC.T
    rows_RV = matrix(tensor.to_local()).float() @ v_VC.T
    shape = torch.Size((len(tensor), len(v_VC)))
    return DTensor.from_local(
        rows_RV, tensor.device_mesh, tensor.placements, shape=shape, stride=(len(v_VC), 1)
    )


@contextlib.contextmanager
def exact_products() -> Iterator[None]:
    """Multiplies float32 in float32: under TF32, which an engine may choose, products differ."""
    chosen = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(chosen)


class Base(NamedTuple):
    """The checkpoint to which engines add adapters. It is sent to them, pickled, within `Wire`."""

    folder: str
    scale: float
    metas: list[WeightMeta]  # describe the merged weights, in the order in which parts are sent

    def merged(
        self, sent: Iterator[tuple[str, Tensor]], device: torch.device
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields whole weights from an `AdapterUpdate`'s tensors, as they arrive.

        Raises RuntimeError naming a matrix that differs from the trainer's.
        """
        with contextlib.ExitStack() as stack:
            files = Matrices.of(self.folder, stack)
            if lacking := files.lacking(self.metas):
                raise RuntimeError(
                    f"{self.folder}, as node {platform.node()} sees it, no longer has {lacking}, "
                    "but updates add adapters to it"
                )
            for meta in self.metas:
                name, tensor = next(sent)
                if not is_matrix(meta.shape):
                    yield name, tensor
                    continue
                sides = None
                if name == meta.name + LEFT:
                    sides = tensor.to(device), next(sent)[1].to(device)
                    name, tensor = next(sent)
                base = files.homes[meta.name].get_tensor(meta.name).to(device)
                with exact_products():
                    made = self.add(meta, base, sides, tensor.to(device))
                yield meta.name, made

    def add(
        self, meta: WeightMeta, base: Tensor, sides: tuple[Tensor, Tensor] | None, sent_RV: Tensor
    ) -> Tensor:
        """Merges one weight. Raises RuntimeError if its product differs from the trainer's."""
        made = torch.empty(meta.shape, dtype=getattr(torch, meta.dtype), device=base.device)
        base_RC, made_RC = matrix(base), matrix(made)
        v_VC = vectors(base_RC.shape[1], base.device)
        wrong = torch.zeros(len(base), dtype=torch.bool, device=base.device)
        size = 1 + AT_ONCE // base_RC.shape[1]
        for i in range(0, len(base), size):
            rows = slice(i, i + size)
            part_RC = base_RC[rows].to(torch.float32, copy=True)
            if sides:
                part_RC.addmm_(sides[0][rows], sides[1], alpha=self.scale)
            made_RC[rows] = part_RC
            gap_R = (part_RC @ v_VC.T - sent_RV[rows]).norm(dim=1)
            wrong[rows] = ~(gap_R <= ROUNDING[torch.float32] * part_RC.norm(dim=1))
        if wrong.any():  # the negated comparison also finds NaN
            row = int(wrong.int().argmax())
            raise RuntimeError(
                f"{meta.name}, row {row}: {self.folder} and the adapter that was sent do not "
                "add up to the trainer's weight"
            )
        return made
