"""Operations on the values of settings: merged, flattened, searched."""

import dataclasses
from collections.abc import Iterator
from typing import Any


def merge(old: Any, new: Any) -> Any:
    """`new`; where both are dictionaries, `old` with the entries of `new`, at any depth.

    An empty dictionary takes the place of the old one.
    """
    if not (isinstance(old, dict) and isinstance(new, dict) and new):
        return new
    return old | {name: merge(old.get(name), value) for name, value in new.items()}


def flatten(settings: Any, prefix: str = "") -> dict[str, Any]:
    """The values of all settings that are no group, by their dotted names."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            found |= flatten(value, f"{prefix}{field.name}.")
        else:
            found[f"{prefix}{field.name}"] = value
    return found


def booleans(given: dict, usual: Any, prefix: str = "") -> Iterator[tuple[str, bool]]:
    """Numbers that are given as True or False, which pydantic takes for 1 and 0."""
    for name, value in given.items():
        default = getattr(usual, str(name), None)
        if isinstance(value, dict) and dataclasses.is_dataclass(default):
            yield from booleans(value, default, f"{prefix}{name}.")
        elif isinstance(value, bool) and type(default) in (int, float):
            yield f"{prefix}{name}", value
