"""Defines the limits of a run of untrusted code, and its outcome."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypedDict

OOM = "the kernel was out of memory and ended a run"
REFUSED = "a run was refused a process or thread by a cgroup's limit (pids.max)"
CGROUPS = Path("/sys/fs/cgroup")
OWN = 8  # processes of a run that belong to bubblewrap, or to an interpreter


class Limits(NamedTuple):
    """The limits of a run. The memory limit per process also applies to all processes together."""

    seconds: float = 10.0  # seconds that it runs or sleeps
    memory: int = 2 << 30  # bytes of address space per process
    processes: int = 64  # processes that run at once
    file_size: int = 64 << 20  # bytes
    open_files: int = 256
    output: int = 1 << 20  # bytes of stdout
    disk: int = 64 << 20  # bytes in its working folder


class Ran(NamedTuple):
    """The outcome of a run."""

    stdout: str
    stderr: str  # the end of stderr
    code: int | None  # negative for a signal; None if it did not end by itself
    ended: str  # "" if it ended by itself, else "time", "memory", "processes" or "output"
    seconds: float


def cgroups(kind: str) -> Iterator[Path]:
    """Yields the folders of this process's cgroups that count a resource, such as "memory"."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds not in ("", kind):
                continue
            folder = CGROUPS / kinds / path.lstrip("/")
            while folder.is_relative_to(CGROUPS / kinds):
                yield folder
                folder = folder.parent


def refusals() -> int:
    """Returns how many processes and threads this process's cgroups have refused; 0 if unknown.

    Refusals by a run's own limit do not count.
    """
    total = 0
    for folder in cgroups("pids"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            total += int((folder / "pids.events").read_text().split()[1])
    return total


def refused_by_limits(stderr: str, limits: Limits) -> str:
    """Returns what its own limits refused a Python program that ended with this error.

    "memory", "processes", which threads count as, or "" if the error is another one. The program
    can write any stderr; only the reason for its reward depends on it.
    """
    last = stderr.rstrip().rpartition("\n")[2]
    threads = re.fullmatch(r"(\d+) threads were running", last)
    if threads:  # each also needs memory for its stack
        return "processes" if int(threads[1]) + OWN >= limits.processes else "memory"
    if last.startswith(("MemoryError", "OSError: [Errno 12]", "numpy._core._exceptions._Array")):
        return "memory"
    return "processes" if last.startswith("BlockingIOError: [Errno 11]") else ""


class Report(TypedDict):
    """The JSON object with which envs/sandbox/interpreter.py reports the outcome of a program."""

    stdout: str
    stderr: str
    code: int
    ended: str


def reported(reply: Report, seconds: float) -> Ran:
    """Returns the outcome that envs/sandbox/interpreter.py reports; `ended` may be "oom" or "late".

    Raises LookupError, TypeError or ValueError if the report is malformed.
    """
    ended = reply["ended"]
    stdout = reply["stdout"]
    stderr = reply["stderr"]
    code = None if ended else reply["code"]
    if not all(isinstance(text, str) for text in (ended, stdout, stderr)):
        raise TypeError(f"expected texts, got {reply!r:.200}")
    if not ended and type(code) is not int:
        raise TypeError(f"expected an exit code, got {code!r:.50}")
    return Ran(stdout, stderr, code, ended, seconds)
