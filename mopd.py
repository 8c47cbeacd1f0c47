"""Multi-teacher on-policy distillation (MOPD), in one file, read from top to bottom.

    A_t  =  log pi_teacher(t) - log pi_train(t)                    no gradient flows through it
    w_t  =  min(max(pi_train(t) / pi_engine(t), 0.2), 5)           nor through this
    loss = -sum_t  w_t  (a A_t + b A_i)  log pi_train(t)  /  (tokens kept in the whole batch)

The student samples, and each of its tokens is scored by the teacher of the row's domain. With w = 1
the expected gradient of the loss is that of KL(student || teacher) at each state that the student
visits. Kept are the tokens of sequences whose mean exp|log pi_train - log pi_engine| is at most 2.
A_i is the advantage of the reward in its group (equation 9 of the report of MiMo-V2-Flash,
arXiv:2601.02780); b = 0 is what Nemotron 3 Ultra publishes: one sample of a prompt, and no reward.

The loops, the buffer, the engines and the packing are those of grpo_async.py. On the way from a
finished rollout to the buffer lies a queue, one for each teacher:

    prompts (JSONL) ---> RolloutWorker(s) ---> Teacher(s) ---> RolloutBuffer ---> Trainer(s)
                           token ids ^         log pi_teacher   (driver)             |
                                     v         of each token                         |
                               Generator(s) <------------ weights v + 1 -------------+

A teacher is a frozen network on ranks of its own. It scores one batch at a time, of the rollouts
that wait, beside generation and training. One that dies is replaced, and scores its batch again.

Axes, as suffixes:  T tokens of a packed row    N sequences in that row

    bash launch/local.sh configs/tiny_mopd.py                       two teachers on a laptop
    python mopd.py --config configs/ultra_mopd.py --steps 50        a file of overrides, then flags
    python mopd.py --help                                           every setting

docs/mopd.md says when to choose it, and what is unlike NeMo-RL.
"""

import asyncio
import dataclasses
import importlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

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
    RowLoss,
    Trained,
    importance_weights,
    trusted_sequences,
)
from policy.factory import network
from policy.packing import Place, Update
from rollout.episode import Episode, Group, Rollouts, Sample, SampleInfo
from runtime.checkpoints.folders import flaw
from runtime.processes.trainer_rank import Rank, SendingRank
from runtime.reporting import metrics
from runtime.reporting.rollout_metrics import mismatch_table
from runtime.rollouts.dispatch import Slot
from runtime.rollouts.teachers import Teachers
from settings.config import CHECKED, Demand
from settings.distillation import TeacherSettings

if TYPE_CHECKING:
    from ray.actor import ActorHandle

# === Config =======================================================================================


@checked_dataclass(frozen=True, config=CHECKED)
class Loss:
    """What an advantage is made of, a and b in the formula above."""

    distill: NonNegativeFloat = 1.0
    """Weight of the teacher's advantage."""
    reward: NonNegativeFloat = 0.0
    """Weight of the reward's advantage, which compares the samples of a prompt; 0: no rewards."""

    updates_per_batch: ClassVar[int] = 1
    """No setting: the student's logprobs are those of the one forward pass that trains."""
    skip_zero_advantage: ClassVar[bool] = False
    """No setting: hardly a token has an advantage of exactly 0."""


@checked_dataclass(frozen=True, config=CHECKED)
class Config(TeacherSettings):
    """Distil teachers into a language model that samples. P, G and weights: Nemotron 3 Ultra."""

    prompts_per_step: PositiveInt = 1024
    """P, prompt groups in a batch."""
    group_size: PositiveInt = 1
    """G, samples of each prompt; 2 or more for loss.reward."""
    advantage: Advantage = dataclasses.field(default_factory=Advantage)
    """From rewards to their advantages, for loss.reward."""
    correction: Correction = dataclasses.field(default_factory=lambda: Correction(low=0.2))
    """Importance weights of the tokens, pi_train / pi_engine, and the sequence-error filter."""
    loss: Loss = dataclasses.field(default_factory=Loss)
    """Weights of what teachers and rewards say."""

    @property
    def demand(self) -> Demand:
        """What the run takes of a cluster beside its trainer ranks."""
        return super().demand._replace(beside=self.teacher_ranks)

    def __post_init__(self) -> None:
        """Refuses combinations that cannot work, naming both sides. Raises ValueError."""
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
            (not self.policy.replay_routing, "policy.replay_routing = True: expected False"),
        ):
            if not holds:
                raise ValueError(message)


