"""Operations on the values of settings: assigned by a file, merged, flattened, searched."""

import ast
import dataclasses
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from core.errors import InputError, located


def merge(old: Any, new: Any) -> Any:
    """`new`; where both are dictionaries, `old` with the entries of `new`, at any depth.

    An empty dictionary takes the place of the old one.
    """
    if not (isinstance(old, dict) and isinstance(new, dict) and new):
        return new
    return old | {name: merge(old.get(name), value) for name, value in new.items()}


class Merged(dict):
    """The names of a config file. A dictionary that is assigned again is merged into the old one.

    So a file that inherits `policy = {"tp": 4}` and assigns `policy = {"lr": 1e-6}` keeps tp.
    """

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, merge(self.get(name), value))


def assigned(path: Path) -> dict[str, Any]:
    """What a config file assigns. Raises InputError naming file and line."""
    names = Merged(__file__=str(path), __name__=path.stem)
    try:
        exec(compile(path.read_text(), str(path), "exec"), names)
    except (Exception, SystemExit) as error:
        text = located(error, str(path)).removeprefix("None:None: ")  # the place of a NUL
        raise InputError(text if text.startswith(str(path)) else f"{path}: {text}") from error
    refuse_twice(path)
    helpers = (types.ModuleType, types.FunctionType, type)
    return {
        name: value
        for name, value in names.items()
        if not name.startswith("_") and not isinstance(value, helpers)
    }


def refuse_twice(path: Path) -> None:
    """Raises InputError for a dictionary that has a key twice, of which Python keeps the last."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Dict):
            keys = Counter(key.value for key in node.keys if isinstance(key, ast.Constant))
            for key, count in keys.items():
                if count > 1:
                    where = f"{path}:{node.lineno}: {key!r}"
                    raise InputError(f"{where} stands {count} times in a dictionary, expected once")


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For json.loads: an object's entries. Raises ValueError for a name that it has twice."""
    for name, count in Counter(name for name, _ in pairs).items():
        if count > 1:
            raise ValueError(f"{name!r} stands {count} times in an object")
    return dict(pairs)


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
