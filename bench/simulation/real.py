"""Compares real runs of grpo_async.py on this machine with their simulations.

Six runs of real Ray, vLLM and trainer with two engines: at max_lag 0, 1, 2, at max_lag 0 and 1 with
train_parts 4, and at max_lag 1 with an engine that is killed. A model of a million parameters lets
this machine keep up; engines and trainer take as long as their settings say, so that they do not
slow each other down.

The simulation's inputs come from a seventh run, at max_lag 0, with different answers: `Costs`. From
the compared run it gets only the configuration and each answer's length; and about the killed
engine, when it died and with which groups, and how long its successor took to start.
"""

import dataclasses
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from bench.simulation import findings, world
from bench.simulation.faults import Faults, Strike
from bench.simulation.hardware import Hardware, Points, Room, interpolated
from bench.simulation.workload import Latency, Lengths, Recorded
from bench.simulation.world import Trace
from bench.vs_trl import save_model
from grpo_async import Config
from launch import tiny_model
from support.configs import changed
from support.program import Program, end
from support.samples import asking

P, G = 4, 8
SEATS = 16  # sequences that an engine runs at once
BASE, EACH = 0.025, 0.0015  # seconds per engine step, and per sequence in it
LONGEST = 200  # tokens of an answer
WORD = 8  # letters: a prompt has one token for each, and the tokens around them
STEPS = {0: 10, 1: 14, 2: 18}  # steps by max_lag
ROWS = {1: 512, P: 256}  # tokens per row, by parts per step: few, so that parts are not joined
KILLED = (6, 22)  # the step after which an engine is killed, and the steps in all
DELAY = 0.5  # seconds from the end of that step
LATE = 0.1  # share by which engine steps may be late: beyond it other work is measured
SMALL = 0.05  # share of a step: shorter waits are not compared


class Beat(NamedTuple):
    """One step of an engine."""

    began: float
    slept: float  # the time until which the engine slept
    batch: int
    kept: int  # sequences that the step before had as well


@dataclasses.dataclass
class Run:
    """The files of a real run."""

    cfg: Config
    began: float  # start of its log, in seconds since 1970
    steps: list[dict]  # metrics
    rollouts: list[dict]
    engines: list[list[Beat]]
    killed: float = 0.0  # time at which an engine was killed; 0: none was

    @property
    def ends(self) -> list[float]:
        """The times at which the steps ended."""
        return [self.began + step["seconds"] for step in self.steps]

    @property
    def answers(self) -> tuple[tuple[int, ...], ...]:
        """The tokens of each slot's answers."""
        found: dict[int, list[int]] = defaultdict(list)
        for line in self.rollouts:
            found[line["slot"]].append(sum(count for _, count in line["versions"]))
        return tuple(tuple(found[slot]) for slot in range(len(self.steps) * P))


# === Real runs ====================================================================================


def make_inputs(folder: Path) -> None:
    """Creates a random model that may end an answer anywhere, and prompts of one length."""
    letters = random.Random(0)
    words = ["".join(letters.choices("abcdefgh", k=WORD)) for _ in range(1024)]
    choice = {"options": [{"A": "a"}, {"B": "b"}], "expected_answer": "A"}
    rows = [asking(word, "mcqa_simple_agent", **choice) for word in words]
    tiny_model.write_rows(folder / "train.jsonl", rows)
    save_model(folder / "model", rows[:8])


class Job(NamedTuple):
    """A real run."""

    lag: int
    parts: int = 1
    kill_after: int = 0  # steps; 0: no engine is killed

    @property
    def name(self) -> str:
        """Its name in the table."""
        parts = f", {self.parts} parts" if self.parts > 1 else ""
        return f"max_lag {self.lag}{parts}" + ", an engine is killed" * bool(self.kill_after)

    @property
    def steps(self) -> int:
        """The number of steps to train."""
        return KILLED[1] if self.kill_after else STEPS[self.lag]


JOBS = (Job(0), Job(1), Job(2), Job(0, P), Job(1, P), Job(1, kill_after=KILLED[0]))


