"""Asynchronous GRPO for large language models, in one file, read from top to bottom.

    A_i  =  (r_i - mean_{j != i} r_j) / std_{j != i} r_j            leave-one-out advantage
    w_t  =  min(pi_train(t) / pi_engine(t), 5)                      no gradient flows through it
    loss = -sum_t  w_t  A_t  log pi_train(t)  /  (tokens kept in the whole batch)

Only sequences whose mean exp|log pi_train - log pi_engine| is at most 2 are summed. One update per
batch is made, so the PPO ratio is 1 and never clips.
All stages of Nemotron 3 Super, NVIDIA's 120B model whose RL recipe is public, have this objective.
That of the GRPO paper, and some twenty others, are settings or a few lines: docs/variants.md.

Two loops run at once and meet in a buffer. Prompts are numbered in file order; group i is trained
at step i // P and nowhere else, and may start as soon as the policy has version i // P - max_lag:

           prompts (JSONL, file order)                                  P groups of step s
                 |  group i starts when version >= i // P - max_lag            |
    RolloutWorker(s) --- token ids ---> Generator(s)                           v
      environment, reward, advantage     vLLM  ^                          Trainer(s)   FSDP2
                 |                             |  pause, keep requests and     | or Megatron
                 v                             |  KV, receive, label, resume   |
           RolloutBuffer (driver)              +------- weights v + 1 ---------+

The driver is one asyncio program that moves references and lengths, never tokens.

Axes, as suffixes:  P prompts of a step    G samples of a prompt    T tokens of a packed row
                    N sequences in that row    J the samples that a reward is compared with

Policy version v = batches trained so far. Every sampled token carries the version that produced it.

rollout/episode.py (turns, episodes, samples) and policy/__init__.py (the network) complete the
picture. docs/grpo_async.md argues each deviation from NeMo-RL (branch super-v3).

    bash launch/local.sh                                            a tiny model learns on a laptop
    python grpo_async.py --config configs/gsm8k.py --steps 100      a file of overrides, then flags
    python grpo_async.py --help                                     every setting
"""

import asyncio
import dataclasses
import importlib
import itertools
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field, NonNegativeFloat, PositiveInt
from pydantic.dataclasses import dataclass as checked_dataclass
from torch import Tensor

from envs import registry
from policy.packing import Share, Update, plan_shares
from rollout import engine_choices
from rollout.drafts import Drafts
from rollout.episode import Episode, Group, Request, Rollouts, Sample, Turn, shaped_reward
from rollout.sampler import Samplers
from runtime.checkpoints.save import Checkpoints
from runtime.engines import repair
from runtime.engines.engine import open_engine
from runtime.engines.fleet import Fleet
from runtime.processes.cluster import Cluster
from runtime.processes.trainer_rank import SendingRank
from runtime.reporting import metrics
from runtime.reporting.log import Log
from runtime.reporting.rollout_metrics import mismatch_table
from runtime.rollouts.dispatch import Dispatcher, Parts, Slot
from runtime.rollouts.evaluation import evaluate
from settings.config import CHECKED, LowEffort, RunSettings

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from vllm.v1.engine.async_llm import AsyncLLM

# === Config =======================================================================================

Unbounded = Annotated[float, Field(allow_inf_nan=True)]
Penalties = dict[Literal["tool_call", "thinking"], float]
Flaws = tuple[Literal["reasoning_is_answer", "empty_answer", "inner_eos", "think_tags"], ...]
Loop = Callable[[], Coroutine[None, None, None]]  # of a run; its start is one as well


@checked_dataclass(frozen=True, config=CHECKED)
class Advantage:
    """From the rewards of a group to the advantages of its tokens."""

    baseline: Literal["leave_one_out", "mean"] = "leave_one_out"
    """Compare a reward with the others of its group, or with all."""
    normalize: bool = True
    """Divide by the standard deviation of those rewards."""
    clip: tuple[Unbounded, Unbounded] = (-50.0, 50.0)
    """Advantages are clamped into this interval; -inf and inf: not at all (Nemotron 3 Nano)."""
    overlong_filtering: bool = False
    """Truncated answers keep their place in the baseline and lose their loss."""
    penalties: Penalties = dataclasses.field(default_factory=dict)
    """Replaces the advantage of every token of a message with such a flaw (Super: -5 each)."""
    low_effort: LowEffort = dataclasses.field(default_factory=LowEffort)
    """What answers to prompts that ask for low effort earn, by their length."""
    zero_rewards: Flaws = ()
    """Flaws that set the reward of an episode to 0 (Ultra: all four, rollout/zero_rewards.py)."""


@checked_dataclass(frozen=True, config=CHECKED)
class Correction:
    """What to do where trainer and engine disagree. Papers differ in level, action, low, high:

    TIS                 token     truncate  0      5        (Nemotron 3 Super)
    IcePop              token     mask      0.5    5
    sequence-mask TIS   sequence  mask      0.999  1.002
    """

    level: Literal["token", "sequence"] = "token"
    """Judge each token's ratio, or the geometric mean of its sequence's ratios."""
    action: Literal["truncate", "mask"] = "truncate"
    """Clamp the ratio into [low, high], or give weight 0 outside, where the divisor counts on."""
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
    """Optimizer steps per batch, each on another part of it. With one, the PPO ratio is 1."""
    ratio_clip: tuple[Annotated[float, Field(ge=0, le=1)], NonNegativeFloat] = (0.2, 0.28)
    """PPO ratio is clipped to [1 - first, 1 + second] (clip-higher, DAPO)."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the k3 KL to the initial policy; 0: no reference model is loaded."""
    reduction: Literal["token", "sequence"] = "token"
    """Every token weighs the same, or every sequence does (an episode may consist of several)."""
    skip_zero_advantage: bool = True
    """Count samples without advantage in the divisor but spend no compute on them."""


