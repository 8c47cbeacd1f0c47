"""Asynchronous GRPO for large language models, in one file, read from top to bottom.

    A_i  =  (r_i - mean_{j != i} r_j) / std_{j != i} r_j            leave-one-out advantage
    w_t  =  min(pi_train(t) / pi_engine(t), 5)                      no gradient flows through it
    loss = -sum_t  w_t  A_t  log pi_train(t)  /  (tokens kept in the whole batch)

A token has its sample's advantage, A_t = A_i, or a penalty. pi_engine is the policy that sampled
it, in vLLM and up to max_lag versions older: w_t corrects for that lag and for the engine's
rounding. Only sequences whose mean exp|log pi_train - log pi_engine| is at most 2 are summed. Each
batch gives one update, so the PPO ratio is 1 and is never clipped.

Every RL stage of Nemotron 3 Super, NVIDIA's 120B model with a public recipe, uses this objective.
The GRPO paper's objective and some twenty others need a setting or a few lines: docs/variants.md.

Two loops run at once and meet in a buffer. A group of rollouts belongs to a slot. Slot i is trained
at step i // P and at no other, and may start as soon as the policy has version i // P - max_lag
(max_lag is 1 by default). Slots take prompts in file order and wrap around at the end of the file:

           prompts (JSONL, file order)
                 |  slot i starts when version >= i // P - max_lag
    RolloutWorker(s) --- token ids ---> Generator(s)  vLLM
      environment, reward, advantage           ^  pause, keep requests and KV,
                 |                             |  receive, label, resume
                 v                             +--- weights v + 1 ----+
           RolloutBuffer (driver) --- P groups of step s ---> Trainer(s)  FSDP2 or Megatron

The driver is one asyncio program that moves references and lengths, never tokens.

Axes, as suffixes:  P prompts per step    G samples per prompt    T tokens of a packed row
                    N sequences in that row    J the samples that a reward is compared with

Policy version v = batches trained so far. Every sampled token carries the version that produced it.

rollout/episode.py (turns, episodes, samples) and policy/__init__.py (the network) complete the
picture. docs/grpo_async.md justifies each deviation from NeMo-RL (branch super-v3).

    bash launch/local.sh                                            a tiny model learns on a laptop
    python grpo_async.py --config configs/gsm8k.py --steps 100      a file of overrides, then flags
    python grpo_async.py --help                                     every setting
"""

import asyncio
import dataclasses
import importlib
import itertools
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from pydantic import Field, NonNegativeFloat, PositiveInt
from pydantic.dataclasses import dataclass as checked_dataclass
from torch import Tensor

from core.waits import Ref, together, unless_stopped
from envs import registry
from policy import Policy, WeightMeta
from policy.packing import Place, Share, Update, plan_shares
from rollout import engine_choices
from rollout.drafts import Drafts, rest_of
from rollout.episode import (
    Episode,
    Group,
    Request,
    Rollouts,
    Sample,
    SampleInfo,
    Turn,
    shaped_reward,
)
from rollout.sampler import Samplers
from runtime.checkpoints.save import Checkpoints, ScoredShare
from runtime.engines import repair
from runtime.engines.engine import open_engine
from runtime.engines.fleet import Fleet, Received
from runtime.processes.cluster import Cluster
from runtime.processes.trainer_rank import SendingRank
from runtime.reporting import metrics
from runtime.reporting.log import Log
from runtime.reporting.rollout_metrics import MismatchTable, mismatch_table
from runtime.rollouts.dispatch import Dispatcher, Slot
from settings.config import CHECKED, LowEffort, RunSettings

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from vllm.v1.engine.async_llm import AsyncLLM

    from runtime.startup.modes import Loops

# === Config =======================================================================================

Unbounded = Annotated[float, Field(allow_inf_nan=True)]
# Flaws of a message, which decide the advantage of its tokens.
Penalties = dict[Literal["tool_call", "thinking"], float]
# Flaws of an episode, which cost it its reward.
Flaws = tuple[Literal["reasoning_is_answer", "empty_answer", "inner_eos", "think_tags"], ...]


@checked_dataclass(frozen=True, config=CHECKED)
class Advantage:
    """The rule that turns the rewards of a group into the advantages of its tokens."""

    baseline: Literal["leave_one_out", "mean"] = "leave_one_out"
    """Compare a reward with the others in its group, or with all rewards."""
    normalize: bool = True
    """Divide by the standard deviation of those rewards."""
    clip: tuple[Unbounded, Unbounded] = (-50.0, 50.0)
    """Advantages are clamped to this interval; (-inf, inf) turns clamping off (Nemotron 3 Nano)."""
    overlong_filtering: bool = False
    """Truncated answers still count toward the baseline, but are not trained on."""
    penalties: Penalties = dataclasses.field(default_factory=dict)
    """Flaw -> the advantage of every token in a message with that flaw (Super: -5 each)."""
    low_effort: LowEffort = dataclasses.field(default_factory=LowEffort)
    """Reward by length for answers to prompts that ask for low effort."""
    zero_rewards: Flaws = ()
    """Flaws that set the reward of an episode to 0 (Ultra: all four, rollout/zero_rewards.py)."""


@checked_dataclass(frozen=True, config=CHECKED)
class Correction:
    """What to do if trainer and engine disagree. Papers differ in level, action, low, high:

    TIS                 token     truncate  0      5        (Nemotron 3 Super)
    IcePop              token     mask      0.5    5
    sequence-mask TIS   sequence  mask      0.999  1.002
    """

    level: Literal["token", "sequence"] = "token"
    """Judge each token's ratio, or the geometric mean of its sequence's ratios."""
    action: Literal["truncate", "mask"] = "truncate"
    """Clamp the ratio to [low, high], or drop tokens outside it; the divisor still counts them."""
    low: NonNegativeFloat = 0.0
    """Lower bound of pi_train / pi_engine."""
    high: Annotated[Unbounded, Field(gt=0)] = 5.0
    """Upper bound of pi_train / pi_engine."""
    sequence_error_limit: Annotated[Unbounded, Field(ge=1)] = 2.0
    """Drop a sequence whose mean exp|logp_train - logp_engine| exceeds this; 1 means no error."""


@checked_dataclass(frozen=True, config=CHECKED)
class Loss:
    """The policy gradient of a batch."""

    updates_per_batch: PositiveInt = 1
    """Optimizer steps per batch, each on a different part of it. If 1, the PPO ratio is 1."""
    ratio_clip: tuple[Annotated[float, Field(ge=0, le=1)], NonNegativeFloat] = (0.2, 0.28)
    """PPO ratio is clipped to [1 - first, 1 + second] (clip-higher, DAPO)."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the k3 KL to the initial policy; 0: no reference model is loaded."""
    reduction: Literal["token", "sequence"] = "token"
    """Every token weighs the same, or every sequence does (an episode may consist of several)."""
    skip_zero_advantage: bool = True
    """Count samples with zero advantage in the divisor, but spend no compute on them."""


class GroupSettings(RunSettings):
    """Settings for any algorithm that trains on groups of rollouts.

    mopd.py shares the code that reads them. Each algorithm declares the fields in its Config, with
    their defaults.
    """

    advantage: Advantage

    @property
    def updates_per_batch(self) -> int:
        """Optimizer steps per batch."""
        return 1

    @property
    def updates(self) -> int:
        """Optimizer steps of the whole run."""
        return self.steps * self.updates_per_batch

    @property
    def skip_zero_advantage(self) -> bool:
        """Whether samples with zero advantage cost no compute."""
        return False


C = TypeVar("C", bound=GroupSettings)


