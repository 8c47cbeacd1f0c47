"""Reads the declarations of all settings from their sources, on a machine without libraries.

`declared` parses a program's Config, its base classes and its groups. A `Setting` knows its type,
its range and its default, so that launch/host.py can refuse a wrong name or value before a job is
submitted. The combinations that a group's `__post_init__` refuses are checked only in the job.
"""

import ast
import contextlib
import functools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from core.errors import InputError
from settings.merging import unique

ROOT = Path(__file__).parent.parent
PYDANTIC: dict[str, tuple[str, dict[str, float]]] = {  # pydantic's names for numbers with a bound
    "PositiveInt": ("int", {"gt": 0}),
    "NonNegativeInt": ("int", {"ge": 0}),
    "PositiveFloat": ("float", {"gt": 0}),
    "NonNegativeFloat": ("float", {"ge": 0}),
    "StrictInt": ("int", {}),
    "StrictFloat": ("float", {}),
}
PLAIN = ("int", "float", "str", "bool")
TRUTHS = {"True": True, "False": False}


@dataclass(frozen=True)
class Kind:
    """The type of a setting, with the values that it allows."""

    name: str  # int, float, str, bool, literal, tuple, dict, union, or any
    bounds: dict[str, float] = field(default_factory=dict)  # ge, gt, le, lt, allow_inf_nan
    choices: tuple = ()  # of a literal
    parts: tuple["Kind", ...] = ()  # of a tuple or a union
    repeats: bool = False  # True for a tuple of any length, all of parts[0]

    def holds(self, value: Any) -> bool:
        """Returns True if a configuration may assign this value."""
        if self.name == "union":
            return any(part.holds(value) for part in self.parts)
        if self.name == "literal":
            return value in self.choices
        if self.name == "tuple":
            return isinstance(value, tuple | list) and self.holds_parts(list(value))
        if self.name in ("int", "float"):
            return self.holds_number(value)
        types = {"bool": bool, "dict": dict, "str": str}
        return isinstance(value, types.get(self.name, object))

    def holds_parts(self, values: list) -> bool:
        """Returns True if a tuple may have these values."""
        parts = self.parts * len(values) if self.repeats else self.parts
        if len(parts) != len(values):
            return False
        return all(part.holds(value) for part, value in zip(parts, values, strict=True))

    def holds_number(self, value: Any) -> bool:
        """Returns True for a number within the bounds; pydantic also reads numbers in texts."""
        if isinstance(value, bool):
            return False
        try:
            whole_text = self.name == "int" and isinstance(value, str)
            number = float(int(value) if whole_text else value)
        except (TypeError, ValueError, OverflowError):
            return False
        if self.name == "int" and not number.is_integer():
            return False
        if not math.isfinite(number) and not self.bounds.get("allow_inf_nan"):
            return False
        limits = {
            "ge": number >= self.bounds.get("ge", -math.inf),
            "gt": number > self.bounds.get("gt", -math.inf),
            "le": number <= self.bounds.get("le", math.inf),
            "lt": number < self.bounds.get("lt", math.inf),
        }
        return all(fits for name, fits in limits.items() if name in self.bounds)

    def read(self, words: list[str]) -> Any:
        """Returns the value that the words after a flag give. Raises ValueError for a wrong one."""
        if self.name == "tuple":
            parts = self.parts * len(words) if self.repeats else self.parts
            value: Any = [part.read([word]) for part, word in zip(parts, words, strict=True)]
        elif len(words) != 1:
            raise ValueError(f"{len(words)} values")
        elif self.name == "dict":
            value = json.loads(words[0], object_pairs_hook=unique)
        elif self.name == "int":
            value = int(words[0])
        elif self.name == "float":
            value = float(words[0])
        elif self.name == "bool":
            value = TRUTHS.get(words[0])
        elif self.name == "union":
            value = self.read_part(words)
        else:
            value = words[0]
        if not self.holds(value):
            raise ValueError(f"{value!r}")
        return value

    def read_part(self, words: list[str]) -> Any:
        """Returns the value of the first part of a union that can read the words."""
        for part in self.parts:
            with contextlib.suppress(ValueError):
                return part.read(words)
        raise ValueError(f"{words}")

    def __str__(self) -> str:
        """Describes what is expected."""
        if self.name == "literal":
            return f"one of {', '.join(map(str, self.choices))}"
        if self.name == "tuple":
            if self.repeats:
                return f"any number of values, each {self.parts[0]}"
            return f"{len(self.parts)} values: {'; '.join(map(str, self.parts))}"
        if self.name == "union":
            return " or ".join(map(str, self.parts))
        if self.name in ("int", "float"):
            return self.describe_number()
        words = {"str": "a text", "bool": "True or False", "dict": "a dictionary"}
        return words.get(self.name, "a value")

    def describe_number(self) -> str:
        """Describes a number and its bounds: "a whole number, 1 or more"."""
        limits = []
        bounds = dict(self.bounds)
        whole = self.name == "int"
        if whole and "gt" in bounds:
            bounds["ge"] = bounds.pop("gt") + 1
        if "ge" in bounds:
            limits.append(f", {bounds['ge']} or more")
        if "gt" in bounds:
            limits.append(f" above {bounds['gt']}")
        if "le" in bounds:
            limits.append(f"{' and' if limits else ''} at most {bounds['le']}")
        if "lt" in bounds:
            limits.append(f"{' and' if limits else ''} below {bounds['lt']}")
        return f"a {'whole ' if whole else ''}number{''.join(limits)}"


