"""The documentation against the code: links name definitions, tables name what is written."""

import ast
import dataclasses
import datetime
import importlib.util
import re
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import data_prep
import dpo
import mopd
from envs import Reward, registry
from grpo_async import Config
from rollout.episode import Episode, Turn, stitch
from runtime.rollouts.dispatch import Slot
from settings import reader
from support import processes

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ALGORITHM = ROOT / "docs/grpo_async.md"
# [`Class.name`](../file.py); a text that ends in .py names a file, not a definition.
NAME_LINK = re.compile(r"\[`(?![^`]*\.py`)([\w.]+)`\]\(([^)\s#]+\.py)\)")


def definitions(path: Path) -> set[str]:
    """The functions, classes and assigned names of a Python file; members as Class.name."""
    found = set()

    def visit(nodes: list, prefix: str) -> None:
        for node in nodes:
            targets = [getattr(node, "target", None), *getattr(node, "targets", ())]
            names = [getattr(target, "id", None) for target in targets]
            found.update(prefix + name for name in (getattr(node, "name", None), *names) if name)
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")

    visit(ast.parse(path.read_text(encoding="utf-8")).body, "")
    return found


def undefined(text: str, folder: Path) -> list[str]:
    """The links of a text, seen from a folder, whose file does not define what they name."""
    links = NAME_LINK.findall(text)
    return [f"{file}: {name}" for name, file in links if name not in definitions(folder / file)]


