"""What the settings of other programs are called here, as the tables of two pages say."""

import difflib
import functools
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from core.errors import InputError

DOCS = Path(__file__).parent.parent / "docs"
PAGES = ("from_nemo_rl.md", "from_trl.md")
# --key, --key=value, and Hydra's key=value, +key=value, ++key=value and ~key.
FLAG = re.compile(r"(?:--|(?=.*=)\+{0,2}|~)([a-z_][\w.-]*)(=.*)?", re.DOTALL)
LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")
NO_SETTING = "no setting takes its place"  # of a group whose keys have lines of their own
WORDS = {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}


def key_of(flag: str) -> str:
    """The dotted name that a word of the command line may set; "" for any other word."""
    found = FLAG.fullmatch(flag)
    return found[1].replace("-", "_") if found else ""


class Name(NamedTuple):
    """A line of a page about a key."""

    key: str
    program: str
    setting: str  # "none" where there is none
    note: str
    page: str

    def __str__(self) -> str:
        text = f"{self.setting}: {self.note}" if self.note else self.setting
        return f"a key of {self.program}; here: {text} (docs/{self.page})".replace("`", "")


@functools.cache
def listed() -> dict[str, list[Name]]:
    """The lines of the pages, by key."""
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
    """What a key is here, by its own line or that of a parent; "" where no line helps.

    A key without a dot may be the last part of one: max_num_steps is grpo.max_num_steps. Below a
    group that other programs alone have, the nearest key is named. Lines are left out that name a
    setting which is none of `ours`, as DPO has others than GRPO.
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
    ends = {name: of_key for name, of_key in lines.items() if name.endswith(f".{key}") and of_key}
    if len({line.setting for of_key in ends.values() for line in of_key}) == 1:
        name, of_key = next(iter(ends.items()))
        return f"{name} is {of_key[0]}"
    if not found:
        return ""
    near = difflib.get_close_matches(key, [name for name, of_key in lines.items() if of_key], 1)
    nearest = f"; the nearest is {near[0]}, {lines[near[0]][0]}" if near else ""
    return f"docs/{found[0].page} has no line about it{nearest}"


def within(key: str, value: Any) -> Iterator[str]:
    """The dotted names of what a dictionary holds at any depth, or the key of any other value."""
    if not isinstance(value, dict) or not value:
        yield key
        return
    for name, inner in value.items():
        yield from within(f"{key}.{name}", inner)


def refuse(flags: list[str], ours: Mapping[str, Any]) -> None:
    """Raises InputError for a key of another program, naming the setting that is meant here.

    Also for a setting of ours in the form of another program, `steps=5` or `--wandb true`, and for
    the last part of its name, such as `--max_grad_norm`.
    """
    groups = {name.rpartition(".")[0] for name in ours}
    for before, flag, after in zip(["", *flags], flags, [*flags[1:], ""], strict=False):
        if not flag.startswith("--") and takes_value(before, ours):
            continue
        key = key_of(flag)
        value = flag.partition("=")[2] if "=" in flag else after
        refuse_spelling(flag, key, value, ours)
        if not key or key in ours or f"command.{key}" in ours:
            continue
        if within_groups := [f"--{name}" for name in ours if name.endswith(f".{key}")]:
            raise InputError(f"{flag}: expected {' or '.join(within_groups)}")
        group, _, leaf = key.rpartition(".")
        if here := meaning(key, ours) or (meaning(leaf, ours) if group in groups else ""):
            raise InputError(f"{flag}: {here}")


def takes_value(flag: str, ours: Mapping[str, Any]) -> bool:
    """Whether the word behind this one is its value."""
    key = key_of(flag)
    default = ours.get(key, ours.get(f"command.{key}"))
    return "=" not in flag and default is not None and not isinstance(default, bool)


def refuse_spelling(flag: str, key: str, value: str, ours: Mapping[str, Any]) -> None:
    """Raises InputError for a setting of ours that is in the form of another program."""
    default = ours.get(key, ours.get(f"command.{key}"))
    if isinstance(default, bool) and value.lower() in WORDS:
        group, dot, leaf = key.rpartition(".")
        expected = f"--{key}" if WORDS[value.lower()] else f"--{group}{dot}no-{leaf}"
        raise InputError(f"{key} = {value}: expected {expected}, without a value")
    if default is not None and not flag.startswith("--"):
        raise InputError(f"{flag}: expected --{key} {value or 'VALUE'}")
