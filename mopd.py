"""Multi-teacher on-policy distillation (MOPD), in one file, read from top to bottom.

    A_t  =  log pi_teacher(t) - log pi_train(t)                    no gradient flows through it
    C_t  =  min(max(a A_t + b A_i, -20), 20)                       nor through this
    w_t  =  min(max(pi_train(t) / pi_engine(t), 0.2), 5)           nor through this
    loss = -sum_t  w_t  C_t  log pi_train(t)  /  (tokens kept in the whole batch)

The student samples an answer, and the row's teacher scores each token of that answer. With w = 1,
the expected gradient of the loss is the gradient of KL(student || teacher) at each state that the
student visits. The clamp breaks this equality only at tokens to which teacher and student give
probabilities that differ by a factor above e^20. A sequence is kept if its mean
exp|log pi_train - log pi_engine| is at most 2.
A_i is the advantage of the sample's reward within its group (equation 9 of the MiMo-V2-Flash
report, arXiv:2601.02780). The published value for Nemotron 3 Ultra is b = 0: one sample per prompt,
and no reward.

The loops, the buffer, the engines and the packing come from grpo_async.py. A finished rollout
passes through its teacher's queue on the way to the buffer:

    prompts (JSONL) ---> RolloutWorker(s) ---> Teacher(s) ---> RolloutBuffer ---> Trainer(s)
                           token ids ^         log pi_teacher   (driver)             |
                                     v         of each token                         |
                               Generator(s) <------------ weights v + 1 -------------+

A teacher is a frozen network on ranks of its own. It scores waiting rollouts in batches, one batch
at a time, while generation and training continue. A teacher that dies is replaced, and its batch is
scored again.

Axes, as suffixes:  T tokens of a packed row    N sequences in that row

    bash launch/local.sh configs/tiny_mopd.py                       two teachers on a laptop
    python mopd.py --config configs/ultra_mopd.py --steps 50        a file of overrides, then flags
    python mopd.py --help                                           every setting

docs/mopd.md explains when to choose MOPD, and how this program differs from NeMo-RL.
"""

import asyncio
import dataclasses
import importlib
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from pydantic import NonNegativeFloat, PositiveInt
from pydantic.dataclasses import dataclass as checked_dataclass
from torch import Tensor

import grpo_async
from core.waits import together
from envs import Reward, registry
from grpo_async import (
    Advantage,
    Correction,
    GradientSum,
    GroupSettings,
    PackedRow,
    RowLoss,
    ScoredRow,
    Trained,
    importance_weights,
    token_mismatch,
    trusted_sequences,
)
from policy import Policy, WeightMeta
from policy.factory import network
from policy.packing import Place, Update
from rollout.episode import Episode, Group, Rollouts, Sample, SampleInfo, Turn
from runtime.checkpoints.folders import flaw as export_flaw
from runtime.processes.trainer_rank import Rank, SendingRank
from runtime.reporting import metrics
from runtime.rollouts.dispatch import Slot
from runtime.rollouts.teachers import Teachers
from settings.config import CHECKED, Demand
from settings.distillation import TeacherSettings

if TYPE_CHECKING:
    from ray.actor import ActorHandle

# === Config =======================================================================================


@checked_dataclass(frozen=True, config=CHECKED)
class Loss:
    """The weights of an advantage's two terms, a and b in the formula above."""

    distill: NonNegativeFloat = 1.0
    """Weight of the teacher's advantage."""
    reward: NonNegativeFloat = 0.0
    """Weight of the reward's advantage, which compares the samples of a prompt; 0: no rewards."""


@checked_dataclass(frozen=True, config=CHECKED)
class Config(TeacherSettings, GroupSettings):
    """Distil teachers into the model that samples. P, G, a, b and w are Nemotron 3 Ultra's."""

    prompts_per_step: PositiveInt = 1024
    """P, prompt groups in a batch."""
    group_size: PositiveInt = 1
    """G, samples per prompt; 2 or more for loss.reward."""
    advantage: Advantage = dataclasses.field(default_factory=lambda: Advantage(clip=(-20.0, 20.0)))
    """Interval of a token's advantage (clip), and how rewards become advantages for loss.reward."""
    correction: Correction = dataclasses.field(default_factory=lambda: Correction(low=0.2))
    """Importance weights of the tokens, pi_train / pi_engine, and the sequence-error filter."""
    loss: Loss = dataclasses.field(default_factory=Loss)
    """Weights of the teacher's advantage and of the reward's advantage."""

    @property
    def demand(self) -> Demand:
        """The resources that the run takes in addition to its trainer ranks."""
        return super().demand._replace(beside=self.teacher_ranks)

    def __post_init__(self) -> None:
        """Refuses combinations that cannot work. Raises ValueError."""
        super().__post_init__()
        G, b = self.group_size, self.loss.reward
        P, n = self.prompts_per_step, self.train_parts
        low, high = self.advantage.clip
        rule = self.correction
        for holds, message in (
            (not b or G > 1, f"loss.reward = {b} and group_size = {G}: expected 2 or more"),
            (b or self.loss.distill, "loss.distill = 0 and loss.reward = 0: nothing to learn"),
            (not b or self.verify, f"loss.reward = {b} needs verify = True"),
            (P % n == 0, f"prompts_per_step = {P} is no multiple of train_parts = {n}"),
            (low <= 0 <= high, f"advantage.clip = {low, high}: expected low <= 0 <= high"),
            (rule.low <= rule.high, f"correction.low = {rule.low} > correction.high = {rule.high}"),
            # The replayed experts are those that the student's engine chose. The rows that a
            # teacher scores would carry them as well.
            (not self.policy.replay_routing, "policy.replay_routing = True: expected False"),
        ):
            if not holds:
                raise ValueError(message)


