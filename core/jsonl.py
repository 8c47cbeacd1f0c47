"""JSON lines: reading those that have a form, and appending whole ones."""

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

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
