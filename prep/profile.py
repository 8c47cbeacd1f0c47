"""`profile`: how often a model solves each row, by our own rollouts."""

import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import tyro

from core.errors import InputError
from prep import files
from settings.reader import ROOT

FIELDS = ("pass_rate", "pass_rate_total", "pass_rate_passed")


class Counts(NamedTuple):
    """Answers to each line of a file, and those that passed."""

    total: Counter[int]
    passed: Counter[int]


@dataclass(frozen=True)
class Profile:
    """The rows with the pass rate of a model: samples, those that passed, and their share.

    Settings of the run follow `--`, such as `-- --config configs/math_blend.py`.
    """

    file: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="FILE")]
    """JSONL file of rows."""
    out: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="OUT")]
    """JSONL file to write, its rows in the same order."""
    model: str
    """Folder of the model, or ORG/NAME of the hub."""
    samples: int = 8
    """Answers to each row."""
    threshold: float = 1.0
    """Reward from which on an answer passes."""
    run_dir: str = ""
    """Folder of the run; empty: below runs/, named after OUT and the time."""
    overrides: tyro.conf.Suppress[tuple[str, ...]] = ()
    """Arguments after `--`."""

    def run(self) -> int:
        """Runs an evaluation and writes the rows. Raises InputError where it failed."""
        stamp = time.strftime("%Y%m%d-%H%M%S")
        run_dir = self.run_dir or f"runs/profile-{Path(self.out).stem}-{stamp}"
        with files.rewriting(self.file, self.out) as output:
            done = subprocess.run(self.command(run_dir))
            if done.returncode:
                raise InputError(
                    f"grpo_async.py ended with {done.returncode}; run folder {run_dir}"
                )
            total, passed = self.counts(Path(run_dir) / "evaluation" / "rollouts.jsonl")
            lacking = 0
            for line in files.lines(self.file):
                row = {name: v for name, v in line.row().items() if name not in FIELDS}
                n = total[line.number]
                lacking += not n
                if n:
                    right = passed[line.number]
                    row |= dict(zip(FIELDS, (right / n, n, right), strict=True))
                output.write(row)
        print(f"  rows without a pass rate, because their rollouts failed: {lacking:,}")
        return 0

    def command(self, run_dir: str) -> list[str]:
        """The command that evaluates the model on the rows."""
        settings = {"model": self.model, "data.train": self.file, "data.val": self.file}
        settings |= {"data.val_samples": str(self.samples), "run_dir": run_dir}
        flags = [word for name, value in settings.items() for word in (f"--{name}", value)]
        return [sys.executable, str(ROOT / "grpo_async.py"), "--eval_only", *flags, *self.overrides]

    def counts(self, path: Path) -> Counts:
        """The counts of an evaluation's rollouts. Raises InputError for a line that is none."""
        counts = Counts(Counter(), Counter())
        for line in files.lines(path):
            rollout = line.row()
            try:
                number, good = int(rollout["row"]), float(rollout["reward"]) >= self.threshold
            except (LookupError, TypeError, ValueError) as error:
                raise InputError(f"{line.place}: expected a rollout: {error!r}") from None
            counts.total[number] += 1
            counts.passed[number] += good
        return counts
