"""What the comparisons with TRL run as ours is a whole copy."""

import shutil
import subprocess
import sys

import pytest
from conftest import write_rows

from bench import vs_trl


@pytest.mark.slow
def test_what_is_compared_starts(tiny_model, tmp_path):
    vs_trl.copy_ours(tmp_path)
    shutil.copytree(tiny_model, tmp_path / "model")
    chat = {"responses_create_params": {"input": [{"role": "user", "content": "say a"}]}}
    write_rows(tmp_path / "train.jsonl", [chat | {"agent_ref": {"name": "vowels"}}])
    command = [sys.executable, "grpo_async.py", "--config", "configs/bench.py", "--dry_run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "envs/vowels.py" in done.stdout