def configured(folder: Path, name: str, job: Job, seed: int) -> Config:
    """Returns a run with two engines. All answers are trained on, and the policy never changes."""
    logs = folder / name / "engines"
    logs.mkdir(parents=True)
    args = {
        "max_num_seqs": SEATS,
        "logits_processors": ["bench.simulation.paced:Paced"],
        "additional_config": {"base": BASE, "each": EACH, "folder": str(logs)},
    }
    parts: dict = {"run_dir": str(folder / name / "run"), "model": str(folder / "model")}
    parts |= {"data": {"train": str(folder / "train.jsonl")}, "engine": {"count": 2, "args": args}}
    parts |= {"lr": 1e-12, "warmup_lr": 1e-12, "skip_zero_advantage": False}
    parts |= {"row_tokens": ROWS[job.parts], "train_parts": job.parts}
    parts |= {"activation_checkpointing": False, "prompts_per_step": P, "group_size": G}
    parts |= {"max_response_tokens": LONGEST, "max_model_len": LONGEST + 32}
    parts |= {"timeouts": {"start": 180.0, "rollout": 180.0, "train": 120.0, "sync": 60.0}}
    return changed(Config(seed=seed, steps=job.steps, max_lag=job.lag, save_period=0), **parts)


def measure(cfg: Config, kill_after: int = 0) -> Run:
    """Runs the program; kills an engine's process some time after that step."""
    program = Program(cfg, script="bench/simulation/paced_run.py")
    killed = 0.0
    try:
        if kill_after:
            program.wait_until(lambda: len(program.steps()) >= kill_after)
            time.sleep(DELAY)
            end(program.engine_cores()[0])
            killed = time.time()
        if program.ends(300):
            raise RuntimeError(f"a real run failed: {program.told()[-4000:]}")
    finally:
        program.stop()
    steps = program.steps()
    began = (program.folder / "metrics.jsonl").stat().st_mtime - steps[-1]["seconds"]
    logs = sorted(program.folder.parent.glob("engines/*.log"))
    return Run(cfg, began, steps, program.lines("rollouts.jsonl"), list(map(beats, logs)), killed)


def beats(path: Path) -> list[Beat]:
    """Reads an engine's steps."""
    rows = (line.split() for line in path.read_text().splitlines())
    return [Beat(float(a), float(b), int(batch), int(kept)) for a, b, batch, kept in rows]


# === What the simulation is told ==================================================================


@dataclasses.dataclass
class Costs(Hardware):
    """The measured seconds, by kind of work."""

    points: Points = dataclasses.field(default_factory=dict)  # seconds per engine step
    call: float = 0.0  # sending a batch to the trainer and getting the reply
    latency: float = 0.0  # per group: sending it, and waiting for its rewards after its last token

    def decode(self, batch: int, context: float) -> float:
        """Returns the seconds of a step with this many sequences."""
        return interpolated(self.points, batch, context)

    def train(self, rows: Sequence[Sequence[int]]) -> float:
        """Returns the seconds for which the trainer has the batch."""
        return self.call + super().train(rows)


def costs(run: Run) -> Costs:
    """Measures a run at max_lag 0, in which nothing overlaps.

    In it, the trainer waits only while an engine works, and for a group's latency.
    """
    steps = run.steps[1:]
    tokens = trained_tokens(run)[1:]
    trained = (step["train_seconds"] / n for step, n in zip(steps, tokens, strict=True))
    return Costs(
        room=Room(SEATS, 1e12, 1.0, 0.0),
        per_trained_token=statistics.median(trained),
        sync=statistics.median(map(update_seconds, steps)),
        points=step_seconds(run.engines),
        call=statistics.median(map(call_seconds, steps)),
        latency=group_latency(run),
    )


def start_seconds(run: Run, update: float) -> float:
    """Returns the seconds from an engine's death until its successor gets weights."""
    firsts = (steps[0].began for steps in run.engines)
    successor = min(began for began in firsts if began > run.killed)
    return successor - run.killed - 1 - update  # the driver waits a second first


