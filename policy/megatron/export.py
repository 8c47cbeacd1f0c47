"""Gathers a checkpoint's whole tensors on rank 0, from a model's shards on all ranks.

    ranks that share a tensor  --gather-->  its owner, the first of them  --send-->  rank 0

No other rank takes part. An owner sends many tensors at once: those of a pipeline stage, or of a
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

MESSAGE_BYTES = 256 << 20  # the most that a rank sends to rank 0 at once


@torch.no_grad()
def export(weights: Weights) -> Iterator[tuple[str, Tensor | None]]:
    """Yields the checkpoint's tensor names, with whole tensors on rank 0, else None; collective."""
    for entries in messages(weights):
        wholes = collect(weights, entries)
        for entry, whole in zip(entries, wholes, strict=True):
            if whole is not None:
                yield from named(whole, entry.place)
                continue
            for name in entry.place.names():
                yield name, None


def messages(weights: Weights) -> Iterator[list[Entry]]:
    """Splits the model into messages, each with tensors of one owner and type."""
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
    """Returns the whole tensors of a message on rank 0; None for each on the other ranks."""
    rank = dist.get_rank()
    owner = entries[0].owner
    shares = mpu.get_tensor_model_parallel_src_rank() == owner
    wholes: list[Tensor | None] = []
    for place, _, _ in entries:
        if rank == owner or (shares and place.ranks > 1):
            wholes.append(gather(weights.local[place.key].tensor.detach(), place))
        else:
            wholes.append(None)
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
    """Yields the checkpoint's name and tensor for each part of a whole Megatron tensor."""
    cuts = zip(place.pieces, whole.split(place.sizes(), place.dim), strict=True)
    rows: dict[str, list[Tensor]] = {}
    for piece, cut in sorted(cuts, key=lambda pair: pair[0]):
        rows.setdefault(piece.name, []).append(cut)
    for name in place.names():
        yield name, torch.cat(rows[name], place.dim)


def gather(tensor: Tensor, place: Place) -> Tensor:
    """Joins, in rank order, the shards of the ranks that share a tensor."""
    if place.ranks == 1:
        return tensor.contiguous()
    shards = [torch.empty_like(tensor) for _ in range(place.ranks)]
    dist.all_gather(shards, tensor.contiguous(), group=mpu.get_tensor_model_parallel_group())
    return torch.cat(shards, place.dim)
