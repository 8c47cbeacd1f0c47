"""A run folder belongs to one process."""

import fcntl
import os
from pathlib import Path
from typing import TextIO

from core.errors import InputError
from settings.config import TrainingSettings


def claim(cfg: TrainingSettings) -> TextIO:
    """Takes the run folder for this process; keep what it returns as long as the run lives.

    Raises InputError where it cannot be written to, where another run is alive in it, or was and
    is not to be continued.
    """
    command = cfg.command
    folder = Path(cfg.run_dir)
    if command.replayed == cfg.run_dir:
        raise InputError(f"replay = run_dir = {cfg.run_dir!r}: expected another run_dir")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / "lock", "a+")  # noqa: SIM115
    except OSError as error:
        expected = f"expected a folder to write to: {error.strerror}"
        raise InputError(f"run_dir = {cfg.run_dir!r}: {expected}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        owner = lock.read().strip()
        raise InputError(f"run_dir = {cfg.run_dir!r} is in use by {owner}") from None
    except OSError as error:
        reason = f"cannot be locked: {error.strerror}"
        raise InputError(f"run_dir = {cfg.run_dir!r} {reason}") from None
    metrics = folder / "metrics.jsonl"
    holds_run = (metrics.exists() and metrics.stat().st_size) or any(
        folder.glob("step_*/complete.json")
    )
    here = command.resume == "auto" or (command.resume and Path(command.resume).parent == folder)
    goes_on = here or command.export or (command.resume and command.eval_only)
    if not goes_on and holds_run:
        expected = "expected an empty folder, or --resume auto to go on"
        raise InputError(f"run_dir = {cfg.run_dir!r} holds a run already: {expected}")
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {os.uname().nodename}")
    lock.flush()
    return lock
