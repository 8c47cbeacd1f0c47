"""What is wrong with a setting: its place, its value, and what was probably meant."""

import dataclasses
import difflib
import re
from pathlib import Path
from typing import Any

import pydantic

from core.errors import InputError
from settings import names_of_other_trainers
from settings.merging import booleans, flatten


def hint(Config: type, path: str, value: Any = None) -> str:
    """The setting that was probably meant by a dotted name, as the end of an error message.

    A dictionary may be a group of another program: the keys in it are looked up.
    """
    known = flatten(Config())
    by_leaf: dict[str, list[str]] = {}
    for ours in known:
        by_leaf.setdefault(ours.rpartition(".")[2], []).append(ours)
    name = path.rpartition(".")[2]
    if name not in by_leaf:
        keys = list(names_of_other_trainers.within(path, value))
        lines = {key: here for key in keys if (here := names_of_other_trainers.meaning(key, known))}
        if not lines and (here := names_of_other_trainers.meaning(name, known)):
            lines = {path: here}
        if path in lines:
            return f": {lines[path]}"
        if lines:
            return f": {'; '.join(f'{key}: {here}' for key, here in [*lines.items()][:3])}"
    near = [name] if name in by_leaf else difflib.get_close_matches(name, by_leaf, 1)
    close = by_leaf[near[0]] if near else difflib.get_close_matches(name, known, 1)
    if close and close[0].startswith("command."):
        return f"; --{close[0].removeprefix('command.')} is a word of the command line"
    return f"; did you mean {' or '.join(close)}?" if close else ""


def explain(Config: type, error: pydantic.ValidationError) -> str:
    """The first problem in a line: field, value and what was expected, or a contradiction."""
    first = error.errors()[0]
    name = group_of(Config(), error.title) + ".".join(map(str, first["loc"]))
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    if first["type"] == "unexpected_keyword_argument":
        return f"unknown field {name!r}{hint(Config, name, first['input'])}"
    return f"{name} = {first['input']!r}: {first['msg']}"


def group_of(settings: Any, title: str) -> str:
    """The dotted name, and a dot, of the group whose class is called `title`; "" for none."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            inner = group_of(value, title)
            if inner or type(value).__name__ == title:
                return f"{field.name}.{inner}".removeprefix("command.")
    return ""


def place(path: Path, name: str, leaf: str = "") -> str:
    """`file:line` of the last assignment to a name, or of its `leaf`; the file if inherited."""
    lines = path.read_text().splitlines()
    hits = [i for i, line in enumerate(lines, 1) if re.match(rf"{re.escape(name)}\s*[:=|]", line)]
    if not hits:
        return str(path)
    inside = [i for i, line in enumerate(lines, 1) if i >= hits[-1] and f'"{leaf}"' in line]
    return f"{path}:{inside[0] if leaf and inside else hits[-1]}"


def refuse(Config: type, path: Path, chosen: dict[str, Any]) -> InputError:
    """The error of a config file: the place of its first wrong name or value, and what is wrong."""
    known = vars(Config())
    if "command" in chosen:
        expected = "expected on the command line, not in a config file"
        return InputError(f"{place(path, 'command')}: command: {expected}")
    for name in sorted(chosen.keys() - known.keys()):
        meant = hint(Config, name, chosen[name])
        return InputError(f"{place(path, name)}: unknown field {name!r}{meant}")
    for name, value in booleans(chosen, Config()):
        at = place(path, *name.split(".")[:2])
        return InputError(f"{at}: {name} = {value}: expected a number")
    try:
        Config(**chosen)
    except pydantic.ValidationError as error:
        where = error.errors()[0]["loc"]
        at = place(path, *map(str, where[:2])) if where else str(path)
        return InputError(f"{at}: {explain(Config, error)}")
    raise AssertionError(f"{path} is no mistake")
