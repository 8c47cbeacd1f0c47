"""Whole tensors of a checkpoint on rank 0, from the shards of a model on all ranks.

    ranks that share a tensor  --gather-->  its owner, the first of them  --send-->  rank 0

No other rank takes part. An owner sends many tensors at once: those of a pipeline stage, or a
layer's experts.
"""

import itertools
import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

from policy.megatron.hf_weights import Entry, Place, Weights

MESSAGE_BYTES = 256 << 20  # that a rank sends to rank 0 at once


@torch.no_grad()
def export(weights: Weights) -> Iterator[tuple[str, Tensor | None]]:
    """The checkpoint's names, with whole tensors on rank 0 and None on the others; collective."""
    for entries in messages(weights):
        for (place, _, _), whole in zip(entries, collect(weights, entries), strict=True):
            if whole is None:
                yield from dict.fromkeys(place.names()).items()
            else:
                yield from named(whole, place)


def messages(weights: Weights) -> Iterator[list[Entry]]:
    """The model, cut into messages: tensors of one owner and type."""
    for (owner, dtype), run in itertools.groupby(weights.catalog, lambda e: (e.owner, e.dtype)):
        message: list[Entry] = []
        used = 0
        for entry in run:
            size = math.prod(weights.shape(entry.place)) * dtype.itemsize
            if message and (owner == 0 or used + size > MESSAGE_BYTES):
                yield message
                message = []
                used = 0
            message.append(entry)
            used += size
        yield message


def collect(weights: Weights, entries: list[Entry]) -> list[Tensor | None]:
    """The whole tensors of a message on rank 0; None for each on the other ranks."""
    rank = dist.get_rank()
    owner = entries[0].owner
    shares = mpu.get_tensor_model_parallel_src_rank() == owner
    wholes: list[Tensor | None] = [
        gather(weights.local[place.key].tensor.detach(), place)
        if rank == owner or shares and place.ranks > 1
        else None
        for place, _, _ in entries
    ]
    if rank == owner != 0:
        dist.send(torch.cat([whole.flatten() for whole in wholes if whole is not None]), 0)
    if rank == 0 != owner:
        shapes = [weights.shape(place) for place, _, _ in entries]
        sizes = [math.prod(shape) for shape in shapes]
        flat = torch.empty(sum(sizes), dtype=entries[0].dtype, device=weights.device)
        dist.recv(flat, owner)
        return [part.view(s) for part, s in zip(flat.split(sizes), shapes, strict=True)]
    return wholes if rank == 0 else [None] * len(entries)


def named(whole: Tensor, place: Place) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor in the checkpoint for each part of a whole Megatron tensor."""
    cuts = zip(place.pieces, whole.split(place.sizes(), place.dim), strict=True)
    rows: dict[str, list[Tensor]] = {}
    for piece, cut in sorted(cuts, key=lambda pair: pair[0]):
        rows.setdefault(piece.name, []).append(cut)
    for name in place.names():
        yield name, torch.cat(rows[name], place.dim)


def gather(tensor: Tensor, place: Place) -> Tensor:
    """The shards of the ranks that share a tensor, in their order."""
    if place.ranks == 1:
        return tensor.contiguous()
    shards = [torch.empty_like(tensor) for _ in range(place.ranks)]
    dist.all_gather(shards, tensor.contiguous(), group=mpu.get_tensor_model_parallel_group())
    return torch.cat(shards, place.dim)
