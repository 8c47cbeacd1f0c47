"""Reads the JSON lines that have a given form, and appends whole lines."""

import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from io import FileIO
from pathlib import Path
from types import UnionType

from tqdm import tqdm

from core.errors import RunError
from core.logs import is_at

LARGEST = 1e100  # sums of larger numbers could overflow
METRICS = {"step": int}

JSON = None | bool | int | float | str | list["JSON"] | dict[str, "JSON"]
# A type, a union of types, `[form]` for a list of such values, or `{name: form}` for an object.
Form = type | UnionType | list["Form"] | dict[str, "Form"]


def parse(lines: Iterable[str], form: dict) -> Iterator[dict]:
    """Yields lines that are JSON objects of this form; numbers that are not finite become None."""
    for line in lines:
        with suppress(ValueError, RecursionError):
            found = json.loads(line, parse_constant=number, parse_float=number, parse_int=number)
            if fits(found, form):
                yield found


def number(text: str) -> int | float | None:
    """Parses a JSON number; returns None for NaN, infinities and numbers from LARGEST on."""
    value = float(text)
    if not abs(value) < LARGEST:
        return None
    return int(text) if text.lstrip("-").isdigit() else value


def fits(value: JSON, form: Form) -> bool:
    """Returns whether a value has a form. An entry that an object lacks counts as None."""
    if isinstance(form, dict):
        if not isinstance(value, dict):
            return False
        return all(fits(value.get(name), inner) for name, inner in form.items())
    if isinstance(form, list):
        return isinstance(value, list) and all(fits(item, form[0]) for item in value)
    return isinstance(value, form)


def read(path: Path, form: dict) -> Iterator[dict]:
    """Yields the lines of a JSONL file that have a form; nothing if the file is missing."""
    if path.exists():
        with open(path, errors="replace") as file:
            yield from parse(file, form)


# The first fields of a rollouts.jsonl line.
NUMBER = rb"(\d{1,15}|null)"
PLACE = re.compile(rb'{"step": %b, "slot": (\d{1,15}), "evaluation": %b[,}]' % (NUMBER, NUMBER))


def place(line: bytes) -> dict | None:
    """Returns the step, slot and evaluation of a rollouts.jsonl line; None for any other line."""
    found = PLACE.match(line)
    return json.loads(found[0][:-1] + b"}") if found else None


class WriteError(RunError):
    """Raised if a write to the run folder fails."""


def opened(path: Path) -> FileIO:
    """Opens a JSONL file to append to; cuts off a partial line that a killed writer left behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open(path, "ab+", buffering=0)  # noqa: SIM115
    size = file.seek(0, os.SEEK_END)
    start = file.seek(max(0, size - (1 << 26)))  # no line is longer
    file.truncate(start + file.read().rfind(b"\n") + 1)
    return file


class LineFile:
    """A JSONL file for appending, which contains only whole lines."""

    def __init__(self, path: Path):
        self.path = path
        self.file = opened(path)

    def append(self, content: bytes) -> None:
        """Writes all lines or none. Raises WriteError with the file, the reason and the bytes."""
        self.follow_path()
        before = self.file.seek(0, os.SEEK_END)
        done = 0
        try:
            while done < len(content):  # a full disk accepts only a part of the content
                done += self.file.write(content[done:])
        except OSError as error:
            self.file.truncate(before)
            raise WriteError(
                f"{self.path}: {done} of {len(content)} bytes could be written: {error}"
            ) from error

    def follow_path(self) -> None:
        """Opens the path again, and prints a line, if the file was deleted or replaced.

        Raises WriteError if the path cannot be opened.
        """
        if is_at(self.path, self.file.fileno()):
            return
        tqdm.write(f"{self.path} was deleted or replaced: its lines so far may be lost")
        self.file.close()
        try:
            self.file = opened(self.path)
        except OSError as error:
            raise WriteError(f"{self.path}: cannot be created again: {error}") from error

    def close(self) -> None:
        """Closes the file; nothing is buffered."""
        self.file.close()
