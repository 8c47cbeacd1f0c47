"""Starts megatron_ranks.py, or a script like it, for tests."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def compute(jobs: list[dict], folder: Path, script: str = "megatron_ranks.py") -> None:
    """Runs a script of this folder; if a rank fails, the others are ended."""
    paths = [folder / f"{job['name']}.json" for job in jobs]
    for path, job in zip(paths, jobs, strict=True):
        path.write_text(json.dumps(job))
    run(script, *map(str, paths))


def run(program: str, *arguments: str) -> str:
    """What a program of tests/support prints where Megatron-Core runs on a CPU."""
    env = os.environ | {"PYTHONPATH": f"{ROOT}/tests/cpu:{ROOT}:{ROOT}/tests"}
    env |= {"OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
    command = [sys.executable, "-W", "ignore", f"tests/support/{program}", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout
