"""Maps names, rows and shards of Megatron's tensors to a Hugging Face checkpoint, and back.

A tensor that Megatron splits over tensor parallel ranks consists, once joined again, of rows of one
or more checkpoint tensors in a different order:

    as the checkpoint has them            q q q q   k k   v v
    as Megatron has them, two groups      q q k v   q q k v

A table in families.py gives, for each Megatron name, the checkpoint's names and how their rows
alternate. Loading reads it from right to left, exporting from left to right.
"""

import itertools
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor
from transformers import PretrainedConfig

from policy import WeightMeta
from policy.megatron.families import FAMILIES, padded
from policy.megatron.model_check import ASIDE, Checkpoint

if TYPE_CHECKING:
    from megatron.core.models.mamba import MambaModel

PADDING = ""  # name for rows that no checkpoint has


class Piece(NamedTuple):
    """A range of rows or columns of a checkpoint tensor."""

    name: str
    start: int
    stop: int


class Place(NamedTuple):
    """The checkpoint's pieces of a Megatron tensor, from the first rank's part to the last's."""

    layer: int  # -1: outside the layers
    pieces: list[Piece]
    dim: int
    ranks: int  # number of ranks that share it; 1: every rank has all of it

    @property
    def key(self) -> tuple[int, str]:
        """The key by which tensors are sorted for sending, the same on every rank."""
        return self.layer, self.pieces[0].name

    def names(self) -> list[str]:
        """Returns the names of the checkpoint tensors that make it up."""
        return list(dict.fromkeys(p.name for p in self.pieces if p.name != PADDING))

    def sizes(self) -> list[int]:
        """Returns the number of rows, or columns, of each piece."""
        return [piece.stop - piece.start for piece in self.pieces]


class Local(NamedTuple):
    """A tensor that this rank holds, either whole or as a shard."""

    place: Place
    tensor: Tensor


class Entry(NamedTuple):
    """A tensor of the model, and the ranks that hold it."""

    place: Place
    dtype: torch.dtype
    holders: list[int]  # the ranks that have it, or a shard of it

    @property
    def owner(self) -> int:
        """The rank that sends it."""
        return self.holders[0]


class Part(NamedTuple):
    """Rows or columns of a tensor, to be cut into n pieces that alternate with other parts'."""

    name: str
    start: int
    size: int


class Rule(NamedTuple):
    """A line of a family's table, for one Megatron name."""

    how: str  # layout: "whole", "rows", "columns", "groups" or "ranks"
    names: str  # names in the checkpoint, which `alternatives` expands


