"""Direct preference optimization of large language models, in one file, read from top to bottom.

    r(y) =  sum_t  log pi(y_t) - log pi_ref(y_t)                 t: the tokens of an answer y
    loss =  sum_pairs ( - w_p  log sigmoid(beta (r(chosen) - r(rejected)))
                        - w_s  mean_t log pi(chosen_t) )   /   (pairs of the whole batch)

Rafailov et al. 2023 (arXiv:2305.18290), with a supervised loss on the chosen answers. The report on
Nemotron 3 Nano evaluates it as a cure for hallucinated tool calls; the defaults are from there.

The reference pi_ref is the policy before its first step. Trainers score every pair with it once,
before training, so no second model is kept in memory; the scores stay in the run folder:

    pairs (JSONL, file order) ---> driver: token ids, rows ---> Trainer(s)   FSDP2 or Megatron
                                            ^                       |
                                            |   log pi_ref of both  |  once, before step 1
                                            +--- reference.jsonl <--+

A pair is packed as one unit: both of its sequences lie in one row, so a row's loss needs no other
row. The driver and the layout of this file are grpo_async.py's, without engines (docs/dpo.md).

Axes, as suffixes:  T tokens of a packed row    N pairs in that row
                    S its sequences, 2N: 2n is the chosen one of pair n, 2n + 1 the rejected one

    python dpo.py --config configs/tiny_dpo.py                      a tiny model learns on a laptop
    python dpo.py --config configs/nano_dpo.py --steps 50           a file of overrides, then flags
    python dpo.py --help                                            every setting
"""

import asyncio
import dataclasses
import importlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from pydantic import NonNegativeFloat, PositiveFloat
from pydantic.dataclasses import dataclass as checked_dataclass
from torch import Tensor
from torch.nn.functional import logsigmoid

from core.waits import within
from policy import on
from policy.packing import plan_rows
from rollout.preference_rows import Pair, load_pairs, render_all
from rollout.rows import Rows
from runtime.checkpoints.row_scores import Scores
from runtime.checkpoints.save import Checkpoints
from runtime.processes.cluster import Cluster
from runtime.processes.trainer_rank import Rank
from runtime.reporting.console import phase
from runtime.reporting.log import Log
from settings import reader
from settings.config import CHECKED, PairSettings

if TYPE_CHECKING:
    from runtime.startup import modes

# === Config =======================================================================================


@checked_dataclass(frozen=True, config=CHECKED)
class Loss:
    """The two losses of a pair, and their weights."""

    beta: PositiveFloat = 0.05
    """Strength of the pull towards the reference: the weight of the KL penalty that DPO implies."""
    preference_weight: NonNegativeFloat = 1.0
    """Weight of the preference loss, which tells the two answers apart."""
    sft_weight: NonNegativeFloat = 0.2
    """Weight of the chosen answer's negative log-likelihood, a mean over tokens."""


@checked_dataclass(frozen=True, config=CHECKED)
class Config(PairSettings):
    """Train a language model with DPO. Defaults: Nemotron 3 Nano."""

    loss: Loss = dataclasses.field(default_factory=Loss)
    """Beta, and the weights of the two losses."""

    def __post_init__(self) -> None:
        """Refuses combinations that cannot work, naming both sides. Raises ValueError."""
        super().__post_init__()
        if not (self.loss.preference_weight or self.loss.sft_weight):
            raise ValueError("loss.preference_weight = 0 and loss.sft_weight = 0: nothing to learn")
        if self.policy.replay_routing:
            raise ValueError("policy.replay_routing = True needs an engine's choices of experts")


# === Data =========================================================================================


NOT_SCORED = (math.nan, math.nan)  # the loss of such a pair is not finite, which ends the run


class Scored(NamedTuple):
    """A pair, its place in the file, and the reference's logprobs of its answers."""

    place: int
    pair: Pair
    ref_logps: Sequence[float] | None = None  # of chosen and rejected, summed over their tokens


@dataclasses.dataclass
class Batch:
    """A packed row of N pairs; `planned_pairs` counts the whole update, over all ranks."""

    tokens_T: Tensor  # int64
    positions_T: Tensor  # int64, from 0 in each sequence, which keeps them apart in attention
    seq_T: Tensor  # int64, the sequence's number in the row: even ones are chosen, odd rejected
    mask_T: Tensor  # bool, the answers' tokens; never the first of a sequence
    ref_logp_S: Tensor  # float64
    planned_pairs: int
    routes_N: list | None = None  # no engine chose experts


# === The algorithm: pure functions of tensors =====================================================


def sequence_sums(x_T: Tensor, batch: Batch) -> Tensor:
    """Returns sums [S] over the answers' tokens, in float64: their small differences matter."""
    at_T = batch.mask_T.nonzero().squeeze(1)
    sums_S = batch.ref_logp_S.new_zeros(len(batch.ref_logp_S))
    return sums_S.index_add(0, batch.seq_T[at_T], x_T[at_T].double())


