"""Explains what is wrong with a setting: its place, its value, and what was probably meant."""

import dataclasses
import difflib
import re
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import pydantic

from core.errors import InputError
from settings import names_of_other_trainers
from settings.merging import Value, booleans, flatten, is_group

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def hint(Config: type, path: str, value: Value = None) -> str:
    """Returns the setting that a dotted name probably means, as the end of an error message.

    A dictionary may be another program's group; in that case its keys are looked up.
    """
    known = flatten(Config())
    by_leaf: dict[str, list[str]] = {}
    for ours in known:
        by_leaf.setdefault(ours.rpartition(".")[2], []).append(ours)
    name = path.rpartition(".")[2]
    if name in by_leaf:
        close = by_leaf[name]
    else:
        meant = of_another_program(path, value, known)
        if meant:
            return f": {meant}"
        near = difflib.get_close_matches(name, by_leaf, 1)
        close = by_leaf[near[0]] if near else difflib.get_close_matches(name, known, 1)
    if not close:
        return ""
    if close[0].startswith("command."):
        return f"; --{close[0].removeprefix('command.')} is a command-line flag"
    return f"; did you mean {' or '.join(close)}?"


def of_another_program(path: str, value: Value, known: Collection[str]) -> str:
    """Returns what another program's name, or the names in its dictionary, mean here; or ""."""
    lines = {}
    for key in names_of_other_trainers.within(path, value):
        here = names_of_other_trainers.meaning(key, known)
        if here:
            lines[key] = here
    if path in lines:
        return lines[path]
    if not lines:
        return names_of_other_trainers.meaning(path.rpartition(".")[2], known)
    first = [f"{key}: {here}" for key, here in lines.items()][:3]
    return "; ".join(first)


def explain(Config: type, error: pydantic.ValidationError) -> str:
    """Returns the first problem in one line: field, value and expectation, or a contradiction."""
    first = error.errors()[0]
    name = group_of(Config(), error.title) + ".".join(map(str, first["loc"]))
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    if first["type"] == "unexpected_keyword_argument":
        return f"unknown field {name!r}{hint(Config, name, first['input'])}"
    return f"{name} = {first['input']!r}: {first['msg']}"


def group_of(settings: "DataclassInstance", title: str) -> str:
    """Returns the dotted name of the group whose class is called `title`, followed by a dot.

    Returns "" if there is no such group.
    """
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if is_group(value):
            inner = group_of(value, title)
            if inner or type(value).__name__ == title:
                return f"{field.name}.{inner}".removeprefix("command.")
    return ""


def place(path: Path, name: str, leaf: str = "") -> str:
    """Returns `file:line` of the last assignment to a name, or of its `leaf`.

    A name that is inherited from another file has no line here; only the path is returned.
    """
    lines = path.read_text().splitlines()
    hits = [i for i, line in enumerate(lines, 1) if re.match(rf"{re.escape(name)}\s*[:=|]", line)]
    if not hits:
        return str(path)
    if leaf:
        for i, line in enumerate(lines, 1):
            if i >= hits[-1] and f'"{leaf}"' in line:
                return f"{path}:{i}"
    return f"{path}:{hits[-1]}"


def refuse(Config: type, path: Path, chosen: dict[str, Value]) -> InputError:
    """Returns the error for a config file: the place of its first mistake, and what is wrong."""
    known = vars(Config())
    if "command" in chosen:
        return InputError(
            f"{place(path, 'command')}: command: expected on the command line, not in a config file"
        )
    for name in sorted(chosen.keys() - known.keys()):
        meant = hint(Config, name, chosen[name])
        return InputError(f"{place(path, name)}: unknown field {name!r}{meant}")
    for name, value in booleans(chosen, Config()):
        at = place(path, *name.split(".")[:2])
        return InputError(f"{at}: {name} = {value}: expected a number")
    try:
        Config(**chosen)
    except pydantic.ValidationError as error:
        loc = [str(part) for part in error.errors()[0]["loc"]]
        at = place(path, *loc[:2]) if loc else str(path)
        return InputError(f"{at}: {explain(Config, error)}")
    raise AssertionError(f"{path} has no mistake")
