"""What a run of untrusted code may use, and how it ended."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

OOM = "the kernel was out of memory and ended a run"
REFUSED = "a run was refused a process or thread: the limit of a cgroup (pids.max)"
CGROUPS = Path("/sys/fs/cgroup")


class Limits(NamedTuple):
    """The limits of a run. All its processes together have the limit of memory of one."""

    seconds: float = 10.0  # that it runs or sleeps
    memory: int = 2 << 30  # bytes of address space of a process
    processes: int = 64  # that run at once
    file_size: int = 64 << 20  # bytes
    open_files: int = 256
    output: int = 1 << 20  # bytes of stdout
    disk: int = 64 << 20  # bytes in its working folder


class Ran(NamedTuple):
    """The outcome of a run."""

    stdout: str
    stderr: str  # its end
    code: int | None  # negative for a signal; None where it was ended
    ended: str  # "" by itself, "time", "memory", "processes" or "output"
    seconds: float


def cgroups(kind: str) -> Iterator[Path]:
    """The folders of the cgroups of this process that count a kind; none where none is known."""
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
    """How many processes and threads the cgroups of this process have refused; 0 if unknown.

    Those that a run's own limit refuses do not count.
    """
    total = 0
    for folder in cgroups("pids"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            total += int((folder / "pids.events").read_text().split()[1])
    return total


def reported(reply: dict[str, Any], seconds: float) -> Ran:
    """The outcome of which envs/sandbox/interpreter.py reports; `ended` may be "oom".

    Raises LookupError, TypeError or ValueError where that is none.
    """
    ended, stdout, stderr = (reply[name] for name in ("ended", "stdout", "stderr"))
    code = None if ended else reply["code"]
    if not all(isinstance(text, str) for text in (ended, stdout, stderr)):
        raise TypeError(f"expected texts, got {reply!r:.200}")
    if type(code) not in (int, NoneType) or (code is None) != bool(ended):
        raise TypeError(f"expected an exit code, got {code!r:.50}")
    return Ran(stdout, stderr, code, ended, seconds)
