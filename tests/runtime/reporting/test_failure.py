"""What a run that fails prints last, and what it keeps."""

import os
import re
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import ActorDiedError, RayTaskError

from core.errors import RunError
from grpo_async import Config
from runtime.reporting import failure
from support.program import ROOT, ran

PID = 4711  # of an actor that has died
GUESS = "Worker exit type: SYSTEM_ERROR. There are some potential root causes. (1) The process is "
GUESS += "killed by SIGKILL by OOM killer due to high memory usage."
DUMP = """Fatal Python error: Aborted

Thread 0x00007f85c6ffd6c0 (most recent call first):
  File "/lib/threading.py", line 331 in wait
  <no Python frame>

Current thread 0x00007f8b2b6c4740 (most recent call first):
  File "/repo/a.py", line 7 in f

Extension modules: numpy._core._multiarray_umath, msgpack._cmsgpack (total: 2)
[2026-11-29 12:00:00,123 E 12 34] logging.cc:497:     @     0x7f8b2b6c4740 1  (unknown)
"""
NO_FILES = "OSError: [Errno 24] Too many open files: 'x'\n"
NO_SPACE = OSError(28, "No space left on device")


@pytest.fixture
def cfg(tmp_path, monkeypatch) -> Config:
    """The configuration of a run whose folder has logs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "run/logs").mkdir(parents=True)
    return Config(run_dir=str(tmp_path / "run"))


def write_log(cfg: Config, text: str, name: str = f"Trainer-host-{PID}", age: float = 0) -> None:
    path = Path(cfg.run_dir, "logs", f"{name}.log")
    path.write_text(text)
    os.utime(path, (time.time() - age, time.time() - age))


def dead(pid: int = PID) -> ActorDiedError:
    """Ray's error for an actor whose process has died."""
    fields = {"class_name": "Trainer", "actor_id": bytes(16), "pid": pid, "error_message": GUESS}
    return ActorDiedError(ActorDiedErrorContext(**fields))


def remote(error: Exception) -> Exception:
    """An error of another process, as Ray raises it here."""
    try:
        raise error
    except Exception:
        trace = traceback.format_exc()
    made = RayTaskError("f", trace, error, "ray::Trainer.f", PID, "127.0.0.1")
    return made.as_instanceof_cause()


def grouped(*errors: Exception) -> ExceptionGroup:
    """Errors as task groups within each other raise them."""
    return ExceptionGroup("unhandled errors", [ExceptionGroup("in another", errors)])


def raised_from(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def noted(error: Exception, note: str) -> Exception:
    error.add_note(note)
    return error


HERE = r'File ".*test_failure.py", line \d+, in remote: '
DIED = rf"Trainer died \(process {PID}\): "
LOG = rf"Trainer-host-{PID}\.log"
LIMIT = r"the limit of open files \(ulimit -n\) is too low: "
LOST = RuntimeError("engines were lost more than MAX_RESTARTS = 3 times in an hour: Trainer died")
OUTSIDE = "something else ended the process, often because memory ran out"
BROKEN = remote(OSError(5, "Input/output error"))


@pytest.mark.parametrize(
    ("error", "log", "expected"),
    [
        (TimeoutError("waited 5 s for X"), "", "TimeoutError: waited 5 s for X"),
        (grouped(KeyError("a"), ValueError("b")), NO_FILES, "KeyError: 'a'"),
        (
            noted(BROKEN, "step_16 was not saved"),
            NO_FILES,
            HERE + r"OSError: \[Errno 5\] Input/output error; step_16 was not saved",
        ),
        (
            grouped(noted(remote(NO_SPACE), "step_16 was not saved")),
            "",
            rf"a disk is full: {HERE}OSError: \[Errno 28\] No space .*; step_16 was not saved",
        ),
        (
            raised_from(ValueError("not written"), NO_SPACE),
            "",
            r"a disk is full: ValueError: not written: \[Errno 28\] No space left on device",
        ),
        (OSError(122, "Disk quota exceeded"), "", "a disk quota is used up: OSError: .*"),
        (remote(MemoryError()), "", f"memory ran out: {HERE}MemoryError"),
        (grouped(dead()), NO_FILES + DUMP, f"{LIMIT}{DIED}{LOG}: OSError: .*Too many .*'x'"),
        (raised_from(LOST, dead()), NO_FILES, f"{LIMIT}RuntimeError: engines were .*: {LOG}: .*"),
        (dead(), DUMP, f"{DIED}{LOG}: Fatal Python error: Aborted"),
        (dead(), "all is well\n", f"{DIED}{LOG} ends without an error: {OUTSIDE}"),
        (dead(7), "an error\n", r"Trainer died \(process 7\)"),
        (RunError("3 did not start"), NO_FILES, f"{LIMIT}RunError: 3 did not start: {LOG}: .*"),
    ],
)
def test_the_reason_is_what_a_machine_ran_out_of_before_what_ray_guesses(cfg, error, log, expected):
    write_log(cfg, log)
    found = failure.reason(cfg, error)
    assert re.fullmatch(expected, found), found


def test_the_log_of_an_earlier_start_explains_nothing(cfg):
    Path(cfg.run_dir, "lock").write_text("process 1")
    write_log(cfg, NO_FILES, age=100)
    assert failure.reason(cfg, RunError("3 did not start")) == "RunError: 3 did not start"


def test_a_full_disk_of_ray_is_named(cfg, small_disk, monkeypatch):
    """Its actors die there without a word, and so do rollout workers."""
    (small_disk / "ray").mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(small_disk))
    found = failure.reason(cfg, RunError("3 rollout workers did not start"))
    assert (
        found == f"the disk of {small_disk}/ray is full: RunError: 3 rollout workers did not start"
    )