ANY = Kind("any")  # of an annotation that this module cannot read


@dataclass(frozen=True)
class Setting:
    """A setting's type and default."""

    kind: Kind
    default: Any  # None if the declaration does not contain it as a literal


class Source:
    """A Python file of ours: its classes, the names that it assigns, and those that it imports."""

    def __init__(self, path: Path):
        self.classes: dict[str, ast.ClassDef] = {}
        self.assigned: dict[str, ast.expr] = {}
        self.imported: dict[str, tuple[Path, str]] = {}  # name -> file, name in it; "": the file
        for node in ast.parse(path.read_text(encoding="utf-8"), path).body:
            if isinstance(node, ast.ClassDef):
                self.classes[node.name] = node
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self.assigned[node.targets[0].id] = node.value
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    self.imported[alias.asname or alias.name] = (file_of(node.module), alias.name)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    self.imported[alias.asname or alias.name] = (file_of(alias.name), "")


def file_of(module: str) -> Path:
    """Returns the path that a module of ours has."""
    return ROOT / f"{module.replace('.', '/')}.py"


@functools.cache
def source(path: Path) -> Source:
    """Returns a file's source, parsed once."""
    return Source(path)


Place = tuple[Source, ast.ClassDef | ast.expr]  # a class or an expression, and the file with it