# === Data =========================================================================================


@dataclasses.dataclass
class Batch(grpo_async.Batch):
    """A packed row of grpo_async.py, and what the teachers say of its tokens."""

    teacher_logp_T: Tensor = dataclasses.field(kw_only=True)  # float32


def pack(samples: list[Sample], update: Update, cfg: Config) -> Batch:
    """One row of several samples; an empty row is a single token that trains nothing.

    Raises RuntimeError for a sample that no teacher has scored.
    """
    row = grpo_async.pack(samples, update, cast(Any, cfg))  # of which it reads `advantage`
    pieces = [np.zeros(1, np.float32)] if not samples else []
    for sample in samples:
        if sample.teacher_logp_T is None or not np.isfinite(sample.teacher_logp_T).all():
            raise RuntimeError("a sample has no teacher's logprobs: only mopd.py writes those")
        pieces.append(sample.teacher_logp_T)
    return Batch(**vars(row), teacher_logp_T=torch.from_numpy(np.concatenate(pieces)))


# === The algorithm: a pure function of tensors ====================================================


def distillation_loss(logp_T: Tensor, batch: Batch, cfg: Config) -> RowLoss:
    """The loss of one packed row, given the student's logprobs `logp_T` [T], with gradient.

    In REINFORCE's form: one update is made of a batch, so there is no PPO ratio. Divided by the
    planned count of the update, or of its first part, as in grpo_async.policy_loss.
    """
    rule = cfg.correction
    student_T = logp_T.detach()
    mask_T = batch.mask_T & batch.engine_logp_T.isfinite()
    gap_T = torch.where(mask_T, student_T - batch.engine_logp_T, 0.0)
    trusted = trusted_sequences(gap_T, mask_T, batch.seq_T, rule.sequence_error_limit)
    mask_T = mask_T & trusted.keep_N[batch.seq_T]
    weight_T, inside_T = importance_weights(gap_T, mask_T, batch.seq_T, rule)

    distill_T = batch.teacher_logp_T - student_T
    A_T = cfg.loss.distill * distill_T + cfg.loss.reward * batch.advantage_T
    loss_T = -weight_T * A_T * logp_T
    loss = torch.where(mask_T, loss_T, 0.0).sum() / max(batch.planned_tokens, 1)
    measured = {
        "advantage": A_T,
        "reverse_kl": -distill_T,
        "student_prefers": (distill_T < 0).float(),
        "sampling_importance_ratio": weight_T,
        "is_oob_ratio": 1.0 - inside_T.float(),
    }
    return RowLoss(loss, metrics.row_stats(loss, logp_T, batch, mask_T, trusted, measured))


# === Rollouts =====================================================================================


class RolloutWorker(grpo_async.RolloutWorker):
    """That of grpo_async.py, which need not verify answers to train on them."""

    cfg: Any  # a Config of this file

    async def rollout_group(self, engine: "ActorHandle", row: dict, slot: Slot, n: int) -> Rollouts:
        """n answers to one row, which are not verified where that can be skipped."""
        module = registry.environment(row["agent_ref"]["name"])
        plays = hasattr(module, "rollout")  # an environment of many turns verifies at its end
        if self.cfg.verify or plays or slot.evaluation is not None:
            return await super().rollout_group(engine, row, slot, n)
        with self.samplers.of_group(engine, row, slot, n) as samplers:
            params = row["responses_create_params"]
            prompt_ids = samplers[0].render(params["input"], params.get("tools"))
            turns = await samplers[0].generate(prompt_ids, n)
        return self.finish(row, slot, [Episode([turn], Reward(0.0)) for turn in turns])


