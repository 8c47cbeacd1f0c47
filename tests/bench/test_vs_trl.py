"""What the comparisons with TRL run as ours is a whole copy."""

import json
import shutil
import sys

import pytest
from conftest import write_rows

from bench import vs_trl, vs_trl_async
from support.program import ran
from support.samples import asking


@pytest.mark.slow
def test_what_is_compared_starts(tiny_model, tmp_path, warm_python):
    vs_trl.copy_ours(tmp_path)
    shutil.copytree(tiny_model, tmp_path / "model")
    write_rows(tmp_path / "train.jsonl", [asking("say a", "vowels")])
    words = ("grpo_async.py", "--config", "configs/bench.py", "--dry_run")
    done = ran(warm_python, *words, root=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "envs/vowels.py" in done.stdout


@pytest.mark.slow
@pytest.mark.long
def test_ours_of_the_asynchronous_comparison_trains_whole_batches(tmp_path, monkeypatch):
    """Also in parts: a step's record is of the whole batch, and its time that of all parts."""
    vs_trl_async.make_inputs(tmp_path)
    monkeypatch.setenv("BENCH_FOLDER", str(tmp_path))
    job = {"lag": 1, "steps": 3, "seconds": 0.4, "faults": False, "parts": vs_trl_async.P}
    script = "bench/vs_trl_async.py"
    done = ran(sys.executable, script, "--ours", json.dumps(job), root=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = json.loads((tmp_path / "record.json").read_text())["steps"]
    whole = vs_trl_async.P * vs_trl_async.G
    sizes = [(len(step["lengths"]), max(step["lags"])) for step in steps]
    assert sizes == [(whole, 0), (whole, 1), (whole, 1)]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["train_seconds"] for line in lines] == pytest.approx([0.4] * 3)