@checked_dataclass(frozen=True, config=CHECKED)
class Config(RunSettings):
    """Train a language model with asynchronous GRPO. Defaults: Nemotron 3 Super."""

    advantage: Advantage = dataclasses.field(default_factory=Advantage)
    """Baseline, normalisation, penalties."""
    correction: Correction = dataclasses.field(default_factory=Correction)
    """Importance weights of the tokens, pi_train / pi_engine, and the sequence-error filter."""
    loss: Loss = dataclasses.field(default_factory=Loss)
    """PPO clip, KL, divisor."""

    @property
    def has_reference(self) -> bool:
        """Whether a frozen copy of the initial policy is loaded beside the trained one."""
        return self.loss.kl_coef > 0

    @property
    def scoring_passes(self) -> int:
        """Forward passes over a batch beside the one that trains, for --dry_run."""
        return (self.loss.updates_per_batch > 1) + self.has_reference

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
            (1 in (n, U), f"train_parts = {n} and loss.updates_per_batch = {U}: expected a 1"),
            (self.command.modes or self.group_size > 1, "group_size = 1: expected 2 or more"),
            (not (kl and skips), f"loss.kl_coef = {kl} needs loss.skip_zero_advantage = False"),
        ):
            if not holds:
                raise ValueError(message)


# === Data =========================================================================================


@dataclasses.dataclass
class Batch:
    """A packed row of N sequences; `planned_*` are counts of an update (`policy_loss`)."""

    tokens_T: Tensor  # int64
    positions_T: Tensor  # int64, from 0 in each sequence: what keeps them apart in attention
    seq_T: Tensor  # int64, which sequence of the row
    mask_T: Tensor  # bool, trained tokens; never the first of a sequence
    engine_logp_T: Tensor  # float32
    advantage_T: Tensor  # float32
    score_N: Tensor  # float32, of the environment, before shaping
    planned_tokens: int
    planned_sequences: int
    old_logp_T: Tensor | None = None  # before the batch's first update, where there are several
    ref_logp_T: Tensor | None = None  # of the frozen reference, where there is a KL term
    routes_N: list[np.ndarray] | None = None  # the engine's experts; the policy joins them
    allowed: tuple[Tensor, Tensor] | None = None  # what tokens were chosen among (sampling.top_p)


# === The algorithm: pure functions of tensors =====================================================

# A smaller std, relative to the largest reward, is rounding: dividing by it would train on noise.
SPREAD_FLOOR = 1e-4


def group_advantages(rewards_G: Tensor, rule: Advantage) -> Tensor:
    """Advantages [G] of one prompt's samples; all zero when the group agrees.

    A reward minus the mean of the others, over their (unbiased) std + 1e-6; with baseline "mean",
    those of all. A std that is only rounding, or of fewer than two, does not divide: one success
    among 15 failures, which agree, keeps r - mean = 1; two get 3.6 each. A sample whose advantage
    is exactly 0 costs no compute without a penalty (`plan_step`). NeMo-RL algorithms/utils.py:79.
    """
    G = len(rewards_G)
    if G < 2:
        return torch.zeros_like(rewards_G)
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
    """Importance weights [T] without gradient, and whether each ratio lay inside the bounds [T]."""

    weight_T: Tensor
    inside_T: Tensor


def importance_weights(
    gap_T: Tensor, mask_T: Tensor, seq_T: Tensor, rule: Correction
) -> ImportanceWeights:
    """Weights of tokens by their ratio pi_old / pi_engine, whose log is `gap_T` [T].

    pi_old is the policy before the batch's first update. The bounds judge a token's own ratio or
    its sequence's. Masking gives a token's own ratio, and 0 where the judged one is outside;
    truncation gives the judged one, clamped. TIS: Yao et al. 2025; IcePop: Ling team 2025.
    """
    weight_T = gap_T.clamp(-20, 20).exp()  # must not overflow before the rule sees it
    judged_T = weight_T
    if rule.level == "sequence":
        judged_T = sequence_mean(gap_T, mask_T, seq_T).clamp(-20, 20).exp()[seq_T]
    inside_T = (rule.low <= judged_T) & (judged_T <= rule.high)  # so written, NaN is outside
    if rule.action == "truncate":
        return ImportanceWeights(judged_T.clamp(rule.low, rule.high), inside_T)
    return ImportanceWeights(torch.where(inside_T, weight_T, 0.0), inside_T)


def sequence_mean(x_T: Tensor, mask_T: Tensor, seq_T: Tensor) -> Tensor:
    """Mean over each sequence's trained tokens [N]; 0 for a sequence that has none."""
    total_N = x_T.new_zeros(int(seq_T.max()) + 1)
    count_N = total_N.clone().index_add_(0, seq_T, mask_T.to(x_T.dtype))
    return total_N.index_add_(0, seq_T, torch.where(mask_T, x_T, 0.0)) / count_N.clamp(min=1)


