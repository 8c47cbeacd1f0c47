"""The style that is enforced: small functions, documented settings, configurations of overrides."""

import ast
import contextlib
import dataclasses
import functools
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from test_docs import first_cells, section

import dpo
import grpo_async
import mopd
from envs.services import Report
from grpo_async import Config, StepInParts, Update, pack, policy_loss
from runtime.reporting.metrics import mean_metrics, reduce_stats, step_metrics
from runtime.reporting.rollout_metrics import rollout_metrics
from runtime.reporting.speed import COUNTS
from runtime.reporting.validation_metrics import validation_metrics
from runtime.rollouts.outages import Outages
from support.samples import make_sample

ROOT = Path(__file__).resolve().parents[1]
LISTED = ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard"]
FILES = [p for p in subprocess.check_output(LISTED, text=True).split("\n") if p]
FILES = [path for path in FILES if (ROOT / path).is_file()]
PYTHON = [path for path in FILES if path.endswith(".py")]
PRODUCT = [path for path in PYTHON if not path.startswith("tests/")]
CONFIGS = [p for p in PYTHON if p.startswith("configs/")]
ROOMS = ("core", "settings", "policy", "rollout", "envs", "runtime", "dry_run", "prep")
MAIN = "grpo_async.py"
SECOND = "dpo.py"
THIRD = "mopd.py"
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
BLOCK = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try)


@functools.cache
def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


@functools.cache
def tree(path: str) -> ast.Module:
    return ast.parse(read(path))


ENVIRONMENTS = [p for p in PYTHON if p[:5] == "envs/" and re.search("^AGENTS", read(p), re.M)]


def refuse(found: Iterable[str]) -> None:
    """Fails where a rule has found something, and names all of it."""
    names = list(found)
    assert not names, "\n".join(names)


def functions(path: str) -> list:
    return [node for node in ast.walk(tree(path)) if isinstance(node, FUNCTION)]


def length(node) -> int:
    return node.end_lineno - node.lineno + 1


def depth(node, elif_of=None) -> int:
    """The deepest nesting of blocks below a node; `elif` is as deep as its `if`."""
    children = ast.iter_child_nodes(node)
    inner = [depth(child, node if is_elif(node, child) else None) for child in children]
    return (isinstance(node, BLOCK) and not elif_of) + max(inner, default=0)


def is_elif(node, child) -> bool:
    alone = isinstance(node, ast.If) and node.orelse == [child] and isinstance(child, ast.If)
    return alone and child.col_offset == node.col_offset


def arguments(node) -> int:
    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return sum(arg.arg not in ("self", "cls", "ctx") for arg in every)


def test_the_measures_measure():
    nested = "if a:\n for b in c:\n  pass\nelif d:\n pass\nelif e:\n with f:\n  g = 1\n"
    assert depth(ast.parse(nested)) == 2
    assert depth(ast.parse("if a:\n pass\nelse:\n if b:\n  pass\n else:\n  c = 1\n")) == 2
    define = ast.parse("async def f(self, a, /, b, *c, d=1, **e):\n pass").body[0]
    assert arguments(define) == 3 and length(define) == 2


def too_large(path: str) -> Iterator[str]:
    """What is wrong with the sizes of a file's functions."""
    for node in functions(path):
        sizes = ((length, 80, "lines"), (depth, 4, "blocks deep"), (arguments, 6, "arguments"))
        for measure, limit, unit in sizes:
            if measure(node) > limit:
                yield f"{path}: {node.name}: {measure(node)} {unit}"


def test_functions_stay_small():
    refuse(found for path in PRODUCT for found in too_large(path))


def test_every_public_function_says_what_it_returns():
    paths = [path for path in PRODUCT if "/" not in path or path.startswith(ROOMS)]
    known = [(path, node) for path in paths for node in public(tree(path).body)]
    known = [(path, node) for path, node in known if isinstance(node, FUNCTION)]
    refuse(f"{path}: {node.name}" for path, node in known if not node.returns)


def test_lines_fit_in_100_columns():
    lines = [(p, i, line) for p in PYTHON for i, line in enumerate(read(p).splitlines(), 1)]
    refuse(f"{path}:{i}" for path, i, line in lines if len(line) > 100)


def public(nodes: list) -> Iterator:
    """Functions, classes and their methods that are not private."""
    for node in nodes:
        if isinstance(node, (*FUNCTION, ast.ClassDef)) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from public(node.body)


def test_everything_public_has_a_docstring():
    paths = [path for path in PRODUCT if "/" not in path]
    refuse(path for path in paths if not ast.get_docstring(tree(path)))
    known = [(path, node) for path in paths for node in public(tree(path).body)]
    refuse(f"{path}: {node.name}" for path, node in known if not ast.get_docstring(node))


SETTINGS = (
    MAIN,
    SECOND,
    THIRD,
    "settings/config.py",
    "settings/network.py",
    "settings/distillation.py",
)