def preference_losses(gap_N: Tensor, rule: Loss) -> Tensor:
    """Returns the loss [N] of pairs whose chosen answer's reward is higher by `gap_N` [N]."""
    return -logsigmoid(rule.beta * gap_N)


class RowLoss(NamedTuple):
    """The loss of a packed row, with gradient, and the sums from which its metrics are computed."""

    loss: Tensor
    stats: dict[str, Tensor]


def dpo_loss(logp_T: Tensor, batch: Batch, cfg: Config) -> RowLoss:
    """Returns the loss of one packed row, given the policy's logprobs `logp_T` [T], with gradient.

    It is a sum over pairs, divided by the update's pair count, so packing and ranks change nothing.
    Rewards are log-ratios, not multiplied by beta, as in NeMo-RL algorithms/loss_functions.py.
    """
    rule = cfg.loss
    logp_S = sequence_sums(logp_T, batch)
    tokens_S = sequence_sums(torch.ones_like(logp_T), batch)
    reward_S = logp_S - batch.ref_logp_S
    chosen_N, rejected_N = reward_S.view(-1, 2).T
    preference_N = preference_losses(chosen_N - rejected_N, rule)
    sft_N = -logp_S[0::2] / tokens_S[0::2]
    loss_N = rule.preference_weight * preference_N + rule.sft_weight * sft_N
    measured = {
        "loss": loss_N,
        "preference_loss": preference_N,
        "sft_loss": sft_N,
        "accuracy": (chosen_N > rejected_N).double(),
        "rewards_chosen_mean": chosen_N,
        "rewards_rejected_mean": rejected_N,
        "rewards_margin_mean": chosen_N - rejected_N,
        "num_valid_samples": torch.ones_like(chosen_N),
    }
    stats = {name: x_N.detach().sum() for name, x_N in measured.items()}
    stats |= {"train_tokens": batch.mask_T.any() * len(batch.mask_T)}
    stats |= {"train_keys": batch.positions_T.sum()}  # keys that tokens attend to, less their own
    return RowLoss(loss_N.sum() / batch.planned_pairs, stats)


def mean_metrics(total: dict[str, float]) -> dict[str, float]:
    """Returns NeMo-RL's training metrics, from sums over all rows: counts, and means over pairs."""
    means = {name: x / total["num_valid_samples"] for name, x in total.items()}
    counts = {name: total[name] for name in ("num_valid_samples", "train_tokens", "train_keys")}
    return means | counts


# === Packing ======================================================================================


def plan_pairs(pairs: Sequence[Pair], cfg: Config) -> list[list[list[int]]]:
    """Plans the rows of each replica of the policy, as indices of pairs in the batch.

    Every replica gets the same number of rows, some of which may be empty.
    """
    from policy.model_shape import even_length  # also imports transformers, which takes seconds

    # A pair's two sequences attend to half as many keys as one sequence of their total length.
    even = 2 * even_length(cfg.model, bool(cfg.policy.lora_rank))
    lengths = [pair.tokens for pair in pairs]
    return plan_rows(lengths, cfg.policy.row_tokens, cfg.policy.replicas, even)


def pack(scored: Sequence[Scored], planned_pairs: int) -> Batch:
    """Packs pairs into one row; an empty row is a single token that trains nothing."""
    sequences = [sequence for one in scored for sequence in one.pair]
    ids = [sequence.ids_T for sequence in sequences]
    masks = [np.arange(len(sequence.ids_T)) >= sequence.start for sequence in sequences]
    if not sequences:
        ids = [np.zeros(1)]
        masks = [np.zeros(1, bool)]
    positions = [np.arange(len(ids_T)) for ids_T in ids]
    numbers = [np.full(len(ids_T), i) for i, ids_T in enumerate(ids)]
    ref_logps = [logp for one in scored for logp in one.ref_logps or NOT_SCORED]

    def join(pieces: list[np.ndarray], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.concatenate(pieces)).to(dtype)

    return Batch(
        tokens_T=join(ids, torch.int64),
        positions_T=join(positions, torch.int64),
        seq_T=join(numbers, torch.int64),
        mask_T=join(masks, torch.bool),
        ref_logp_S=torch.tensor(ref_logps, dtype=torch.float64),
        planned_pairs=planned_pairs,
    )


# === Trainer ======================================================================================


