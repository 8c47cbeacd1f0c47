"""Validates the simulation against closed forms and a published ratio.

Each line gives the simulated value, the expected value, and how far they are apart.
"""

import dataclasses
import itertools
import tempfile
from typing import NamedTuple

from transformers import Qwen3MoeConfig

from bench.simulation import findings, world
from bench.simulation.faults import Faults
from bench.simulation.hardware import Hardware, Modelled, Room
from bench.simulation.workload import Latency, Lengths, Workload
from bench.simulation.world import Trace
from grpo_async import Config
from policy import model_shape
from policy.gpus import H100
from runtime.engines import repair

P, G = 4, 2
TOKENS = 1000
# NeMo-RL v0.6, docs/about/performance-summary.md: Qwen3-30B-A3B, 32 H100, 64 prompts x 32 answers
# of at most 4,096 tokens, 3,200 on average; one step off-policy on 16 + 16 of them.
PUBLISHED = 192 / 152


class Check(NamedTuple):
    """One line of the table; seconds, a count, or a ratio."""

    name: str
    simulated: float
    expected: float
    note: str = ""

    @property
    def error(self) -> float:
        """The error relative to the expected value; the value itself if 0 is expected."""
        return abs(self.simulated - self.expected) / (abs(self.expected) or 1)


def small(lag: int, hardware: Hardware, work: Workload, faults: str = "", parts: int = 1) -> Trace:
    """Simulates a small run of 6 cycles."""
    sizes: dict = {"prompts_per_step": P, "group_size": G, "engine": {"count": 2}}
    sizes |= {"train_parts": parts, "policy": {"row_tokens": TOKENS}}
    sizes |= {"rollout_workers": 2, "save_period": 0}
    cfg = Config(steps=6 * (lag + 1), max_lag=lag, **sizes)
    repair.MAX_RESTARTS = 1000  # all of these faults occur within one simulated hour
    return world.run(cfg, hardware, work, Faults.read(faults))


def closed_forms() -> list[Check]:
    """Compares the step times of constant lengths with closed forms."""
    work = Workload(Lengths(0.0, 0.0, TOKENS, (TOKENS,)), prompt=0)
    hardware = Hardware(per_token=0.5, per_trained_token=0.01, sync=3.0)
    generation, training = 0.5 * TOKENS, 0.01 * P * G * TOKENS
    checks = []
    for lag in (0, 1, 2, 4):
        found = findings.find(small(lag, hardware, work)).seconds
        # The updates of other steps pause a rollout as well.
        chain = generation + lag * 3 + training + 3
        name = "generation + training + update" if not lag else f"the same / {lag + 1}, with pauses"
        checks.append(Check(f"max_lag {lag}: {name}", found, chain / (lag + 1)))
    slow = dataclasses.replace(hardware, per_trained_token=0.2)
    found = findings.find(small(1, slow, work)).seconds
    checks.append(Check("slow trainers: training + update", found, 0.2 * P * G * TOKENS + 3))
    full = Hardware(per_token=0.5, room=Room(2, 1e9, 1.0, 0.0))
    found = findings.find(small(2, full, work)).seconds
    checks.append(Check("two slots in two engines: two rounds", found, 2 * generation))
    half = dataclasses.replace(full, per_trained_token=0.01, sync=3.0)
    for lag, chain in ((0, 2 * generation + training / 2 + 3), (1, 2 * generation + 3)):
        found = findings.find(small(lag, half, work, parts=2)).seconds
        name = f"max_lag {lag}: the same, half of the training between them"
        checks.append(Check(name, found, chain))
    judged = dataclasses.replace(work, judge=Latency(30, 0), judged_at_once=2)
    found = findings.find(small(0, Hardware(per_token=0.5), judged)).seconds
    checks.append(Check("two judges of 30 s: four rounds more", found, generation + 4 * 30))
    return checks


def bounds() -> list[Check]:
    """Counts violations that no lengths and no faults may cause: steps and groups, expected 0."""
    checks = []
    hardware = Hardware(per_token=1.0, per_trained_token=0.01, sync=2.0, start=30.0)
    kinds = ((1, ""), (2, "engine=20"), (3, "engine=10,worker=20,hang=3"))
    for lag in (0, 1, 2, 4):
        early = wrong = 0
        for (seed, faults), parts in itertools.product(kinds, (1, 2, 4)):
            work = Workload(Lengths.with_mean(50, 400), prompt=0, seed=seed)
            trace = small(lag, hardware, work, faults, parts)
            early += too_early(trace)
            wrong += len(findings.conserved(trace))
        checks.append(Check(f"max_lag {lag}: steps shorter than t_longest / {lag + 1}", early, 0))
        checks.append(Check(f"max_lag {lag}: groups lost, trained twice or too old", wrong, 0))
    return checks


def too_early(trace: Trace) -> int:
    """Counts groups that, with an update, take longer than their step took since their version."""
    ends = [trace.began, *(step.ended for step in trace.steps)]
    lag = trace.cfg.max_lag
    count = 0
    for span in trace.spans:
        step = span.slot // P
        since = ends[max(0, step - lag)]
        count += ends[step + 1] - since < span.ended - span.began + trace.hardware.sync - 1e-6
    return count


def one_off() -> Check:
    """Compares one step off-policy with taking turns on the same GPUs.

    Taking turns, all 32 GPUs generate and then all train; switching is free. NeMo-RL's trainers are
    Megatron's with ep 8 and pp 2; here they are assumed to lose nothing to the pipeline.
    """
    sizes_of = {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144}
    sizes_of |= {"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4}
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    shape = Qwen3MoeConfig(**sizes_of, **experts, head_dim=128, tie_word_embeddings=False)
    with tempfile.TemporaryDirectory() as folder:
        shape.save_pretrained(folder)
        model = shape.read_model(folder)
        turns, off = (
            findings.find(published(folder, model, *parts)).seconds
            for parts in ((0, 16, 32), (1, 8, 16))
        )
    note = f"{turns:.0f} and {off:.0f} s; they measured 192 and 152"
    return Check("NeMo-RL, Qwen3-30B-A3B, 32 H100: turns / one-off", turns / off, PUBLISHED, note)


def published(folder: str, model: model_shape.Model, lag: int, engines: int, ranks: int) -> Trace:
    """Simulates the published set-up."""
    parts: dict = {"engine": {"count": engines, "tensor_parallel": 2}, "save_period": 0}
    parts |= {"sampling": {"max_model_len": 5120, "max_response_tokens": 4096}, "max_lag": lag}
    parts |= {"policy": {"kind": "megatron", "ranks": ranks, "ep": 8, "row_tokens": 8192}}
    parts |= {"loss": {"skip_zero_advantage": False}, "prompts_per_step": 64, "group_size": 32}
    cfg = Config(model=folder, steps=4 * (lag + 1), **parts)
    work = Workload(Lengths.with_mean(3200, 4096), prompt=200)
    return world.run(cfg, Modelled(model, cfg, H100), work)


def table() -> list[str]:
    """Runs all checks; returns them and the largest error of the exact ones."""
    exact = closed_forms()
    counts = bounds()
    lines = [f"{'':58}{'simulated':>11}{'expected':>11}{'apart':>8}"]
    for check in (*exact, *counts, one_off()):
        values = f"{check.simulated:11,.2f}{check.expected:11,.2f}{check.error:8.1%}"
        lines.append(f"{check.name:58}{values}  {check.note}".rstrip())
    worst = max(check.error for check in (*exact, *counts))
    lines.append(f"closed forms and counts: apart by at most {worst:.2%}")
    return lines
