"""Runs mopd.py with trainers and teachers that run at a fixed speed, for bench/three_sides.py.

python bench/simulation/paced_mopd.py --config FILE
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import mopd  # noqa: E402
from grpo_async import Trained  # noqa: E402
from rollout.episode import Sample  # noqa: E402

TOKEN = 2e-3  # seconds to train or score a token; on one core, either takes less than half of that


def tokens_of(rows: list, groups: tuple[list[Sample], ...]) -> int:
    """Returns the tokens of packed rows, whose places are (group, sample)."""
    return sum(len(groups[g][j].tokens_T) for row in rows for g, j in row)


class Trainer(mopd.Trainer):
    """Trains, and then waits until the time set for its tokens has passed."""

    def train_step(self, step: int, updates: list, *groups: list[Sample]) -> Trained:
        """Trains as the product does, and waits."""
        began = time.perf_counter()
        due = began + TOKEN * sum(tokens_of(update.rows, groups) for update in updates)
        trained = super().train_step(step, updates, *groups)
        time.sleep(max(0.0, due - time.perf_counter()))
        trained.metrics["train_seconds"] = time.perf_counter() - began
        return trained


class Teacher(mopd.Teacher):
    """Scores, and then waits until the time set for its tokens has passed."""

    def score(self, model: str, rows: list, *groups: list[Sample]) -> tuple:
        """Scores as the product does, and waits."""
        began = time.perf_counter()
        due = began + TOKEN * tokens_of(rows, groups)
        _, *scored = super().score(model, rows, *groups)
        time.sleep(max(0.0, due - time.perf_counter()))
        return time.perf_counter() - began, *scored


if __name__ == "__main__":
    mopd.Run.ACTORS = (Trainer, mopd.RolloutWorker)
    mopd.Teacher = Teacher
    mopd.main()