# === Data =========================================================================================


@dataclasses.dataclass
class Batch(grpo_async.Batch):
    """A packed row of grpo_async.py with the teachers' logprobs of its tokens."""

    teacher_logp_T: Tensor = dataclasses.field(kw_only=True)  # float32


def pack(samples: list[Sample], update: Update, cfg: Config) -> Batch:
    """Joins samples into one row; without samples, the row is one token that trains nothing.

    Raises RuntimeError if any token of a sample lacks a finite teacher logprob.
    """
    row = grpo_async.pack(samples, update, cfg)
    pieces = []
    for sample in samples:
        if sample.teacher_logp_T is None or not np.isfinite(sample.teacher_logp_T).all():
            raise RuntimeError("a sample lacks finite teacher logprobs: only mopd.py writes them")
        pieces.append(sample.teacher_logp_T)
    if not samples:
        pieces.append(np.zeros(1, np.float32))
    return Batch(**vars(row), teacher_logp_T=torch.from_numpy(np.concatenate(pieces)))


# === The algorithm: a pure function of tensors ====================================================


def distillation_loss(logp_T: Tensor, batch: Batch, cfg: Config) -> RowLoss:
    """Returns the loss of one packed row; `logp_T` [T] has the student's logprobs, with gradient.

    The loss has REINFORCE's form: a batch gives one update, so there is no PPO ratio. It is divided
    by the count planned for the update, or for its first part, as in grpo_async.policy_loss. A fork
    with another divisor also changes `Trainer.optimizer_step`.
    """
    rule = cfg.correction
    student_T = logp_T.detach()
    mask_T = batch.mask_T & batch.engine_logp_T.isfinite()
    gap_T = torch.where(mask_T, student_T - batch.engine_logp_T, 0.0)
    trusted = trusted_sequences(gap_T, mask_T, batch.seq_T, rule.sequence_error_limit)
    mask_T = mask_T & trusted.keep_N[batch.seq_T]
    weight_T, inside_T = importance_weights(gap_T, mask_T, batch.seq_T, rule)

    distill_T = batch.teacher_logp_T - student_T
    unclamped_T = cfg.loss.distill * distill_T + cfg.loss.reward * batch.advantage_T
    A_T = unclamped_T.clamp(*cfg.advantage.clip)
    loss_T = -weight_T * A_T * logp_T
    loss = torch.where(mask_T, loss_T, 0.0).sum() / max(batch.planned_tokens, 1)
    measured = {
        "advantage": A_T,
        "advantage_clip_fraction": (unclamped_T != A_T).float(),
        "reverse_kl": -distill_T,
        "student_prefers": (distill_T < 0).float(),
        "sampling_importance_ratio": weight_T,
        "is_oob_ratio": 1.0 - inside_T.float(),
    }
    measured |= token_mismatch(student_T, student_T, batch.engine_logp_T)
    return RowLoss(loss, metrics.row_stats(loss, batch, mask_T, trusted, measured))


# === Rollouts =====================================================================================


class RolloutWorker(grpo_async.RolloutWorker[Config]):
    """The worker of grpo_async.py, which skips the verification of answers if it can."""

    async def rollout_group(self, engine: "ActorHandle", row: dict, slot: Slot, n: int) -> Rollouts:
        """Returns n answers to one row; verifies them only if their rewards are needed."""
        module = registry.environment(row["agent_ref"]["name"])
        has_turns = hasattr(module, "rollout")  # a multi-turn environment verifies at its end
        if self.cfg.verify or has_turns or slot.evaluation is not None:
            return await super().rollout_group(engine, row, slot, n)
        with self.samplers.of_group(engine, row, slot, n) as group:
            params = row["responses_create_params"]
            sampler = group.samplers[0]  # any of them can generate for the whole group
            prompt_ids = sampler.render(params["input"], params.get("tools"))
            turns = await sampler.generate(prompt_ids, n)
        return self.finish(row, slot, [Episode([turn], Reward(0.0)) for turn in turns])


