"""Computes how long tokens, batches, updates and starts take, by dry_run/pace.py or a table."""

import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from core.errors import InputError
from dry_run import pace
from policy import gpu_memory
from policy.gpus import Gpu
from policy.model_shape import Model, read_model

if TYPE_CHECKING:
    from grpo_async import Config
    from settings.network import PolicySettings

PREFILL_MFU = 0.4  # assumed: share of the peak, while an engine reads a prompt
START_S = 180.0  # assumed: an engine's imports, compilation and CUDA graphs; it reads no weights
CONNECT_S = 10.0  # assumed: trainer and engines create a process group
COPY_BYTES_S = 10e9  # assumed: a GPU copies its state to the host
TAIL = 16  # sequences: an engine with more gains nothing from drafts


class Room(NamedTuple):
    """The limits on how many sequences an engine runs at once."""

    slots: int
    bytes: float  # bytes for KV and states
    token: float  # KV bytes per token
    sequence: float  # bytes of a sequence's states

    def taken(self, sequences: int, context: float) -> float:
        """Returns the bytes of this many sequences with `context` tokens in all."""
        return sequences * self.sequence + context * self.token


@dataclasses.dataclass
class Hardware:
    """Seconds by kind of work; zero here, so that tests name only what they need."""

    room: Room = Room(10**9, math.inf, 1.0, 0.0)
    per_token: float = 0.0  # decoding, however full the engine is
    per_prompt_token: float = 0.0
    per_trained_token: float = 0.0  # on one replica of the policy
    sync: float = 0.0
    start: float = 0.0
    connect: float = 0.0
    copy: float = 0.0  # copying a checkpoint to the host
    write: float = 0.0  # writing a checkpoint to the disk

    def decode(self, batch: int, context: float) -> float:
        """Returns the seconds for one more token in each sequence; `context` counts all tokens."""
        return self.per_token

    def prefill(self, tokens: float) -> float:
        """Returns the seconds that an engine takes to read a prompt."""
        return self.per_prompt_token * tokens

    def train(self, rows: Sequence[Sequence[int]]) -> float:
        """Returns the seconds that a replica takes to train rows of sequences of these lengths."""
        return self.per_trained_token * sum(map(sum, rows))

    def score(self, model: str, layout: "PolicySettings", rows: Sequence[Sequence[int]]) -> float:
        """Returns the seconds that a teacher's replica takes to score rows: a third of training."""
        return self.train(rows) / 3


class Modelled(Hardware):
    """A model on GPUs, as in the dry run. `drafts` is the tokens per engine step in the tail."""

    def __init__(self, model: Model, cfg: "Config", gpu: Gpu, drafts: float = 1.0):
        tp = cfg.engine.tensor_parallel
        saved = pace.checkpoint_bytes(model, cfg)
        super().__init__(
            room=Room(
                cfg.engine.arguments["max_num_seqs"],
                gpu_memory.kv_budget(model, cfg, gpu.memory),
                gpu_memory.kv_bytes(model, tp),
                model.state / tp,
            ),
            per_prompt_token=2 * (model.active - model.embedding) / tp / gpu.flops / PREFILL_MFU,
            sync=pace.sync_seconds(model, cfg, gpu),
            start=START_S,
            connect=CONNECT_S,
            copy=saved.whole / cfg.policy.ranks / COPY_BYTES_S,
            write=pace.checkpoint_seconds(model, cfg),
        )
        if self.room.bytes <= self.room.sequence:
            raise InputError(
                f"an engine of {tp} {gpu.name} has no room for a sequence next to its weights"
            )
        self.drafts = drafts
        self.step = functools.cache(self._step)
        self.read = functools.cache(read_model)
        self.parts = (model, tp, gpu)
        self.slope = (self._memory(1, 1e6) - self._memory(1, 0)) / 1e6
        self._of_trainer(model, cfg, gpu)

    def decode(self, batch: int, context: float) -> float:
        """Returns pace.decode_seconds, and caches what does not change between calls."""
        memory, matmuls = self.step(batch)
        seconds = pace.LAUNCH_S + max(memory + context * self.slope, matmuls)
        return seconds / self.drafts if batch <= TAIL else seconds

    def train(self, rows: Sequence[Sequence[int]]) -> float:
        """Returns pace.train_seconds for the lengths that one replica has."""
        tokens = sum(map(sum, rows))
        pairs = self.row_keys * tokens or sum(n * n / 2 for row in rows for n in row)
        return tokens * self.per_trained_token + pairs * self.per_pair

    def score(self, model: str, layout: "PolicySettings", rows: Sequence[Sequence[int]]) -> float:
        """Returns the seconds of a forward pass on a replica's ranks, as pace.teacher_seconds."""
        tokens = sum(map(sum, rows))
        keys = sum(n * n / 2 for row in rows for n in row)
        flops = self.read(model).flops(tokens, keys, 1, False)
        return flops / (layout.ranks / layout.replicas * pace.MFU * self.parts[2].flops)

    def _memory(self, batch: int, context: float) -> float:
        model, tp, gpu = self.parts
        seconds = pace.decode_seconds(model, tp, batch, context, gpu._replace(flops=math.inf))
        return seconds - pace.LAUNCH_S

    def _step(self, batch: int) -> tuple[float, float]:
        model, tp, gpu = self.parts
        matmuls = pace.decode_seconds(model, tp, batch, 0, gpu._replace(hbm=math.inf))
        return self._memory(batch, 0), matmuls - pace.LAUNCH_S

    def _of_trainer(self, model: Model, cfg: "Config", gpu: Gpu) -> None:
        layout = cfg.policy
        passes = 3 + layout.recomputes + cfg.scoring_passes
        of_weights = passes - bool(layout.lora_rank)
        speed = layout.ranks / layout.replicas * pace.MFU * gpu.flops
        exposed = sum(pace.exposed_seconds(cfg, gpu).values())
        tokens = pace.MEAN_SHARE * pace.step_tokens(cfg) / layout.replicas
        flops = of_weights * 2 * (model.active - model.embedding)
        self.per_trained_token = flops / speed + exposed / tokens
        self.per_pair = passes * 4 * model.heads * model.head_dim * model.kv_layers / speed
        self.row_keys = layout.row_tokens if gpu_memory.mask_bytes(layout).row else 0


