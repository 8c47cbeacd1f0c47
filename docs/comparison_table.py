"""Writes the comparison in README.md from docs/comparison.toml."""

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "README.md"
DATA = ROOT / "docs/comparison.toml"
BEGIN = "<!-- comparison: written by docs/comparison_table.py -->\n"
END = "<!-- end of the comparison -->\n"
COLUMNS = {  # field of a program -> header
    "name": "program",
    "version": "version",
    "checked": "checked on",
    "bound": "bound on staleness",
    "dropped": "groups dropped for staleness",
    "step": "step of a group",
    "resume": "after a resume",
    "version_of": "policy version of each",
}


def programs() -> list[dict[str, object]]:
    """Returns the programs with their properties, this project first."""
    return tomllib.loads(DATA.read_text(encoding="utf-8"))["program"]


def row(program: dict[str, object]) -> str:
    """Returns the table line for a program."""
    return f"| {' | '.join(str(program[field]) for field in COLUMNS)} |\n"


def table() -> str:
    """Returns the table, one line for each program."""
    head = f"| {' | '.join(COLUMNS.values())} |\n"
    rule = f"|{'---|' * len(COLUMNS)}\n"
    return head + rule + "".join(map(row, programs()))


def page() -> str:
    """Returns the page with its own text, and the current table between the two markers."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    if not after:
        sys.exit(f"{PAGE}: lacks the lines {BEGIN.strip()} and {END.strip()}")
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
