"""Computes the order in which files or domains take turns: even, and the same each time."""

import heapq
import itertools
import math
import reprlib
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path

from core.errors import InputError

LARGEST = 1e9  # weight; 1 / LARGEST is the smallest


def turns(weights: Sequence[float]) -> Iterator[int]:
    """Yields indices forever: i gets n * weight / sum, +- 1, of the first n turns.

    The k-th turn of i lies in its window [k, k + 1) * sum / weight; among the windows that have
    begun, the one that ends first is served (Baruah et al. 1996, proportionate progress).
    """
    exact = [Fraction(repr(weight)) for weight in weights]
    windows = [sum(exact) / weight for weight in exact]
    slot = math.lcm(*(window.denominator for window in windows))
    spans = [int(window * slot) for window in windows]  # integers, so nothing is rounded
    waiting = [(0, i) for i in range(len(spans))]
    begun: list[tuple[int, int]] = []
    for now in itertools.count(slot, slot):
        while waiting and waiting[0][0] < now:
            start, i = heapq.heappop(waiting)
            heapq.heappush(begun, (start + spans[i], i))
        end, i = heapq.heappop(begun)
        yield i
        heapq.heappush(waiting, (end, i))


def order(counts: Sequence[int], weights: Sequence[float]) -> Iterator[int]:
    """Yields, for each row, the index of its source.

    Ends when it is the turn of a source that has no rows left.
    """
    left = list(counts)
    for i in turns(weights):
        if not left[i]:
            return
        left[i] -= 1
        yield i


def parts(spec: str) -> list[tuple[Path, float]]:
    """Returns the files and weights of FILE:WEIGHT,FILE:WEIGHT.

    Raises InputError if the text has a different form.
    """
    found = []
    for part in spec.split(","):
        path, _, weight = part.strip().rpartition(":")
        number = float(weight) if weight.replace(".", "", 1).isdecimal() else 0.0
        if not path or not 1 / LARGEST <= number <= LARGEST:
            raise InputError(
                f"--mix: {reprlib.repr(part.strip())}: expected FILE:WEIGHT, such as a.jsonl:0.5"
            )
        found.append((Path(path), number))
    return found
