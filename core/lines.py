"""Files of JSON lines that are appended to."""

import os
from pathlib import Path

from core.errors import RunError


class WriteError(RunError):
    """The run folder does not take what is written to it."""


class LineFile:
    """A JSONL file to append to, which holds whole lines only."""

    def __init__(self, path: Path):
        """Half a line that a killed writer left is cut off."""
        self.path = path
        self.file = open(path, "ab+", buffering=0)  # noqa: SIM115
        size = self.file.seek(0, os.SEEK_END)
        start = self.file.seek(max(0, size - (1 << 26)))  # no line is longer
        self.file.truncate(start + self.file.read().rfind(b"\n") + 1)

    def append(self, content: bytes) -> None:
        """Writes lines, all or none. Raises WriteError with the file, the reason and the bytes."""
        before = self.file.seek(0, os.SEEK_END)
        done = 0
        try:
            while done < len(content):  # a full disk takes a part, and refuses the rest
                done += self.file.write(content[done:])
        except OSError as error:
            self.file.truncate(before)
            told = f"{self.path}: {done} of {len(content)} bytes could be written: {error}"
            raise WriteError(told) from error

    def close(self) -> None:
        """Closes the file, in which nothing is buffered."""
        self.file.close()