def call_seconds(step: dict) -> float:
    """Returns the seconds of a step other than waiting, training and weight updates."""
    known = step["wait_for_rollouts"] + step["train_seconds"] + update_seconds(step)
    return step["step_seconds"] - known


def update_seconds(step: dict) -> float:
    """Returns the seconds for which engines pause."""
    return step["sync_pause"] + step["sync_transfer"] + step["sync_resume"]


def trained_tokens(run: Run) -> list[int]:
    """Returns the tokens of prompts and answers in each step."""
    totals = [sum(answers) + G * prompt_tokens() for answers in run.answers]
    return [sum(totals[i : i + P]) for i in range(0, len(totals), P)]


def prompt_tokens() -> int:
    """Returns the tokens of a prompt: a word, and the two tokens of the roles around it."""
    return WORD + 2


def step_seconds(engines: list[list[Beat]]) -> Points:
    """Returns the seconds of an engine step, by its sequences."""
    taken: dict[int, list[float]] = defaultdict(list)
    for steps in engines:
        for before, beat in zip(steps, steps[1:], strict=False):
            if beat.kept:
                taken[beat.batch].append(beat.slept - before.slept)
    return {batch: [(0.0, statistics.median(taken[batch]))] for batch in sorted(taken)}


def busy_spans(steps: list[Beat]) -> list[tuple[float, float]]:
    """Returns the intervals in which an engine had sequences."""
    spans: list[tuple[float, float]] = []
    for beat in steps:
        began = spans.pop()[0] if beat.kept else beat.began
        spans.append((began, beat.slept))
    return spans


def group_latency(run: Run) -> float:
    """Returns the seconds that the trainer waits while no engine has a sequence."""
    waits = []
    for began, ended, step in zip(run.ends, run.ends[1:], run.steps[1:], strict=False):
        spans = [s for steps in run.engines for s in busy_spans(steps)]
        waits.append(step["wait_for_rollouts"] - covered(spans, began, ended))
    return statistics.median(waits)


def covered(spans: list[tuple[float, float]], began: float, ended: float) -> float:
    """Returns the seconds of an interval that the spans cover."""
    total, last = 0.0, began
    for start, stop in sorted(spans):
        low, high = max(start, last), min(stop, ended)
        total += max(0.0, high - low)
        last = max(last, high)
    return total


def behind(run: Run, hardware: Hardware) -> float:
    """Returns how much longer engine steps took than they were set to, as a share of that."""
    pairs = [pair for steps in run.engines for pair in zip(steps, steps[1:], strict=False)]
    kept = [(before, beat) for before, beat in pairs if beat.kept]
    taken = sum(beat.slept - before.slept for before, beat in kept)
    return taken / sum(hardware.decode(beat.batch, 0) for _, beat in kept) - 1


# === Both, side by side ===========================================================================


class Pair(NamedTuple):
    """One figure, simulated and measured, in seconds."""

    name: str
    simulated: float
    measured: float

    @property
    def error(self) -> float:
        """The error, relative to the measured value."""
        return abs(self.simulated - self.measured) / self.measured


def simulated(run: Run, hardware: Costs) -> Trace:
    """Simulates the same run on a virtual clock."""
    strikes: tuple[Strike, ...] = ()
    if run.killed:
        hardware = dataclasses.replace(hardware, start=start_seconds(run, hardware.sync))
        strikes = (strike(run),)
    work = Recorded(
        lengths=Lengths(0.0, 0.0, LONGEST, (LONGEST,)),
        prompt=prompt_tokens(),
        environment=Latency(hardware.latency, 0.0),
        answers=run.answers,
    )
    return world.run(run.cfg, hardware, work, Faults(strikes=strikes))


def strike(run: Run) -> Strike:
    """Returns when the engine was killed, and its groups of the next step, which restarted."""
    version = sum(ended < run.killed for ended in run.ends)
    oldest: dict[int, int] = {}
    for line in run.rollouts:
        began = line["versions"][0][0]
        oldest[line["slot"]] = min(began, oldest.get(line["slot"], began))
    slots = frozenset(range(version * P, (version + 1) * P))
    lost = frozenset(slot for slot in slots if oldest[slot] == version)
    return Strike(version, run.killed - run.ends[version - 1], lost, slots - lost)