class Trainer(Rank[Config]):
    """One rank of the policy being trained. A plain class; Ray makes it an actor."""

    def start(self, rank: int, address: tuple[str, int]) -> list:
        """Joins the other ranks and loads the policy; returns each weight's name and shape."""
        cfg = self.cfg
        torch.manual_seed(cfg.seed)
        self.join_ranks(rank, address)
        self.policy = self.open_policy(temperature=1.0)
        return self.policy.weight_metas()

    def score(self, rows: list[list[Scored]], planned_pairs: int) -> dict[int, list[float]]:
        """Returns the summed logprobs [chosen, rejected] of each pair, by the pair's place.

        Ranks whose policy does not report return {}.
        """
        batches = [pack(row, planned_pairs) for row in rows]
        logps = self.policy.logprobs(batches)
        found: dict[int, list[float]] = {}
        for row, logp_T, batch in zip(rows, logps, batches, strict=True):
            sums_S = sequence_sums(logp_T, on(logp_T.device, batch))
            for one, sums in zip(row, sums_S.view(-1, 2).tolist(), strict=True):
                found[one.place] = sums
        return found if self.policy.reports else {}

    def train_step(self, rows: list[list[Scored]], planned_pairs: int) -> dict[str, float]:
        """Adds up gradients over this rank's packed rows, then takes one optimizer step.

        Raises FloatingPointError on every rank if a loss is not finite; then no weight changes.
        """
        began = time.perf_counter()
        batches = [pack(row, planned_pairs) for row in rows]
        stats = self.policy.forward_backward(batches, lambda x, of: dpo_loss(x, of, self.cfg))
        total = self.reduced(stats)
        if not math.isfinite(total["loss"]):
            raise FloatingPointError(f"the loss of {planned_pairs} pairs is {total['loss']}")
        measured = mean_metrics(total) | self.policy.optimizer_step()
        return measured | {"train_seconds": time.perf_counter() - began}

    def evaluate(self, rows: list[list[Scored]], planned_pairs: int) -> dict[str, float]:
        """Returns the metrics of pairs as sums over all ranks; trains nothing."""
        batches = [pack(row, planned_pairs) for row in rows]
        logps = self.policy.logprobs(batches)
        stats = []
        for logp_T, batch in zip(logps, batches, strict=True):
            stats.append(dpo_loss(logp_T, on(logp_T.device, batch), self.cfg).stats)
        return self.reduced(stats)


# === The driver ===================================================================================