def divisor(tokens: float, sequences: float, cfg: Config) -> float:
    """The divisor of an update's summed loss, by the tokens and sequences that it trains.

    Called with the planned counts, and again with those that the filter kept (`policy_loss`). A
    fork with another normalisation changes this: Dr. GRPO returns a constant.
    """
    return max(tokens if cfg.loss.reduction == "token" else sequences, 1)


class Trusted(NamedTuple):
    """Which sequences of a row [N] the engine sampled from our policy, and how far each is off."""

    keep_N: Tensor  # bool
    error_N: Tensor  # mean exp|log pi_old - log pi_engine| over its tokens; 1 means no error


def trusted_sequences(gap_T: Tensor, mask_T: Tensor, seq_T: Tensor, limit: float) -> Trusted:
    """The filter: judges each sequence by the log-ratios `gap_T` [T] of its trained tokens.

    Where trainer and engine disagree by more than `limit`, the engine sampled from some other
    policy, and its tokens teach nothing about ours. NeMo-RL algorithms/loss_functions.py.
    """
    # expm1: a float32 sum of values near 1 loses the error.
    error_N = 1 + sequence_mean(gap_T.abs().clamp(max=20).expm1(), mask_T, seq_T)
    return Trusted(error_N <= limit, error_N)


class RowLoss(NamedTuple):
    """The loss of a packed row, with gradient, and the sums that its metrics are made of."""

    loss: Tensor
    stats: dict[str, Tensor]


def policy_loss(logp_T: Tensor, batch: Batch, cfg: Config) -> RowLoss:
    """The clipped policy gradient of one packed row.

    `logp_T` [T] are the trainer's logprobs, with gradient. The sum over the row is divided by the
    planned count of the update, or of its first part (`train_parts`), over all ranks, as the count
    that the filter keeps is known after the last row only:

        planned 1,000 tokens; the filter drops a sequence of 200     every row divides by 1,000
        grad_scale = 1,000 / 800 = 1.25 before the optimizer step    as if each had divided by 800
        in two parts, of which the first has 300                     every row divides by 300
        grad_scale = 300 / 800 after the second                      as if each had divided by 800

    So the filter costs no second forward pass, and packing changes nothing.
    """
    rule = cfg.loss
    # With one update per batch the old policy is this one: the ratio is 1, its gradient counts.
    old_logp_T = logp_T.detach() if batch.old_logp_T is None else batch.old_logp_T
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
        # Its weight has no gradient, and `correction` does not bound it, as in super-v3.
        drift_T = torch.where(mask_T, logp_T.detach() - batch.engine_logp_T, 0.0)
        kl_T = drift_T.clamp(-20, 20).exp() * metrics.k3(batch.ref_logp_T - logp_T)
        loss_T = loss_T + rule.kl_coef * kl_T

    if rule.reduction == "token":
        total = torch.where(mask_T, loss_T, 0.0).sum()
    else:
        total = sequence_mean(loss_T, mask_T, batch.seq_T).sum()
    loss = total / divisor(batch.planned_tokens, batch.planned_sequences, cfg)
    measured = {
        "probs_ratio": ratio_T,
        "probs_ratio_clamped": clipped_T,
        "sampling_importance_ratio": weight_T,
        "is_oob_ratio": 1.0 - inside_T.float(),
        "kl_penalty": kl_T,
    }
    return RowLoss(loss, metrics.row_stats(loss, logp_T, batch, mask_T, trusted, measured))


# === Packing ======================================================================================


def plan_step(groups: list[Group], cfg: Config, more: bool = False) -> list[Share]:
    """What each replica trains of a batch, or of a part that `more` follow; from SampleInfos."""
    size = len(groups) // cfg.loss.updates_per_batch
    updates = []
    for first in range(0, len(groups), size):
        trained = {
            (g, j): info
            for g in range(first, first + size)
            for j, info in enumerate(groups[g].infos)
            if info.trained_tokens
        }
        planned = Update(sum(i.trained_tokens for i in trained.values()), len(trained), [], more)
        # Samples without gradient are in these counts, and in no row where they are skipped.
        skips = cfg.loss.skip_zero_advantage
        lengths = {at: i.tokens for at, i in trained.items() if i.has_gradient or not skips}
        updates.append((planned, lengths))
    return plan_shares(updates, cfg)


def pack(samples: list[Sample], update: Update, cfg: Config) -> Batch:
    """One row of several samples; an empty row is a single token that trains nothing."""
    samples = samples or [Sample.empty()]

    def join(pieces: Iterable[np.ndarray], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.concatenate(list(pieces))).to(dtype)

    lengths = [len(sample.tokens_T) for sample in samples]
    return Batch(
        tokens_T=join((sample.tokens_T for sample in samples), torch.int64),
        positions_T=join((np.arange(n) for n in lengths), torch.int64),
        seq_T=join((np.full(n, i) for i, n in enumerate(lengths)), torch.int64),
        mask_T=join((sample.mask_T for sample in samples), torch.bool),
        engine_logp_T=join((sample.engine_logp_T for sample in samples), torch.float32),
        advantage_T=join((token_advantages(s, cfg.advantage) for s in samples), torch.float32),
        score_N=torch.tensor([sample.score for sample in samples]),
        planned_tokens=update.planned_tokens,
        planned_sequences=update.planned_sequences,
        **engine_choices.of_row(samples, cfg.sampling.truncates),
    )