# === Teachers =====================================================================================


class Teacher(Rank):
    """One rank of one or more frozen networks. A plain class; Ray makes it an actor."""

    def start(self, rank: int, address: tuple[str, int]) -> None:
        """Joins the other ranks and loads the checkpoints of the teachers that they serve.

        `self.cfg` holds the settings of these ranks: its `model` is a teacher's checkpoint, the
        first one that they serve. Raises RuntimeError if a checkpoint that a run exported is
        damaged: its marker lists the sizes and checksums of its files, of which each rank checks
        some.
        """
        cfg = self.cfg
        self.join_ranks(rank, address)
        # A host is the ranks that hold one or more teachers. Its first checkpoint identifies it.
        models = cfg.models_of_host(cfg.model)
        for model in models:
            if found := export_flaw(model, rank, cfg.policy.ranks):
                raise RuntimeError(f"the teacher in {model!r}: {found}")
        self.networks: dict[str, Policy] = {}
        for model in models:
            self.networks[model] = network(
                model, cfg.policy, cfg.sampling.temperature, cfg.seed, cfg.timeouts.train
            )

    def score(
        self, model: str, rows: list[list[Place]], *groups: list[Sample]
    ) -> tuple[float | list[list[SampleInfo]] | list[Sample], ...]:
        """Scores the samples that are packed in `rows` with one checkpoint; collective.

        Returns the seconds, the infos of each group, and then each group as a separate value for
        Ray; its samples now have `teacher_logp_T`. Only one rank of a replica returns infos and
        groups; the others return empty lists. Raises FloatingPointError if a logprob is not finite.
        """
        began = time.perf_counter()
        teacher = self.networks[model]
        no_loss = Update(planned_tokens=1, planned_sequences=1, rows=[])  # nothing is divided
        # With top_p, rows hold the sets that the student drew from: teachers normalise over them.
        packed: list[list[Sample]] = []
        batches: list[grpo_async.Batch] = []
        for places in rows:
            samples = [groups[g][j] for g, j in places]
            packed.append(samples)
            batches.append(grpo_async.pack(samples, no_loss, self.cfg))
        logps = [logp_T.cpu().numpy() for logp_T in teacher.logprobs(batches)]
        seconds = time.perf_counter() - began
        if not teacher.reports:
            return seconds, [], *([] for _ in groups)
        for group in groups:  # samples without trained tokens are in no row
            for sample in group:
                sample.teacher_logp_T = np.zeros(len(sample.tokens_T), np.float32)
        for samples, logp_T in zip(packed, logps, strict=True):
            if not samples:  # a padding row
                continue
            ends = np.cumsum([len(sample.tokens_T) for sample in samples])
            for sample, of_sample_T in zip(samples, np.split(logp_T, ends[:-1]), strict=True):
                keep_score(sample, of_sample_T, model)
        infos = [[sample.info() for sample in group] for group in groups]
        return seconds, infos, *groups


def keep_score(sample: Sample, teacher_logp_T: np.ndarray, model: str) -> None:
    """Stores the teacher's logprobs [T] in a sample, and the mean reverse KL for the driver.

    The KL compares the teacher with the engine. Raises FloatingPointError naming `model` if a
    logprob is not finite: the sample could not be trained on.
    """
    if not np.isfinite(teacher_logp_T).all():
        found = teacher_logp_T[~np.isfinite(teacher_logp_T)][0]
        raise FloatingPointError(
            f"the teacher {model} gives a token of {sample.env} the logprob {found}"
        )
    sample.teacher_logp_T = teacher_logp_T
    used_T = sample.mask_T & np.isfinite(sample.engine_logp_T)
    if used_T.any():
        gap = float((sample.engine_logp_T - teacher_logp_T)[used_T].mean())
        sample.components = sample.components | {"reverse_kl": gap}


# === Trainer ======================================================================================