def compared(run: Run, trace: Trace) -> list[Pair]:
    """Returns means over the steps between filling and draining, in seconds per step.

    Waits shorter than `SMALL` of a step are left out.
    """
    found = findings.find(trace)
    window = measured_window(run, trace)
    began, ended = run.ends[window[0]["step"] - 2], run.ends[window[-1]["step"] - 1]
    length = (ended - began) / len(window)
    busy = sum(covered(busy_spans(steps), began, ended) for steps in run.engines)
    idle = 1 - busy / (ended - began) / run.cfg.engine.count
    waits = [
        Pair("trainer waits", found.trainer_waits, mean(window, "wait_for_rollouts")),
        Pair("an engine has no answer", (1 - found.engines_busy) * found.seconds, idle * length),
        Pair("an engine has no group", found.engines_wait, mean(window, "wait_for_training")),
    ]
    kept = [pair for pair in waits if pair.measured > SMALL * length]
    return [Pair("a step", found.seconds, length), *kept]


def each_step(run: Run, trace: Trace) -> list[Pair]:
    """Returns the same comparison for each single step."""
    ends = [trace.began, *(step.ended for step in trace.steps)]
    numbers = [step["step"] for step in measured_window(run, trace)]
    return [
        Pair(f"step {n}", ends[n] - ends[n - 1], run.ends[n - 1] - run.ends[n - 2]) for n in numbers
    ]


def measured_window(run: Run, trace: Trace) -> list[dict]:
    """Returns the metrics of the steps that the simulation's findings cover."""
    numbers = {step.number for step in findings.window(trace)}
    return [step for step in run.steps if step["step"] in numbers]


def mean(steps: list[dict], name: str) -> float:
    """Returns a metric's mean."""
    return statistics.fmean(step[name] for step in steps)


def told(hardware: Costs) -> str:
    """Formats the measured speed of this machine, in one line."""
    return (
        f"told, from a run of its own: {1e3 * hardware.per_trained_token:.2f} ms to train a token,"
        f" {1e3 * hardware.call:.0f} ms to ask for it, {1e3 * hardware.sync:.0f} ms an update,"
        f" {1e3 * hardware.latency:.0f} ms a group, {1e3 * hardware.decode(1, 0):.1f} to"
        f" {1e3 * hardware.decode(SEATS, 0):.1f} ms an engine's step by its sequences"
    )


def table(folder: Path) -> Iterator[str]:
    """Executes all runs below a folder; yields the lines to print, as they come."""
    if torch.cuda.is_available():
        yield "real runs: none, because they need a machine without a GPU, and vLLM's CPU build"
        return
    make_inputs(folder)
    hardware = costs(measure(configured(folder, "costs", Job(0), 2)))
    yield told(hardware)
    yield f"{'seconds of a step':58}{'simulated':>11}{'measured':>11}{'apart':>8}"
    pairs: list[Pair] = []
    steps_alone: list[Pair] = []
    for number, job in enumerate(JOBS):
        run = measure(configured(folder, f"run-{number}", job, 1), job.kill_after)
        trace = simulated(run, hardware)
        found = compared(run, trace)
        for pair in found:
            values = f"{pair.simulated:11,.2f}{pair.measured:11,.2f}{pair.error:8.1%}"
            yield f"{job.name + ': ' + pair.name:58}{values}"
        if (late := behind(run, hardware)) > LATE:
            yield f"  NOT VALID: other work on this machine made engine steps {late:.0%} longer"
        if run.killed:
            start = start_seconds(run, hardware.sync)
            yield f"  taken from this run: a new engine needs {start:.0f} s until it gets weights"
        pairs += found
        steps_alone += each_step(run, trace)
    alone = statistics.median(pair.error for pair in steps_alone)
    error = statistics.median(pair.error for pair in pairs)
    yield f"real runs: apart by {error:.1%} in the median; single steps by {alone:.1%}"
