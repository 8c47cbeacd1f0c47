"""JSON lines: reading those that have a form, and appending whole ones."""

import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from core.errors import RunError

LARGEST = 1e100  # sums of larger numbers could overflow
METRICS: dict[str, Any] = {"step": int}


def parse(lines: Iterable[str], form: dict) -> Iterator[dict]:
    """The lines that are whole JSON objects of a form; numbers without a finite value are None."""
    for line in lines:
        with suppress(ValueError, RecursionError):
            found = json.loads(line, parse_constant=number, parse_float=number, parse_int=number)
            if fits(found, form):
                yield found


def number(text: str) -> int | float | None:
    """A number of JSON; None for NaN, the infinities, and what is nearly as large."""
    value = float(text)
    if not abs(value) < LARGEST:
        return None
    return int(text) if text.lstrip("-").isdigit() else value


def fits(value: Any, form: Any) -> bool:
    """Whether a value is of a type, a list of such values, or an object with such entries."""
    if isinstance(form, dict):
        return isinstance(value, dict) and all(fits(value.get(k), f) for k, f in form.items())
    if isinstance(form, list):
        return isinstance(value, list) and all(fits(item, form[0]) for item in value)
    return isinstance(value, form)


def read(path: Path, form: dict) -> Iterator[dict]:
    """The lines of a JSONL file that have a form; none if it is missing."""
    if path.exists():
        with open(path, errors="replace") as file:
            yield from parse(file, form)


# The fields that stand first in a line of rollouts.jsonl.
NUMBER = rb"(\d{1,15}|null)"
PLACE = re.compile(rb'{"step": %b, "slot": (\d{1,15}), "evaluation": %b[,}]' % (NUMBER, NUMBER))


def place(line: bytes) -> dict | None:
    """Step, slot and evaluation of a line of rollouts.jsonl; None for what is no such line."""
    found = PLACE.match(line)
    return json.loads(found[0][:-1] + b"}") if found else None


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