def found(node: ast.expr, at: Source) -> Place | None:
    """Returns the class or expression that a name in a file stands for; None if it is not ours."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        path, _ = at.imported.get(node.value.id, (Path(), ""))
        return found(ast.Name(node.attr), source(path)) if path.is_file() else None
    if not isinstance(node, ast.Name):
        return None
    if node.id in at.classes:
        return at, at.classes[node.id]
    if node.id in at.assigned:
        return at, at.assigned[node.id]
    path, name = at.imported.get(node.id, (Path(), ""))
    return found(ast.Name(name), source(path)) if path.is_file() and name else None


def is_settings(node: ast.ClassDef) -> bool:
    """Returns True for a dataclass; the fields of other classes are no settings."""
    return any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)


def fields(node: ast.ClassDef, at: Source) -> dict[str, tuple[Source, ast.AnnAssign]]:
    """Returns the fields of a class by name, with the files that declare them; bases come first."""
    of_class: dict[str, tuple[Source, ast.AnnAssign]] = {}
    for base in reversed(node.bases):
        place = found(base, at)
        if place and isinstance(place[1], ast.ClassDef):
            of_class |= fields(place[1], place[0])
    for line in node.body if is_settings(node) else ():
        if not isinstance(line, ast.AnnAssign) or not isinstance(line.target, ast.Name):
            continue
        if "ClassVar" not in ast.unparse(line.annotation):
            of_class[line.target.id] = (at, line)
    return of_class


def group(annotation: ast.expr, at: Source) -> tuple[Source, ast.ClassDef] | None:
    """Returns the class of a group of settings; None for a single setting."""
    if isinstance(annotation, ast.Subscript) and "OmitArgPrefixes" in ast.unparse(annotation.value):
        annotation = annotation.slice
    place = found(annotation, at)
    if place and isinstance(place[1], ast.ClassDef) and is_settings(place[1]):
        return place[0], place[1]
    return None


def kind_of(node: ast.expr, at: Source) -> Kind:
    """Returns the type that an annotation states; ANY if it has an unknown form."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return Kind("union", parts=(kind_of(node.left, at), kind_of(node.right, at)))
    if isinstance(node, ast.Subscript):
        return kind_of_subscript(node, at)
    if isinstance(node, ast.Name):
        if node.id in PLAIN:
            return Kind(node.id)
        if node.id in PYDANTIC:
            name, bounds = PYDANTIC[node.id]
            return Kind(name, bounds)
    place = found(node, at)
    if place and isinstance(place[1], ast.expr):
        return kind_of(place[1], place[0])
    return ANY


def kind_of_subscript(node: ast.Subscript, at: Source) -> Kind:
    """Returns the type of Literal[...], tuple[...], dict[...] or Annotated[..., Field(...)]."""
    name = ast.unparse(node.value)
    inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    if name == "dict":
        return Kind("dict")
    if name == "Literal":
        return Kind("literal", choices=tuple(ast.literal_eval(choice) for choice in inner))
    if name == "tuple":
        repeats = isinstance(inner[-1], ast.Constant) and inner[-1].value is ...
        kinds = [kind_of(part, at) for part in (inner[:1] if repeats else inner)]
        return Kind("tuple", parts=tuple(kinds), repeats=repeats)
    if name == "Annotated":
        of = kind_of(inner[0], at)
        bounds = dict(of.bounds)
        for call in inner[1:]:
            for keyword in call.keywords if isinstance(call, ast.Call) else ():
                bounds[str(keyword.arg)] = eval(ast.unparse(keyword.value), {"__builtins__": {}})
        return Kind(of.name, bounds, of.choices, of.parts, of.repeats)
    return ANY


def literal(node: ast.expr | None) -> Any:
    """Returns a default that is written as a literal, or as the literal of a factory; or None."""
    if isinstance(node, ast.Call):
        for keyword in node.keywords:
            if keyword.arg == "default_factory":
                made = keyword.value
                if isinstance(made, ast.Name) and made.id == "dict":
                    return {}
                return literal(made.body) if isinstance(made, ast.Lambda) else None
        return None
    try:
        return ast.literal_eval(node) if node else None
    except ValueError:
        return None


def settings_of(node: ast.ClassDef, at: Source, prefix: str = "") -> Iterator[tuple[str, Setting]]:
    """Yields all settings of a class and of its groups, by their dotted names."""
    for name, (file, line) in fields(node, at).items():
        inner = group(line.annotation, file)
        if inner:
            yield from settings_of(inner[1], inner[0], f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", Setting(kind_of(line.annotation, file), literal(line.value))


def declared(program: Path) -> dict[str, Setting]:
    """Returns all settings of a program by their dotted names, as its sources declare them.

    Raises InputError if the program has no class Config.
    """
    place = found(ast.Name("Config"), source(program))
    if not place or not isinstance(place[1], ast.ClassDef):
        raise InputError(f"{program}: expected a class Config")
    return dict(settings_of(place[1], place[0]))