# === Teachers =====================================================================================


class Teacher(Rank):
    """One rank of one or more frozen networks. A plain class; an actor where it is used."""

    def start(self, rank: int, address: tuple[str, int]) -> None:
        """Joins the other ranks and loads the checkpoints that they hold, `cfg.model` the first.

        Raises RuntimeError where one was exported by a run and its marker says otherwise.
        """
        cfg = self.cfg
        self.join_ranks(rank, address)
        for model in cfg.models_beside(cfg.model):
            if found := flaw(model, rank, cfg.policy.ranks):
                raise RuntimeError(f"the teacher in {model!r}: {found}")
        how = (cfg.policy, cfg.sampling.temperature, cfg.seed, cfg.timeouts.train)
        self.networks = {model: network(model, *how) for model in cfg.models_beside(cfg.model)}

    def score(self, model: str, rows: list[list[Place]], *groups: list[Sample]) -> tuple:
        """Logprobs of the samples' tokens, packed in `rows`, of one checkpoint; collective.

        Returns the seconds that it took, the infos of each group, and then the groups, whose
        samples have `teacher_logp_T`. Of a replica's ranks one returns them, and the others empty
        ones. Raises FloatingPointError for a logprob that is not finite: it would train nothing.
        """
        began = time.perf_counter()
        network = self.networks[model]
        packed = [[groups[g][j] for g, j in row] for row in rows]
        batches = [grpo_async.pack(samples, Update(1, 1, []), self.cfg) for samples in packed]
        logps = [logp_T.cpu().numpy() for logp_T in network.logprobs(batches)]
        seconds = time.perf_counter() - began
        if not network.reports:
            return seconds, [], *([] for _ in groups)
        for sample in (sample for group in groups for sample in group):
            sample.teacher_logp_T = np.zeros(len(sample.tokens_T), np.float32)
        for samples, logp_T in zip(packed, logps, strict=True):
            if not samples:  # a row that fills up a share
                continue
            ends = np.cumsum([len(sample.tokens_T) for sample in samples])
            for sample, of_sample_T in zip(samples, np.split(logp_T, ends[:-1]), strict=True):
                keep_score(sample, of_sample_T, model)
        return seconds, [[sample.info() for sample in group] for group in groups], *groups


def keep_score(sample: Sample, teacher_logp_T: np.ndarray, model: str) -> None:
    """Gives a sample its teacher's logprobs [T], and its reverse KL by those of the engine.

    The driver knows that mean over tokens. Raises FloatingPointError naming `model`.
    """
    if not np.isfinite(teacher_logp_T).all():
        found = teacher_logp_T[~np.isfinite(teacher_logp_T)][0]
        raise FloatingPointError(f"the teacher {model} gives a token of {sample.env} {found}")
    sample.teacher_logp_T = teacher_logp_T
    used_T = sample.mask_T & np.isfinite(sample.engine_logp_T)
    if used_T.any():
        gap = float((sample.engine_logp_T - teacher_logp_T)[used_T].mean())
        sample.components = sample.components | {"reverse_kl": gap}


# === Trainer ======================================================================================


