"""Known answers, example rows and chat templates: in tests/data, or next to the project."""

from pathlib import Path

import pytest

from support.program import ROOT

HERE = ROOT / "tests/data"
SHARED = ROOT.parent / "shared/data"  # what may not be passed on, or is too long for HERE
LACKS = "lacks ../shared/data/"
in_both = pytest.mark.parametrize("place", [HERE, SHARED], ids=["here", "shared"])


def shared(name: str) -> Path:
    """Returns a file or folder of ../shared/data; skips the test if it is absent."""
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"{LACKS}{name}")
    return path


def template(name: str) -> str:
    """Returns a model's chat template; skips the test if tests/data has none and it is absent."""
    file = f"chat_templates/{name}.jinja"
    path = HERE / file if (HERE / file).exists() else shared(file)
    return path.read_text(encoding="utf-8")


def texts(file: str, place: Path) -> list[str]:
    """Returns the lines of a file in HERE, or those of the same file in SHARED that HERE lacks."""
    path = HERE / file
    here = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    if place == HERE:
        assert here, f"tests/data has no {file}"
        return here
    known = set(here)
    whole = shared(file).read_text(encoding="utf-8").splitlines()
    return [line for line in whole if line not in known]


def skipped(reports: list) -> list[str]:
    """Returns a line for each report of a test that `shared` has skipped: its name and the file."""
    found = []
    for report in reports:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple | list) else ""
        _, lacks, file = reason.partition(LACKS)
        if lacks:
            found.append(f"{report.nodeid} {lacks}{file}")
    return sorted(found)
