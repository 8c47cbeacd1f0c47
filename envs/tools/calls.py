"""Tool calls of an answer, compared with those that a row expects."""

import functools
import json
from collections import Counter
from typing import Any

from envs import get, require


def arguments(call: dict[str, Any]) -> Any:
    """The parsed arguments of a call; None where they are no JSON."""
    try:
        return json.loads(call["arguments"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return None


def check_call(call: Any, at: str) -> None:
    """Raises ValueError unless a row's call at the path `at` has a name and a JSON object."""
    get(call, "name", str, "the name of a tool", at)
    text = get(call, "arguments", str, "a JSON object as text", at)
    is_object = isinstance(arguments(call), dict)
    require(is_object, at + "arguments", text, "a JSON object as text")


def matching(candidates: list[list[int]]) -> int:
    """The number of expected calls that can have a candidate of their own (Kuhn's algorithm)."""
    owners: dict[int, int] = {}

    def place(call: int, seen: set[int]) -> bool:
        for i in candidates[call]:
            if i not in seen:
                seen.add(i)
                if i not in owners or place(owners[i], seen):
                    owners[i] = call
                    return True
        return False

    return sum(place(call, set()) for call in range(len(candidates)))


def same(expected: Any, actual: Any, likeness: float, tolerance: float) -> bool:
    """Whether arguments have the expected types, keys, lengths and values.

    Fractions may differ by less than `tolerance`. Two texts of several words are the same if the
    words they share are `likeness` of the words of both.
    """
    if type(actual) is not type(expected):
        return False
    if isinstance(expected, dict):
        keys = expected.keys()
        both = [(expected[key], actual[key]) for key in keys if key in actual]
        return keys == actual.keys() and all(same(*pair, likeness, tolerance) for pair in both)
    if isinstance(expected, list):
        pairs = zip(expected, actual, strict=False)
        alike = all(same(*pair, likeness, tolerance) for pair in pairs)
        return len(expected) == len(actual) and alike
    if isinstance(expected, float):
        return abs(actual - expected) < tolerance
    if not isinstance(expected, str):
        return expected == actual
    words, found = counted(expected), Counter(actual.lower().split())
    total = words.total() + found.total()
    if min(words.total(), found.total()) < 2:
        return expected == actual
    return (words & found).total() / total >= likeness


@functools.lru_cache(1000)
def counted(text: str) -> Counter:
    """The words of an expected text, which each call of an answer may be compared with."""
    return Counter(text.lower().split())