@checked_dataclass(frozen=True, config=CHECKED)
class Config(GroupSettings):
    """Train a language model with asynchronous GRPO. Defaults: Nemotron 3 Super."""

    prompts_per_step: PositiveInt = 256
    """P, prompt groups in a batch."""
    group_size: PositiveInt = 16
    """G, samples per prompt."""
    advantage: Advantage = dataclasses.field(default_factory=Advantage)
    """Baseline, normalisation, penalties."""
    correction: Correction = dataclasses.field(default_factory=Correction)
    """Importance weights of the tokens, pi_train / pi_engine, and the sequence-error filter."""
    loss: Loss = dataclasses.field(default_factory=Loss)
    """PPO clip, KL, divisor."""

    @property
    def has_reference(self) -> bool:
        """Whether a frozen copy of the initial policy is loaded as well."""
        return self.loss.kl_coef > 0

    @property
    def updates_per_batch(self) -> int:
        """Optimizer steps per batch."""
        return self.loss.updates_per_batch

    @property
    def skip_zero_advantage(self) -> bool:
        """Whether samples with zero advantage cost no compute."""
        return self.loss.skip_zero_advantage

    @property
    def scoring_passes(self) -> int:
        """Forward passes over a batch in addition to the one that trains, for --dry_run."""
        passes = 0
        if self.loss.updates_per_batch > 1:  # the logprobs before the first update
            passes += 1
        if self.has_reference:
            passes += 1
        return passes

    def __post_init__(self) -> None:
        """Refuses combinations that cannot work, naming both sides. Raises ValueError."""
        super().__post_init__()
        loss, rule = self.loss, self.correction
        P, U, n = self.prompts_per_step, loss.updates_per_batch, self.train_parts
        low, high = self.advantage.clip
        kl, skips = loss.kl_coef, loss.skip_zero_advantage
        for holds, message in (
            (low <= 0 <= high, f"advantage.clip = {low, high}: expected low <= 0 <= high"),
            (rule.low <= rule.high, f"correction.low = {rule.low} > correction.high = {rule.high}"),
            (P % U == 0, f"prompts_per_step = {P} is no multiple of loss.updates_per_batch = {U}"),
            (P % n == 0, f"prompts_per_step = {P} is no multiple of train_parts = {n}"),
            (n == 1 or U == 1, f"train_parts = {n}, loss.updates_per_batch = {U}: one must be 1"),
            # A mode such as --eval_only or --export compares no answers.
            (self.command.modes or self.group_size > 1, "group_size = 1: expected 2 or more"),
            (not (kl and skips), f"loss.kl_coef = {kl} needs loss.skip_zero_advantage = False"),
        ):
            if not holds:
                raise ValueError(message)


# === Data =========================================================================================


@dataclasses.dataclass
class Batch:
    """A packed row of N sequences. `policy_loss` divides by the `planned_*` counts.

    A step may be trained in parts, each as soon as its groups are ready (`StepInParts`).
    """

    tokens_T: Tensor  # int64
    positions_T: Tensor  # int64, from 0 in each sequence: this keeps them apart in attention
    seq_T: Tensor  # int64, the number of the token's sequence in the row
    mask_T: Tensor  # bool, trained tokens; never the first of a sequence
    engine_logp_T: Tensor  # float32
    advantage_T: Tensor  # float32
    score_N: Tensor  # float32, the environment's rewards before shaping
    # Counts of the whole update, over all ranks. With parts, those of the first part: it is divided
    # before the others are complete, and only gradients with the same divisor can be added up.
    planned_tokens: int
    planned_sequences: int
    old_logp_T: Tensor | None = None  # before the batch's first update, if it has several
    ref_logp_T: Tensor | None = None  # of the frozen reference, if there is a KL term
    # The experts that the engine chose for each sequence [its tokens, expert layers, experts].
    routes_N: list[np.ndarray] | None = None
    # With top_p: how many ids each token was chosen from [T], and these ids, end to end.
    allowed: tuple[Tensor, Tensor] | None = None


# === The algorithm: pure functions of tensors =====================================================

# Equal scores may differ by rounding: a std below this share of the largest reward does not divide.
SPREAD_FLOOR = 1e-4


def group_advantages(rewards_G: Tensor, rule: Advantage) -> Tensor:
    """Returns the advantages [G] of one prompt's samples; all are 0 if the rewards are equal.

    A reward is compared with the G - 1 others ("leave_one_out") or with all G ("mean"): their mean
    is subtracted, and the difference is divided by their unbiased std + 1e-6, unless that std is 0
    or only rounding. A single success among 15 failures has r - mean = 1, because the others agree.
    Each of two successes has (1 - 1/15) / 0.26 = 3.6. A sample whose advantage is exactly 0, and
    which has no penalty, costs no compute (`plan_step`). Source: NeMo-RL algorithms/utils.py:79.
    """
    G = len(rewards_G)
    if G < 2:
        return torch.zeros_like(rewards_G)
    # Sums in float64 are exact here: equal rewards have advantages of exactly 0.
    r_G = rewards_G.double()
    compared_GJ = r_G.expand(G, G)
    if rule.baseline == "leave_one_out":
        compared_GJ = compared_GJ[~torch.eye(G, dtype=torch.bool)].view(G, G - 1)
    advantage_G = r_G - compared_GJ.mean(1)
    if rule.normalize and compared_GJ.shape[1] > 1:
        std_G = compared_GJ.std(1)
        spread_G = std_G > SPREAD_FLOOR * r_G.abs().max()
        advantage_G = torch.where(spread_G, advantage_G / (std_G + 1e-6), advantage_G)
    return advantage_G.clamp(*rule.clip).to(rewards_G.dtype)


class ImportanceWeights(NamedTuple):
    """Importance weights of the tokens, without gradient."""

    weight_T: Tensor
    inside_T: Tensor  # bool, whether the ratio lay inside the bounds


def importance_weights(
    gap_T: Tensor, mask_T: Tensor, seq_T: Tensor, rule: Correction
) -> ImportanceWeights:
    """Weighs tokens by the ratio pi_old / pi_engine, whose log is `gap_T` [T].

    pi_old is the policy before the batch's first update: with one update, pi_train. The bounds
    judge either the token's own ratio or the geometric mean over its sequence. Truncation returns
    the judged ratio, clamped to the bounds. Masking returns the token's own ratio, or 0 if the
    judged ratio is outside the bounds.
    Sources: TIS, Yao et al. 2025; IcePop, Ling team 2025.
    """
    weight_T = gap_T.clamp(-20, 20).exp()  # must not overflow before the rule sees it
    judged_T = weight_T
    if rule.level == "sequence":
        judged_T = sequence_mean(gap_T, mask_T, seq_T).clamp(-20, 20).exp()[seq_T]
    inside_T = (rule.low <= judged_T) & (judged_T <= rule.high)  # written so that NaN is outside
    if rule.action == "truncate":
        return ImportanceWeights(judged_T.clamp(rule.low, rule.high), inside_T)
    return ImportanceWeights(torch.where(inside_T, weight_T, 0.0), inside_T)


def sequence_mean(x_T: Tensor, mask_T: Tensor, seq_T: Tensor) -> Tensor:
    """Returns the mean over each sequence's trained tokens [N]; 0 for a sequence without any."""
    total_N = x_T.new_zeros(int(seq_T.max()) + 1)
    count_N = total_N.clone().index_add_(0, seq_T, mask_T.to(x_T.dtype))
    total_N.index_add_(0, seq_T, torch.where(mask_T, x_T, 0.0))
    return total_N / count_N.clamp(min=1)


def divisor(tokens: float, sequences: float, cfg: Config) -> float:
    """Returns the number that divides an update's summed loss.

    `tokens` and `sequences` count what the update trains: first as planned, then again as the
    filter keeps it (`policy_loss`). A fork with another normalisation changes this function: Dr.
    GRPO returns a constant.
    """
    count = tokens if cfg.loss.reduction == "token" else sequences
    return max(count, 1)


class Trusted(NamedTuple):
    """The verdict of the sequence-error filter on each sequence of a row."""

    keep_N: Tensor  # bool, False if the engine sampled from a policy that is not ours
    error_N: Tensor  # mean exp|log pi_old - log pi_engine| over its tokens; 1 means no error


