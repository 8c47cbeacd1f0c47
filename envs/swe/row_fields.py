"""Reads the fields of envs/swe/swe_patch.py's rows that are objects or lists, or their JSON.

This is not an environment itself: envs/swe/swe_patch.py uses it.
"""

import json
from typing import TypeVar

from envs import get, require

T = TypeVar("T")


def contents(row: dict) -> dict[str, str]:
    """Returns the files that may be edited, by path. Raises ValueError as `get` does."""
    return _json(row, "metadata.relevant_file_contents", dict, "an object: path -> content")


def tests_of(row: dict, name: str) -> list[str]:
    """Returns the tests in FAIL_TO_PASS or PASS_TO_PASS. Raises ValueError as `get` does."""
    return _json(row, f"instance.{name}", list, "a list of test names")


def _json(row: dict, path: str, kind: type[T], expected: str) -> T:
    """Returns the value of a field that contains a `kind`, or the JSON text of one."""
    value = get(row, path, kind | str, expected)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            require(False, path, value, expected)
    require(isinstance(value, kind), path, value, expected)
    return value
