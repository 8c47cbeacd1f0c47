"""Sums up a simulated run: how long a step takes, who worked, who waited, and what binds.

A step s begins its groups at version s - max_lag. So max_lag + 1 steps hold its longest rollout,
the training of its last part (`train_parts`) and its update, one after the other:

    T >= (longest rollout + last part + update) / (max_lag + 1)     the tail binds
    T >= training + update                                          the trainers bind
    T >= tokens per step / tokens per second of full engines        the engines bind
"""

import itertools
import statistics
from collections.abc import Collection
from typing import NamedTuple

from bench.simulation.simulated_actors import Span, Training
from bench.simulation.world import Step, Trace


class Longest(NamedTuple):
    """The slowest group of each step, averaged over the steps."""

    seconds: float
    queued: float  # the part of `seconds` until the group had a place in its engine
    tokens: float  # tokens in their longest answers
    judging: float  # seconds after the last token


class Findings(NamedTuple):
    """Means over a window of steps; seconds unless another unit is named."""

    steps: int  # steps in the window
    seconds: float  # seconds per step
    quantiles: tuple[float, float, float]  # 0.1, 0.5 and 0.9 quantiles of the seconds per step
    training: float
    last_part: float  # training time after the last groups have arrived
    update: float
    trainer_waits: float  # time for which trainers wait for rollouts
    engines_wait: float  # mean time of an engine without a group
    engines_busy: float  # share of the time in which an engine has a sequence
    batch: float  # sequences at once in an engine that has any
    room: float  # sequences that an engine has room for
    trainers_busy: float
    tokens: float  # tokens written per step
    reread: float  # share of the written tokens that had to be read or written again
    longest: Longest
    bounds: dict[str, float]  # seconds per step, by what may bind it
    binds: str

    @property
    def bound(self) -> float:
        """The largest of the bounds."""
        return self.bounds[self.binds]


