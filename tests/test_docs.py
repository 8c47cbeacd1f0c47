"""The documentation against the code: links point at definitions, tables name what is written.

python tests/test_docs.py --fix        rewrites the line numbers of all links in docs/*.md
"""

import ast
import re
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
ALGORITHM = ROOT / "docs/grpo_async.md"
LINE_LINK = re.compile(r"\[`([\w.]+)`\]\(([^)\s#]+)#L(\d+)\)")  # [`Class.name`](../file.py#L12)


def definitions(path: Path) -> dict[str, int]:
    """Line of each function, class and assigned name of a Python file; members as Class.name."""
    found = {}

    def visit(nodes: list, prefix: str) -> None:
        for node in nodes:
            names = [
                getattr(node, "name", None),
                getattr(getattr(node, "target", None), "id", None),
            ]
            names += [getattr(target, "id", None) for target in getattr(node, "targets", ())]
            for name in filter(None, names):
                found.setdefault(prefix + name, node.lineno)
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")

    visit(ast.parse(path.read_text(encoding="utf-8")).body, "")
    return found


def fixed(text: str, folder: Path) -> str:
    """The text with each link's line number where its name is defined now; KeyError if nowhere."""

    def point(match: re.Match) -> str:
        name, file, _ = match.groups()
        lines = definitions(folder / file)
        if name not in lines:
            raise KeyError(f"{file} defines no {name}")
        return f"[`{name}`]({file}#L{lines[name]})"

    return LINE_LINK.sub(point, text)


def section(heading: str) -> str:
    """What stands below a heading of the algorithm's page, up to the next one of its level."""
    parts = re.split(r"^(#+) (.*)$", ALGORITHM.read_text(encoding="utf-8"), flags=re.M)
    found = [i for i in range(2, len(parts), 3) if heading.lower() in parts[i].lower()]
    assert len(found) == 1, f"{len(found)} headings contain {heading!r}"
    (at,) = found
    body = parts[at + 1]
    for level, title, text in zip(*[iter(parts[at + 2 :])] * 3, strict=True):
        if len(level) <= len(parts[at - 1]):
            break
        body += f"{level} {title}{text}"
    return body


def first_cells(text: str) -> list[str]:
    """The names in backticks in the first column of all tables."""
    return [key for cell in re.findall(r"^\|([^|]*)\|", text, re.M) for key in ticked(cell)]


def ticked(text: str) -> list[str]:
    return re.findall(r"`(\w+)`", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_line_links_point_at_the_definition_they_name(page):
    text = page.read_text(encoding="utf-8")
    assert fixed(text, page.parent) == text, "run: python tests/test_docs.py --fix"
    for name, file, number in LINE_LINK.findall(text):
        line = (page.parent / file).read_text(encoding="utf-8").splitlines()[int(number) - 1]
        assert name.rpartition(".")[2] in line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_all_links_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    for target in targets:
        if not target.startswith("http"):
            assert (page.parent / target.partition("#")[0]).exists(), target
    with_lines = [t for t in targets if "#L" in t]
    assert len(with_lines) == len(LINE_LINK.findall(page.read_text(encoding="utf-8")))


def test_links_follow_a_definition_that_moved(tmp_path):
    code = "\n\nx = 1\nclass A:\n    y: int = 2\n    async def f(self):\n        x = 3\n"
    (tmp_path / "code.py").write_text(code)
    text = "[`x`](code.py#L9) [`A.f`](code.py#L1), [`A.y`](code.py#L5) [`A`](code.py) `x`"
    moved = "[`x`](code.py#L3) [`A.f`](code.py#L6), [`A.y`](code.py#L5) [`A`](code.py) `x`"
    assert fixed(text, tmp_path) == moved == fixed(moved, tmp_path)
    with pytest.raises(KeyError, match=r"code.py defines no A.x"):
        fixed("[`A.x`](code.py#L1)", tmp_path)


def test_each_metric_is_explained_once():
    """That all are there, and none besides, is checked in test_style.py."""
    told = Counter(first_cells(section("glossary")))
    assert {"step", "seconds", "loss"} <= set(told)
    assert max(told.values()) == 1, told.most_common(1)


def test_each_field_of_a_rollout_is_explained_once():
    from envs import Reward
    from envs.episode import Episode, Turn, record, stitch

    turn = Turn([1], [2], [-1.0], [0], "stop")
    row = {"_line": 1, "agent_ref": {"name": "any"}}
    tokenizer = SimpleNamespace(decode=str)
    line = record(tokenizer, row, Episode([turn], Reward(1.0)), stitch([turn])[0])
    told = first_cells(section("rollouts.jsonl"))
    assert sorted(told) == sorted({"step", "slot"} | set(line))


def test_implementation_details_are_numbered_and_each_links_to_the_code():
    text = section("implementation details")
    items = re.split(r"^(\d+)\. ", text, flags=re.M)[1:]
    numbers, bodies = items[::2], items[1::2]
    assert [int(number) for number in numbers] == list(range(1, len(bodies) + 1))
    assert 25 <= len(bodies) <= 37
    assert all(LINE_LINK.search(body) for body in bodies)


def test_options_that_the_pages_name_exist():
    """Every `--flag` is a field of Config, or of a command that the pages show."""
    import dataclasses

    from grpo_async import Config, Correction

    known = {field.name for field in dataclasses.fields(Config)}
    known |= {f"correction.{field.name}" for field in dataclasses.fields(Correction)}
    known |= {f"no-{name}" for name in known} | {"config", "help", "fix"}
    for page in PAGES:
        flags = set(re.findall(r"(?<![\w-])--([a-z][\w.-]*\w)", page.read_text(encoding="utf-8")))
        assert flags <= known, f"{page.name}: {flags - known}"


if __name__ == "__main__":
    if sys.argv[1:] != ["--fix"]:
        sys.exit("usage: python tests/test_docs.py --fix")
    for page in PAGES:
        page.write_text(fixed(page.read_text(encoding="utf-8"), page.parent), encoding="utf-8")