class Measured(Modelled):
    """A Modelled engine with seconds per token from a file: lines of batch, context, seconds.

    Between the table's batches seconds are interpolated; beyond them, the last ones grow in
    proportion. `context` is the mean over the sequences.
    """

    def __init__(self, model: Model, cfg: "Config", gpu: Gpu, drafts: float, path: str):
        super().__init__(model, cfg, gpu, drafts)
        self.points = read_table(path)

    def decode(self, batch: int, context: float) -> float:
        """Returns the seconds at the nearest measured contexts, between the two nearest batches."""
        seconds = interpolated(self.points, batch, context / max(batch, 1))
        return seconds / self.drafts if batch <= TAIL else seconds


Points = dict[int, list[tuple[float, float]]]  # batch -> (context, seconds), by context


def read_table(path: str) -> Points:
    """Reads a JSON file: [[batch, context, seconds], ...]. Raises InputError for anything else."""
    try:
        rows: list[tuple[float, float, float]] = json.loads(Path(path).read_text())
        points: Points = {}
        for batch, context, seconds in rows:
            if not (batch >= 1 and context >= 0 and seconds > 0):
                raise ValueError(f"{[batch, context, seconds]}")
            points.setdefault(int(batch), []).append((float(context), float(seconds)))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(
            f"table = {path!r}: expected JSON, [[batch, context, seconds], ...], all above 0: "
            f"{error}"
        ) from None
    if not points:
        raise InputError(f"table = {path!r} is empty: expected [[batch, context, seconds], ...]")
    return {batch: sorted(points[batch]) for batch in sorted(points)}


def interpolated(points: Points, batch: int, context: float) -> float:
    """Returns the seconds at a batch and a mean context."""
    batches = list(points)
    low = max((b for b in batches if b <= batch), default=batches[0])
    high = min((b for b in batches if b >= batch), default=batches[-1])
    at_low, at_high = (along(points[b], context) for b in (low, high))
    if batch > batches[-1]:
        return at_high * batch / batches[-1]
    return at_low + (at_high - at_low) * (max(batch, low) - low) / max(high - low, 1)


def along(line: list[tuple[float, float]], context: float) -> float:
    """Interpolates seconds between the two nearest contexts; beyond the last, keeps its seconds."""
    for (x0, y0), (x1, y1) in zip(line, line[1:], strict=False):
        if context <= x1:
            return y0 + (y1 - y0) * (max(context, x0) - x0) / max(x1 - x0, 1e-9)
    return line[-1][1]
