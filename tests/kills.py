"""Kills or stops what a run is made of at every point of its life, and prints how each time ended.

    python tests/kills.py [KILLS [SEED [--flag value ...]]]

Half a minute each, alone on the machine. Flags are those of grpo_async.py: --policy.lora_rank 8.

Needs models/tiny and data/tiny (launch/make_tiny.py). Each point of
support/kill_points/sitecustomize.py (a role, and what it is about to do or has just done) is hit
twice in 68 kills: by SIGKILL, and by SIGSTOP, when nothing dies and deadlines must notice. A point
of the disk raises EIO and ENOSPC instead, once each. The run trains in seven parts, validates every
third step, and saves and verifies after each step. It has two engines, and one after every second
start. After the loss of an engine (the actor, or vLLM's process in it) or of a rollout worker it
must have trained two more steps in time, and the same holds after an error of the disk. A dead
trainer or driver must end it in time, by name, and `--resume auto` must continue. At the end every
slot was trained once, with the prompt of its place in the file, or was dropped with a reason.

The summary has the median and the 95th percentile of the seconds until the loss was named on the
console, until two more steps were trained, and until all engines served again, and the share of
goodput that is left at one kill in 20 steps.

The exit status is 1 if one was late or silent, or if a run ended that should have continued.
"""

import dataclasses
import itertools
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from support.kill_points.sitecustomize import POINTS
from support.program import ROOT, Program, end

sys.path.insert(0, str(ROOT))
from grpo_async import Config  # noqa: E402
from runtime.startup import preflight
from settings import reader

FLAGS = {"steps": 100_000, "save_period": 1, "engine.verify_sync_every": 1, "val_period": 3}
FLAGS |= {"rollout_workers": 2, "train_parts": 7}
FLAGS |= {f"timeouts.{name}": 20 for name in ("rollout", "train", "sync")}
FATAL = ("trainer", "driver")
GOOD = ("recovered", "ended by name")
NOTICES = ("is lost", "was not saved", "saving")  # what the console says of a loss
NAMES = ("died", "waited", "trainer rank")  # what it says of one that ends the run


@dataclasses.dataclass
class Outcome:
    """How a run took one kill. Seconds are NaN if it did not come to that."""

    how: str
    noticed: float = math.nan  # until the console named the loss
    trained: float = math.nan  # until two more steps were trained
    whole: float = math.nan  # until all engines served again

    def __str__(self) -> str:
        seconds = {"noticed": self.noticed, "two steps": self.trained, "whole": self.whole}
        told = [f"{what} {took:.0f} s" for what, took in seconds.items() if not math.isnan(took)]
        return ", ".join([self.how, *told])


def limit(what: str, name: str, engines: int) -> float:
    """Returns the seconds until two more steps must be trained."""
    if name == "SIGSTOP":  # several deadlines may follow each other if it must not be asked
        return 60 if what in ("while it serves", "before it reports its health") else 90
    return 45 if engines > 1 and "join" not in what else 60


def survive(program: Program, engines: int, seconds: float) -> Outcome:
    """Watches a run that has lost something that it can replace."""
    began = time.monotonic()
    seen = len(program.steps())
    told = len(program.told())
    outcome = Outcome("SILENT")

    def whole() -> bool:
        now = time.monotonic() - began
        if math.isnan(outcome.noticed) and any(w in program.told()[told:] for w in NOTICES):
            outcome.noticed = now
        if len(program.steps()) < seen + 2:
            return False
        if math.isnan(outcome.trained):
            outcome.trained = now
        return program.steps()[-1]["engines"] == engines

    try:
        outcome.whole = program.wait_until(whole, 8 * seconds)
    except AssertionError:
        if program.process.poll() is not None:
            outcome.how = "ENDED: " + program.told().splitlines()[-1]
        program.stop()
        return outcome
    outcome.how = "recovered" if outcome.trained <= seconds else "LATE"
    return outcome


def fall(program: Program, role: str, name: str) -> Outcome:
    """Watches a run end that cannot continue."""
    began = time.monotonic()
    if role == "driver" and name == "SIGSTOP":
        time.sleep(5)
        program.process.kill()
    told = len(program.told())
    try:
        status = program.ends(90 if name == "SIGSTOP" else 60)
    except AssertionError:
        return Outcome("SILENT")
    said = program.told()[told:]
    named = role == "driver" or any(word in said for word in NAMES)
    how = "ended by name" if named and status else "SILENT"
    return Outcome(how, noticed=time.monotonic() - began)


def cases(dice: random.Random) -> Iterator[tuple[tuple[str, str], str]]:
    """Yields every point with each of its signals or errors, in random order, for ever."""
    every = []
    for role, of_role in POINTS.items():
        for what in of_role:
            for name in ("EIO", "ENOSPC") if role == "disk" else ("SIGKILL", "SIGSTOP"):
                every.append(((role, what), name))
    while True:
        dice.shuffle(every)
        yield from every