def trusted_sequences(gap_T: Tensor, mask_T: Tensor, seq_T: Tensor, limit: float) -> Trusted:
    """Judges each sequence by the log-ratios `gap_T` [T] of its trained tokens.

    If trainer and engine disagree by more than `limit`, the engine sampled from some other policy,
    and its tokens teach nothing about ours. Source: NeMo-RL algorithms/loss_functions.py.
    """
    # expm1: a float32 sum of values near 1 loses the error.
    error_N = 1 + sequence_mean(gap_T.abs().clamp(max=20).expm1(), mask_T, seq_T)
    return Trusted(error_N <= limit, error_N)


def k3(log_ratio_T: Tensor) -> Tensor:
    """Returns Schulman's k3 estimate of KL(p || q) per token [T]: log_ratio = log q - log p, x ~ p.

    Uses expm1: in float32, exp(x) - 1 - x is negative for every third x near 1e-4.
    Source: Schulman, "Approximating KL divergence", 2020.
    """
    log_ratio_T = log_ratio_T.clamp(-20, 20)
    return log_ratio_T.expm1() - log_ratio_T


@torch.no_grad()
def token_mismatch(logp_T: Tensor, old_logp_T: Tensor, engine_logp_T: Tensor) -> dict[str, Tensor]:
    """Measures, per token [T], how far the trainer is from the engine that sampled.

    The means of these tensors are metrics. Their names and definitions are those of NeMo-RL
    algorithms/loss_functions.py.
    """
    gap_T = old_logp_T - engine_logp_T
    mixture_T = torch.logaddexp(old_logp_T, engine_logp_T) - math.log(2)
    # The Jensen-Shannon divergence has log(mixture / pi). NeMo-RL reverses the ratios; so do we.
    divergence_T = k3(old_logp_T - mixture_T) + k3(engine_logp_T - mixture_T)
    return {
        "token_mult_prob_error": gap_T.abs().clamp(max=20).exp(),
        "gen_kl_error": k3(gap_T),
        "policy_kl_error": k3(-gap_T),
        "js_divergence_error": divergence_T / 2,
        "approx_entropy": -(logp_T - engine_logp_T).clamp(-20, 20).exp() * logp_T,
    }


class RowLoss(NamedTuple):
    """The loss of a packed row, with gradient, and the sums from which its metrics are computed."""

    loss: Tensor
    stats: dict[str, Tensor]


def policy_loss(logp_T: Tensor, batch: Batch, cfg: Config) -> RowLoss:
    """Returns the clipped policy gradient of one packed row.

    `logp_T` [T] has the trainer's logprob of each token, with gradient. How much the filter keeps
    is known only after the last row. So each row is divided by the count planned for the update,
    over all ranks. Gradients are summed over those ranks, and are rescaled once, before the
    optimizer step:

        1,000 tokens are planned                                  each row is divided by 1,000
        the filter drops a sequence of 200                        800 are kept
        the gradients are multiplied by 1,000 / 800 = 1.25        as if divided by 800 at once

    If a step is trained in parts, the first part is divided before the others are complete. So each
    part is divided by the count planned for the first part:

        in the same step the first of two parts has 300           each row is divided by 300
        the gradients are multiplied by 300 / 800                 as if divided by 800 at once

    So the filter costs no second forward pass, and packing changes nothing.
    """
    rule = cfg.loss
    # With one update per batch, the old policy is this one: the ratio is 1, but has a gradient.
    old_logp_T = logp_T.detach() if batch.old_logp_T is None else batch.old_logp_T
    # An engine logprob that is NaN or infinite is a fault: its token is masked, a metric counts it.
    mask_T = batch.mask_T & batch.engine_logp_T.isfinite()
    gap_T = torch.where(mask_T, old_logp_T - batch.engine_logp_T, 0.0)
    trusted = trusted_sequences(gap_T, mask_T, batch.seq_T, cfg.correction.sequence_error_limit)
    mask_T = mask_T & trusted.keep_N[batch.seq_T]
    weight_T, inside_T = importance_weights(gap_T, mask_T, batch.seq_T, cfg.correction)

    ratio_T = (logp_T - old_logp_T).clamp(-20, 20).exp()
    clipped_T = ratio_T.clamp(1 - rule.ratio_clip[0], 1 + rule.ratio_clip[1])
    A_T = batch.advantage_T
    surrogate_T = torch.maximum(-A_T * ratio_T, -A_T * clipped_T)
    loss_T = weight_T * surrogate_T

    kl_T = torch.zeros_like(logp_T)
    if batch.ref_logp_T is not None:
        # As in super-v3, the KL's weight has no gradient, and `correction` does not bound it.
        drift_T = torch.where(mask_T, logp_T.detach() - batch.engine_logp_T, 0.0)
        kl_T = drift_T.clamp(-20, 20).exp() * k3(batch.ref_logp_T - logp_T)
        loss_T = loss_T + rule.kl_coef * kl_T

    if rule.reduction == "token":
        total = torch.where(mask_T, loss_T, 0.0).sum()
    else:
        total = sequence_mean(loss_T, mask_T, batch.seq_T).sum()
    loss = total / divisor(batch.planned_tokens, batch.planned_sequences, cfg)
    # Values per token: their means over the kept tokens become metrics with these names.
    measured = {
        "probs_ratio": ratio_T,
        "probs_ratio_clamped": clipped_T,
        "clip_fraction": (ratio_T != clipped_T).float(),
        "sampling_importance_ratio": weight_T,
        "is_oob_ratio": 1.0 - inside_T.float(),
        "kl_penalty": kl_T,
    }
    measured |= token_mismatch(logp_T.detach(), old_logp_T, batch.engine_logp_T)
    return RowLoss(loss, metrics.row_stats(loss, batch, mask_T, trusted, measured))


# === Packing ======================================================================================


def plan_step(groups: list[Group], cfg: GroupSettings, more: bool = False) -> list[Share]:
    """Plans which replica trains which samples of a batch, or of a part of one.

    Reads only lengths and counts, because the driver has no tokens. If `more`, further parts of the
    same step follow.

    A place (g, j) is sample j of group g: here, of `groups[g]`. A replica gets only some of the
    groups, so in the rows of its share g is renumbered: the group is `groups[share.groups[g]]`.
    """
    size = len(groups) // cfg.updates_per_batch
    updates: list[tuple[Update, dict[Place, int]]] = []
    for first in range(0, len(groups), size):
        tokens = 0
        sequences = 0
        lengths: dict[Place, int] = {}
        for g in range(first, first + size):
            for j, info in enumerate(groups[g].infos):
                if not info.trained_tokens:
                    continue
                tokens += info.trained_tokens
                sequences += 1
                # A sample without a gradient is counted, but is computed only if it is not skipped.
                if info.has_gradient or not cfg.skip_zero_advantage:
                    lengths[g, j] = info.tokens
        # Without rows: `plan_shares` gives each replica a copy with its own.
        planned = Update(planned_tokens=tokens, planned_sequences=sequences, rows=[], more=more)
        updates.append((planned, lengths))
    return plan_shares(updates, cfg)


def pack(samples: list[Sample], update: Update, cfg: GroupSettings) -> Batch:
    """Joins samples into one row; without samples, the row is one token that trains nothing."""
    samples = samples or [Sample.empty()]
    lengths = [len(sample.tokens_T) for sample in samples]

    def join(pieces: Iterable[np.ndarray], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.concatenate(list(pieces))).to(dtype)

    batch = Batch(
        tokens_T=join((sample.tokens_T for sample in samples), torch.int64),
        positions_T=join((np.arange(length) for length in lengths), torch.int64),
        seq_T=join((np.full(length, n) for n, length in enumerate(lengths)), torch.int64),
        mask_T=join((sample.mask_T for sample in samples), torch.bool),
        engine_logp_T=join((sample.engine_logp_T for sample in samples), torch.float32),
        advantage_T=join((token_advantages(s, cfg.advantage) for s in samples), torch.float32),
        score_N=torch.tensor([sample.score for sample in samples]),
        planned_tokens=update.planned_tokens,
        planned_sequences=update.planned_sequences,
    )
    batch.routes_N = engine_choices.routes_of_row(samples)
    batch.allowed = engine_choices.sets_of_row(samples, cfg.sampling.truncates)
    return batch


