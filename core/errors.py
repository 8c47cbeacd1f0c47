"""Defines the errors that end a program or a run, and formats errors and paths as one line."""

import contextlib
import os
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

# How Ray names an actor whose process has died. Beside it, Ray only guesses why.
DEAD_ACTOR = re.compile(r"class_name: (\w+)$.*^\s*pid: (\d+)$", re.MULTILINE | re.DOTALL)


class InputError(SystemExit):
    """A mistake in the user's input; ends the program with one line: where, what and why."""

    def __init__(self, message: str):
        super().__init__(f"error: {message}")


def shown(path: str | Path) -> str:
    """Returns a path relative to the working folder; a path outside it stays as it is."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def located(error: BaseException, file: str) -> str:
    """Returns an error as one line, prefixed with the last `FILE:LINE` of `file` in its trace."""
    frames = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if frame.f_code.co_filename == file]
    place = f"{file}:{lines[-1]}: " if lines else ""
    if isinstance(error, SyntaxError):
        place = f"{error.filename}:{error.lineno}: "
    return " ".join(f"{place}{type(error).__name__}: {error}".split())


def brief(error: BaseException) -> str:
    """Returns another library's error as one line of at most 300 characters."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 300 else f"{text[:297]}..."


def in_one_line(error: BaseException) -> str:
    """Returns an error's last line, preceded by the last file and line of a remote traceback.

    Of an actor that has died, returns its class and its process.
    """
    text = str(error)
    dead = DEAD_ACTOR.search(text)
    if dead:
        return f"{dead[1]} died (process {dead[2]})"
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [repr(error)]
    places = [line for line in lines if line.startswith('File "')]
    return ": ".join([*places[-1:], lines[-1]])


@contextlib.contextmanager
def reader_may_leave() -> Iterator[None]:
    """Lets a program end without an error if the reader of its output, such as head, has left."""
    try:
        yield
    except BrokenPipeError:
        pass
    finally:
        try:
            sys.stdout.flush()
        except BrokenPipeError:  # Python would try again at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class RunError(RuntimeError):
    """Raised for a failure that another prompt would not avoid; it ends the run."""


class ModuleError(ValueError):
    """Raised if an environment's module cannot be used, whatever the row."""
