"""Kills what a run is made of, again and again, and tells how each time ended.

    python tests/kills.py [KILLS] [SEED]

Needs models/tiny and data/tiny (launch/tiny.py). Saving and verifying after each step, so that many
of the kills hit them. After a kill of an engine (vLLM's process or the actor around it) or of a
rollout worker the run must train two more steps within 30 s. A dead trainer or driver must end it
within 60 s, by name, and `--resume auto` must go on. At the end every slot was trained once, with
the prompt of its place in the file, or was dropped with a reason.
"""

import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from program import Program, end

sys.path.insert(0, str(Path(__file__).parent.parent))
import configs  # noqa: E402
from grpo_async import Config  # noqa: E402

FLAGS = {"steps": 100_000, "save_period": 1, "verify_sync_every": 1, "val_period": 0}
FLAGS |= {"val_data": "", "generators": 2, "rollout_workers": 2, "max_engine_restarts": 10**6}
FATAL = ("Trainer", "driver")
ROLES = ("EngineCore", "Generator", "RolloutWorker", *FATAL)


def strike(program: Program, role: str, dice: random.Random) -> None:
    """Kills one process of a role."""
    if role == "driver":
        return program.process.kill()
    pids = program.engine_cores() if role == "EngineCore" else program.pids(role)
    return end(dice.choice(pids))


def survive(program: Program, role: str) -> str:
    """How a run takes the loss of something that it can replace."""
    seen = len(program.steps())
    try:
        took = program.wait_until(lambda: len(program.steps()) >= seen + 2, 60)
        return f"recovered in {took:.0f} s" if took <= 30 else f"LATE: {took:.0f} s"
    except AssertionError:
        named = "Error" in program.told()[-8000:]
        return "ended with a named error" if named else "SILENT"


def main() -> None:
    """Prints a line for each kill and a summary."""
    kills, seed = (int(word) for word in (*sys.argv[1:], "100", "0")[:2])
    dice, ends = random.Random(seed), Counter()
    with tempfile.TemporaryDirectory() as folder:
        flags = FLAGS | {"run_dir": f"{folder}/run"}
        words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
        cfg = configs.load(Config, words, default="configs/tiny.py")
        program = Program(cfg, "--resume", "auto")
        program.wait_until(lambda: len(program.steps()) >= 2)
        for number in range(1, kills + 1):
            role = dice.choice(ROLES)
            time.sleep(dice.uniform(0, 2))
            strike(program, role, dice)
            if role not in FATAL:
                told = survive(program, role)
            else:
                began = time.monotonic()
                status = program.ends(60)
                named = role == "driver" or "died" in program.told()
                told = f"ended in {time.monotonic() - began:.0f} s" if named else "SILENT"
                assert status != 0
            print(f"{number:4} {role:14} {told}", flush=True)
            ends[role, told.split(" in ")[0].split(":")[0]] += 1
            if program.process.poll() is not None:
                done = len(program.steps())
                program = Program(cfg, "--resume", "auto")
                program.wait_until(lambda p=program, n=done: len(p.steps()) > n)
        program.signal(signal.SIGTERM)
        assert program.ends(120) == 0, program.told()[-4000:]
        check(program, cfg)
    for (role, told), count in sorted(ends.items()):
        print(f"{role:14} {told:30} {count}")


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
