"""Starts megatron_ranks.py for tests."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def compute(jobs: list[dict], folder: Path) -> None:
    """Runs megatron_ranks.py; if a rank fails, the others are ended."""
    paths = [folder / f"{job['name']}.json" for job in jobs]
    for path, job in zip(paths, jobs, strict=True):
        path.write_text(json.dumps(job))
    env = os.environ | {"PYTHONPATH": f"{ROOT}/tests/cpu:{ROOT}:{ROOT}/tests"}
    env |= {"OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
    command = [sys.executable, "-W", "ignore", "tests/support/megatron_ranks.py", *map(str, paths)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-6000:]
