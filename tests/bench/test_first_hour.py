"""The first hour on GPUs, where there is none: what a CPU can do passes, the rest says why not."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def hour():
    spec = importlib.util.spec_from_file_location(
        "gpu_first_hour", ROOT / "bench/gpu_first_hour.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def table(folder: Path, *lines: str, before: tuple[str, ...] = ()) -> tuple[int, list[list[str]]]:
    """Exit status and words of each line."""
    command = [*before, sys.executable, "bench/gpu_first_hour.py", str(folder), *lines]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert not done.stderr, done.stderr
    return done.returncode, [line.split() for line in done.stdout.splitlines()]


def test_a_line_that_needs_more_gpus_is_skipped_and_nothing_fails(tmp_path):
    code, lines = table(tmp_path, "driver", "two_gpus", "matmul")
    assert code == 0
    assert [line[:2] for line in lines] == [
        ["skip", "driver"],
        ["skip", "two_gpus"],
        ["pass", "matmul"],
    ]


def test_a_line_that_fails_says_why_and_does_not_end_the_others(tmp_path):
    code, lines = table(tmp_path, "limits", "matmul", before=("prlimit", "--nofile=4000"))
    assert code == 1 and [line[0] for line in lines] == ["FAIL", "pass"]
    said = " ".join(lines[0])
    assert "ulimit -n is 4000, expected 65536" in said and str(tmp_path / "limits.log") in said


def test_a_program_ends_at_its_line_s_deadline_with_all_that_it_started(hour, tmp_path):
    log = hour.Log("late", tmp_path, 2.0)
    with pytest.raises(TimeoutError, match="waited too long for sleep 60 & sleep 60 to end"):
        log.run("sh", "-c", "sleep 60 & sleep 60")
    assert not [p for p in psutil.Process().children(recursive=True) if p.name() == "sleep"]
    with pytest.raises(RuntimeError, match="status 3"):
        hour.Log("wrong", tmp_path, 60.0).run("sh", "-c", "exit 3")


@pytest.mark.e2e
def test_engine_and_trainer_agree_on_a_cpu(tmp_path):
    code, (line,) = table(tmp_path, "one_gpu")
    assert code == 0 and line[0] == "pass", Path(tmp_path / "one_gpu.log").read_text()[-3000:]
