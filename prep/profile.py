"""`profile`: measures how often a model solves each row, with our own rollouts."""

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
    """The number of answers, and of answers that passed, per line of a file."""

    total: Counter[int]
    passed: Counter[int]


@dataclass(frozen=True)
class Profile:
    """Adds a model's pass rate to rows: samples, samples that passed, and their share.

    Settings of the run follow `--`, such as `-- --config configs/math_blend.py`.
    """

    file: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="FILE")]
    """JSONL file of rows."""
    out: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="OUT")]
    """JSONL file to write, with the rows in the same order."""
    model: str
    """Model folder, or ORG/NAME on the hub."""
    samples: int = 8
    """Number of answers per row."""
    threshold: float = 1.0
    """Reward at which an answer passes."""
    run_dir: str = ""
    """Run folder; empty: below runs/, named after OUT and the time."""
    overrides: tyro.conf.Suppress[tuple[str, ...]] = ()
    """Arguments after `--`."""

    def run(self) -> int:
        """Runs an evaluation and writes the rows. Raises InputError if it fails."""
        stamp = time.strftime("%Y%m%d-%H%M%S")
        run_dir = self.run_dir or f"runs/profile-{Path(self.out).stem}-{stamp}"
        with files.rewriting(self.file, self.out) as output:
            done = subprocess.run(self.command(run_dir))
            if done.returncode:
                raise InputError(
                    f"grpo_async.py exited with code {done.returncode}; run folder {run_dir}"
                )
            total, passed = self.counts(Path(run_dir) / "evaluation" / "rollouts.jsonl")
            lacking = 0
            for line in files.lines(self.file):
                row = {name: v for name, v in line.row().items() if name not in FIELDS}
                n = total[line.number]
                right = passed[line.number]
                if n:
                    row["pass_rate"] = right / n
                    row["pass_rate_total"] = n
                    row["pass_rate_passed"] = right
                else:
                    lacking += 1
                output.write(row)
        print(f"  rows without a pass rate, because their rollouts failed: {lacking:,}")
        return 0

    def command(self, run_dir: str) -> list[str]:
        """Returns the command that evaluates the model on the rows."""
        command = [sys.executable, str(ROOT / "grpo_async.py"), "--eval_only"]
        command += ["--model", self.model]
        command += ["--data.train", self.file]
        command += ["--data.val", self.file]
        command += ["--data.val_samples", str(self.samples)]
        command += ["--run_dir", run_dir]
        return [*command, *self.overrides]

    def counts(self, path: Path) -> Counts:
        """Returns the counts for an evaluation's rollouts.

        Raises InputError if a line is not a rollout.
        """
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