def window(trace: Trace) -> list[Step]:
    """Returns the steps to evaluate: full and not draining, a multiple of max_lag + 1.

    Steps come in waves of max_lag + 1, so the mean over any other number of steps would be too high
    or too low.
    """
    cycle = trace.cfg.max_lag + 1
    steps = trace.steps
    last = len(steps) - cycle  # the groups of later steps run with fewer other groups
    first = min(2 * cycle, max(0, last - cycle))
    return steps[first : first + max(0, last - first) // cycle * cycle]


def fewest(lag: int) -> int:
    """Returns the steps that a max_lag needs: the first, a wave that counts, one that drains."""
    return 2 * lag + 3


def find(trace: Trace) -> Findings:
    """Sums up a run. Raises ValueError if it has too few steps."""
    steps = window(trace)
    cfg = trace.cfg
    needed = fewest(cfg.max_lag)
    if len(trace.steps) < needed:
        told = f"{len(trace.steps)} steps at max_lag {cfg.max_lag}"
        raise ValueError(f"{told}: expected at least {needed}")
    before = trace.steps[steps[0].number - 2] if steps[0].number > 1 else None
    began = before.ended if before else trace.began
    took = steps[-1].ended - began
    totals = before.totals if before else (0, 0, 0, 0)
    done = (b - a for a, b in zip(totals, steps[-1].totals, strict=True))
    busy, filled, tokens, reread = done
    n = len(steps)
    numbers = {step.number - 1 for step in steps}
    trained = [t for t in trace.trainings if t.step in numbers]
    training = statistics.fmean(step.stats["train_seconds"] for step in steps)
    last_part = statistics.fmean(one.seconds for one in slowest(last_parts(trained)))
    update = statistics.fmean(step.stats["sync_transfer"] for step in steps)
    longest = longest_of(trace, steps)
    each = [b - a for a, b in itertools.pairwise([began, *(step.ended for step in steps)])]
    batch = filled / busy if busy else 0.0
    room, generation = engine_bound(trace, tokens / n)
    chain = longest.seconds - longest.queued + last_part + update
    bounds = {"longest rollout": chain / (cfg.max_lag + 1), "training": training + update}
    bounds["generation"] = generation + (0 if cfg.max_lag else last_part + update)
    engine_seconds = took * cfg.engine.count
    return Findings(
        steps=n,
        seconds=took / n,
        quantiles=quantiles(each),
        training=training,
        last_part=last_part,
        update=update,
        trainer_waits=statistics.fmean(step.stats["wait_for_rollouts"] for step in steps),
        engines_wait=statistics.fmean(step.stats["wait_for_training"] for step in steps),
        engines_busy=busy / engine_seconds,
        batch=batch,
        room=room,
        trainers_busy=sum(t.seconds for t in trained) / cfg.policy.ranks / took,
        tokens=tokens / n,
        reread=(reread + trace.lost_tokens * took / trace.steps[-1].ended) / max(tokens, 1),
        longest=longest,
        bounds=bounds,
        binds=max(bounds, key=lambda name: bounds[name]),
    )


def last_parts(trained: list[Training]) -> list[Training]:
    """Returns each rank's last work in each step."""
    return list({(one.step, one.rank): one for one in trained}.values())


def slowest(trained: list[Training]) -> Collection[Training]:
    """Returns the work of the slowest rank in each step."""
    return {one.step: one for one in sorted(trained, key=lambda one: one.seconds)}.values()


def quantiles(values: list[float]) -> tuple[float, float, float]:
    """Returns the 0.1, 0.5 and 0.9 quantiles."""
    if len(values) == 1:
        return (values[0],) * 3
    cuts = statistics.quantiles(values, n=10, method="inclusive")
    return cuts[0], cuts[4], cuts[8]


def longest_of(trace: Trace, steps: list[Step]) -> Longest:
    """Averages the slowest group of each step."""
    P = trace.cfg.prompts_per_step
    longest: dict[int, Span] = {}
    for span in trace.spans:
        step = span.slot // P
        if step not in longest or seconds(span) > seconds(longest[step]):
            longest[step] = span
    found = [longest[step.number - 1] for step in steps]
    return Longest(
        statistics.fmean(seconds(span) for span in found),
        statistics.fmean(span.queued for span in found),
        statistics.fmean(span.tokens for span in found),
        statistics.fmean(span.ended - span.written for span in found),
    )


def seconds(span: Span) -> float:
    """Returns the seconds from a group's start to its end; earlier attempts do not count."""
    return span.ended - span.began


def engine_bound(trace: Trace, tokens: float) -> tuple[float, float]:
    """Returns the sequences that an engine has room for, and a step's seconds if all are full."""
    cfg = trace.cfg
    hardware = trace.hardware
    answers = cfg.prompts_per_step * cfg.group_size
    mean = tokens / answers
    context = trace.workload.prompt + mean / 2
    each = hardware.room.sequence + hardware.room.token * context
    in_flight = (cfg.max_lag + 1) * answers / cfg.engine.count
    room = max(1.0, min(hardware.room.slots, in_flight, hardware.room.bytes / each))
    batch = max(1, int(room))
    prompts = cfg.prompts_per_step * (1 if trace.workload.reuses_prompts else cfg.group_size)
    reading = prompts * hardware.prefill(trace.workload.prompt) / cfg.engine.count
    step = hardware.decode(batch, batch * context)
    return room, tokens / cfg.engine.count / batch * step + reading


def table(trace: Trace, found: Findings) -> list[str]:
    """Formats the findings of a run."""
    cfg = trace.cfg
    low, middle, high = found.quantiles
    n = len(trace.steps)
    shares = f"10 % below {low:,.0f}, half {middle:,.0f}, 90 % {high:,.0f}"
    longest = found.longest
    parts = f"{longest.tokens:,.0f} tokens; before them {longest.queued:,.0f} s"
    parts += f", after them {longest.judging:,.0f} s"
    full = f"with {found.batch:.1f} sequences, room for {found.room:.0f}"
    rate = found.tokens / found.seconds / (cfg.engine.count * cfg.engine.tensor_parallel)
    after = f"; after the last groups {found.last_part:,.1f} s" if cfg.train_parts > 1 else ""
    waves = f": they come in waves of {cfg.max_lag + 1}" if cfg.max_lag else ""
    return [
        f"simulated: {n} steps, of which {found.steps} are counted; all seconds are of the model",
        row("a step, s", found.seconds, shares + waves),
        row("training", found.training, f"trainers busy {found.trainers_busy:.0%}{after}"),
        row("weight update", found.update, f"{found.update / found.seconds:.1%} of the step"),
        row("longest rollout", longest.seconds, parts),
        row("trainer waits", found.trainer_waits, f"{found.trainer_waits / found.seconds:.0%}"),
        row("engines wait", found.engines_wait, "no group at all, mean of the engines"),
        row("engines busy, %", 100 * found.engines_busy, full),
        row("tokens a GPU, /s", rate, f"{found.tokens / 1e6:,.1f} M a step"),
        row("written or read again, %", 100 * found.reread, lost(trace)),
        *(row(f"at least, {name}", value) for name, value in found.bounds.items()),
    ]


def lost(trace: Trace) -> str:
    """Formats the faults and what they cost."""
    dropped = trace.steps[-1].stats["dropped_prompts"]
    faults = ", ".join(f"{kind} {count}" for kind, count in trace.faults.items()) or "none"
    engines = trace.steps[-1].stats["engines"]
    return f"faults: {faults}; engines at the end {engines:.0f}; prompts dropped {dropped:.0f}"


def row(label: str, value: float, note: str = "") -> str:
    """Formats one line: a label, a value, and where the value comes from."""
    return f"  {label:<26}{value:>12,.1f}  {note}".rstrip()


def conserved(trace: Trace) -> list[str]:
    """Returns what is wrong with the trained groups; empty if each was trained once."""
    P, lag = trace.cfg.prompts_per_step, trace.cfg.max_lag
    wrong = []
    for place, step in enumerate(trace.steps):
        expected = list(range(place * P, (place + 1) * P))
        in_order = step.slots if trace.cfg.train_parts == 1 else sorted(step.slots)
        if in_order != expected:
            wrong.append(f"step {step.number} trained other slots than its own")
        oldest = min(step.versions)
        if not step.number - 1 - lag <= oldest <= step.number - 1:
            wrong.append(f"step {step.number} trained a group of version {oldest}")
    begun = {span.slot for span in trace.spans}
    trained = {slot for step in trace.steps for slot in step.slots}
    if begun != trained:
        wrong.append(f"{len(begun ^ trained)} groups were only rolled out, or only trained")
    return wrong