def of_seconds(values: list[float]) -> str:
    """Returns the median and the 95th percentile."""
    known = sorted(value for value in values if not math.isnan(value))
    if not known:
        return "never"
    high = known[math.ceil(0.95 * len(known)) - 1]
    return f"p50 {statistics.median(known):.1f} s, p95 {high:.1f} s (of {len(known)})"


def summary(outcomes: dict[str, list[Outcome]], step: float) -> None:
    """Prints seconds and goodput for each role; `step` is the median seconds of a step."""
    for role, of_role in sorted(outcomes.items()):
        print(f"{role}: noticed {of_seconds([o.noticed for o in of_role])}")
        if role in FATAL:
            continue
        print(f"{role}: two more steps {of_seconds([o.trained for o in of_role])}")
        print(f"{role}: all engines serve {of_seconds([o.whole for o in of_role])}")
        lost = [o.trained - 2 * step for o in of_role if not math.isnan(o.trained)]
        if lost:
            share = 20 * step / (20 * step + statistics.fmean(lost))
            print(f"{role}: goodput at one kill in 20 steps of {step:.1f} s: {share:.2f}")


def arm(program: Program, armed: Path, role: str, what: str, name: str) -> None:
    """Lets the next process that reaches the point take the signal; waits until one has."""
    armed.with_name("next").write_text(f"{role} {what} {name}")
    armed.with_name("next").rename(armed)
    if what == "before it joins":  # which happens when an engine was lost
        end(program.pids("Generator")[0])
    while armed.exists():  # the driver may be gone as soon as it is not
        time.sleep(0.005)
        assert program.process.poll() is None, program.told()[-4000:]


def main() -> int:
    """Prints a line for each kill and a summary; returns the exit status."""
    given = sys.argv[1:]
    kills, seed, *flags_given = (*given, *("60", "0")[len(given) :])
    dice = random.Random(int(seed))
    ends = Counter()
    outcomes: dict[str, list[Outcome]] = {}
    counts = itertools.cycle((2, 1))
    with tempfile.TemporaryDirectory() as folder:
        armed = Path(folder) / "armed"
        os.environ["KILL_FILE"] = str(armed)
        os.environ["PYTHONPATH"] = f"{ROOT}/tests/support/kill_points:{ROOT}/tests/cpu"

        def start(engines: int) -> Program:
            """Starts or resumes the run, and waits for two of its steps."""
            flags = FLAGS | {"run_dir": f"{folder}/run", "engine.count": engines}
            words = ["--resume", "auto", *flags_given]
            words += [str(word) for flag in flags.items() for word in (f"--{flag[0]}", flag[1])]
            cfg = preflight.load(Config, words, default="configs/tiny.py")
            program = Program(cfg, "--resume", "auto")
            done = len(program.steps())
            program.wait_until(lambda: len(program.steps()) >= done + 2)
            return program

        engines = next(counts)
        program = start(engines)
        chosen = itertools.islice(cases(dice), int(kills))
        for number, ((role, what), name) in enumerate(chosen, 1):
            time.sleep(dice.uniform(0, 2))
            arm(program, armed, role, what, name)
            if role in FATAL:
                outcome = fall(program, role, name)
            else:
                outcome = survive(program, engines, limit(what, name, engines))
            about = f"{role} {what}, {name}, engines: {engines}"
            print(f"{number:4} {about:62} {outcome}", flush=True)
            ends[role, name, outcome.how] += 1
            outcomes.setdefault(role, []).append(outcome)
            if program.process.poll() is not None:
                engines = next(counts)
                program = start(engines)
        program.signal(signal.SIGTERM)
        program.succeeds(120)
        check(program, reader.read(Config, ROOT / "configs/tiny.py"))
        step = statistics.median(line["step_seconds"] for line in program.steps())
    for (role, name, how), count in sorted(ends.items()):
        print(f"{role:14} {name:10} {how:30} {count}")
    summary(outcomes, step)
    return any(how not in GOOD for _, _, how in ends)


def check(program: Program, cfg) -> None:
    """Every step once; every slot's group whole; every prompt in its place or dropped."""
    steps = [m["step"] for m in program.steps()]
    assert steps == list(range(1, len(steps) + 1))
    lines = [line for line in program.lines("rollouts.jsonl") if line["evaluation"] is None]
    seen = Counter(line["slot"] for line in lines)
    trained = range(len(steps) * cfg.prompts_per_step)
    wrong = {slot: seen[slot] for slot in trained if seen[slot] != cfg.group_size}
    assert not wrong, wrong
    rows = {line["slot"]: line["row"] for line in lines}
    dropped = len(program.lines("dropped.jsonl"))
    moved = sum(rows[slot] != slot % 4096 + 1 for slot in trained)
    assert dropped or not moved
    print(f"{len(steps)} steps, {len(trained)} slots trained once each, {dropped} prompts dropped")


if __name__ == "__main__":
    sys.exit(main())
