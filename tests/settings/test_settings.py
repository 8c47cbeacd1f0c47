"""Each setting is declared once, and a fork may delete those of the algorithm."""

import ast
import dataclasses
import re
from collections import Counter
from collections.abc import Iterator

import pytest
import test_style
from conftest import spelling_rows, write_rows
from pydantic.dataclasses import dataclass as checked_dataclass

import dpo
import grpo_async
import mopd
from dry_run import explain
from grpo_async import CHECKED, Advantage, Correction, Loss, LowEffort
from runtime.processes.cluster import ROOT
from settings.config import Data, RunSettings
from settings.reader import leaves
from support.tables import gives

GROUPS = ("advantage", "correction", "loss")
CLASSES = (Advantage, Correction, LowEffort, Loss)
LEAVES = {field.name for group in CLASSES for field in dataclasses.fields(group)}
# These words have other meanings too: numpy's clip, a level of a log, the bounds of anything.
COMMON = {"action", "baseline", "clip", "high", "level", "low", "normalize", "penalty", "reduction"}
COMMON |= {"marker", "tokens", "weight"}
ROOMS = ("runtime/", "policy/", "envs/", "dry_run/", "prep/", "data_prep.py", "report.py")
FILES = [name for name in test_style.FILES if name.startswith(ROOMS)]


def reads(source: str) -> set[str]:
    """The algorithm's settings that Python code reads, as attributes or as text."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            holder = ast.unparse(node.value)
            if node.attr in GROUPS and re.search(r"(^|\.)(cfg|config)$", holder):
                found.add(f"{holder}.{node.attr}")
            if node.attr in LEAVES - COMMON:
                found.add(f"{holder}.{node.attr}")
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = set(re.findall(r"[\w.]+", node.value)) if " " not in node.value else set()
            dotted = {f"{group}.{leaf}" for group in GROUPS for leaf in LEAVES}
            found |= words & (dotted | (LEAVES - COMMON))
    return found


test_the_search_finds_what_it_looks_for = gives(
    reads,
    ("cfg.loss.kl_coef", {"cfg.loss", "cfg.loss.kl_coef"}),
    ("run.cfg.correction", {"run.cfg.correction"}),
    ("getattr(cfg, 'x')['advantage.clip']", {"advantage.clip"}),
    ("rule.ratio_clip", {"rule.ratio_clip"}),
    ("sample.advantage + loss.detach() + x.clip(max=2)", set()),
)


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".py")])
def test_no_file_of_the_rooms_reads_a_setting_of_the_algorithm(name):
    assert reads((ROOT / name).read_text()) == set()


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".html")])
def test_a_page_looks_settings_up_where_they_may_be_missing(name):
    """`setting("advantage.penalties")?.` gives nothing for a setting that is gone."""
    text = (ROOT / name).read_text()
    words = "|".join(GROUPS)
    assert not re.findall(rf"\bconfig\??\.(?:{words})\b", text)
    used = re.findall(rf'"(?:{words})\.[\w.]+"\)(\S*)', text)
    assert all(rest.startswith(("?.", ")", ",", ";")) for rest in used), used


@checked_dataclass(frozen=True, config=CHECKED)
class Stripped(RunSettings):
    """A fork's Config, whose algorithm has no settings of its own."""

    prompts_per_step: int = 8
    group_size: int = 4
    has_reference = False
    scoring_passes = 0


def test_a_config_without_the_algorithm_s_groups_is_planned_and_saved(tiny_model, tmp_path):
    assert not any(name.partition(".")[0] in GROUPS for name in leaves(Stripped))
    train = write_rows(tmp_path / "rows.jsonl", spelling_rows(2))
    cfg = Stripped(model=tiny_model, data=Data(train=train))
    assert "everything fits" in explain(cfg, Stripped)


# --- one declaration of each setting --------------------------------------------------------------

CONFIGS = pytest.mark.parametrize("Config", [grpo_async.Config, mopd.Config, dpo.Config])


def groups(settings) -> Iterator[type]:
    """The classes of all groups of settings, at any depth."""
    for value in vars(settings).values():
        if dataclasses.is_dataclass(value):
            yield type(value)
            yield from groups(value)


@CONFIGS
def test_a_group_is_one_class(Config):
    """So the docstring and the default of each of its settings are found in one place."""
    found = list(groups(Config()))
    assert len(found) > 5
    assert [Group for Group in found if Group.__bases__ != (object,)] == []


@CONFIGS
def test_no_class_declares_a_setting_that_it_inherits(Config):
    classes = [cls for cls in Config.__mro__ if "__dataclass_fields__" in vars(cls)]
    declared = Counter(name for cls in classes for name in vars(cls).get("__annotations__", {}))
    assert declared.keys() >= {field.name for field in dataclasses.fields(Config)}
    assert [name for name, count in declared.items() if count > 1] == []
