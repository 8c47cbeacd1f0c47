"""Reads, merges, flattens and searches the values of settings."""

import ast
import dataclasses
import json
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from core.cpu_alarm import at_most
from core.errors import InputError, located

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SECONDS = 5.0  # seconds of CPU time that a config file may run; most take a millisecond
OTHER_FORMATS = {".yaml": "YAML", ".yml": "YAML", ".toml": "TOML"}
# What a configuration may assign to a setting or a group: JSON, and tuples.
Value = None | bool | int | float | str | list["Value"] | tuple["Value", ...] | dict[str, "Value"]


def is_group(value: "Value | DataclassInstance") -> "TypeGuard[DataclassInstance]":
    """Returns True if a setting's value is a group of settings."""
    return dataclasses.is_dataclass(value)


def merge(old: Any, new: Any) -> Any:
    """Returns `new`; if both are dictionaries, returns `old` updated with `new`, at any depth.

    An empty dictionary replaces the old one.
    """
    if not (isinstance(old, dict) and isinstance(new, dict) and new):
        return new
    return old | {name: merge(old.get(name), value) for name, value in new.items()}


class Merged(dict[str, Value]):
    """The names of a config file. A dictionary that is assigned again is merged into the old one.

    So a file that inherits `policy = {"tp": 4}` and assigns `policy = {"lr": 1e-6}` keeps tp.
    """

    def __setitem__(self, name: str, value: Value) -> None:
        super().__setitem__(name, merge(self.get(name), value))


def written(path: Path) -> dict[str, Value]:
    """Returns what a config file assigns, in Python or JSON. Raises InputError naming the line."""
    if path.suffix in OTHER_FORMATS:
        raise InputError(
            f"{path}: a {OTHER_FORMATS[path.suffix]} file, expected Python assignments, such as"
            ' policy = {"lr": 1e-6}, or JSON: docs/from_nemo_rl.md and docs/from_trl.md list the'
            " names of settings"
        )
    return of_json(path) if path.suffix == ".json" else assigned(path)


def of_json(path: Path) -> dict[str, Value]:
    """Returns what a JSON configuration assigns. Raises InputError naming the file and line."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise InputError(f"{path}:{error.lineno}: expected JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: expected JSON: {error}") from None
    if not isinstance(found, dict):
        raise InputError(f'{path}: expected a JSON object, such as {{"steps": 5}}')
    return found


def assigned(path: Path) -> dict[str, Value]:
    """Runs a config file; returns what it assigns. Raises InputError naming the file and line."""
    names = Merged(__file__=str(path), __name__=path.stem)
    try:
        code = compile(path.read_text(), str(path), "exec")
        with at_most(SECONDS):
            exec(code, names)
    except (Exception, SystemExit) as error:
        text = located(error, str(path)).removeprefix("None:None: ")  # the place of a NUL byte
        raise InputError(text if text.startswith(str(path)) else f"{path}: {text}") from error
    refuse_twice(path)
    helpers = (types.ModuleType, types.FunctionType, type)
    return {
        name: value
        for name, value in names.items()
        if not name.startswith("_") and not isinstance(value, helpers)
    }


def refuse_twice(path: Path) -> None:
    """Raises InputError if a dictionary has a key twice: Python would keep only the last value."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Dict):
            keys = Counter(key.value for key in node.keys if isinstance(key, ast.Constant))
            for key, count in keys.items():
                if count > 1:
                    raise InputError(
                        f"{path}:{node.lineno}: {key!r} appears {count} times in a dictionary,"
                        " expected once"
                    )


def unique(pairs: list[tuple[str, Value]]) -> dict[str, Value]:
    """Returns the entries of an object, for json.loads. Raises ValueError if a name is repeated."""
    for name, count in Counter(name for name, _ in pairs).items():
        if count > 1:
            raise ValueError(f"{name!r} appears {count} times in an object")
    return dict(pairs)


def flatten(settings: "DataclassInstance", prefix: str = "") -> dict[str, Value]:
    """Returns the values of all settings that are not groups, by their dotted names."""
    found: dict[str, Value] = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if is_group(value):
            found |= flatten(value, f"{prefix}{field.name}.")
        else:
            found[f"{prefix}{field.name}"] = value
    return found


def booleans(
    given: dict[str, Value], usual: "DataclassInstance", prefix: str = ""
) -> Iterator[tuple[str, bool]]:
    """Yields numbers that are given as True or False, which pydantic would read as 1 or 0."""
    for name, value in given.items():
        default = getattr(usual, str(name), None)
        if isinstance(value, dict) and is_group(default):
            yield from booleans(value, default, f"{prefix}{name}.")
        elif isinstance(value, bool) and type(default) in (int, float):
            yield f"{prefix}{name}", value
