"""Finds the file or folder that a command is to write, and refuses to replace anything else."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

from core.errors import InputError

KINDS: dict[Callable[[int], bool], str] = {  # tests of a mode, and what they find
    stat.S_ISREG: "a file",
    stat.S_ISDIR: "a folder",
    stat.S_ISFIFO: "a pipe",
    stat.S_ISSOCK: "a socket",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
}


def output_file(path: str | Path) -> Path:
    """Returns the file to write if the user gave this path: the target of a link, which stays.

    Raises InputError if anything but a regular file is there, such as a device or a pipe.
    """
    return _output(path, stat.S_ISREG)


def output_folder(path: str | Path) -> Path:
    """Returns the folder to write if the user gave this path: the target of a link, which stays.

    Raises InputError if anything but a folder is there.
    """
    return _output(path, stat.S_ISDIR)


def _output(path: str | Path, is_expected: Callable[[int], bool]) -> Path:
    expected = f"expected {KINDS[is_expected]}, or a path where none is yet"
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:  # also a link to a path where nothing is yet
        mode = 0
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}, {expected}") from None
    for is_kind, kind in KINDS.items():
        if is_kind(mode) and is_kind is not is_expected:
            raise InputError(f"{path}: is {kind}, {expected}")
    return Path(os.path.realpath(path)) if os.path.islink(path) else Path(path)