def token_advantages(sample: Sample, rule: Advantage) -> np.ndarray:
    """Returns each token's advantage [T]: the sample's, or the penalty if its message is flawed."""
    advantage_T = np.full(len(sample.tokens_T), sample.advantage)
    for name, penalty in rule.penalties.items():
        advantage_T[sample.flawed(name)] = penalty
    return advantage_T


# === Rollout buffer ===============================================================================


class RolloutBuffer:
    """Holds finished groups by slot, and decides which slots may start: the two loops meet here.

    Slot i trains at step i // P. It may be dispatched once the engines' policy version is at
    least i // P - max_lag, so nothing is ever too old to train on, and nothing is thrown away.
    """

    def __init__(self, prompts_per_step: int, max_lag: int, parts: int = 1):
        self.prompts_per_step = prompts_per_step
        self.max_lag = max_lag
        self.part_size = prompts_per_step // parts
        self.version = 0  # of the policy that the engines hold
        self.next_step = 0  # the trainer waits for groups of this step
        self.running: dict[int, float] = {}  # slot -> time of dispatch
        self.ready: dict[int, Group] = {}  # in order of arrival
        self.waiting: Counter[int] = Counter()  # step -> the number of its groups that are ready
        self.taken: list[Group] = []  # groups of next_step that were taken before its last part
        self.dropped: Counter[str] = Counter()  # reason -> prompts that the next one replaced
        self.changed = asyncio.Event()

    def may_start(self, slot: int) -> bool:
        """Returns whether the newest policy is recent enough for this slot."""
        return self.version >= slot // self.prompts_per_step - self.max_lag

    def start(self, slot: int) -> None:
        """Marks a slot as being generated. Raises ValueError if it may not start."""
        if not self.may_start(slot) or slot in self.running or slot in self.ready:
            raise ValueError(f"slot {slot} cannot start now: {self.census()}")
        self.running[slot] = time.monotonic()

    def put(self, group: Group) -> None:
        """Hands in a finished group. Raises ValueError if its slot was not running."""
        if self.running.pop(group.slot, None) is None:
            raise ValueError(f"slot {group.slot} was not running: {self.census()}")
        self.ready[group.slot] = group
        self.waiting[group.slot // self.prompts_per_step] += 1
        self.wake()

    def advance(self, version: int) -> None:
        """Notes that the engines hold `version`, so that more slots may start."""
        self.version = version
        self.wake()

    def restore(self, version: int, ready: list[Group], dropped: dict[str, int]) -> None:
        """Continues from a checkpoint; slots that were running then must be started again."""
        self.version = version
        self.next_step = version
        self.ready = {group.slot: group for group in ready}
        self.waiting = Counter(slot // self.prompts_per_step for slot in self.ready)
        self.dropped.update(dropped)

    def untrained(self) -> list[Group]:
        """Returns the finished groups whose step is not trained yet: a checkpoint holds them."""
        return [*self.taken, *self.ready.values()]

    def has_part(self, step: int) -> bool:
        """Returns whether the next part of a step is ready; usually a part is the whole step."""
        return self.waiting[step] >= self.part_size

    def has_taken_all(self, step: int) -> bool:
        """Returns whether all groups of a step have been taken."""
        return self.next_step > step

    def take(self, step: int) -> list[Group]:
        """Removes and returns the next part of a step: the first groups to arrive, in slot order.

        Raises RuntimeError if it is not this step's turn, or if a group is older than max_lag.
        """
        if step != self.next_step:
            raise RuntimeError(f"step {step} was taken, but step {self.next_step} is next")
        ours = [slot for slot in self.ready if slot // self.prompts_per_step == step]
        came_first = ours[: self.part_size]
        groups = [self.ready.pop(slot) for slot in sorted(came_first)]
        self.waiting[step] -= self.part_size
        self.taken += groups
        if len(self.taken) == self.prompts_per_step:
            self.next_step = step + 1
            self.taken = []
        for group in groups:  # `version` is the policy's when the group was dispatched
            if step - group.version > self.max_lag:
                raise RuntimeError(
                    f"slot {group.slot} has version {group.version}, too old for step {step}"
                )
        return groups

    async def until(self, holds: Callable[[], bool]) -> None:
        """Waits until a condition holds. Has no deadline of its own."""
        while not holds():
            await self.changed.wait()

    def census(self) -> str:
        """Describes, for error messages, how many groups are ready or running, and for how long."""
        oldest = max((time.monotonic() - t for t in self.running.values()), default=0.0)
        now = f"{len(self.ready)} groups ready, {len(self.running)} running (oldest {oldest:.0f} s)"
        # Users read this, and count steps from 1.
        now += f", {len(self.taken)} of step {self.next_step + 1} taken" if self.taken else ""
        return f"version {self.version}, {now}, dropped: {dict(self.dropped) or 'none'}"

    def wake(self) -> None:
        """Wakes all waits on the buffer, so that each checks its condition again."""
        self.changed.set()
        self.changed = asyncio.Event()


# === Generator: a vLLM engine =====================================================================


class Generator:
    """One vLLM engine, token ids in and token ids out. A plain class; Ray makes it an actor."""

    def __init__(self, cfg: RunSettings):
        self.cfg = cfg
        self.version = -1  # no policy has been synced yet
        self.written = Drafts()  # answers so far; workers copy them, so others can continue them

    async def start(self) -> None:
        """Builds the engine; its weights come with its first update."""
        # It has `receive_weights` and a `meter`: runtime/engines/engine.py.
        self.engine: AsyncLLM = open_engine(self.cfg)

    async def generate(self, request: Request) -> list[Turn]:
        """Returns the request's answers. An answer that a lost engine had begun is continued."""
        with self.written.open(request) as turns:
            await together(self.answer(request, j, turns) for j in range(request.n))
        return turns

    async def answer(self, request: Request, j: int, turns: list[Turn]) -> None:
        """Completes answer j of a request, `turns[j]`.

        At first it has the prompt, and either no tokens or those of a draft. Logprobs are those of
        the policy that sampled, at the run's temperature. vLLM labels each token with the policy
        version of its engine step (`weight_versions`), which `Turn.from_vllm` reads. A running
        request keeps its KV cache during an update; a request submitted later never hits an older
        prefix (`cache_salt`).
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        draft = turns[j]
        if draft.finish_reason:
            return
        rest = rest_of(request, j, draft)  # the prompt and the draft; only new tokens come back
        room = self.cfg.sampling.max_model_len - len(rest.prompt_ids)
        params = SamplingParams(
            seed=rest.seed,
            max_tokens=min(rest.max_tokens, room),
            logprobs=0,  # of the sampled token only
            flat_logprobs=True,
            detokenize=False,
            routed_experts_prompt_start=rest.known_routes,  # routes are returned from this token on
            output_kind=RequestOutputKind.FINAL_ONLY,
            **self.cfg.sampling.parameters | rest.sampling,
        )
        prompt = {"prompt_token_ids": rest.prompt_ids, "cache_salt": str(self.version)}
        outputs = self.engine.generate(prompt, params, rest.name, priority=rest.priority)
        (output,) = [output async for output in outputs]
        cached = output.num_cached_tokens or 0
        new = Turn.from_vllm(prompt_ids=[], answer=output.outputs[0], cached=cached)
        turns[j] = draft.extended(new)

    def drafts(self, name: str, known: list[int | None]) -> list[Turn | None]:
        """Returns the new tokens of each answer, after its first `known` ones.

        None in `known` and in the result stands for an answer that the caller has in full.
        """
        return self.written.since(name, known, self.engine.output_processor.request_states)

    async def join_sync_group(
        self, wire: bytes, host: str, port: int, rank: int, world: int
    ) -> list[int]:
        """Connects the engine's workers to trainer rank 0.

        `wire` is a pickled `Wire`, the terms of all updates (policy/sync/weight_sync.py). Returns
        the bytes that each worker has for KV: on shared GPUs, an engine's successor gets as many.
        """
        meeting = (wire, host, port, rank, world)
        return await self.engine.collective_rpc("join_sync_group", args=meeting)

    async def update_weights(self, version: int, verify: bool) -> Received:
        """Receives `version` in flight, between two engine steps.

        If this raises CutOff, the engine stays paused, and the next update sends all weights
        again. After any other error, the engine is discarded and replaced.
        """
        began = time.perf_counter()
        await self.engine.pause_generation(mode="keep", clear_cache=False)
        paused = time.perf_counter()
        checksums = await self.engine.receive_weights(version, verify)
        self.version = version
        loaded = time.perf_counter()
        await self.engine.resume_generation()
        resumed = time.perf_counter()
        phases = {
            "sync_pause": paused - began,
            "sync_transfer": loaded - paused,
            "sync_resume": resumed - loaded,
        }
        meters = self.engine.meter.take()
        # Idle seconds: usually, no other slot may start before training brings the next version.
        meters["wait_for_training"] = self.written.idle.take()
        return Received(phases, checksums, meters)

    async def check_health(self) -> None:
        """Raises if the engine is dead; its workers reply between two engine steps."""
        await self.engine.collective_rpc("check_health")


# === Rollouts =====================================================================================


class RolloutWorker(Generic[C]):
    """Renders prompts, runs environments, and computes advantages."""

    def __init__(self, cfg: C):
        self.cfg = cfg
        self.samplers = Samplers(cfg)

    async def rollout_group(self, engine: "ActorHandle", row: dict, slot: Slot, n: int) -> Rollouts:
        """Returns n scored answers to one row.

        If this raises, the next call for the slot continues from this call's drafts.
        """
        with self.samplers.of_group(engine, row, slot, n) as group:
            episodes = await registry.rollouts(row, group.samplers)
        rollouts = self.finish(row, slot, episodes)
        judging_seconds = group.idle.take()  # in which no rollout of the group waited for tokens
        for info in rollouts.infos:
            info.judging = judging_seconds
        return rollouts

    def finish(self, row: dict, slot: Slot, episodes: list[Episode]) -> Rollouts:
        """Turns rewards into advantages, and episodes into samples and lines of rollouts.jsonl.

        Also used for validation: then `slot.evaluation` is a version, and one episode is enough.
        Raises ValueError if a reward is not finite.
        """
        rule = self.cfg.advantage
        rewards_G = torch.tensor([shaped_reward(row, e, rule.low_effort) for e in episodes])
        if not rewards_G.isfinite().all():
            raise ValueError(f"rewards must be finite, got {rewards_G.tolist()}")
        rewards_G[self.samplers.flawed(episodes, rule.zero_rewards)] = 0.0
        advantages_G = group_advantages(rewards_G, rule)
        samples: list[Sample] = []
        lines = []
        for episode, reward, advantage in zip(episodes, rewards_G, advantages_G, strict=True):
            pieces = episode.samples(row)  # usually one
            for sample in pieces:
                if rule.overlong_filtering and sample.truncated:
                    sample.mask_T[:] = False
                sample.keep_flaws(rule.penalties)  # forgets message flaws that have no penalty
                sample.reward = float(reward)
                sample.advantage = float(advantage)
            samples += pieces
            lines.append(episode.record(self.samplers.tokenizer, row, pieces[-1]))
        infos = [sample.info() for sample in samples]
        return Rollouts(infos, samples, slot.lines(lines, self.cfg))

    def forget(self, slot: Slot, line: int) -> None:
        """Drops the drafts of a prompt that is abandoned."""
        self.samplers.drafts.forget(slot, line)


# === Trainer ======================================================================================


class PackedRow(NamedTuple):
    """Samples and their tensors; without samples, the row only fills up a rank's share."""

    samples: list[Sample]
    batch: Batch


class ScoredRow(NamedTuple):
    """The samples of a packed row, and the trainer's logprobs of all its tokens [T]."""

    samples: list[Sample]
    logp_T: Tensor


RowLossFn = Callable[[Tensor, Any], RowLoss]  # (logp_T, the batch of a packed row)


class GradientSum:
    """Counts and row stats for the gradients that wait in the policy for the optimizer step.

    They cover one update or, if a step is trained in parts, the parts so far.
    """

    def __init__(self) -> None:
        self.updates: list[Update] = []  # one update, or the parts of one so far
        self.row_stats: list[dict[str, Tensor]] = []

    def add(
        self, policy: Policy, update: Update, rows: list[PackedRow], loss: RowLossFn
    ) -> list[ScoredRow]:
        """Runs forward and backward over a rank's rows for an update, or for a part of one.

        Returns the rows that have samples, with the logprobs that the engine's are compared with.
        Only one rank of each replica returns them (`policy.reports`). The others either compute the
        same logprobs, or are an earlier pipeline stage, which has none.
        """
        logps: list[Tensor] = []

        def noting_loss(logp_T: Tensor, batch: Batch) -> RowLoss:
            logps.append(logp_T.detach() if batch.old_logp_T is None else batch.old_logp_T)
            return loss(logp_T, batch)

        batches = [row.batch for row in rows]
        # Calls the loss once for each row, in order.
        self.row_stats += policy.forward_backward(batches, noting_loss, update.more)
        self.updates.append(update)
        scored: list[ScoredRow] = []
        if not policy.reports:
            return scored
        for row, logp_T in zip(rows, logps, strict=True):
            if row.samples:
                scored.append(ScoredRow(row.samples, logp_T))
        return scored

    def first_part(self, update: Update) -> Update:
        """Returns the first part of the step to which `update` belongs.

        If the step is not trained in parts, that is `update` itself.
        """
        return self.updates[0] if self.updates else update

    @property
    def planned_tokens(self) -> int:
        """Trained tokens over all ranks, as planned."""
        return sum(update.planned_tokens for update in self.updates)

    @property
    def planned_sequences(self) -> int:
        """Trained sequences over all ranks, as planned."""
        return sum(update.planned_sequences for update in self.updates)


class Trained(NamedTuple):
    """A rank's results for a batch. Ray keeps the logprobs; the driver fetches the rest."""

    metrics: dict[str, float]  # over updates and ranks; the seconds are this rank's
    mismatch: MismatchTable  # between trainer and engine, by environment, lag and position
    logps: np.ndarray  # float32 [T] of all tokens, in the order of the share's places

    @classmethod
    def of(
        cls, measured: dict[str, float], rows: list[ScoredRow], step: int, limit: float
    ) -> "Trained":
        """Joins the rows that a rank reports; `limit` is the sequence-error filter's."""
        samples = [sample for row in rows for sample in row.samples]
        logp_T = np.zeros(0, np.float32)
        if rows:
            logp_T = torch.cat([row.logp_T.cpu() for row in rows]).numpy()
        return cls(measured, mismatch_table(samples, logp_T, step, limit), logp_T)


class Trainer(SendingRank[Config]):
    """One rank of the policy being trained. A plain class; Ray makes it an actor."""

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self.gradients = GradientSum()

    def start(self, rank: int, address: tuple[str, int]) -> list[WeightMeta]:
        """Joins the other ranks and loads the policy; returns each weight's name and shape."""
        torch.manual_seed(self.cfg.seed)
        self.join_ranks(rank, address)
        temperature = self.cfg.sampling.temperature
        self.policy = self.open_policy(temperature)
        self.reference: Policy | None = None
        if self.cfg.has_reference:
            self.reference = self.open_policy(temperature, reference_of=self.policy)
        return self.open_sender()

    def train_step(self, step: int, updates: list[Update], *groups: list[Sample]) -> Trained:
        """Trains on this rank's share of a batch, or of a part of one.

        Each group is a separate argument because Ray does not resolve references in a list.
        """
        began = time.perf_counter()
        packed = [self.pack_rows(update, groups) for update in updates]
        self.add_old_and_reference(packed)
        measured: list[dict[str, float]] = []
        scored: list[ScoredRow] = []
        for update, rows in zip(updates, packed, strict=True):
            scored += self.add_gradients(update, rows)
            if not update.more:
                measured.append(self.optimizer_step())
        if not updates[-1].more:
            self.stage_weights()  # gathers the first bucket while the engines still generate
        means = metrics.mean_metrics(measured)
        means["train_seconds"] = time.perf_counter() - began
        return Trained.of(means, scored, step, self.cfg.correction.sequence_error_limit)

    def pack_rows(self, update: Update, groups: Sequence[list[Sample]]) -> list[PackedRow]:
        """Packs the rows of an update. In a place (g, j), g is an index in `groups`."""
        # All parts of a step divide by the counts of the first one: the total is not yet known.
        planned = self.gradients.first_part(update)
        rows = []
        for places in update.rows:
            samples = [groups[g][j] for g, j in places]
            rows.append(PackedRow(samples, pack(samples, planned, self.cfg)))
        return rows

    def add_old_and_reference(self, packed: list[list[PackedRow]]) -> None:
        """Adds the logprobs that the loss compares with, computed before the policy changes."""
        batches = [row.batch for rows in packed for row in rows]
        if len(packed) > 1:  # several updates: the policy changes after the first
            for batch, logp_T in zip(batches, self.policy.logprobs(batches), strict=True):
                batch.old_logp_T = logp_T
        if self.reference:
            for batch, logp_T in zip(batches, self.reference.logprobs(batches), strict=True):
                batch.ref_logp_T = logp_T

    def add_gradients(self, update: Update, rows: list[PackedRow]) -> list[ScoredRow]:
        """Adds the gradients of this rank's rows of an update, or of a part of one."""
        loss = partial(policy_loss, cfg=self.cfg)
        return self.gradients.add(self.policy, update, rows, loss)

    def optimizer_step(self) -> dict[str, float]:
        """Takes a step on the summed gradients, scaled as if each row was divided by what is kept.

        Returns the metrics of the update.
        """
        summed = self.gradients
        self.gradients = GradientSum()
        total = self.reduced(summed.row_stats)
        # `row_*` counts what was computed, `kept_*` what of it the loss kept. Samples that were
        # planned but not computed have no gradient: they cannot fail the filter and count as kept.
        kept_tokens = summed.planned_tokens - total["row_tokens"] + total["kept_tokens"]
        kept_sequences = summed.planned_sequences - total["row_sequences"] + total["kept_sequences"]
        first = summed.updates[0]
        planned = divisor(first.planned_tokens, first.planned_sequences, self.cfg)
        grad_scale = planned / divisor(kept_tokens, kept_sequences, self.cfg)
        measured = metrics.step_metrics(total, summed.planned_tokens, grad_scale)
        return measured | self.policy.optimizer_step(grad_scale)

    def probe_gaps(self, answers: list[list[Turn]]) -> list[float]:
        """Returns the mean |logp - engine_logp| over each engine's turns; collective."""
        return probe_gaps(self.policy, answers, self.cfg)


def probe_gaps(policy: Policy, answers: list[list[Turn]], cfg: GroupSettings) -> list[float]:
    """Returns the mean |logp - engine_logp|, in nats, over the tokens of each engine's turns.

    All engines have answered the same prompts, with answers of one length. A row holds as many
    engines as it has room for, but at least one.
    """
    samples = [[Sample.of([turn]) for turn in turns] for turns in answers]
    tokens = sum(len(sample.tokens_T) for sample in samples[0])
    at_once = max(1, cfg.policy.row_tokens // tokens)
    nothing = Update(planned_tokens=1, planned_sequences=1, rows=[])
    rows = []
    for first in range(0, len(samples), at_once):
        of_row = itertools.chain(*samples[first : first + at_once])
        rows.append(pack(list(of_row), nothing, cfg))
    gaps: list[float] = []
    for row, logp_T in zip(rows, policy.logprobs(rows), strict=True):
        gap_T = (logp_T.cpu() - row.engine_logp_T).abs()
        gap_N = sequence_mean(gap_T, row.mask_T, row.seq_T)
        gaps += gap_N.view(-1, len(answers[0])).mean(1).tolist()
    return gaps


# === Weight sync: every engine from one policy version to the next, in flight =====================


class Engines:
    """The fleet of generators, kept at one policy version.

    An engine that does not acknowledge an update is replaced. An engine whose update was cut off,
    because it failed elsewhere, stays paused until it gets the update again: its layers come from
    two policies. Before an update is sent again, all engines join a new process group.
    """

    def __init__(self, cfg: RunSettings, cluster: Cluster):
        self.cfg = cfg
        self.cluster = cluster
        self.fleet = Fleet(Generator, cfg, cluster)

    async def sync(self, version: int) -> dict[str, float]:
        """Brings all engines to `version`, and tries again with new engines if some fail.

        Returns metrics; the seconds of each phase are those of the slowest engine. If one engine
        fails, the attempt ends with its error, and the next one goes to those that are left and to
        new ones. Raises RuntimeError if no engine is left and none may be replaced, or if all
        engines compute with other weights than the trainer. An error in the very first update is
        raised as it is.
        """
        fleet = self.fleet
        while True:
            lost_before = fleet.discarded
            fleet.launch_missing()
            try:
                measured = await self.send_weights(version)
            except Exception as error:
                # Discards the dead engines, so that the next attempt replaces them. If no engine
                # is known to be dead (`discarded` has not grown), discards all. Re-raises the error
                # if no new engine can help.
                await repair.discard_dead(fleet, error, lost_before)
                continue
            if fleet.alive:  # all may have died after they acknowledged the update
                fleet.all_synced()
                return measured | {"engines": len(fleet.serving)}

    async def send_weights(self, version: int) -> dict[str, float]:
        """Sends the policy to all engines once, and compares their logprobs with the trainer's.

        The comparison is made every few versions, and if an engine is new: runtime/engines/probe.py
        says what follows from it. Returns the metrics of the update.
        """
        fleet = self.fleet
        await fleet.connect()
        verify = self.verifies(version)
        sends = [trainer.send_weights.remote(verify) for trainer in self.cluster.trainers]
        updates = {engine: engine.update_weights.remote(version, verify) for engine in fleet.alive}
        measured = await fleet.exchange(sends, updates)
        return measured | await fleet.compare(version, verify)

    def verifies(self, version: int) -> bool:
        """Returns whether to verify all of an update, because an engine is new or a check is due.

        Each worker then reads back all parameters that it can compare, instead of some of them, and
        the checksum of what it received is compared with that of what was sent.
        """
        every = self.cfg.engine.verify_sync_every
        return bool(self.fleet.fresh) or (every > 0 and version % every == 0)

    async def repair_forever(self, run: "Run") -> None:
        """Replaces engines that die while they serve; the others continue, and so does training."""
        while not run.leaving:
            replacing = repair.replace(self.fleet)
            await repair.unless_left(self.fleet, replacing, lambda: run.leaving)
            # By now, an engine was lost, and a successor has loaded. The lock keeps successors from
            # getting weights between an optimizer step and `buffer.advance`.
            async with run.training:
                # `missing` stays set until all engines are synced: a step may have done so by now.
                if self.fleet.missing.is_set():
                    await run.sync_or_leave(run.buffer.version)


# === The driver: two loops and what they share ====================================================

# The life of step s, from the first prompt to the next policy:
#
#   generate_forever     slot i of step s starts when version >= s - max_lag     RolloutBuffer
#     fill               one prompt: a worker and the least busy engine          Dispatcher
#       rollout_group    prompt ids, turns, rewards, advantages                  RolloutWorker
#         generate       token ids in, token ids and logprobs out                Generator
#     buffer.put         the group is ready; its samples stay where they are
#   train_forever
#     take               waits until step s, or a part of it, is ready           StepInParts
#     plan_step          from lengths: which replica packs which samples
#     train_step         pack, policy_loss, gradients, an optimizer step         Trainer
#     sync               pause, send weights, label them s + 1, resume           Engines
#     buffer.advance     slots of step s + 1 + max_lag may start
#     log, save, evaluate


@checked_dataclass  # checked, so that the slots, which are strings in JSON, become int again
class Progress:
    """The driver's place in the stream of prompts. Checkpoints hold every field of it."""

    next_slot: int = 0  # the first that has not started
    next_prompt: int = 0  # never shuffled: file order is the curriculum
    in_flight: dict[int, int] = dataclasses.field(default_factory=dict)  # slot -> its prompt


@dataclasses.dataclass
class StepInParts:
    """The driver's running totals for one training step.

    A step has cfg.train_parts parts, usually one: the whole batch. Each part is trained as soon as
    its groups are ready, while the rollouts of the next part still run. The gradients of the parts
    add up in the trainers, and the last part ends with the optimizer step.
    """

    groups: list[Group] = dataclasses.field(default_factory=list)  # trained so far
    tables: list[MismatchTable] = dataclasses.field(default_factory=list)  # of each rank and part
    scores: list[ScoredShare] = dataclasses.field(default_factory=list)  # likewise, to be written
    wait_for_rollouts: float = 0.0  # seconds
    train_seconds: float = 0.0

    @property
    def seconds(self) -> dict[str, float]:
        """The metrics that add up over the parts of a step."""
        return {"wait_for_rollouts": self.wait_for_rollouts, "train_seconds": self.train_seconds}


class TrainCall(NamedTuple):
    """A rank's share of a part, and Ray's references to the fields of its `Trained`."""

    share: Share
    metrics: Ref[dict[str, float]]
    mismatch: Ref[MismatchTable]
    logps: Ref[np.ndarray]


class Run(Generic[C]):
    """One training run. `generate_forever` and `train_forever` meet in the buffer."""

    # A checkpoint from a run that differs in these, or in its adapters, is refused.
    STREAM = ("prompts_per_step", "group_size", "data.train")
    MUST_MATCH: tuple[str, ...] = (*STREAM, "policy.replay_routing")
    ACTORS: tuple[type, type] = (Trainer, RolloutWorker)
    MAX_DROPPED = 20  # prompts in a row; one more dropped prompt ends the run with its error

    def __init__(self, cfg: C, rows: Sequence[dict], val_rows: Sequence[dict]):
        self.cfg = cfg
        self.rows = rows
        self.val_rows = val_rows
        self.cluster = Cluster(cfg, *self.ACTORS)
        self.buffer = RolloutBuffer(cfg.prompts_per_step, cfg.max_lag, cfg.train_parts)
        self.progress = Progress()
        self.log = Log()
        self.engines: Any = Engines(cfg, self.cluster)  # with --replay: modes.NoEngines
        self.dispatcher = Dispatcher(
            cfg,
            self.cluster,
            self.engines.fleet,
            census=self.buffer.census,
            write=self.log.rollouts,
        )
        self.checkpoints = Checkpoints(cfg, self.cluster, rows)
        self.current_step = StepInParts()
        self.evaluated = -1  # the last policy version that was evaluated
        self.saved = self.contents()  # those of the newest checkpoint
        self.dropped_in_a_row = 0
        # Held from the optimizer step through the sync, so that a repair never sends weights that
        # have no version yet.
        self.training = asyncio.Lock()
        self.leaving = ""  # the reason, once the run is asked to save and leave

    async def start(self) -> None:
        """Starts all actors and gives the engines the policy before any rollout.

        With --eval_only, the checkpoint may come from another dataset, and training is not resumed.
        """
        # Engines that share GPUs start after the trainers, so vLLM sees how much memory is free.
        if not self.cluster.shares_gpus():
            self.engines.fleet.launch_missing()
        await self.cluster.start_trainers()
        trains = not self.cfg.command.eval_only
        must_match = self.MUST_MATCH if trains else None
        # `load` returns the state in the checkpoint, or {} if there is none. It refuses a state
        # whose fields are not those of `self.state()`, and adds two: `folder`, and `evaluated`, the
        # last version whose validation metrics are in metrics.jsonl.
        state = await self.checkpoints.load(must_match, self.state())
        version = state.get("version", 0)
        self.log.open(self.cfg, version)
        self.dispatcher.crew.start()
        await self.engines.fleet.launch_and_wait()
        await self.engines.sync(version)
        self.buffer.version = version
        if state and trains:
            ready = await self.checkpoints.read_ready(state)
            self.restore(state, ready)

    async def run(self, loops: "Loops | None" = None) -> None:
        """Starts the run and its two loops, or the loops of a mode such as --replay.

        Ends when the training loop ends. An error in any loop ends all of them.
        """
        start, generate, train = loops or (self.start, self.generate_forever, self.train_forever)
        self.cluster.on_signal(self.leave)
        await start()
        async with asyncio.TaskGroup() as tasks:
            self.tasks = tasks  # includes the tasks that write checkpoints
            background = [
                tasks.create_task(generate()),
                tasks.create_task(self.engines.repair_forever(self)),
            ]
            for trainer in self.cluster.trainers:
                background.append(tasks.create_task(self.cluster.watch(trainer)))
            await train()
            for task in background:
                task.cancel()
        self.log.close()

    def leave(self, reason: str) -> None:
        """Asks the run to save and end once the part that is being trained is done."""
        self.leaving = reason
        self.buffer.wake()

    async def generate_forever(self) -> None:
        """Starts each slot as soon as the policy is recent enough for it."""
        progress = self.progress
        end = self.cfg.steps * self.cfg.prompts_per_step
        resumed = sorted(progress.in_flight)
        async with asyncio.TaskGroup() as tasks:
            for slot in itertools.chain(resumed, range(progress.next_slot, end)):
                await self.buffer.until(partial(self.buffer.may_start, slot))
                self.buffer.start(slot)
                if slot == progress.next_slot:  # new: a resumed slot has its prompt
                    progress.next_slot += 1
                    self.assign(slot)
                tasks.create_task(self.fill(slot))

    def assign(self, slot: int) -> None:
        """Gives a slot the next prompt."""
        self.progress.in_flight[slot] = self.progress.next_prompt
        self.progress.next_prompt += 1

    async def fill(self, slot: int) -> None:
        """Rolls out a slot's prompt; if it keeps failing, the next prompt takes its place.

        An error arrives here only after the dispatcher's last try.
        """
        progress = self.progress
        while True:
            row = self.rows[progress.in_flight[slot] % len(self.rows)]
            try:
                group = await self.roll_out(row, Slot(slot))
                break
            except Exception as error:
                self.buffer.dropped[type(error).__name__] += 1
                self.dropped_in_a_row += 1
                line = f"{self.cfg.data.train}:{row['_line']}"
                self.log.drop(Slot(slot), progress.in_flight[slot], line, error)
                if self.dropped_in_a_row > self.MAX_DROPPED:
                    raise
                self.assign(slot)
        self.dropped_in_a_row = 0
        del progress.in_flight[slot]
        self.buffer.put(group)
        self.log.show_ready(len(self.buffer.ready))

    async def roll_out(self, row: dict, slot: Slot) -> Group:
        """Rolls out a prompt; returns its group, ready to be trained on."""
        return await self.dispatcher.roll_out(row, slot, self.cfg.group_size, self.buffer.version)

    async def train_forever(self) -> None:
        """Takes each step's groups, trains, syncs; reads like synchronous GRPO."""
        cfg = self.cfg
        buffer = self.buffer
        # A run that resumed from another folder's checkpoint has none of its own yet.
        if buffer.version and not self.checkpoints.exist():
            await self.save()
            await self.checkpoints.written()
        if self.is_due(cfg.val_period):
            await self.evaluate()
        for step in range(buffer.version, cfg.steps):
            began = time.perf_counter()
            stats = await self.train_and_sync(step)
            if stats is None:  # the run was asked to leave
                break
            stats["step_seconds"] = time.perf_counter() - began
            stats["dropped_prompts"] = buffer.dropped.total()
            self.log.step(step + 1, self.current_step.groups, stats | self.dispatcher.meters())
            if self.is_due(cfg.save_period) and not self.leaving:
                await self.save()
            if self.is_due(cfg.val_period):
                await self.evaluate()
        if self.saved != self.contents():
            await self.save()
        await self.checkpoints.written()
        if self.leaving:
            self.log.note(
                f"left at step {buffer.version} ({self.leaving}); --resume auto continues"
            )

    async def train_and_sync(self, step: int) -> dict[str, float] | None:
        """Trains one step, part by part, and brings the engines to the new policy.

        Returns the step's metrics, or None if the run is asked to leave before the last part.
        """
        self.current_step = StepInParts()
        while groups := await self.take(step):
            async with self.training:
                stats = await self.train(step, groups)
                if self.buffer.has_taken_all(step):  # that was the last part
                    stats |= await self.sync_or_leave(step + 1)
                    self.buffer.advance(step + 1)
                    return stats
        return None

    async def sync_or_leave(self, version: int) -> dict[str, float]:
        """Syncs the engines; returns {} if the run was asked to leave and no engine is alive."""
        fleet = self.engines.fleet
        return await repair.unless_left(fleet, self.engines.sync(version), lambda: self.leaving)

    def is_due(self, period: int) -> bool:
        """Returns whether something is due now: every `period` versions, and at the end."""
        version = self.buffer.version
        if version == self.cfg.steps:
            return True
        return period > 0 and version % period == 0

    async def take(self, step: int) -> list[Group]:
        """Waits for the next part of a step; returns [] if the run is asked to leave.

        Parts are joined until they fill a row on each replica, so that no replica is idle.
        """
        began = time.perf_counter()
        limit = 2 * self.dispatcher.prompt_seconds  # a prompt may fail, and the next take its place
        room = self.cfg.policy.row_tokens * self.cfg.policy.replicas
        groups: list[Group] = []
        while not self.buffer.has_taken_all(step) and room > 0:
            ready = self.buffer.until(lambda: bool(self.leaving) or self.buffer.has_part(step))
            await self.dispatcher.wait(limit, f"the groups of step {step + 1}", ready)
            if self.leaving:
                return []  # a checkpoint keeps the parts that were taken, in `buffer.taken`
            part = self.buffer.take(step)
            groups += part
            room -= self.tokens_to_compute(part)
        self.current_step.wait_for_rollouts += time.perf_counter() - began
        return groups

    def tokens_to_compute(self, groups: list[Group]) -> int:
        """Returns the tokens of the samples that the trainers compute."""
        tokens = 0
        for group in groups:
            for info in group.infos:
                if info.has_gradient or not self.cfg.skip_zero_advantage:
                    tokens += info.tokens
        return tokens

    async def train(self, step: int, groups: list[Group]) -> dict[str, float]:
        """Trains a part of a step on all trainer ranks; the last part ends with the optimizer step.

        Each rank gets the groups that it packs, and no others. Returns the metrics of the step so
        far.
        """
        cfg = self.cfg
        current = self.current_step
        more = not self.buffer.has_taken_all(step)
        shares = await asyncio.to_thread(plan_step, groups, cfg, more)
        calls: list[TrainCall] = []
        for rank, trainer in enumerate(self.cluster.trainers):
            share = shares[cfg.policy.replica_of(rank)]
            samples = [groups[g].samples for g in share.groups]
            train_step = trainer.train_step.options(num_returns=len(Trained._fields))
            calls.append(TrainCall(share, *train_step.remote(step, share.updates, *samples)))

        async def finished() -> tuple[dict[str, float], list[MismatchTable]]:
            tables = await asyncio.gather(*(call.mismatch for call in calls))
            return await calls[0].metrics, tables  # over all ranks; the seconds are rank 0's

        # No judge is needed: the clock of the deadline runs even while a judge is away.
        measured, tables = await self.dispatcher.wait(
            cfg.timeouts.train, "a training step", finished(), needs_judges=False
        )
        if cfg.sample_period and (step + 1) % cfg.sample_period == 0:
            for call in calls:
                # In the whole step, this part's groups come after those of earlier parts. A rank
                # that does not report has no logps, and nothing is written for it.
                places = call.share.places(first=len(current.groups))
                current.scores.append(ScoredShare(places, call.logps))
        current.groups += groups
        current.tables += tables
        current.train_seconds += measured["train_seconds"]
        if not more:
            self.log.mismatch(step + 1, current.tables)
        if current.scores and not more:
            writing = self.checkpoints.write_samples(step + 1, current.groups, current.scores)
            self.tasks.create_task(writing)
        return measured | current.seconds

    async def evaluate(self) -> None:
        """Evaluates the current policy version on the validation rows, once.

        Gives up if the run is asked to leave. Raises RuntimeError if every row failed.
        """
        version = self.buffer.version
        if self.leaving or not self.val_rows or self.evaluated == version:
            return
        slots = [Slot(number, evaluation=version) for number in range(len(self.val_rows))]
        self.log.note(f"evaluating version {version} (prompts: {len(slots)})")
        rollouts = self.dispatcher.roll_out_all(self.val_rows, slots, self.cfg.data.val_samples)
        leaves = self.buffer.until(lambda: bool(self.leaving))
        results = await unless_stopped(leaves, asyncio.ensure_future(rollouts))
        if results is None:
            return
        answered: list[list[SampleInfo]] = []
        for row, slot, result in zip(self.val_rows, slots, results, strict=True):
            if isinstance(result, Exception):
                line = f"{self.cfg.data.val}:{row['_line']}"
                self.log.drop(slot, slot.number, line, result)
            else:
                answered.append(result.infos)
        if not answered:
            await self.checkpoints.written()  # otherwise the end of the run would cancel the write
            raise RuntimeError(f"every validation row failed, the last with {results[-1]!r}")
        self.log.evaluation(version, answered, len(slots) - len(answered))
        self.evaluated = version

    async def save(self) -> None:
        """Copies the state while the run waits, and writes the copy while the run continues."""
        await self.checkpoints.written()
        async with self.training:  # ranks that copy cannot answer a repair, which would time out
            # Groups and state belong to one moment: no `await` may come between them.
            groups = self.buffer.untrained()
            self.saved = self.contents()
            await self.checkpoints.save(self.state(), groups, self.tasks)

    def contents(self) -> tuple[int, set[int]]:
        """Returns what a checkpoint would hold now: the version, and the slots of its groups."""
        return self.buffer.version, {group.slot for group in self.buffer.untrained()}

    def state(self) -> dict:
        """Returns what a checkpoint holds besides the policy and the groups, as JSON values."""
        return {
            "version": self.buffer.version,
            "dropped": dict(self.buffer.dropped),
            "progress": dataclasses.asdict(self.progress),
        }

    def restore(self, state: dict, ready: list[Group]) -> None:
        """Continues from the `state` of a checkpoint and its finished groups."""
        self.progress = Progress(**state["progress"])
        self.buffer.restore(state["version"], ready, state["dropped"])
        self.evaluated = state["evaluated"]  # added by `checkpoints.load`
        self.saved = self.contents()


def main() -> None:
    """Checks everything that can be checked without starting a process, then runs."""
    from settings import reader

    cfg = reader.load(Config, sys.argv[1:], default="configs/tiny.py")
    if cfg.command.dry_run:
        from dry_run import show

        sys.exit(show(cfg, Config))
    from envs.check_rows import load_rows
    from runtime.startup import modes, preflight

    preflight.prepare(cfg)
    rows = load_rows(cfg.data.train, cfg)
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
