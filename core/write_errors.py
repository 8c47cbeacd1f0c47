"""Finds out why a file could not be written: libraries name neither the file nor the reason."""

import errno
import os
import re
from contextlib import suppress
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)  # errors that free space would have prevented
PROBE = bytes(1 << 24)
RUST = re.compile(r"\bOs \{ code: (\d+)|\(os error (\d+)\)")  # as safetensors prints such errors


def write_error(error: BaseException, folder: str) -> OSError | None:
    """Returns the system's error behind an error of writing to a folder, with a file's name.

    Torch says of a full disk "unexpected pos 704 vs 598". If nothing better is known, a write to
    the folder is tried, and the file that was written last is named. Returns None if the error has
    another reason.
    """
    name = last_written(folder)
    found = system_error(error) or probe(folder)
    if found is None:
        return None
    return OSError(found.errno, os.strerror(found.errno or 0), found.filename or name)


def system_error(error: BaseException) -> OSError | None:
    """Returns the first error of a file system among an error and its causes in any process.

    A deadline that has passed and a connection that is lost are none.
    """
    known: list[BaseException] = [error]
    for one in known:
        if isinstance(one, OSError) and one.errno and not isinstance(one, ConnectionError):
            return one
        if found := RUST.search(str(one)):
            number = int(found[1] or found[2])
            return OSError(number, os.strerror(number))
        causes = [one.__cause__, getattr(one, "cause", None)]  # Ray's errors have `cause`
        causes += [failure for failure, _ in getattr(one, "failures", {}).values()]  # torch's ranks
        known += [cause for cause in causes if cause is not None]
    return None


def probe(folder: str) -> OSError | None:
    """Returns the error with which a file cannot be written to a folder now; None if it can."""
    path = Path(folder, "probe.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            file.write(PROBE)
            os.fsync(file.fileno())
    except OSError as error:
        return error
    finally:
        with suppress(OSError):
            path.unlink()
    return None


def last_written(folder: str) -> str:
    """Returns the file below a folder that was written last; the folder if there is none."""
    files: list[tuple[int, str]] = []
    with suppress(OSError):
        for path in Path(folder).rglob("*"):
            if path.is_file():
                files.append((path.stat().st_mtime_ns, str(path)))
    return max(files)[1] if files else folder