class Trainer(SendingRank[Config]):
    """One rank of the student. A plain class; Ray makes it an actor."""

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self.gradients = GradientSum()

    def start(self, rank: int, address: tuple[str, int]) -> list[WeightMeta]:
        """Joins the other ranks and loads the student; returns each weight's name and shape."""
        torch.manual_seed(self.cfg.seed)
        self.join_ranks(rank, address)
        self.policy = self.open_policy(self.cfg.sampling.temperature)
        return self.open_sender()

    def train_step(self, step: int, updates: list[Update], *groups: list[Sample]) -> Trained:
        """Trains on this rank's share of a batch, or of a part of one.

        Each group is a separate argument because Ray does not resolve references in a list.
        """
        began = time.perf_counter()
        (update,) = updates
        scored = self.add_gradients(update, groups)
        measured: dict[str, float] = {}
        if not update.more:
            measured = self.optimizer_step()
            self.stage_weights()
        measured["train_seconds"] = time.perf_counter() - began
        return Trained.of(measured, scored, step, self.cfg.correction.sequence_error_limit)

    def add_gradients(self, update: Update, groups: Sequence[list[Sample]]) -> list[ScoredRow]:
        """Packs this rank's rows of an update, or of a part of one, and adds their gradients."""
        planned = self.gradients.first_part(update)
        rows = []
        for places in update.rows:
            samples = [groups[g][j] for g, j in places]
            rows.append(PackedRow(samples, pack(samples, planned, self.cfg)))
        loss = partial(distillation_loss, cfg=self.cfg)
        return self.gradients.add(self.policy, update, rows, loss)

    def optimizer_step(self) -> dict[str, float]:
        """Takes a step on the summed gradients, scaled as if each row was divided by what is kept.

        Returns the metrics of the update.
        """
        summed = self.gradients
        self.gradients = GradientSum()
        total = self.reduced(summed.row_stats)
        first = summed.updates[0]
        grad_scale = max(first.planned_tokens, 1) / max(total["kept_tokens"], 1)
        measured = metrics.step_metrics(total, summed.planned_tokens, grad_scale)
        return measured | self.policy.optimizer_step(grad_scale)

    def probe_gaps(self, answers: list[list[Turn]]) -> list[float]:
        """Returns the mean |logp - engine_logp| over each engine's turns; collective."""
        return grpo_async.probe_gaps(self.policy, answers, self.cfg)


# === The driver ===================================================================================


class Run(grpo_async.Run[Config]):
    """The run of grpo_async.py, with teachers that score groups on their way to the buffer."""

    MUST_MATCH = (*grpo_async.Run.STREAM, "teachers", "routes", "default_teacher")
    ACTORS = (Trainer, RolloutWorker)

    def __init__(self, cfg: Config, rows: Sequence[dict], val_rows: Sequence[dict]):
        super().__init__(cfg, rows, val_rows)
        self.teachers = Teachers(cfg, self.cluster, Teacher)
        self.dispatcher.census = lambda: f"{self.buffer.census()}; {self.teachers.census()}"

    async def start(self) -> None:
        """Starts all actors; --replay and --eval_only need no teachers."""
        starts = [super().start()]
        if not self.cfg.command.replay and not self.cfg.command.eval_only:
            starts.append(self.teachers.start())
        await together(starts)

    async def roll_out(self, row: dict, slot: Slot) -> Group:
        """Returns a prompt's group once its teacher has scored it."""
        group = await super().roll_out(row, slot)
        return await self.teachers.score(group)

    async def train(self, step: int, groups: list[Group]) -> dict[str, float]:
        """Trains a part of a step; with the last part, also measures the gap to each teacher."""
        measured = await super().train(step, groups)
        if not self.buffer.has_taken_all(step):
            return measured
        infos = [info for group in self.current_step.groups for info in group.infos]
        return measured | self.kl_by_teacher(infos) | self.teachers.meters()

    def kl_by_teacher(self, infos: list[SampleInfo]) -> dict[str, float]:
        """Returns the mean reverse KL, in nats, over the tokens that each teacher has scored."""
        kl: defaultdict[str, float] = defaultdict(float)
        tokens: defaultdict[str, int] = defaultdict(int)
        for info in infos:
            if "reverse_kl" in info.components:
                name = self.cfg.teacher_of(info.env, info.dataset)
                kl[name] += info.trained_tokens * info.components["reverse_kl"]
                tokens[name] += info.trained_tokens
        return {f"reverse_kl/{name}": kl[name] / tokens[name] for name in tokens}


def main() -> None:
    """Checks everything that can be checked without starting a process, then runs."""
    from settings import reader

    cfg = reader.load(Config, sys.argv[1:], default="configs/tiny_mopd.py")
    if cfg.command.dry_run:
        from dry_run import show

        sys.exit(show(cfg, Config))
    from envs.check_rows import load_rows
    from runtime.startup import modes, preflight
    from runtime.startup.check_teachers import check_teachers

    preflight.prepare(cfg)
    rows = load_rows(cfg.data.train, cfg)
    check_teachers(cfg, rows)
    run = Run(cfg, rows, load_rows(cfg.data.val, cfg) if cfg.data.val else [])
    loops = modes.loops(run)
    with run.cluster:
        asyncio.run(run.run(loops))
        if run.log.is_open:
            from report import finish

            finish(run.cfg)


if __name__ == "__main__":
    # Actors import their classes by this file's name: the driver must use that module as well.
    importlib.import_module(Path(__file__).stem).main()
