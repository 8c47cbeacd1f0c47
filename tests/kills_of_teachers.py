"""Kills or stops teachers at random moments, beside all else, and prints how each time ended.

    python tests/kills_of_teachers.py [KILLS [SEED]]

Half a minute each, alone on the machine. Needs models/tiny_mopd (launch/make_tiny_mopd.py). The run
is configs/tiny_mopd.py with two engines; it saves each step and keeps all samples. After a loss
it must have trained two more steps in time. A dead trainer or driver must end it in time, by name,
and `--resume auto` must continue. At the end every slot was trained once, no prompt was dropped,
and every trained token has a score of its teacher.

The exit status is 1 if one was late or silent, or if a run ended that should have continued.
"""

import itertools
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter

from kills import FATAL, FLAGS, GOOD, check, fall, survive

from support.program import ROOT, Program, end

sys.path.insert(0, str(ROOT))
from mopd import Config  # noqa: E402
from runtime.checkpoints import archive
from runtime.startup import preflight

FLAGS = FLAGS | {"sample_period": 1, "engine.count": 2, "prompts_per_step": 16}
FLAGS |= {"val_period": 0, "data.val": "", "train_parts": 1}
SECONDS = 60.0  # in which two more steps must be trained; a stopped teacher is noticed after 20
# What is lost together, by signal: classes of actors, in the order in which they are hit.
CASES = [
    (("Teacher",), "SIGKILL"),
    (("Teacher",), "SIGSTOP"),
    (("Teacher", "Teacher"), "SIGKILL"),
    (("Generator", "Teacher"), "SIGKILL"),
    (("RolloutWorker", "Teacher"), "SIGKILL"),
    (("Teacher", "while it saves"), "SIGKILL"),
    (("Teacher", "Trainer"), "SIGKILL"),
    (("Teacher", "driver"), "SIGKILL"),
]


def hit(program: Program, what: tuple[str, ...], name: str, dice: random.Random) -> None:
    """Sends the signals, each within a second of the one before."""
    if "while it saves" in what:
        program.wait_until(lambda: any(program.folder.glob("step_*.partial")))
    for role, count in Counter(part for part in what if part != "while it saves").items():
        if role == "driver":
            program.process.kill()
            continue
        program.wait_until(lambda role=role, count=count: len(program.pids(role)) >= count)
        for pid in dice.sample(program.pids(role), count):
            end(pid) if name == "SIGKILL" else os.kill(pid, signal.SIGSTOP)
            time.sleep(dice.random())


def check_scores(program: Program) -> None:
    """No trained token is without a score, and no step without its samples."""
    files = sorted(program.folder.glob("samples/step_*.npz"))
    assert len(files) == len(program.steps())
    tokens = 0
    for path in files:
        _, *groups = archive.read_groups(str(path))
        for sample in itertools.chain(*groups):
            scores_N = sample.teacher_logp_T[sample.mask_T]
            assert (scores_N < 0).all(), path
            tokens += len(scores_N)
    print(f"{tokens} trained tokens have a score of their teacher")


def main() -> int:
    """Prints a line for each kill and a summary; returns the exit status."""
    given = sys.argv[1:]
    kills, seed = (*given, *("20", "0")[len(given) :])
    dice = random.Random(int(seed))
    ends = Counter()
    with tempfile.TemporaryDirectory() as folder:
        flags = FLAGS | {"run_dir": f"{folder}/run"}
        words = [str(word) for flag in flags.items() for word in (f"--{flag[0]}", flag[1])]
        words += ["--resume", "auto"]
        cfg = preflight.load(Config, words, default="configs/tiny_mopd.py")

        def start() -> Program:
            """Starts or resumes the run, and waits for two of its steps."""
            program = Program(cfg, "--resume", "auto", script="mopd.py")
            done = len(program.steps())
            program.wait_until(lambda: len(program.steps()) >= done + 2, 240)
            return program

        program = start()
        for number in range(int(kills)):
            if number % len(CASES) == 0:
                chosen = dice.sample(CASES, len(CASES))
            what, name = chosen[number % len(CASES)]
            time.sleep(dice.uniform(0, 2))
            hit(program, what, name, dice)
            fatal = next((role for role in what if role.lower() in FATAL), "")
            if fatal:
                outcome = fall(program, fatal.lower(), name)
            else:
                outcome = survive(program, 2, SECONDS)
            print(f"{number + 1:4} {', '.join(what)}, {name}: {outcome}", flush=True)
            ends[what, name, outcome.how] += 1
            if program.process.poll() is not None:
                program = start()
        program.signal(signal.SIGTERM)
        program.succeeds(120)
        check(program, cfg)
        check_scores(program)
        assert not program.lines("dropped.jsonl")
    return any(how not in GOOD for _, _, how in ends)


if __name__ == "__main__":
    sys.exit(main())
