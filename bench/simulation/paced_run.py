"""Runs grpo_async.py with a trainer that runs at a fixed speed, for real.py.

python bench/simulation/paced_run.py --config FILE
"""

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import grpo_async  # noqa: E402

TOKEN = 1e-3  # seconds to train a token; on one core, it takes less than half of that


class Trainer(grpo_async.Trainer):
    """Trains, and then waits until the time set for its tokens has passed."""

    def train_step(self, step: int, updates: list, *groups: Any) -> grpo_async.Trained:
        """Trains as the product does, and waits."""
        began = time.perf_counter()
        places = (place for update in updates for row in update.rows for place in row)
        tokens = sum(len(groups[g][j].tokens_T) for g, j in places)
        trained = super().train_step(step, updates, *groups)
        time.sleep(max(0.0, began + TOKEN * tokens - time.perf_counter()))
        trained.metrics["train_seconds"] = time.perf_counter() - began
        return trained


if __name__ == "__main__":
    grpo_async.Run.ACTORS = (Trainer, grpo_async.RolloutWorker)
    grpo_async.main()
