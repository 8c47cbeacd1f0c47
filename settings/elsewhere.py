"""What the settings of other programs are called here, as the tables of two pages say."""

import functools
import re
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from settings.errors import InputError

DOCS = Path(__file__).parent.parent / "docs"
PAGES = ("from_nemo_rl.md", "from_trl.md")
# --key, --key=value, and Hydra's key=value, +key=value, ++key=value and ~key.
FLAG = re.compile(r"(?:--|(?=.*=)\+{0,2}|~)([a-z_][\w.-]*)(=.*)?", re.DOTALL)


def key_of(flag: str) -> str:
    """The dotted name that a word of the command line may set; "" for any other word."""
    found = FLAG.fullmatch(flag)
    return found[1].replace("-", "_") if found else ""


class Name(NamedTuple):
    """A line of a page about a key."""

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
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if cells[1:2] == ["here"]:
                program = cells[0]
            elif line.startswith("| `"):
                keys, here, note = cells
                for key in re.findall(r"`([\w.]+)`", keys):
                    found.setdefault(key, []).append(Name(program, here.strip("`"), note, page))
    return found


def meaning(key: str, ours: Collection[str]) -> str:
    """What a key, or the nearest of its parents, is here; "" where none is listed.

    Lines are left out that name a setting which is none of `ours`, as DPO has others than GRPO.
    """
    while key not in listed() and "." in key:
        key = key.rpartition(".")[0]
    known = {*ours, *(name.rpartition(".")[0] for name in ours), "none"}
    return "; ".join(str(name) for name in listed().get(key, ()) if name.setting in known)


def refuse(flags: list[str], ours: Collection[str]) -> None:
    """Raises InputError for a key of another program, naming the setting that is meant here.

    Of the last part of a name of ours, such as `--beta`, tyro says which one it belongs to.
    """
    leaves = {name.rpartition(".")[2] for name in ours}
    for flag in flags:
        key = key_of(flag)
        own = flag.startswith("--") and (key in ours or key in leaves)
        if here := "" if own else meaning(key, ours):
            raise InputError(f"{flag}: {here}")
