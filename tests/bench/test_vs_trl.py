"""What the comparisons with TRL run as ours is a whole copy."""

import shutil
import sys

import pytest
from conftest import write_rows

from bench import vs_trl
from support.program import ran
from support.samples import asking


@pytest.mark.slow
def test_what_is_compared_starts(tiny_model, tmp_path):
    vs_trl.copy_ours(tmp_path)
    shutil.copytree(tiny_model, tmp_path / "model")
    write_rows(tmp_path / "train.jsonl", [asking("say a", "vowels")])
    words = ("grpo_async.py", "--config", "configs/bench.py", "--dry_run")
    done = ran(sys.executable, *words, root=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "envs/vowels.py" in done.stdout
