"""Names, rows and shards: what a Megatron tensor is in a Hugging Face checkpoint, and back.

A tensor that Megatron cuts over its tensor parallel ranks is, put together again, some rows of one
or more tensors of the checkpoint in another order:

    as the checkpoint has them            q q q q   k k   v v
    as Megatron has them, two groups      q q k v   q q k v

A table of families.py tells for each Megatron name the checkpoint's names and how their rows
alternate. Loading reads it from right to left, exporting from left to right.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor, nn

from policy.megatron.check import ASIDE, Checkpoint
from policy.megatron.families import FAMILIES, padded

PADDING = ""  # the name of rows that no checkpoint has


class Place(NamedTuple):
    """Where a Megatron tensor lies in the checkpoint, from the first rank's part to the last's."""

    pieces: list[tuple[str, int, int]]  # tensor, first row (or column), the one after the last
    dim: int
    ranks: int  # that share it; 1: every rank has all of it

    def names(self) -> list[str]:
        """The checkpoint's tensors that it is made of."""
        return list(dict.fromkeys(name for name, _, _ in self.pieces if name != PADDING))


class Weights:
    """One rank's tensors of a model, each with its place in a checkpoint."""

    def __init__(self, folder: str, hf, model: nn.Module):
        self.hf, self.file = hf, Checkpoint(folder)
        table, self.prefix, self.split = FAMILIES[hf.model_type]
        self.table = [re.split(r" *\| +", line) for line in table.strip().splitlines()]
        biases = (item for item in model.named_buffers() if item[0].endswith("expert_bias"))
        # By layer and first name: the order of loading and sending, the same on every rank.
        self.local: dict[tuple[int, str], tuple[Place, Tensor]] = {}
        for name, tensor in [*model.named_parameters(), *biases]:
            self.device = tensor.device
            layer, place = self.place(name, model)
            self.load(place, tensor)
            # Megatron marks what it initialises itself, and experts only where ep > 1.
            tensor.allreduce = ".experts." not in name
            tensor.tensor_model_parallel = place.ranks > 1 or not tensor.allreduce
            self.local.setdefault((layer, place.pieces[0][0]), (place, tensor))
        self.catalog = self.gather_catalog()

    def place(self, name: str, model: nn.Module) -> tuple[int, Place]:
        """A parameter's layer (-1: none) and place. Raises ValueError where it has no home."""
        layer, prefix, rest = -1, "", name
        if match := re.match(r"decoder\.layers\.(\d+)\.(.*)", name):
            layer, rest = model.decoder.layers[int(match[1])].layer_number - 1, match[2]
            prefix = self.prefix.format(layer // self.split)
        # local_experts.3.linear_fc1.weight, or with Transformer Engine linear_fc1.weight3
        grouped = r"experts\.(?:local_experts\.)?(\d*)\.?(linear_fc.\.weight)(\d*)$"
        if expert := re.search(rf"mlp\.{grouped}", rest):
            each = self.hf.num_experts if self.split > 1 else self.hf.n_routed_experts
            each //= mpu.get_expert_model_parallel_world_size()
            number = int(expert[1] or expert[3]) + each * mpu.get_expert_model_parallel_rank()
            rest = f"mlp.experts.{number}.{expert[2]}"
        matches = ((re.fullmatch(rule[0], rest), *rule[1:]) for rule in self.table)
        match, how, names = next((found for found in matches if found[0]), (None, "", ""))
        if not match:
            raise ValueError(f"{name} has no home in a {self.hf.model_type} checkpoint")
        names = [n.format(prefix) for n in alternatives(match.expand(names))]
        if names == ["lm_head.weight"] and self.hf.tie_word_embeddings:
            names = [self.table[0][2]]
        shared = how != "whole" and not expert  # experts are never cut
        ranks = mpu.get_tensor_model_parallel_world_size() if shared else 1
        return layer, Place(self.pieces(names, how, ranks), int(how == "columns"), ranks)

    def pieces(self, names: list[str], how: str, ranks: int) -> list[tuple[str, int, int]]:
        """The rows of some tensors in Megatron's order; they are cut in n, and alternate."""
        hf, dim = self.hf, int(how == "columns")
        parts = [(name, 0, self.file.shape(name)[dim]) for name in names]
        n = {"groups": getattr(hf, "num_key_value_heads", 1), "ranks": ranks}.get(how, 1)
        if mamba := re.search(r"mixer\.(in_proj|conv1d)", names[0]):  # each of its parts is cut
            inner, state = hf.mamba_num_heads * hf.mamba_head_dim, hf.n_groups * hf.ssm_state_size
            sizes = [inner, state, state]  # x, B, C of the convolution
            if mamba[1] == "in_proj":  # the gate z before them, dt behind
                sizes = [inner, *sizes, hf.mamba_num_heads]
            ends = torch.tensor(sizes).cumsum(0).tolist()
            parts = [(names[0], end - size, size) for end, size in zip(ends, sizes, strict=True)]
        if names[0] in (self.table[0][2], "lm_head.weight"):
            parts.append((PADDING, 0, padded(hf.vocab_size) - hf.vocab_size))
        return [
            (name, at + i * size // n, at + (i + 1) * size // n)
            for i in range(n)
            for name, at, size in parts
        ]

    def load(self, place: Place, tensor: Tensor) -> None:
        """Fills a tensor, reading no row that this rank does not need."""
        rank = mpu.get_tensor_model_parallel_rank() if place.ranks > 1 else 0
        total = sum(stop - start for _, start, stop in place.pieces)
        low, high, parts = rank * total // place.ranks, (rank + 1) * total // place.ranks, []
        for name, start, stop in place.pieces:
            first, last = start + max(0, low), min(stop, start + high)
            if first < last and name == PADDING:
                parts.append(torch.zeros(last - first, tensor.shape[1]))
            elif first < last:
                parts.append(self.file.read(name, place.dim, first, last))
            low, high = low - (stop - start), high - (stop - start)
        tensor.data.copy_(torch.cat(parts, place.dim).view_as(tensor))

    def gather_catalog(self) -> list[tuple]:
        """(key, place, dtype, rank that tells the others) of all tensors of the model, in order.

        Raises ValueError naming a tensor of the checkpoint that no rank has.
        """
        mine = {key: (place, tensor.dtype) for key, (place, tensor) in self.local.items()}
        every, owners = [None] * dist.get_world_size(), {}
        dist.all_gather_object(every, mine)
        for rank, items in reversed(list(enumerate(every))):
            owners |= {key: (key, *item, rank) for key, item in items.items()}
        homes = {name for _, place, _, _ in owners.values() for name in place.names()}
        homes |= {"lm_head.weight"} if self.hf.tie_word_embeddings else set()
        for name in sorted(self.file.files.keys() - homes):
            if not ASIDE.match(name):
                raise ValueError(f"{name} of the checkpoint has no home in Megatron's model")
        return [owners[key] for key in sorted(owners)]

    def metas(self) -> list[tuple[str, tuple[int, ...], str]]:
        """Name, shape and dtype of what `export` yields, in its order; no communication."""
        every = ((name, dtype) for _, place, dtype, _ in self.catalog for name in place.names())
        return [(name, tuple(self.file.shape(name)), str(dtype)[6:]) for name, dtype in every]

    @torch.no_grad()
    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors by the checkpoint's names, one Megatron tensor's worth at a time.

        Collective: the ranks that have one put its shards together, one of them tells the others.
        """
        for key, place, dtype, owner in self.catalog:
            sizes = [stop - start for _, start, stop in place.pieces]
            if key in self.local:
                whole = gather(self.local[key][1].detach(), place)
            else:
                shape = self.file.shape(place.pieces[0][0])
                shape[place.dim] = sum(sizes)
                whole = torch.empty(shape, dtype=dtype, device=self.device)
            dist.broadcast(whole, owner)
            cuts = zip(place.pieces, whole.split(sizes, place.dim), strict=True)
            rows: dict[str, list] = {}
            for (name, _, _), cut in sorted(cuts, key=lambda cut: cut[0]):
                rows.setdefault(name, []).append(cut)
            for name in place.names():
                yield name, torch.cat(rows[name], place.dim)


def alternatives(names: str) -> list[str]:
    """`a.[qkv]_proj` as three names, `a.[gate,up]_proj` as two."""
    before, _, rest = names.partition("[")
    inside, _, after = rest.partition("]")
    parts = inside.split(",") if "," in inside else list(inside)
    return [f"{before}{part}{after}" for part in parts] or [names]


def gather(tensor: Tensor, place: Place) -> Tensor:
    """The shards of the ranks that share a tensor, in their order."""
    if place.ranks == 1:
        return tensor.contiguous()
    shards = [torch.empty_like(tensor) for _ in range(place.ranks)]
    dist.all_gather(shards, tensor.contiguous(), group=mpu.get_tensor_model_parallel_group())
    return torch.cat(shards, place.dim)
