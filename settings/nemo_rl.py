"""What the keys of NeMo-RL are called here, as the tables of docs/from_nemo_rl.md say."""

import re
from collections.abc import Container
from pathlib import Path

from settings.errors import InputError

PAGE = Path(__file__).parent.parent / "docs/from_nemo_rl.md"
# --key, --key=value, and Hydra's key=value, +key=value, ++key=value and ~key.
FLAG = re.compile(r"(?:--|(?=.*=)\+{0,2}|~)([a-z_][\w.-]*)(=.*)?", re.DOTALL)


def key_of(flag: str) -> str:
    """The dotted name that a word of the command line may set; "" for any other word."""
    found = FLAG.fullmatch(flag)
    return found[1].replace("-", "_") if found else ""


def meaning(key: str) -> str:
    """What a key of NeMo-RL, or the nearest of its parents, is here; "" where none is listed."""
    listed: dict[str, str] = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines() if PAGE.is_file() else ():
        if line.startswith("| `"):
            keys, here, note = (cell.strip() for cell in line.strip("|").split("|"))
            text = here + (f": {note}" if note else "")
            listed |= dict.fromkeys(re.findall(r"`([\w.]+)`", keys), text.replace("`", ""))
    while key not in listed and "." in key:
        key = key.rpartition(".")[0]
    return listed.get(key, "")


def refuse(flags: list[str], ours: Container[str]) -> None:
    """Raises InputError for a key of NeMo-RL, naming the setting that stands in its place here."""
    for flag in flags:
        key = key_of(flag)
        here = "" if flag.startswith("--") and key in ours else meaning(key)
        if here:
            raise InputError(f"{flag}: a key of NeMo-RL; here: {here} (docs/{PAGE.name})")
