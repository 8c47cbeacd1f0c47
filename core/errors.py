"""Defines the errors that end a program or a run, and formats errors and paths as one line."""

import os
import traceback
from pathlib import Path


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


class RunError(RuntimeError):
    """Raised for a failure that another prompt would not avoid; it ends the run."""


class ModuleError(ValueError):
    """Raised if an environment's module cannot be used, whatever the row."""