class Run:
    """One training run: scores all pairs with the reference, then trains step by step."""

    # A checkpoint from a run that differs in these is refused; `model` is the reference.
    STREAM = ("pairs_per_step", "data.train", "data.chat_template_kwargs")
    MUST_MATCH = (*STREAM, "model")

    def __init__(self, cfg: Config, rows: Rows, val_rows: Rows | None = None):
        self.cfg = cfg
        self.rows = rows
        self.val_rows = val_rows
        self.cluster = Cluster(cfg, Trainer)
        self.checkpoints = Checkpoints(cfg, self.cluster, rows)
        self.log = Log(("starts", "metrics"))
        self.scores = {of.path: Scores(cfg, of) for of in (rows, val_rows) if of}
        self.version = 0  # steps trained so far
        self.evaluated = -1  # last policy version that was evaluated
        self.leaving = ""  # the reason, once the run is asked to save and exit

    async def start(self) -> None:
        """Starts the trainers; scores the pairs while the policy is still the reference."""
        await self.cluster.start_trainers()
        trains = not self.cfg.command.eval_only
        if trains:
            await self.score(self.rows, self.cfg.steps * self.cfg.pairs_per_step)
        await self.score(self.val_rows)
        if self.leaving:
            return
        state = await self.checkpoints.load(self.MUST_MATCH if trains else None, self.state())
        self.version = state.get("version", 0)
        self.evaluated = state.get("evaluated", -1)
        self.log.open(self.cfg, self.version)

    async def run(self, loops: "modes.Loops") -> None:
        """Starts what training needs, then trains; any task that fails ends the run."""
        self.cluster.on_signal(self.leave)
        await loops.start()
        async with asyncio.TaskGroup() as self.tasks:  # includes the tasks that write checkpoints
            watched = [self.cluster.watch(trainer) for trainer in self.cluster.trainers]
            tasks = [self.tasks.create_task(watch) for watch in watched]
            await loops.train()
            for task in tasks:
                task.cancel()
        self.log.close()

    def leave(self, reason: str) -> None:
        """Makes the run save and end as soon as the step that is being trained is done."""
        self.leaving = reason

    async def score(self, rows: Rows | None, most: int = sys.maxsize) -> None:
        """Scores the first rows with the reference, except rows that have scores already."""
        if rows is None:
            return
        scores = self.scores[rows.path]
        for places in self.parts(rows, most):
            if self.leaving or not scores.lacks(places):
                continue
            phase(f"scoring pairs {places.start:,} to {places.stop:,} of {rows.path}")
            found: dict[int, list[float]] = {}
            for of_rank in await self.on_trainers(Trainer.score, rows, places):
                found |= of_rank
            scores.add(places.start, [found[place] for place in places])

    def parts(self, rows: Rows, most: int = sys.maxsize) -> Iterator[range]:
        """Yields the places of the first rows, one batch at a time."""
        count = min(most, len(rows))
        for first in range(0, count, self.cfg.pairs_per_step):
            yield range(first, min(first + self.cfg.pairs_per_step, count))

    async def on_trainers(self, method: Callable, rows: Rows, places: Sequence[int]) -> list:
        """Calls a method on all ranks, each with its part of these pairs; returns their results."""
        pairs = await asyncio.to_thread(render_all, rows, places, self.cfg)
        values = self.scores[rows.path].values
        scored = [Scored(i, pair, values.get(i)) for i, pair in zip(places, pairs, strict=True)]
        plan = plan_pairs(pairs, self.cfg)
        parts = [[[scored[i] for i in row] for row in rows_of] for rows_of in plan]
        calls = []
        for rank, trainer in enumerate(self.cluster.trainers):
            part = parts[self.cfg.policy.replica_of(rank)]
            calls.append(getattr(trainer, method.__name__).remote(part, len(pairs)))
        what = f"{method.__name__} of {len(pairs)} pairs"
        return await within(self.cfg.timeouts.train, what, asyncio.gather(*calls))

    async def train_forever(self) -> None:
        """Trains on the batches in file order, and again from the top when the rows run out."""
        saved = self.version
        if saved and not self.checkpoints.exist():  # resumed from another folder's checkpoint
            await self.save()
            await self.checkpoints.written()
        if self.is_due(self.cfg.val_period):
            await self.evaluate()
        size = self.cfg.pairs_per_step
        for step in range(self.version, self.cfg.steps):
            if self.leaving:
                break
            began = time.perf_counter()
            places = [i % len(self.rows) for i in range(step * size, (step + 1) * size)]
            stats, *_ = await self.on_trainers(Trainer.train_step, self.rows, places)
            self.version = step + 1
            stats |= {"step_seconds": time.perf_counter() - began}
            self.log.trained(step + 1, stats | {"batch_tokens": stats["train_tokens"]})
            if self.is_due(self.cfg.save_period):
                saved = self.version
                await self.save()
            if self.is_due(self.cfg.val_period):
                await self.evaluate()
        if saved != self.version:
            await self.save()
        await self.checkpoints.written()
        if self.leaving:
            self.log.note(f"left at step {self.version} ({self.leaving}); --resume auto continues")

    def is_due(self, period: int) -> bool:
        """Returns whether something is due now: every `period` versions, and at the end."""
        return self.version == self.cfg.steps or bool(period and self.version % period == 0)

    async def evaluate(self) -> None:
        """Measures losses and accuracy on the validation pairs, once per version."""
        if self.leaving or not self.val_rows or self.evaluated == self.version:
            return
        total: dict[str, float] = {}
        for places in self.parts(self.val_rows):
            sums, *_ = await self.on_trainers(Trainer.evaluate, self.val_rows, places)
            total = {name: total.get(name, 0.0) + value for name, value in sums.items()}
        means = mean_metrics(total)
        del means["train_tokens"], means["train_keys"]  # nothing was trained
        self.log.write(self.version, {f"validation_{name}": x for name, x in means.items()})
        self.log.note(
            f"version {self.version}: validation accuracy {means['accuracy']:.3f},"
            f" preference loss {means['preference_loss']:.4f}"
        )
        self.evaluated = self.version

    async def save(self) -> None:
        """Copies the state while the run waits, and writes it while the run continues."""
        await self.checkpoints.save(self.state(), None, self.tasks)

    def state(self) -> dict:
        """Returns what a checkpoint holds in addition to the policy, as JSON values."""
        progress = {"next_prompt": self.version * self.cfg.pairs_per_step}
        return {"version": self.version, "progress": progress}


def main() -> None:
    """Checks everything that can be checked without starting a process, then runs."""
    cfg = reader.load(Config, sys.argv[1:], default="configs/tiny_dpo.py")
    if cfg.command.dry_run:
        from dry_run import show

        sys.exit(show(cfg, Config))
    from runtime.startup import modes, preflight

    preflight.prepare(cfg)
    rows = load_pairs(cfg.data.train, cfg)
    run = Run(cfg, rows, load_pairs(cfg.data.val, cfg) if cfg.data.val else None)
    loops = modes.training_loops(run)
    with run.cluster:
        asyncio.run(run.run(loops))
        if run.log.is_open:
            from report import finish

            finish(run.cfg)


if __name__ == "__main__":
    # Actors import their classes by this file's name: the driver must use that module as well.
    importlib.import_module(Path(__file__).stem).main()
