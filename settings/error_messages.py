"""Explains what is wrong with a setting: its place, its value, and what was probably meant."""

import dataclasses
import difflib
import json
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

ALTERNATIVES = ("bool", "int", "float", "str", "none")  # how pydantic names a union's types
TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"(?:\s*:)?|[{}\[\]]')  # of JSON: a text, a key, a bracket


def hint(Config: type, path: str, value: Value = None) -> str:
    """Returns the setting that a dotted name probably means, as the end of an error message.

    A dictionary may be a misspelt group, or another program's; in that case its keys are looked up.
    """
    known = flatten(Config())
    if path in known and not path.startswith("command."):  # a JSON key such as "policy.lr"
        return f"; did you mean {json.dumps(nested(path, value))}?"
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
        groups = {ours.rpartition(".")[0] for ours in known} - {""}
        group = difflib.get_close_matches(path, groups, 1) if isinstance(value, dict) else []
        if group:
            return f"; did you mean {group[0]}?"
        near = difflib.get_close_matches(name, by_leaf, 1)
        close = by_leaf[near[0]] if near else difflib.get_close_matches(name, known, 1)
    if not close:
        return ""
    if close[0].startswith("command."):
        return f"; --{close[0].removeprefix('command.')} is a command-line flag"
    return f"; did you mean {' or '.join(close)}?"


def nested(path: str, value: Value) -> Value:
    """Returns the value inside a dictionary for each part of a dotted name."""
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


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
    parts = [str(part) for part in first["loc"] if part not in ALTERNATIVES]
    name = group_of(Config(), error.title) + ".".join(parts)
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


def place(path: Path, name: str, *leaves: str) -> str:
    """Returns `file:line` of the last assignment to a name, or of the leaf in it.

    A name that is inherited from another file has no line here; only the path is returned.
    """
    if path.suffix == ".json":
        return f"{path}:{line_in_json(path.read_text(encoding='utf-8'), [name, *leaves])}"
    leaf = leaves[0] if leaves else ""
    lines = path.read_text().splitlines()
    hits = [i for i, line in enumerate(lines, 1) if re.match(rf"{re.escape(name)}\s*[:=|]", line)]
    if not hits:
        return str(path)
    if leaf:
        for i, line in enumerate(lines, 1):
            if i >= hits[-1] and f'"{leaf}"' in line:
                return f"{path}:{i}"
    return f"{path}:{hits[-1]}"


def line_in_json(text: str, names: list[str]) -> int:
    """Returns the line of the entry that these keys lead to, or of the last one that exists.

    `text` is JSON of an object that holds the first key.
    """
    line = 1
    found = 0  # how many of the keys led to an entry
    key = ""
    above: list[str] = []  # the key of each object and array that is open
    for token in TOKEN.finditer(text):
        word = token[0]
        if word in "{[":
            above.append(key)
        elif word in "]}":
            above.pop()
        elif word[-1] == ":":
            key = json.loads(word[:-1])
            here = [*above[1:], key]
            if len(here) > found and here == names[: len(here)]:
                found = len(here)
                line = text.count("\n", 0, token.start()) + 1
    return line


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
        at = place(path, *name.split("."))
        return InputError(f"{at}: {name} = {value}: expected a number")
    try:
        Config(**chosen)
    except pydantic.ValidationError as error:
        loc = [str(part) for part in error.errors()[0]["loc"]]
        at = place(path, *loc) if loc else str(path)
        return InputError(f"{at}: {explain(Config, error)}")
    raise AssertionError(f"{path} has no mistake")