def test_the_traceback_is_kept_even_if_the_disk_of_the_run_is_full(cfg, small_disk, monkeypatch):
    """In the temporary folder then; the last line names the file."""
    sentence = failure.ending(cfg, remote(KeyError("a")))
    path = Path(cfg.run_dir, "logs", f"traceback-{os.uname().nodename}-{os.getpid()}.txt")
    assert sentence.endswith(f"KeyError: 'a'; traceback: {path.relative_to(Path.cwd())}")
    assert "raise error\nKeyError: 'a'" in path.read_text()
    (small_disk / "logs").mkdir()
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "filler").write_bytes(bytes(1 << 20))
    full = Config(run_dir=str(small_disk))
    sentence = failure.ending(full, remote(KeyError("a")))
    assert sentence.startswith(f"error: the disk of {small_disk} is full: File ")
    path = Path(sentence.rpartition("; traceback: ")[2])
    assert "KeyError: 'a'" in path.read_text()
    path.unlink()
    monkeypatch.setattr(failure.tempfile, "tempdir", str(small_disk))
    assert failure.ending(full, KeyError("a")).endswith("; traceback: it cannot be written")


def test_slurm_starts_a_run_that_failed_again_and_not_one_that_was_refused(cfg, tmp_path):
    """launch/grpo.sbatch tells them apart by what they print."""
    (words,) = re.findall("^failed='(.*)'", (ROOT / "launch/grpo.sbatch").read_text(), re.M)
    log = tmp_path / "driver.log"
    for told, status in (
        (failure.ending(cfg, KeyError("a")), 0),
        ("Traceback (most recent call last):", 0),
        ("error: policy.tp = 3: expected 2", 1),
    ):
        log.write_text(f"starting Ray\n{told}\n")
        assert subprocess.run(["grep", "-qE", words, log]).returncode == status


def test_the_last_lines_of_the_latest_logs_come_first(cfg):
    for age, name in enumerate(("Generator", "Trainer", "RolloutWorker")):
        lines = "".join(f"{name} {i}\n" for i in range(9)) if age else ""
        write_log(cfg, lines, name, age)
    expected = ["--- Trainer.log", "Trainer 7", "Trainer 8"]
    expected += ["--- RolloutWorker.log", "RolloutWorker 7", "RolloutWorker 8"]
    assert failure.last_lines(cfg, 2).splitlines() == expected


def test_lines_with_an_error_are_shown_rather_than_others_and_stacks_are_left_out(cfg):
    noise = "".join(f"line {i}\n" for i in range(20))
    write_log(cfg, NO_FILES + noise + DUMP + noise)
    _, *shown = failure.last_lines(cfg, 4).splitlines()
    assert shown == [NO_FILES.strip(), "Fatal Python error: Aborted", "line 18", "line 19"]


FAILS = """
import asyncio, os, resource, sys
from grpo_async import Config
from runtime.processes.actors import actor
from runtime.processes.cluster import Cluster

class Trainer:
    def __init__(self, cfg):
        pass

    def run_out_of_files(self):
        resource.setrlimit(resource.RLIMIT_NOFILE, (500, 500))
        files = []
        try:
            while True:
                files.append(open(__file__))
        except OSError as error:
            print(error, flush=True)
        os.abort()

async def run(cfg):
    async with asyncio.TaskGroup() as tasks:
        made = actor(Trainer, 0, cfg).remote(cfg)
        for _ in range(3):
            tasks.create_task(asyncio.wait_for(made.run_out_of_files.remote(), 60))

cfg = Config(run_dir=sys.argv[1])
with Cluster(cfg, Trainer):
    asyncio.run(run(cfg))
"""


@pytest.mark.slow
def test_a_failed_run_ends_with_one_sentence_and_prints_no_traceback(tmp_path):
    """A process of real Ray that may open no more files, and is aborted."""
    script = tmp_path / "fails.py"
    script.write_text(FAILS)
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    env["PYTHONPATH"] = f"{ROOT}:{env.get('PYTHONPATH', '')}"
    done = ran(sys.executable, script, tmp_path / "run", env=env, seconds=300)
    told = done.stdout + done.stderr
    assert done.returncode == 1 and "Traceback" not in told, told
    logs = tmp_path / "run/logs"
    (path,) = logs.glob("traceback-*.txt")
    (log,) = logs.glob("Trainer-*.log")
    pid = log.stem.rsplit("-")[-1]
    expected = rf"error: {LIMIT}Trainer died \(process {pid}\): {log.name}: "
    expected += rf"\[Errno 24\] Too many open files: '.*'; traceback: {path}"
    assert re.fullmatch(expected, done.stderr.splitlines()[-1]), done.stderr
    assert "Extension modules" in log.read_text() and "Extension modules" not in told
    assert "Traceback" in path.read_text() and "OOM killer" in path.read_text()
