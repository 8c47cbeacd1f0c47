"""Kills what a run is made of at every point of its life, and prints how each time ended.

    python tests/kills.py [KILLS] [SEED] [SIGNAL]     half a minute each; alone on the machine

Needs models/tiny and data/tiny (launch/make_tiny.py). Each kill hits one of the points of
support/kill_points/sitecustomize.py: a role, and what it is about to do or has just done; saving
and verifying after each step. After a kill of an engine (the actor, or vLLM's process in it) or of
a rollout worker the run must have trained two more steps within 30 s; also printed is when all
engines serve. A dead trainer or driver must end it within 60 s, by name, and `--resume auto` must
go on. At the end every slot was trained once, with the prompt of its place in the file, or was
dropped with a reason.

With SIGSTOP nothing dies: the process stands still, and it is the deadlines that must notice.
"""

import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from support.kill_points.sitecustomize import POINTS
from support.program import ROOT, Program

sys.path.insert(0, str(ROOT))
from grpo_async import Config  # noqa: E402
from runtime import config  # noqa: E402

ENGINES = 2
FLAGS = {"steps": 100_000, "save_period": 1, "engine.verify_sync_every": 1, "val_period": 0}
FLAGS |= {"data.val": "", "engine.count": ENGINES, "rollout_workers": 2}
FLAGS |= {"engine.max_restarts": 10**6}
FLAGS |= {f"timeouts.{name}": 20 for name in ("rollout", "train", "sync")}
FATAL = ("trainer", "driver")


def survive(program: Program, limit: float) -> str:
    """How a run takes the loss of something that it can replace."""
    seen = len(program.steps())

    def trains() -> bool:
        return len(program.steps()) >= seen + 2

    def whole() -> bool:
        return trains() and program.steps()[-1]["engines"] == ENGINES

    try:
        took = program.wait_until(trains, 4 * limit)
        late = "recovered" if took <= limit else "LATE"
        return f"{late} in {took:.0f} s, whole {program.wait_until(whole, 4 * limit):.0f} s later"
    except AssertionError:
        named = "Error" in program.told()[-8000:]
        return "ended with a named error" if named else "SILENT"


def fall(program: Program, role: str, name: str) -> str:
    """How a run ends that cannot go on."""
    began = time.monotonic()
    if role == "driver" and name == "SIGSTOP":
        time.sleep(5)
        program.process.kill()
    status = program.ends(60)
    named = role == "driver" or "died" in program.told() or "waited" in program.told()
    assert status != 0
    return f"ended in {time.monotonic() - began:.0f} s" if named else "SILENT"


def main() -> None:
    """Prints a line for each kill and a summary."""
    given = sys.argv[1:]
    kills, seed, name = (*given, *("100", "0", "SIGKILL")[len(given) :])
    dice = random.Random(int(seed))
    ends = Counter()
    points = [(role, what) for role, of_role in POINTS.items() for what in of_role]
    limit = 30 if name == "SIGKILL" else 90
    with tempfile.TemporaryDirectory() as folder:
        armed = Path(folder) / "armed"
        os.environ["KILL_FILE"] = str(armed)
        os.environ["PYTHONPATH"] = f"{ROOT}/tests/support/kill_points:{ROOT}/tests/cpu"
        flags = FLAGS | {"run_dir": f"{folder}/run"}
        words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
        cfg = config.load(Config, words, default="configs/tiny.py")
        program = Program(cfg, "--resume", "auto")
        program.wait_until(lambda: len(program.steps()) >= 2)
        for number in range(1, int(kills) + 1):
            if (number - 1) % len(points) == 0:
                dice.shuffle(points)
            role, what = points[(number - 1) % len(points)]
            time.sleep(dice.uniform(0, 2))
            (Path(folder) / "next").write_text(f"{role} {what} {name}")
            (Path(folder) / "next").rename(armed)
            while armed.exists():  # the driver may be gone as soon as it is not
                time.sleep(0.005)
                assert program.process.poll() is None, program.told()[-4000:]
            end = fall(program, role, name) if role in FATAL else survive(program, limit)
            print(f"{number:4} {role:12} {what:34} {end}", flush=True)
            ends[role, end.split(" in ")[0]] += 1
            if program.process.poll() is not None:
                done = len(program.steps())
                program = Program(cfg, "--resume", "auto")
                program.wait_until(lambda p=program, n=done: len(p.steps()) > n)
        program.signal(signal.SIGTERM)
        assert program.ends(120) == 0, program.told()[-4000:]
        check(program, cfg)
    for (role, end), count in sorted(ends.items()):
        print(f"{role:14} {end:30} {count}")


def check(program: Program, cfg) -> None:
    """Every step once; every slot's group whole; every prompt in its place or dropped."""
    steps = [m["step"] for m in program.steps()]
    assert steps == list(range(1, len(steps) + 1))
    lines = program.lines("rollouts.0.jsonl") + program.lines("rollouts.1.jsonl")
    seen = Counter(line["slot"] for line in lines)
    trained = range(len(steps) * cfg.prompts_per_step)
    # A worker killed between writing a group down and handing it in does both again.
    wrong = {slot: seen[slot] for slot in trained if seen[slot] % cfg.group_size or not seen[slot]}
    assert not wrong, wrong
    again = sum(seen[slot] > cfg.group_size for slot in trained)
    print(f"{again} groups were written down twice, by workers that were killed then")
    rows = {line["slot"]: line["row"] for line in lines}
    dropped = len(program.lines("dropped.jsonl"))
    moved = sum(rows[slot] != slot % 4096 + 1 for slot in trained)
    assert dropped or not moved
    print(f"{len(steps)} steps, {len(trained)} slots trained once each, {dropped} prompts dropped")


if __name__ == "__main__":
    main()