@pytest.mark.parametrize("path", SETTINGS)
def test_every_setting_is_followed_by_its_docstring(path):
    checked = [n for n in tree(path).body if isinstance(n, ast.ClassDef) and is_checked(n)]
    assert checked
    for body in (node.body for node in checked):
        for i in [i for i, node in enumerate(body) if isinstance(node, ast.AnnAssign)]:
            after = getattr(body[i + 1], "value", None) if i + 1 < len(body) else None
            documented = isinstance(after, ast.Constant) and isinstance(after.value, str)
            assert documented and len(after.value) > 10, body[i].target.id


def is_checked(node: ast.ClassDef) -> bool:
    """Whether a class holds settings: what pydantic checks, and nobody changes."""
    return any("frozen" in ast.unparse(decorator) for decorator in node.decorator_list)


def is_override(node: ast.stmt, known: set[str]) -> bool:
    """Whether a statement of a config inherits from another config, or sets what there is."""
    if isinstance(node, ast.ImportFrom):
        return node.module.startswith("configs.")
    return isinstance(node, ast.Assign) and {target.id for target in node.targets} <= known


def test_config_files_are_overrides_only():
    wrong = []
    for path in CONFIGS:
        program = {"dpo.py": dpo, "mopd.py": mopd}.get(path.rpartition("_")[2])
        known = set(vars((program or grpo_async).Config()))
        docstring, *statements = tree(path).body
        assert isinstance(docstring.value, ast.Constant), path
        wrong += [f"{path}:{node.lineno}" for node in statements if not is_override(node, known)]
    refuse(wrong)


def texts() -> Iterator[tuple[str, str]]:
    """Every file that is text and that we wrote, and its text."""
    for path in FILES:
        if re.match("tests/data/.*/", path):
            continue  # published data, as it is
        with contextlib.suppress(UnicodeDecodeError):
            yield path, read(path)


def test_no_leftovers_and_no_paths_of_one_machine():
    leftover = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X)\b")
    place = re.compile(r"(?<![\w.:~/-])/(?:wo" r"rk|ro" r"ot|ho" r"me)/")
    refuse(path for path, text in texts() if leftover.search(text))
    refuse(path for path, text in texts() if place.search(text))


def imported(path: str) -> set[str]:
    """The first parts of the names of all modules that a file imports."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name.partition(".")[0] for name in found}


def test_policies_and_environments_do_not_know_the_algorithm():
    paths = [path for path in PRODUCT if path.startswith(("policy/", "envs/"))]
    refuse(path for path in paths if {"grpo_async", "dpo", "mopd"} & imported(path))


# --- metrics --------------------------------------------------------------------------------------


def literal_keys(path: str, function: str) -> set[str]:
    """String keys of the dict literals in one function, and those that it assigns to."""
    (node,) = (f for f in functions(path) if f.name == function)
    keys = [key for d in ast.walk(node) if isinstance(d, ast.Dict) for key in d.keys]
    for assigned in ast.walk(node):
        if isinstance(assigned, ast.Subscript) and isinstance(assigned.ctx, ast.Store):
            keys.append(assigned.slice)
    return {key.value for key in keys if isinstance(key, ast.Constant)}


def metric_keys() -> set[str]:
    """Every key that a run writes to metrics.jsonl beside `step` and `seconds`."""
    sample = make_sample(np.random.default_rng(0), 2, env="env")
    sample.mask_T[:] = [False, True]
    batch = pack([sample], Update(1, 1, [[(0, 0)]]), Config())
    stats = policy_loss(-torch.ones(2), batch, Config()).stats
    keys = set(mean_metrics([step_metrics(reduce_stats([stats]), 1, 1.0)]))
    later = dataclasses.replace(sample, continues=True, cache_hits=0.5, allowed_M=np.arange(3))
    infos = [part.info() for part in (sample, later)]
    keys |= set(rollout_metrics([infos], 0))
    keys |= set(validation_metrics([infos[:1] * 2], 2, 1))
    outages = Outages()
    outages.receive("worker", Report({}, Counter({"judge/reason": 1}), Counter({"env/error": 1})))
    outages.earlier = 1.0
    keys |= {key.partition("/")[0] for key in outages.meters()} | {*StepInParts().seconds}
    # Those by environment and data set are the same metrics again.
    keys = {key.replace("@2", "@k").removesuffix("/env") for key in keys}
    for path, function in (
        ("policy/fsdp.py", "optimizer_step"),
        ("policy/logprobs.py", "take"),
        ("policy/rounding.py", "compare"),
        ("policy/megatron/policy.py", "_replayed"),
        (MAIN, "sync"),
        ("runtime/engines/fleet.py", "compare"),
        ("runtime/engines/stat_logger.py", "take"),
        ("runtime/reporting/speed.py", "of"),
        (MAIN, "train_step"),
        (MAIN, "update_weights"),
        (MAIN, "train_forever"),
    ):
        found = literal_keys(path, function) - {"betas", "eps", "weight_decay"}
        assert found, f"{path} {function} writes no metric any more?"
        keys |= found
    return keys - {*COUNTS}


def test_metrics_are_those_of_the_glossary():
    listed = set(first_cells(section("glossary")))
    assert listed - {"step", "seconds"} == metric_keys()