class Trainer(SendingRank):
    """One rank of the student. A plain class; an actor where it is used."""

    parts: tuple[Update, ...] = ()  # whose gradients wait for the optimizer step
    stats: tuple[dict[str, Tensor], ...] = ()  # of their rows
    probe_gaps = grpo_async.Trainer.probe_gaps

    def start(self, rank: int, address: tuple[str, int]) -> list:
        """Joins the other ranks and loads the student; returns what its weights look like."""
        torch.manual_seed(self.cfg.seed)
        self.join_ranks(rank, address)
        self.policy = self.open_policy(self.cfg.sampling.temperature)
        return self.open_sender()

    def train_step(self, step: int, updates: list[Update], *groups: list[Sample]) -> Trained:
        """Trains one batch, or a part: Ray resolves `groups` one by one, but not inside a list."""
        began = time.perf_counter()
        (part,) = updates
        self.parts += (part,)
        rows = [[groups[g][j] for g, j in row] for row in part.rows]
        batches = [pack(samples, self.parts[0], self.cfg) for samples in rows]
        logps: list[Tensor] = []

        def loss_fn(logp_T: Tensor, batch: Batch) -> RowLoss:
            logps.append(logp_T.detach().cpu())
            return distillation_loss(logp_T, batch, self.cfg)

        self.stats += tuple(self.policy.forward_backward(batches, loss_fn, part.more))
        measured = {} if part.more else self.step()
        measured |= {"train_seconds": time.perf_counter() - began}
        if not self.policy.reports:  # another rank of this replica reports the same rows
            return Trained(measured, {}, np.empty(0))
        # A row without samples fills up a share, so that all ranks have as many.
        used = [logp_T for samples, logp_T in zip(rows, logps, strict=True) if samples]
        samples = [sample for row in rows for sample in row]
        logp_T = torch.cat([torch.empty(0), *used]).numpy()
        limit = self.cfg.correction.sequence_error_limit
        return Trained(measured, mismatch_table(samples, logp_T, step, limit), logp_T)

    def step(self) -> dict[str, float]:
        """An optimizer step, with gradients scaled as if the divisor had counted kept tokens."""
        total = self.reduced(self.stats)
        planned = self.parts[0].planned_tokens
        tokens = sum(part.planned_tokens for part in self.parts)
        self.parts, self.stats = (), ()
        kept = tokens - total["row_tokens"] + total["kept_tokens"]
        grad_scale = max(planned, 1) / max(kept, 1)
        measured = metrics.step_metrics(total, tokens, grad_scale)
        measured |= self.policy.optimizer_step(grad_scale)
        self.stage_weights()
        return measured


# === The driver ===================================================================================


class Run(grpo_async.Run):
    """The run of grpo_async.py, whose groups pass their teachers before they reach the buffer."""

    MUST_MATCH = (*grpo_async.Run.STREAM, "teachers", "routes", "default_teacher")
    ACTORS = (Trainer, RolloutWorker)
    cfg: Any  # a Config of this file

    def __init__(self, cfg: Config, rows: Sequence[dict], val_rows: Sequence[dict]):
        super().__init__(cast(Any, cfg), rows, val_rows)
        self.teachers = Teachers(cfg, self.cluster, Teacher)
        self.dispatcher.census = lambda: f"{self.buffer.census()}; {self.teachers.census()}"

    async def start(self) -> None:
        """Starts all actors; no teachers where samples are read, or a checkpoint is evaluated."""
        command = self.cfg.command
        idle = command.replay or command.eval_only
        await together([super().start()] + ([] if idle else [self.teachers.start()]))

    async def roll_out(self, row: dict, slot: Slot) -> Group:
        """A prompt's group, once its teacher has scored it."""
        return await self.teachers.score(await super().roll_out(row, slot))

    async def train(self, step: int, groups: list[Group]) -> dict[str, float]:
        """A batch, or a part; measures beside it how far the student is from each teacher."""
        measured = await super().train(step, groups)
        if self.buffer.next_step <= step:
            return measured
        infos = [info for group in self.parts.groups for info in group.infos]
        return measured | self.kl_by_teacher(infos) | self.teachers.meters()

    def kl_by_teacher(self, infos: list[SampleInfo]) -> dict[str, float]:
        """The mean reverse KL over the tokens that each teacher has scored, in nats."""
        sums: dict[str, list[float]] = {}
        for info in infos:
            if "reverse_kl" in info.components:
                name = self.cfg.teacher_of(info.env, info.dataset)
                total = sums.setdefault(f"reverse_kl/{name}", [0.0, 0.0])
                total[0] += info.trained_tokens * info.components["reverse_kl"]
                total[1] += info.trained_tokens
        return {name: kl / tokens for name, (kl, tokens) in sums.items()}


def main() -> None:
    """Checks everything that can be checked without a process, then runs."""
    from settings import reader

    cfg = reader.load(Config, sys.argv[1:], default="configs/tiny_mopd.py")
    if cfg.command.dry_run:
        from dry_run import explain

        print(explain(cfg, Config))
        return
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