class Weights:
    """One rank's tensors of a model, each with its place in a checkpoint."""

    def __init__(self, folder: str, hf: PretrainedConfig, model: "MambaModel"):
        self.hf = hf
        self.file = Checkpoint(folder)
        family = FAMILIES[self.hf.model_type]
        self.prefix = family.prefix
        self.split = family.split
        self.table = [re.split(r" *\| +", line) for line in family.table.strip().splitlines()]
        biases = (item for item in model.named_buffers() if item[0].endswith("expert_bias"))
        self.local: dict[tuple[int, str], Local] = {}
        for name, tensor in [*model.named_parameters(), *biases]:
            self.device = tensor.device
            place = self.place(name, model)
            self.load(place, tensor)
            self.mark(tensor, place, is_expert=".experts." in name)
            self.local.setdefault(place.key, Local(place, tensor))
        self.catalog = self.gather_catalog()

    def mark(self, tensor: Any, place: Place, is_expert: bool) -> None:
        """Sets the attributes that Megatron reads but does not always set itself."""
        tensor.allreduce = not is_expert
        tensor.tensor_model_parallel = place.ranks > 1 or is_expert

    def place(self, name: str, model: "MambaModel") -> Place:
        """Finds a parameter's place. Raises ValueError if the checkpoint has no place for it."""
        layer = -1
        prefix = ""
        rest = name
        if inside := re.match(r"decoder\.layers\.(\d+)\.(.*)", name):
            layer = model.decoder.layers[int(inside[1])].layer_number - 1
            rest = inside[2]
            prefix = self.prefix.format(layer // self.split)
        if expert := re.fullmatch(r"mlp\.experts\.(linear_fc.\.weight)(\d+)", rest):
            each = self.hf.num_experts if self.split > 1 else self.hf.n_routed_experts
            each //= mpu.get_expert_model_parallel_world_size()
            number = int(expert[2]) + each * mpu.get_expert_model_parallel_rank()
            rest = f"mlp.experts.{number}.{expert[1]}"
        rule = self.rule(rest)
        if rule is None:
            raise ValueError(f"{name} has no home in a {self.hf.model_type} checkpoint")
        names = [n.format(prefix) for n in alternatives(rule.names)]
        if names == ["lm_head.weight"] and self.hf.tie_word_embeddings:
            names = [self.table[0][2]]
        shared = rule.how != "whole" and not expert  # experts are never split
        ranks = mpu.get_tensor_model_parallel_world_size() if shared else 1
        pieces = self.pieces(names, rule.how, ranks)
        return Place(layer, pieces, int(rule.how == "columns"), ranks)

    def rule(self, name: str) -> Rule | None:
        """Finds the table's first rule for a Megatron name, without its layer's prefix."""
        for pattern, how, names in self.table:
            if match := re.fullmatch(pattern, name):
                return Rule(how, match.expand(names))
        return None

    def pieces(self, names: list[str], how: str, ranks: int) -> list[Piece]:
        """Returns the pieces of some tensors in Megatron's order: n of each part, alternating."""
        hf = self.hf
        dim = int(how == "columns")
        parts = [Part(name, 0, self.file.shape(name)[dim]) for name in names]
        n = {"groups": getattr(hf, "num_key_value_heads", 1), "ranks": ranks}.get(how, 1)
        if mamba := re.search(r"mixer\.(in_proj|conv1d)", names[0]):  # parts are split separately
            inner = hf.mamba_num_heads * hf.mamba_head_dim
            state = hf.n_groups * hf.ssm_state_size
            sizes = [inner, state, state]  # x, B, C of the convolution
            if mamba[1] == "in_proj":  # the gate z comes before them, dt after
                sizes = [inner, *sizes, hf.mamba_num_heads]
            ends = itertools.accumulate(sizes)
            parts = [Part(names[0], e - size, size) for e, size in zip(ends, sizes, strict=True)]
        if names[0] in (self.table[0][2], "lm_head.weight"):
            parts.append(Part(PADDING, 0, padded(hf.vocab_size) - hf.vocab_size))
        return [
            Piece(p.name, p.start + i * p.size // n, p.start + (i + 1) * p.size // n)
            for i in range(n)
            for p in parts
        ]

    def load(self, place: Place, tensor: Tensor) -> None:
        """Fills a tensor, reading only the rows that this rank needs."""
        rank = mpu.get_tensor_model_parallel_rank() if place.ranks > 1 else 0
        total = sum(piece.stop - piece.start for piece in place.pieces)
        # This rank's rows, counted from the start of the current piece.
        low = rank * total // place.ranks
        high = (rank + 1) * total // place.ranks
        parts = []
        for name, start, stop in place.pieces:
            first = start + max(0, low)
            last = min(stop, start + high)
            if first < last and name == PADDING:
                parts.append(torch.zeros(last - first, tensor.shape[1]))
            elif first < last:
                parts.append(self.file.read(name, place.dim, first, last))
            low -= stop - start
            high -= stop - start
        tensor.data.copy_(torch.cat(parts, place.dim).view_as(tensor))

    def gather_catalog(self) -> list[Entry]:
        """Returns all model tensors, in sending order; collective.

        Raises ValueError naming a checkpoint tensor that no rank has.
        """
        mine = [(place, tensor.dtype) for place, tensor in self.local.values()]
        every: list[list[tuple[Place, torch.dtype]]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(every, mine)
        entries: dict[tuple[int, str], Entry] = {}
        for rank, held in enumerate(every):
            for place, dtype in held:
                entries.setdefault(place.key, Entry(place, dtype, [])).holders.append(rank)
        homes = {name for entry in entries.values() for name in entry.place.names()}
        homes |= {"lm_head.weight"} if self.hf.tie_word_embeddings else set()
        for name in sorted(self.file.files.keys() - homes):
            if not ASIDE.match(name):
                raise ValueError(f"{name} of the checkpoint has no home in Megatron's model")
        # A rank's experts of one layer are adjacent, so that the rank sends them at once.
        return sorted(entries.values(), key=lambda e: (e.place.layer, e.owner, e.place.key))

    def shape(self, place: Place) -> list[int]:
        """Returns the shape of a whole Megatron tensor, with its shards joined."""
        shape = self.file.shape(place.pieces[0].name)
        shape[place.dim] = sum(place.sizes())
        return shape

    def metas(self) -> list[WeightMeta]:
        """Describes the tensors that export.py yields, in its order; no communication."""
        return [
            WeightMeta(name, tuple(self.file.shape(name)), str(dtype).removeprefix("torch."))
            for place, dtype, _ in self.catalog
            for name in place.names()
        ]


def alternatives(names: str) -> list[str]:
    """Expands `a.[qkv]_proj` to three names, and `a.[gate,up]_proj` to two."""
    before, _, rest = names.partition("[")
    inside, _, after = rest.partition("]")
    parts = inside.split(",") if "," in inside else list(inside)
    return [f"{before}{part}{after}" for part in parts] or [names]
