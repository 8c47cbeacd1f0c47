"""What a run of untrusted code may use, and how it ended."""

from typing import Any, NamedTuple

OOM = "the kernel was out of memory and ended a run"


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


def reported(reply: dict[str, Any], seconds: float) -> Ran:
    """The outcome of which envs/sandbox/interpreter.py reports; `ended` may be "oom".

    Raises LookupError, TypeError or ValueError where that is none.
    """
    ended = str(reply["ended"])
    code = None if ended else int(reply["code"])
    return Ran(str(reply["stdout"]), str(reply["stderr"]), code, ended, seconds)
