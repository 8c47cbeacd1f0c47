"""What is wrong with what a user wrote, in one line; and how settings are shown."""

import os
import traceback
from pathlib import Path


class InputError(SystemExit):
    """Something the user wrote is wrong: ends the program saying where, what and why."""

    def __init__(self, message: str):
        super().__init__(f"error: {message}")


def shown(path: str | Path) -> str:
    """A path as seen from where the user is, if it lies below."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def located(error: BaseException, file: str) -> str:
    """An error in one line, behind the last `FILE:LINE` in `file` that its traceback names."""
    frames = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if frame.f_code.co_filename == file]
    place = f"{file}:{lines[-1]}: " if lines else ""
    if isinstance(error, SyntaxError):
        place = f"{error.filename}:{error.lineno}: "
    return " ".join(f"{place}{type(error).__name__}: {error}".split())


def brief(error: BaseException) -> str:
    """An error of another library in one line of at most 300 characters."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 300 else f"{text[:297]}..."


class RunError(RuntimeError):
    """A failure that another prompt would not avoid: it ends the run, and costs no prompt."""


class ModuleError(ValueError):
    """An environment's module cannot be used, whatever the row."""
