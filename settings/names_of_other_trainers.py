"""Looks up what other programs' settings are called here, in the tables of two pages."""

import difflib
import functools
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from core.errors import InputError
from settings.merging import Value

DOCS = Path(__file__).parent.parent / "docs"
PAGES = ("from_nemo_rl.md", "from_trl.md")
# --key, --key=value, and Hydra's key=value, +key=value, ++key=value and ~key.
FLAG = re.compile(r"(?:--|(?=.*=)\+{0,2}|~)([a-z_][\w.-]*)(=.*)?", re.DOTALL)
LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")
NO_SETTING = "no setting takes its place"  # note for a group whose keys have their own lines
WORDS = {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}


def key_of(flag: str) -> str:
    """Returns the dotted name that a command-line word may set; "" for any other word."""
    found = FLAG.fullmatch(flag)
    return found[1].replace("-", "_") if found else ""


class Name(NamedTuple):
    """A table line about a key."""

    key: str
    program: str
    setting: str  # "none" if no setting corresponds to it
    note: str
    page: str

    def __str__(self) -> str:
        text = f"{self.setting}: {self.note}" if self.note else self.setting
        return f"a key of {self.program}; here: {text} (docs/{self.page})".replace("`", "")


@functools.cache
def listed() -> dict[str, list[Name]]:
    """Returns the lines of the pages, by key."""
    found: dict[str, list[Name]] = {}
    for page in PAGES:
        path = DOCS / page
        for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
            cells = [cell.strip() for cell in LINK.sub(r"\1", line).strip("|").split("|")]
            if cells[1:2] == ["here"]:
                program = cells[0]
            elif line.startswith("| `"):
                keys, here, note = cells
                for key in re.findall(r"`([\w.]+)`", keys):
                    name = Name(key, program, here.strip("`"), note, page)
                    found.setdefault(key, []).append(name)
    return found


def meaning(key: str, ours: Collection[str]) -> str:
    """Returns what a key is called here, by its own line or a parent's; "" if no line helps.

    A key without a dot may be the last part of a key: max_num_steps is grpo.max_num_steps. For an
    unknown key in a group that only other programs have, the nearest key is named. Lines whose
    setting is not among `ours` are left out, because DPO and GRPO have different settings.
    """
    known = {*ours, *(name.rpartition(".")[0] for name in ours), "none"}
    pairs = "pairs_per_step" in ours
    lines = {}
    for name, of_key in listed().items():
        sayable = [line for line in of_key if line.setting in known]
        same = [line for line in sayable if line.program.endswith("DPO") == pairs]
        lines[name] = same or sayable
    parent = key
    while not lines.get(parent) and "." in parent:
        parent = parent.rpartition(".")[0]
    found = lines.get(parent, [])
    if found and (parent == key or found[0].note != NO_SETTING):
        return "; ".join(map(str, found))
    ends = [name for name in lines if name.endswith(f".{key}") and lines[name]]
    settings = {line.setting for name in ends for line in lines[name]}
    if len(settings) == 1:
        return f"{ends[0]} is {lines[ends[0]][0]}"
    if not found:
        return ""
    near = difflib.get_close_matches(key, [name for name in lines if lines[name]], 1)
    if not near:
        return f"docs/{found[0].page} has no line about it"
    nearest = lines[near[0]][0]
    return f"docs/{found[0].page} has no line about it; the nearest is {near[0]}, {nearest}"


def within(key: str, value: Value) -> Iterator[str]:
    """Yields the dotted names of a dictionary's entries, at any depth, or another value's key."""
    if not isinstance(value, dict) or not value:
        yield key
        return
    for name, inner in value.items():
        yield from within(f"{key}.{name}", inner)


def refuse(flags: list[str], ours: Mapping[str, Value]) -> None:
    """Raises InputError for another program's key, naming the setting that is meant here.

    It also refuses our own settings in another program's syntax, `steps=5` or `--wandb true`, and
    the last part of a setting's name alone, such as `--max_grad_norm`.
    """
    for at, flag in enumerate(flags):
        if at and not flag.startswith("--") and takes_value(flags[at - 1], ours):
            continue  # a value
        key = key_of(flag)
        if "=" in flag:
            value = flag.partition("=")[2]
        else:
            value = flags[at + 1] if at + 1 < len(flags) else ""
        refuse_spelling(flag, key, value, ours)
        if key and key not in ours and f"command.{key}" not in ours:
            refuse_key(flag, key, ours)


def refuse_key(flag: str, key: str, ours: Mapping[str, Value]) -> None:
    """Raises InputError for a key that is not one of our settings, if its meaning is known."""
    full_names = [f"--{name}" for name in ours if name.endswith(f".{key}")]
    if full_names:
        raise InputError(f"{flag}: expected {' or '.join(full_names)}")
    group, _, leaf = key.rpartition(".")
    here = meaning(key, ours)
    if not here and group in {name.rpartition(".")[0] for name in ours}:
        here = meaning(leaf, ours)
    if here:
        raise InputError(f"{flag}: {here}")


def takes_value(flag: str, ours: Mapping[str, Value]) -> bool:
    """Returns True if the word after a flag is its value."""
    key = key_of(flag)
    default = ours.get(key, ours.get(f"command.{key}"))
    return "=" not in flag and default is not None and not isinstance(default, bool)


def refuse_spelling(flag: str, key: str, value: str, ours: Mapping[str, Value]) -> None:
    """Raises InputError if one of our settings is written in another program's syntax."""
    default = ours.get(key, ours.get(f"command.{key}"))
    if isinstance(default, bool) and value.lower() in WORDS:
        group, dot, leaf = key.rpartition(".")
        if WORDS[value.lower()]:
            expected = f"--{key}"
        else:
            expected = f"--{group}{dot}no-{leaf}"
        raise InputError(f"{key} = {value}: expected {expected}, without a value")
    if default is not None and not flag.startswith("--"):
        raise InputError(f"{flag}: expected --{key} {value or 'VALUE'}")
