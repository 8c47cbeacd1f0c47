"""Measures how well the two loops overlap: the tiny job with one core each, at max_lag 1 and 0.

    python bench/overlap.py [STEPS]

Both runs train with a learning rate of zero, so that every step does the same work. The synchronous
run shows how long each side takes alone; the asynchronous run's efficiency is the longer of the two
times divided by its time per step.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
SKIPPED = 5  # steps during which both sides still warm up


def measure(max_lag: int, steps: int, folder: str) -> dict[str, float]:
    """Returns medians over the steps of one run of configs/tiny.py."""
    run_dir = f"{folder}/lag{max_lag}"
    flags = {"max_lag": max_lag, "steps": steps, "run_dir": run_dir}
    flags |= {"policy.lr": 1e-12, "policy.warmup_lr": 1e-12, "val_period": 0, "data.val": ""}
    command = [sys.executable, "grpo_async.py"]
    command += [str(part) for name, value in flags.items() for part in (f"--{name}", value)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True)
    text = Path(f"{run_dir}/metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()[SKIPPED:]]
    keys = "step_seconds train_seconds wait_for_rollouts sync_pause sync_transfer sync_resume"
    return {key: statistics.median(line[key] for line in lines) for key in keys.split()} | {
        "mixed": statistics.fmean(line["mixed_version_samples"] for line in lines)
    }


def main() -> None:
    """Prints one table and the ratios."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    with tempfile.TemporaryDirectory() as folder:
        lag0, lag1 = (measure(lag, steps, folder) for lag in (0, 1))
    generation, training = lag0["wait_for_rollouts"], lag0["train_seconds"]
    print(f"median of {steps - SKIPPED} steps        max_lag 0   max_lag 1")
    for key in ("step_seconds", "train_seconds", "wait_for_rollouts"):
        print(f"{key:24} {lag0[key]:10.3f} {lag1[key]:11.3f}")
    step = lag1["step_seconds"]
    print(f"generation alone (T_gen)   {generation:8.3f} s")
    print(f"training alone (T_train)   {training:8.3f} s")
    print(f"overlap efficiency         {max(generation, training) / step:8.2f}   (goal 0.80)")
    print(f"trainer waits              {lag1['wait_for_rollouts'] / step:8.1%}   (goal 10 %)")
    print(f"asynchronous speed-up      {lag0['step_seconds'] / step:8.2f}")
    print(f"samples of several versions {lag1['mixed']:7.1%}")


if __name__ == "__main__":
    main()
