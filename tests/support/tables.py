"""Tests that are tables: of what a function gives, of what it refuses, and of cases in a file."""

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest


def gives(function: Callable, *cases: tuple) -> Callable:
    """A test of what a function gives for each case: arguments, and the value at its end.

    True, False and None must be those themselves.
    """

    @pytest.mark.parametrize("case", cases)
    def test(case: tuple) -> None:
        *given, expected = case
        found = function(*given)
        assert found == expected and (found is expected or not isinstance(expected, bool | None))

    return test


def refused(check: Callable, *cases: tuple, taken: tuple = ()) -> Callable:
    """A test that `check` raises ValueError for each case: arguments, and what its message holds.

    `taken` are arguments that it does not refuse.
    """

    @pytest.mark.parametrize("case", cases)
    def test(case: tuple) -> None:
        *given, message = case
        if taken:
            check(*taken)
        with pytest.raises(ValueError, match=message):
            check(*given)

    return test


def table(path: Path) -> dict[str, list[tuple]]:
    """The cases of a text file: below a line `[name]`, one a line, `#` begins a comment.

    A line holds a tuple's values as Python writes them.
    """
    found: dict[str, list[tuple]] = {}
    for line in path.read_text(encoding="utf-8").split("\n"):
        if section := re.fullmatch(r"\[([a-z_][\w' -]*)\]", line):
            cases = found.setdefault(section[1], [])
        elif line and line[0] != "#":
            cases.append(ast.literal_eval(f"({line},)"))
    return found
