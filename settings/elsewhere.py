"""What the settings of other programs are called here, as the tables of two pages say."""

import functools
import re
from collections.abc import Container
from pathlib import Path

from settings.errors import InputError

DOCS = Path(__file__).parent.parent / "docs"
PAGES = ("from_nemo_rl.md", "from_trl.md")
# --key, --key=value, and Hydra's key=value, +key=value, ++key=value and ~key.
FLAG = re.compile(r"(?:--|(?=.*=)\+{0,2}|~)([a-z_][\w.-]*)(=.*)?", re.DOTALL)


def key_of(flag: str) -> str:
    """The dotted name that a word of the command line may set; "" for any other word."""
    found = FLAG.fullmatch(flag)
    return found[1].replace("-", "_") if found else ""


@functools.cache
def listed() -> dict[str, str]:
    """What an error says of each key in the pages; a key of two programs has both texts."""
    found: dict[str, str] = {}
    for page in PAGES:
        path = DOCS / page
        for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if cells[1:2] == ["here"]:
                program = cells[0]
            elif line.startswith("| `"):
                keys, here, note = cells
                text = (here + (f": {note}" if note else "")).replace("`", "")
                told = f"a key of {program}; here: {text} (docs/{page})"
                for key in re.findall(r"`([\w.]+)`", keys):
                    found[key] = f"{found[key]}; {told}" if key in found else told
    return found


def meaning(key: str) -> str:
    """What a key, or the nearest of its parents, is here; "" where none is listed."""
    while key not in listed() and "." in key:
        key = key.rpartition(".")[0]
    return listed().get(key, "")


def refuse(flags: list[str], ours: Container[str]) -> None:
    """Raises InputError for a key of another program, naming the setting that is meant here."""
    for flag in flags:
        key = key_of(flag)
        here = "" if flag.startswith("--") and key in ours else meaning(key)
        if here:
            raise InputError(f"{flag}: {here}")
