"""Compares the tool calls in an answer with the calls that a row expects."""

import functools
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from envs import Json, get, require


def arguments(call: Mapping[str, Json]) -> Any:
    """Returns a call's parsed arguments; None if they are not JSON."""
    text = call.get("arguments")
    if not isinstance(text, str):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def check_call(call: Json, at: str) -> None:
    """Raises ValueError unless a row's call, at the path `at`, has a name and JSON arguments."""
    get(call, "name", str, "the name of a tool", at)
    text = get(call, "arguments", str, "a JSON object as text", at)
    is_object = isinstance(arguments({"arguments": text}), dict)
    require(is_object, at + "arguments", text, "a JSON object as text")


def matching(candidates: list[list[int]]) -> int:
    """Returns how many expected calls can be matched one to one, by Kuhn's algorithm.

    `candidates` lists, for each expected call, the indices of the calls that fit it.
    """
    owners: dict[int, int] = {}

    def place(call: int, seen: set[int]) -> bool:
        for i in candidates[call]:
            if i in seen:
                continue
            seen.add(i)
            if i not in owners or place(owners[i], seen):
                owners[i] = call
                return True
        return False

    return sum(place(call, set()) for call in range(len(candidates)))


def same(expected: Json, actual: Json, likeness: float, tolerance: float) -> bool:
    """Returns whether arguments have the expected types, keys, lengths and values.

    Fractions may differ by less than `tolerance`. Two texts of several words are the same if the
    words that they share make up at least `likeness` of the words of both.
    """
    if type(actual) is not type(expected):
        return False
    if isinstance(expected, dict) and isinstance(actual, dict):
        if expected.keys() != actual.keys():
            return False
        return all(same(expected[key], actual[key], likeness, tolerance) for key in expected)
    if isinstance(expected, list) and isinstance(actual, list):
        if len(expected) != len(actual):
            return False
        pairs = zip(expected, actual, strict=True)
        return all(same(left, right, likeness, tolerance) for left, right in pairs)
    if isinstance(expected, str) and isinstance(actual, str):
        return alike(expected, actual, likeness)
    if type(expected) is float and type(actual) is float:
        return abs(actual - expected) < tolerance
    return expected == actual


def alike(expected: str, actual: str, likeness: float) -> bool:
    """Returns whether two texts share enough words; texts of fewer than two words must be equal."""
    words = counted(expected)
    found = Counter(actual.lower().split())
    if min(words.total(), found.total()) < 2:
        return expected == actual
    total = words.total() + found.total()
    return (words & found).total() / total >= likeness


@functools.lru_cache(1000)
def counted(text: str) -> Counter[str]:
    """Returns the words of an expected text, cached because it is compared with several calls."""
    return Counter(text.lower().split())
