"""Kills or stops what a run is made of at every point of its life, and prints how each time ended.

    python tests/kills.py [KILLS [SEED [--flag value ...]]]

Half a minute each, alone on the machine. Flags are those of grpo_async.py: --train_parts 7.

Needs models/tiny and data/tiny (launch/make_tiny.py). Each point of
support/kill_points/sitecustomize.py (a role, and what it is about to do or has just done) is hit
twice in 60 kills: by SIGKILL, and by SIGSTOP, where nothing dies and it is the deadlines that must
notice. The run saves and verifies after each step. It has two engines, and one after every second
start. After the loss of an engine (the actor, or vLLM's process in it) or of a rollout worker it
must have trained two more steps in time; also printed is when all engines serve. A dead trainer or
driver must end it in time, by name, and `--resume auto` must go on. At the end every slot was
trained once, with the prompt of its place in the file, or was dropped with a reason.

The exit status is 1 where one was late or silent, or a run ended that should have gone on.
"""

import itertools
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from support.kill_points.sitecustomize import POINTS
from support.program import ROOT, Program, end

sys.path.insert(0, str(ROOT))
from grpo_async import Config  # noqa: E402
from runtime.startup import preflight
from settings import reader

FLAGS = {"steps": 100_000, "save_period": 1, "engine.verify_sync_every": 1, "val_period": 0}
FLAGS |= {"data.val": "", "rollout_workers": 2}
FLAGS |= {f"timeouts.{name}": 20 for name in ("rollout", "train", "sync")}
FATAL = ("trainer", "driver")
GOOD = ("recovered", "ended by name")


def limit(what: str, name: str, engines: int) -> float:
    """Seconds until two more steps must be trained."""
    if name == "SIGSTOP":  # several deadlines may follow each other where it must not be asked
        return 60 if what in ("while it serves", "before it reports its health") else 90
    return 30 if engines > 1 and "join" not in what else 60


def survive(program: Program, engines: int, seconds: float) -> str:
    """How a run takes the loss of something that it can replace."""
    seen = len(program.steps())

    def trains() -> bool:
        return len(program.steps()) >= seen + 2

    def whole() -> bool:
        return trains() and program.steps()[-1]["engines"] == engines

    try:
        took = program.wait_until(trains, 4 * seconds)
        late = "recovered" if took <= seconds else "LATE"
        return f"{late} in {took:.0f} s, whole {program.wait_until(whole, 4 * seconds):.0f} s later"
    except AssertionError:
        if program.process.poll() is not None:
            return "ENDED: " + program.told().splitlines()[-1]
        program.stop()
        return "SILENT"


def fall(program: Program, role: str, name: str) -> str:
    """How a run ends that cannot go on."""
    began = time.monotonic()
    if role == "driver" and name == "SIGSTOP":
        time.sleep(5)
        program.process.kill()
    told = len(program.told())
    try:
        status = program.ends(90 if name == "SIGSTOP" else 60)
    except AssertionError:
        return "SILENT"
    said = program.told()[told:]
    named = role == "driver" or any(word in said for word in ("died", "waited", "trainer rank"))
    seconds = time.monotonic() - began
    return f"ended by name in {seconds:.0f} s" if named and status else f"SILENT in {seconds:.0f} s"


def cases(dice: random.Random):
    """Every point with each signal, in random order, for ever."""
    points = [(role, what) for role, of_role in POINTS.items() for what in of_role]
    every = list(itertools.product(points, ("SIGKILL", "SIGSTOP")))
    while True:
        dice.shuffle(every)
        yield from every


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
    counts = itertools.cycle((2, 1))
    with tempfile.TemporaryDirectory() as folder:
        armed = Path(folder) / "armed"
        os.environ["KILL_FILE"] = str(armed)
        os.environ["PYTHONPATH"] = f"{ROOT}/tests/support/kill_points:{ROOT}/tests/cpu"

        def start(engines: int) -> Program:
            """The run, gone on with; two of its steps are trained."""
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
                how = fall(program, role, name)
            else:
                how = survive(program, engines, limit(what, name, engines))
            about = f"{role} {what}, {name}, engines: {engines}"
            print(f"{number:4} {about:62} {how}", flush=True)
            ends[role, name, how.split(" in ")[0]] += 1
            if program.process.poll() is not None:
                engines = next(counts)
                program = start(engines)
        program.signal(signal.SIGTERM)
        program.succeeds(120)
        check(program, reader.read(Config, ROOT / "configs/tiny.py"))
    for (role, name, how), count in sorted(ends.items()):
        print(f"{role:14} {name:10} {how:30} {count}")
    return any(how not in GOOD for _, _, how in ends)


def check(program: Program, cfg) -> None:
    """Every step once; every slot's group whole; every prompt in its place or dropped."""
    steps = [m["step"] for m in program.steps()]
    assert steps == list(range(1, len(steps) + 1))
    lines = program.lines("rollouts.jsonl")
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