def section(heading: str) -> str:
    """The text below a heading of the algorithm's page, up to the next one of its level."""
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
    cells = re.findall(r"^\|([^|]*)\|", text, re.M)
    return [key for cell in cells for key in re.findall(r"`([\w@]+)`", cell)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_name_what_their_file_defines(page):
    assert undefined(page.read_text(encoding="utf-8"), page.parent) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_all_links_lead_somewhere_and_none_to_a_line(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith("http"):
            assert (page.parent / target.partition("#")[0]).exists(), target
    assert "#L" not in text


def test_a_link_to_a_name_that_is_gone_is_found(tmp_path):
    code = "x = 1\nclass A:\n    y: int = 2\n    async def f(self):\n        z = 3\n"
    (tmp_path / "code.py").write_text(code)
    good = "[`x`](code.py) [`A.f`](code.py), [`A.y`](code.py) [`A`](code.py) [`code.py`](code.py)"
    assert undefined(good, tmp_path) == []
    assert undefined("[`A.x`](code.py) [`z`](code.py)", tmp_path) == ["code.py: A.x", "code.py: z"]


def test_the_readme_quotes_the_manifest_and_its_lines_are_true():
    """Within a tenth: a line more is no reason to change the page."""
    (rows,) = re.findall(r"\n((?:\| [a-z ]+ \| \d+ \| [\d,]+ \|\n)+)", processes.PAGE.read_text())
    assert rows in (ROOT / "README.md").read_text(encoding="utf-8")
    for process, files, lines in re.findall(r"\| ([a-z ]+) \| (\d+) \| ([\d,]+) \|", rows):
        modules = processes.listed()[process]
        assert int(files) == len(modules)
        assert processes.lines_of(modules) == pytest.approx(int(lines.replace(",", "")), rel=0.1)


def test_each_metric_is_explained_once():
    """That all are there, and none besides, is checked in test_style.py."""
    explained = Counter(first_cells(section("glossary")))
    assert {"step", "seconds", "loss"} <= set(explained)
    assert max(explained.values()) == 1, explained.most_common(1)


def test_each_field_of_a_rollout_is_explained_once():
    turn = Turn([1], [2], [-1.0], [0], "stop")
    row = {"_line": 1, "agent_ref": {"name": "any"}}
    tokenizer = SimpleNamespace(decode=str)
    episode = Episode([turn], Reward(1.0))
    line = Slot(0).record(1) | episode.record(tokenizer, row, stitch([turn])[0])
    assert sorted(first_cells(section("rollouts.jsonl"))) == sorted(line)


def test_implementation_details_are_numbered_and_each_links_to_the_code():
    items = re.split(r"^(\d+)\. ", section("implementation details"), flags=re.M)[1:]
    bodies = items[1::2]
    assert [int(number) for number in items[::2]] == list(range(1, len(bodies) + 1))
    assert len(bodies) >= 25
    assert all(NAME_LINK.search(body) for body in bodies)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_and_settings_that_the_pages_name_exist(page):
    """Every `--flag` is one of the programs', and `group.setting` is in that group."""
    leaves = reader.leaves(Config) | reader.leaves(dpo.Config) | reader.leaves(mopd.Config)
    flags = {name.removeprefix("command.") for name in leaves}
    flags |= {re.sub(r"(\w+)$", r"no-\1", name) for name in flags} | {"help"}
    commands = data_prep.COMMANDS.values()
    flags |= {field.name for command in commands for field in dataclasses.fields(command)}
    flags |= set(re.findall(r"^ +--(\w+)\)", (ROOT / "launch/submit.sh").read_text(), re.M))
    simulate = (ROOT / "bench/simulate.py").read_text(encoding="utf-8")
    flags |= set(re.findall(r'add\("--(\w+)"', simulate))
    flags |= {"tensor-parallel-size", "max-model-len", "host", "dtype"}  # of vLLM's servers
    flags |= {"no-build-isolation"}  # of `pip install`
    flags |= {"tokens"}  # of bench/logprob_memory.py
    text = page.read_text(encoding="utf-8")
    if page.name.startswith("from_"):  # a first column, and an example, have other programs' names
        text = re.sub(r"^\|[^|]*\||^\$ .*|^error: .*", "|", text, flags=re.MULTILINE)
    assert set(re.findall(r"(?<![\w-])--([a-z][\w.-]*\w)", text)) <= flags
    groups = {name.rpartition(".")[0] for name in leaves} - {""}
    start = "|".join(sorted(groups))
    named = set(re.findall(rf"`((?:{start})\.\w[\w.]*)", text))
    diffs = "\n".join(path.read_text() for path in (ROOT / "docs/forks").glob("*.diff"))
    added = re.findall(r"^\+    (\w+): ", diffs, re.M)
    of_forks = {f"{group}.{name}" for group in ("loss", "advantage") for name in added}
    assert named <= set(leaves) | groups | of_forks


def test_the_page_of_environments_has_them_all():
    """Each module, and each agent that rows of the released blends name."""
    page = (ROOT / "docs/environments.md").read_text(encoding="utf-8")
    for agent, module in registry.served().items():
        assert f"[{module.rpartition('/')[2]}](../envs/{module}.py)" in page
        if agent.endswith("_simple_agent"):
            assert f"`{agent}`" in page, agent


def script(name: str) -> ModuleType:
    """A module of docs/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"docs/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_comparison_is_that_of_its_file_and_each_line_is_dated():
    """A claim about another program names the version and the day, or says "not checked"."""
    comparison = script("comparison_table")
    page = comparison.PAGE.read_text(encoding="utf-8")
    assert page == comparison.page(), "README.md: run .venv/bin/python docs/comparison_table.py"
    ours, *others = comparison.programs()
    for program in (ours, *others):
        assert set(program) == {*comparison.COLUMNS, "source"}, program["name"]
        assert isinstance(program["checked"], datetime.date)
        assert all(program.values()), program["name"]
    for path in ours["source"].split(", "):
        assert (ROOT / path).is_file(), path
    versions = [program["version"] for program in others if program["name"].startswith("TRL")]
    assert any("1.18" in version and "untested" in version for version in versions)


def test_only_here_do_all_five_properties_hold():
    """What README says about the table; "not checked" is not a property."""
    properties = ("dropped", "step", "version_of")
    ours, *others = script("comparison_table").programs()
    assert ours["bound"].startswith("at most") and "no prompt" in ours["resume"]
    for program in others:
        same = [program[name] == ours[name] for name in properties]
        assert not (program["bound"].startswith("at most") and all(same)), program["name"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_claims_something_of_all_other_programs(page):
    """Such a claim has no version, and is wrong as soon as one of them changes."""
    text = " ".join(page.read_text(encoding="utf-8").lower().split())
    assert re.findall(r"others? do(?:es)? not|no (?:one|body) else|no peer", text) == []


def test_the_shelf_of_environments_is_that_of_their_modules():
    """The table is generated: files, agents, rewards and needs are those of the code."""
    shelf = script("environment_table")
    page = shelf.PAGE.read_text(encoding="utf-8")
    assert page == shelf.page(), (
        "docs/environments.md: run .venv/bin/python docs/environment_table.py"
    )
    drawn = shelf.Shelf()
    served = set(registry.served().values())
    assert served <= drawn.serving and len(drawn.serving - served) == 1  # nemo_gym names no agent
    for name in drawn.serving:
        judged, _, reward = shelf.first_line(drawn.modules[name]).partition(": ")
        assert judged and reward, f"envs/{name}.py: begin the docstring with `JUDGED: REWARD.`"
        has_needs = hasattr(importlib.import_module(f"envs.{name.replace('/', '.')}"), "needs")
        assert (shelf.needs(drawn.modules[name]) != "-") == has_needs, name
    assert "[math](../envs/maths/math.py)" in drawn.row("maths/math")
    assert "same_answer" in drawn.uses("maths/math")
    assert "[same_answer](../envs/maths/same_answer.py)" in drawn.heading("maths")
