"""Sends what a process and its children print to a log file, also after the file was deleted."""

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

VARIABLE = "GRPO_ASYNC_LOG"  # the path of the log, for the children as well
SECONDS = 5.0  # between two looks at the log


def redirect(path: Path) -> None:
    """Sends the output of this process, and of its children, to a log file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", buffering=1) as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)


def begin(path: Path) -> None:
    """Redirects this process to a log file, and again whenever somebody has deleted it."""
    redirect(path)
    os.environ[VARIABLE] = str(path)
    threading.Thread(target=renew_forever, daemon=True).start()


def renew_forever() -> None:
    """Renews the log soon after it was deleted."""
    while True:
        time.sleep(SECONDS)
        renew()


def renew() -> None:
    """Begins this process's log again if it was deleted. Does nothing in a process without one."""
    path = os.environ.get(VARIABLE)
    if not path or is_at(path, descriptor=1):
        return
    with suppress(OSError):  # a full disk, or a missing one: the run ends for it elsewhere
        redirect(Path(path))
        print("this log was deleted or replaced: its lines so far may be lost", flush=True)


def is_at(path: str | Path, descriptor: int) -> bool:
    """Returns whether a path leads to an open file. True if the path cannot be followed now."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
    except OSError:  # the disk is gone
        return True