def token_advantages(sample: Sample, rule: Advantage) -> np.ndarray:
    """The sample's advantage at each token [T], or the penalty of a flawed message's tokens."""
    advantage_T = np.full(len(sample.tokens_T), sample.advantage)
    for name, penalty in rule.penalties.items():
        advantage_T[sample.flawed(name)] = penalty
    return advantage_T


# === Rollout buffer ===============================================================================


class RolloutBuffer:
    """Where the two loops meet: finished groups, by slot, and the rule which slots may start.

    Slot i trains at step i // P. It may be dispatched once the engines' policy version is at
    least i // P - max_lag, so nothing is ever too old to train on, and nothing is thrown away.
    """

    def __init__(self, prompts_per_step: int, max_lag: int, parts: int = 1):
        self.prompts_per_step = prompts_per_step
        self.max_lag = max_lag
        self.part_size = prompts_per_step // parts
        self.version = 0  # what the engines hold
        self.next_step = 0  # whose groups the trainer waits for
        self.running: dict[int, float] = {}  # slot -> time of dispatch
        self.ready: dict[int, Group] = {}  # in the order in which they came
        self.waiting: Counter[int] = Counter()  # step -> its groups that are ready
        self.taken: list[Group] = []  # of next_step, of which other groups are not taken yet
        self.dropped: Counter[str] = Counter()  # reason -> prompts that gave way to the next
        self.changed = asyncio.Event()

    def may_start(self, slot: int) -> bool:
        """Whether the newest policy is recent enough for this slot."""
        return self.version >= slot // self.prompts_per_step - self.max_lag

    def start(self, slot: int) -> None:
        """Marks a slot as being generated. Raises ValueError if it may not be."""
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
        """The engines hold `version` now: more slots may start."""
        self.version = version
        self.wake()

    def restore(self, version: int, ready: list[Group], dropped: dict[str, int]) -> None:
        """Goes on where a checkpoint was taken; what was running then must be started again."""
        self.version = version
        self.next_step = version
        self.ready = {group.slot: group for group in ready}
        self.waiting = Counter(slot // self.prompts_per_step for slot in self.ready)
        self.dropped.update(dropped)

    def has_part(self, step: int) -> bool:
        """Whether the next part of a step, or the whole of it, is ready."""
        return self.waiting[step] >= self.part_size

    def take(self, step: int) -> list[Group]:
        """Removes the part of the next step that came first, in slot order; RuntimeError if old."""
        if step != self.next_step:
            raise RuntimeError(f"step {step} is taken where {self.next_step} is next")
        ours = (slot for slot in self.ready if slot // self.prompts_per_step == step)
        groups = [self.ready.pop(slot) for slot in sorted(itertools.islice(ours, self.part_size))]
        self.waiting[step] -= self.part_size
        self.taken += groups
        if len(self.taken) == self.prompts_per_step:
            self.next_step, self.taken = step + 1, []
        for group in groups:
            if step - group.version > self.max_lag:
                raise RuntimeError(f"slot {group.slot} is of version {group.version} at {step}")
        return groups

    async def until(self, holds: Callable[[], bool]) -> None:
        """Waits until a condition holds. What fills and empties the buffer has the deadlines."""
        while not holds():
            await self.changed.wait()

    def census(self) -> str:
        """One line for error messages: what is where, and for how long."""
        oldest = max((time.monotonic() - t for t in self.running.values()), default=0.0)
        now = f"{len(self.ready)} groups ready, {len(self.running)} running (oldest {oldest:.0f} s)"
        now += f", {len(self.taken)} of step {self.next_step + 1} trained" if self.taken else ""
        return f"version {self.version}, {now}, dropped: {dict(self.dropped) or 'none'}"

    def wake(self) -> None:
        """Wakes all waits on the buffer, so that each looks at its condition again."""
        self.changed.set()
        self.changed = asyncio.Event()


# === Generator: a vLLM engine =====================================================================


class Generator:
    """One vLLM engine, token ids in and token ids out. A plain class; an actor where it is used."""

    def __init__(self, cfg: Config):
        self.cfg = cfg
        self.version = -1  # no policy was ever synced
        self.written = Drafts()  # what running requests have so far, should this engine be lost

    async def start(self) -> None:
        """Builds the engine; its weights come with version 0."""
        self.engine: AsyncLLM = open_engine(self.cfg)

    async def generate(self, request: Request) -> list[Turn]:
        """The request's answers. Those that a lost engine had begun go on from their drafts."""
        return await self.written.complete(request, self.answer)

    async def answer(self, request: Request) -> Turn:
        """The answer to a request of one sample.

        Logprobs are of the policy that sampled, at the run's temperature. vLLM labels each token
        with the policy version of its engine step; a running request keeps its KV over an update,
        one submitted after it never hits an older prefix (`cache_salt`).
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        room = self.cfg.sampling.max_model_len - len(request.prompt_ids)
        params = SamplingParams(
            seed=request.seed,
            max_tokens=min(request.max_tokens, room),
            logprobs=0,  # of the sampled token only
            flat_logprobs=True,
            detokenize=False,
            routed_experts_prompt_start=request.known_routes,
            output_kind=RequestOutputKind.FINAL_ONLY,
            **self.cfg.sampling.parameters | request.sampling,
        )
        prompt = {"prompt_token_ids": request.prompt_ids, "cache_salt": str(self.version)}
        outputs = self.engine.generate(prompt, params, request.name, priority=request.priority)
        (output,) = [output async for output in outputs]
        return Turn.from_vllm([], output.outputs[0], cached=output.num_cached_tokens or 0)

    def drafts(self, name: str, known: list[int | None]) -> list[Turn | None]:
        """For each answer, the tokens after the first `known` ones; None: the caller has all."""
        return self.written.since(name, known, self.engine.output_processor.request_states)

    async def join_sync_group(self, *meeting: bytes | str | int) -> list[int]:
        """Connects the engine's workers to trainer rank 0; returns the bytes of KV of each."""
        return await self.engine.collective_rpc("join_sync_group", args=meeting)

    async def update_weights(self, version: int, verify: bool) -> tuple[dict, list[int], dict]:
        """Receives `version` in flight, between two engine steps. An error costs the engine.

        Except CutOff: the engine stays paused then, and the next update repeats this one.
        Returns the seconds of each phase, a checksum of what each worker received, and what the
        engine did since the last update.
        """
        began = time.perf_counter()
        await self.engine.pause_generation(mode="keep", clear_cache=False)
        paused = time.perf_counter()
        checksums = await self.engine.receive_weights(version, verify)
        self.version = version
        loaded = time.perf_counter()
        await self.engine.resume_generation()
        phases = {"sync_pause": paused - began, "sync_transfer": loaded - paused}
        phases |= {"sync_resume": time.perf_counter() - loaded}
        meters = self.engine.meter.take() | {"wait_for_training": self.written.idle.take()}
        return phases, checksums, meters

    async def check_health(self) -> None:
        """Raises if the engine is dead; its workers reply between two of its steps."""
        await self.engine.collective_rpc("check_health")


# === Rollouts =====================================================================================


class RolloutWorker:
    """Renders prompts, runs environments, and computes advantages."""

    def __init__(self, cfg: Config):
        self.cfg = cfg
        self.samplers = Samplers(cfg)

    async def rollout_group(self, engine: "ActorHandle", row: dict, slot: Slot, n: int) -> Rollouts:
        """n scored answers to one row; after an error, the next call goes on from their drafts."""
        with self.samplers.of_group(engine, row, slot, n) as samplers:
            episodes = await registry.rollouts(row, samplers)
        rollouts = self.finish(row, slot, episodes)
        judging = samplers[0].idle.take()
        for info in rollouts.infos:
            info.judging = judging
        return rollouts

    def finish(self, row: dict, slot: Slot, episodes: list[Episode]) -> Rollouts:
        """Rewards to advantages, episodes to samples and to a line of rollouts.jsonl each.

        Also for validation, where `slot.evaluation` is a version and n may be 1.
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
            pieces = episode.samples(row)
            for sample in pieces:
                sample.mask_T &= not (rule.overlong_filtering and sample.truncated)
                sample.keep_flaws(rule.penalties)
                sample.reward = float(reward)
                sample.advantage = float(advantage)
            samples += pieces
            lines.append(episode.record(self.samplers.tokenizer, row, pieces[-1]))
        return Rollouts([s.info() for s in samples], samples, slot.lines(lines, self.cfg))

    def forget(self, slot: Slot, line: int) -> None:
        """Drops the drafts of a prompt that is given up."""
        self.samplers.drafts.forget(slot, line)


# === Trainer ======================================================================================


class Trained(NamedTuple):
    """What a rank makes of a batch. Ray keeps the logprobs; the driver fetches the rest."""

    metrics: dict[str, float]  # means over the batch's updates, of all ranks; its own seconds
    mismatch: dict  # between trainer and engine, by environment, lag and place
    logps: np.ndarray  # of all tokens, in the order of the share's places


class Trainer(SendingRank):
    """One rank of the policy being trained. A plain class; an actor where it is used."""

    parts: tuple[Update, ...] = ()  # whose gradients wait for the optimizer step
    stats: tuple[dict[str, Tensor], ...] = ()  # of their rows

    def start(self, rank: int, address: tuple[str, int]) -> list:
        """Joins the other ranks and loads the policy; returns what its weights look like."""
        torch.manual_seed(self.cfg.seed)
        self.join_ranks(rank, address)
        open_policy = partial(self.open_policy, self.cfg.sampling.temperature)
        self.policy = open_policy()
        self.reference = open_policy(self.policy) if self.cfg.has_reference else None
        return self.open_sender()

    def train_step(self, step: int, updates: list[Update], *groups: list[Sample]) -> Trained:
        """Trains one batch, or a part: Ray resolves `groups` one by one, but not inside a list."""
        began = time.perf_counter()
        rows = [[[groups[g][j] for g, j in row] for row in update.rows] for update in updates]
        first_part = self.parts[0] if self.parts else None
        batches = [
            [pack(samples, first_part or update, self.cfg) for samples in of_update]
            for update, of_update in zip(updates, rows, strict=True)
        ]
        self.add_old_and_reference(batches)
        found, of_rows = zip(*map(self.update, updates, batches), strict=True)
        if not self.parts:
            self.stage_weights()
        measured = metrics.mean_metrics(found) | {"train_seconds": time.perf_counter() - began}
        if not self.policy.reports:  # another rank of this replica reports the same rows
            return Trained(measured, {}, np.empty(0))
        # A row without samples fills up a share, so that all ranks have as many.
        pairs = zip(itertools.chain(*rows), itertools.chain(*of_rows), strict=True)
        used = [pair for pair in pairs if pair[0]]
        samples = [sample for row, _ in used for sample in row]
        logp_T = torch.cat([torch.empty(0), *(x_T.cpu() for _, x_T in used)]).numpy()
        limit = self.cfg.correction.sequence_error_limit
        return Trained(measured, mismatch_table(samples, logp_T, step, limit), logp_T)

    def add_old_and_reference(self, batches: list[list[Batch]]) -> None:
        """The logprobs that the loss compares with, computed before the policy moves."""
        rows = list(itertools.chain(*batches))
        if len(batches) > 1:
            for batch, logp_T in zip(rows, self.policy.logprobs(rows), strict=True):
                batch.old_logp_T = logp_T
        if self.reference:
            for batch, logp_T in zip(rows, self.reference.logprobs(rows), strict=True):
                batch.ref_logp_T = logp_T

    def update(self, part: Update, rows: list[Batch]) -> tuple[dict[str, float], list[Tensor]]:
        """Gradients of this rank's packed rows; after an update's last part, an optimizer step.

        Returns that step's metrics, and the logprobs [T] of each row.
        """
        logps: list[Tensor] = []

        def loss_fn(logp_T: Tensor, batch: Batch) -> RowLoss:
            logps.append(logp_T.detach() if batch.old_logp_T is None else batch.old_logp_T)
            return policy_loss(logp_T, batch, self.cfg)

        self.stats += tuple(self.policy.forward_backward(rows, loss_fn, part.more))
        self.parts += (part,)
        if part.more:
            return {}, logps
        total = self.reduced(self.stats)
        first_part = self.parts[0]
        tokens = sum(part.planned_tokens for part in self.parts)
        sequences = sum(part.planned_sequences for part in self.parts)
        self.parts, self.stats = (), ()
        # Samples that were counted but not computed cannot fail the filter: they count as kept.
        kept_tokens = tokens - total["row_tokens"] + total["kept_tokens"]
        kept_sequences = sequences - total["row_sequences"] + total["kept_sequences"]
        planned = divisor(first_part.planned_tokens, first_part.planned_sequences, self.cfg)
        grad_scale = planned / divisor(kept_tokens, kept_sequences, self.cfg)
        measured = metrics.step_metrics(total, tokens, grad_scale)
        return measured | self.policy.optimizer_step(grad_scale), logps

    def probe_gaps(self, answers: list[list[Turn]]) -> list[float]:
        """Mean |logp - engine_logp| over each engine's turns; collective over the ranks."""
        samples = ([Sample.of([turn]) for turn in turns] for turns in answers)
        rows = [pack(of_engine, Update(1, 1, []), self.cfg) for of_engine in samples]
        scored = zip(rows, self.policy.logprobs(rows), strict=True)
        gaps = ((x_T.cpu() - row.engine_logp_T)[row.mask_T] for row, x_T in scored)
        return [float(gap_N.abs().mean()) for gap_N in gaps]


# === Weight sync: every engine from one policy version to the next, in flight =====================


class Engines:
    """The fleet of generators, kept at one policy version.

    An engine that does not acknowledge an update is replaced. Those from which it was cut off get
    it again, paused meanwhile: their layers are of two policies. All join a new process group.
    """

    def __init__(self, cfg: Config, cluster: Cluster):
        self.cfg = cfg
        self.cluster = cluster
        self.fleet = Fleet(Generator, cfg, cluster)

    async def sync(self, version: int) -> dict[str, float]:
        """Brings all engines to `version`; returns metrics, a phase's seconds from the slowest one.

        Raises RuntimeError where none is left and none may be replaced, or where one
        holds other weights than the trainer; and whatever the very first update raises.
        """
        fleet = self.fleet
        every = self.cfg.engine.verify_sync_every
        while True:
            lost_before = fleet.discarded
            fleet.launch()
            try:
                await fleet.connect()
                verify = bool(fleet.fresh or (every and version % every == 0))
                sends = [trainer.send_weights.remote(verify) for trainer in self.cluster.trainers]
                updates = {e: e.update_weights.remote(version, verify) for e in fleet.alive}
                measured = await fleet.exchange(sends, updates)
                gaps = await fleet.gaps() if verify else []
            except Exception as error:
                # Re-raises what no restart can fix.
                await repair.discard_dead(fleet, error, lost_before)
                continue
            fleet.probe.judge(version, gaps)
            if fleet.alive:  # or all died after they had acknowledged the update
                fleet.all_synced()
                return measured | {"engines": len(fleet.queue)}

    async def repair_forever(self, run: "Run") -> None:
        """Replaces engines that die while they serve; the others go on, and so does training."""
        while not run.leaving:
            replacing = repair.replace(self.fleet)
            await repair.unless_left(self.fleet, replacing, lambda: run.leaving)
            async with run.training:
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
#     take               waits until step s, or a part of it, is ready
#     plan_step          from lengths: which replica packs which samples
#     train_step         pack, policy_loss, gradients; at last an optimizer step Trainer
#     sync               pause, send weights, label them s + 1, resume           Engines
#     buffer.advance     slots of step s + 1 + max_lag may start
#     log, save, evaluate


@checked_dataclass
class Progress:
    """The driver's place in the stream of prompts. Checkpoints hold every field of it."""

    next_slot: int = 0  # never started before
    next_prompt: int = 0  # never shuffled: file order is the curriculum
    in_flight: dict[int, int] = dataclasses.field(default_factory=dict)  # slot -> its prompt


class Run:
    """One training run. `generate_forever` and `train_forever` meet in the buffer."""

    # A checkpoint of a run that differs in these, or in its adapters, is refused.
    STREAM = ("prompts_per_step", "group_size", "data.train")
    MUST_MATCH: tuple[str, ...] = (*STREAM, "policy.replay_routing")
    ACTORS: tuple[type, type] = (Trainer, RolloutWorker)
    MAX_DROPPED = 20  # prompts in a row; the next one ends the run with its error

    def __init__(self, cfg: Config, rows: Sequence[dict], val_rows: Sequence[dict]):
        self.cfg = cfg
        self.rows, self.val_rows = rows, val_rows
        self.cluster = Cluster(cfg, *self.ACTORS)
        self.buffer = RolloutBuffer(cfg.prompts_per_step, cfg.max_lag, cfg.train_parts)
        self.progress = Progress()
        self.log = Log()
        self.engines: Any = Engines(cfg, self.cluster)
        census, write = self.buffer.census, self.log.rollouts
        self.dispatcher = Dispatcher(cfg, self.cluster, self.engines.fleet, census, write)
        self.checkpoints = Checkpoints(cfg, self.cluster, rows)
        self.parts = Parts()
        self.evaluated = -1  # last policy version that was evaluated
        self.dropped_in_a_row = 0
        # Held from optimizer step to sync: a repair must never send weights without a version.
        self.training = asyncio.Lock()
        self.leaving = ""  # why, once the run is asked to save and leave

    async def start(self) -> None:
        """Starts all actors and gives the engines the policy before any rollout.

        To be evaluated, a checkpoint may be of any stream of prompts, and is not gone on from.
        """
        # Engines that share a GPU start after its trainers, so that vLLM sees the free memory.
        if not self.cluster.shares_gpus():
            self.engines.fleet.launch()
        await self.cluster.start_trainers()
        trains = not self.cfg.command.eval_only
        state = await self.checkpoints.load(self.MUST_MATCH if trains else None, self.state())
        version = state.get("version", 0)
        self.log.open(self.cfg, version)
        self.dispatcher.crew.start()
        await self.engines.fleet.start()
        await self.engines.sync(version)
        self.buffer.version = version
        if state and trains:
            self.restore(state, await self.checkpoints.read_ready(state))

    async def run(self, loops: Sequence[Loop] | None = None) -> None:
        """Starts what is needed, then runs both loops, or those of a mode; a failure ends all."""
        start, generate, train = loops or (self.start, self.generate_forever, self.train_forever)
        self.cluster.on_signal(self.leave)
        await start()
        async with asyncio.TaskGroup() as self.tasks:  # also those that write checkpoints
            beside = [generate(), self.engines.repair_forever(self)]
            beside += [self.cluster.watch(trainer) for trainer in self.cluster.trainers]
            tasks = [self.tasks.create_task(loop) for loop in beside]
            await train()
            for task in tasks:
                task.cancel()
        self.log.close()

    def leave(self, reason: str) -> None:
        """Saves and ends the run as soon as the step that is being trained is done."""
        self.leaving = reason
        self.buffer.wake()

    async def generate_forever(self) -> None:
        """Starts each slot as soon as the policy is recent enough for it."""
        progress = self.progress
        last = self.cfg.steps * self.cfg.prompts_per_step
        slots = itertools.chain(sorted(progress.in_flight), range(progress.next_slot, last))
        async with asyncio.TaskGroup() as tasks:
            for slot in slots:
                await self.buffer.until(partial(self.buffer.may_start, slot))
                self.buffer.start(slot)
                if slot == progress.next_slot:
                    progress.next_slot += 1
                    self.assign(slot)
                tasks.create_task(self.fill(slot))

    def assign(self, slot: int) -> None:
        """Gives a slot the next prompt."""
        self.progress.in_flight[slot] = self.progress.next_prompt
        self.progress.next_prompt += 1

    async def fill(self, slot: int) -> None:
        """Rolls out a slot's prompt; one that keeps failing gives way to the next."""
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
        """A prompt's group, as it is trained on."""
        return await self.dispatcher.roll_out(row, slot, self.cfg.group_size, self.buffer.version)

    async def train_forever(self) -> None:
        """Takes each step's groups, trains, syncs; reads like synchronous GRPO."""
        cfg, buffer = self.cfg, self.buffer
        saved = buffer.version
        if saved and not self.checkpoints.exist():  # it came from another folder's checkpoint
            await self.save()
            await self.checkpoints.written()
        if self.is_due(cfg.val_period):
            await self.evaluate()
        for step in range(buffer.version, cfg.steps):
            began = time.perf_counter()
            parts = self.parts = Parts()
            while (groups := await self.take(step)) and buffer.next_step <= step:
                async with self.training:  # a part of the batch: its gradients wait for the others
                    await self.train(step, groups)
            if not groups:
                break
            async with self.training:
                stats = await self.train(step, groups)
                stats |= await self.sync_or_leave(step + 1)
                buffer.advance(step + 1)
            stats |= {"step_seconds": time.perf_counter() - began}
            stats |= {"dropped_prompts": buffer.dropped.total()}
            self.log.step(step + 1, parts.groups, stats | self.dispatcher.meters())
            if self.is_due(cfg.save_period):
                saved = step + 1
                await self.save()
            if self.is_due(cfg.val_period):
                await self.evaluate()
        if saved != buffer.version:
            await self.save()
        await self.checkpoints.written()
        if self.leaving:
            self.log.note(f"left at step {buffer.version} ({self.leaving}); --resume auto goes on")

    async def sync_or_leave(self, version: int) -> dict[str, float]:
        """`Engines.sync`; {} once the run is to leave and no engine lives, so that it can save."""
        fleet = self.engines.fleet
        return await repair.unless_left(fleet, self.engines.sync(version), lambda: self.leaving)

    def is_due(self, period: int) -> bool:
        """Whether something is to be done at this version: every `period`, and at the end."""
        version = self.buffer.version
        return version == self.cfg.steps or bool(period and version % period == 0)

    async def take(self, step: int) -> list[Group]:
        """A step's next groups: part by part until they fill a row of each replica; [] to leave."""
        began = time.perf_counter()
        limit = 2 * self.dispatcher.prompt_seconds  # a prompt, and the one that takes its place
        groups: list[Group] = []
        room = self.cfg.policy.row_tokens * self.cfg.policy.replicas
        skips = self.cfg.loss.skip_zero_advantage
        while self.buffer.next_step <= step and room > 0:
            ready = self.buffer.until(lambda: bool(self.leaving) or self.buffer.has_part(step))
            await self.dispatcher.wait(limit, f"the groups of step {step + 1}", ready)
            if self.leaving:
                return []
            groups += (part := self.buffer.take(step))
            infos = itertools.chain(*(group.infos for group in part))
            room -= sum(i.tokens for i in infos if i.has_gradient or not skips)
        self.parts.seconds["wait_for_rollouts"] += time.perf_counter() - began
        return groups

    async def train(self, step: int, groups: list[Group]) -> dict[str, float]:
        """A batch, or a part, on all trainer ranks, each with just the groups that it packs."""
        cfg, more = self.cfg, self.buffer.next_step <= step
        shares = await asyncio.to_thread(plan_step, groups, cfg, more)
        of_ranks = [shares[cfg.policy.replica_of(rank)] for rank in range(cfg.policy.ranks)]
        calls = []
        for trainer, share in zip(self.cluster.trainers, of_ranks, strict=True):
            samples = (groups[g].samples for g in share.groups)
            train = trainer.train_step.options(num_returns=len(Trained._fields))
            calls.append(train.remote(step, share.updates, *samples))
        stats, tables, logps = zip(*calls, strict=True)  # Ray's references, of all ranks
        done = asyncio.gather(stats[0], *tables)  # all ranks have the same metrics
        limit = cfg.timeouts.train
        measured, *found = await self.dispatcher.wait(limit, "a training step", done, judged=False)
        parts = self.parts
        if cfg.sample_period and (step + 1) % cfg.sample_period == 0:
            places = [share.places(len(parts.groups)) for share in of_ranks]
            parts.scores.extend(zip(places, logps, strict=True))
        parts.groups.extend(groups)
        parts.seconds["train_seconds"] += measured["train_seconds"]
        parts.tables.extend(found)
        if not more:
            self.log.mismatch(step + 1, parts.tables)
        if parts.scores and not more:
            writes = self.checkpoints.write_samples(step + 1, parts.groups, parts.scores)
            self.tasks.create_task(writes)
        return measured | parts.seconds

    async def evaluate(self) -> None:
        """Validation rewards and pass@k, once a version; given up when the run is to leave."""
        await evaluate(self)

    async def save(self) -> None:
        """Copies this moment, while the run waits, and writes it while the run goes on."""
        await self.checkpoints.written()
        async with self.training:  # or a repair would wait for this save and count it as a failure
            ready = [*self.buffer.taken, *self.buffer.ready.values()]  # as old as the state
            await self.checkpoints.save(self.state(), ready, self.tasks)

    def state(self) -> dict:
        """What a checkpoint holds beside the policy and the finished groups, as JSON values."""
        return {
            "version": self.buffer.version,
            "dropped": dict(self.buffer.dropped),
            "progress": dataclasses.asdict(self.progress),
        }

    def restore(self, state: dict, ready: list[Group]) -> None:
        """Goes on where `state` was taken."""
        self.progress = Progress(**state["progress"])
        self.buffer.restore(state["version"], ready, state["dropped"])
        self.evaluated = state["evaluated"]  # which Checkpoints.load reads from metrics.jsonl


def main() -> None:
    """Checks everything that can be checked without a process, then runs."""
    from settings import reader

    cfg = reader.load(Config, sys.argv[1:], default="configs/tiny.py")
    if cfg.command.dry_run:
        from dry_run import explain

        print(explain(cfg, Config))
        return
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
