"""The house: imports run one way, nothing circles, and what the two algorithms load stays small."""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

import pytest

from envs.check_rows import MECHANISMS
from support.program import ROOT, ran

LISTED = ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "*.py"]
SKIPPED = ("tests/", "docs/", "configs/")
FILES = [
    name
    for name in subprocess.check_output(LISTED, text=True).split()
    if not name.startswith(SKIPPED) and (ROOT / name).is_file()
]
MODULES = {name[:-3].replace("/", ".").removesuffix(".__init__"): name for name in FILES}
FLOORS = (
    ("core", "settings"),
    ("policy", "rollout", "envs"),
    ("prep", "runtime"),
    ("data_prep", "dry_run", "launch", "report"),
    ("dpo", "grpo_async", "mopd"),
    ("bench",),
)
FLOOR = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}


CLASS = re.compile(r"\w+(\.\w+)*\.[A-Z]\w*")  # as `worker_extension_cls` names one


class Import(NamedTuple):
    """That one module of the project needs another, and whether only once a function runs."""

    name: str
    lazy: bool


def known(name: str) -> str:
    """The module of the project that a dotted name is, or is in; "" for none."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name


def named(node: ast.AST) -> Iterator[str]:
    """The modules of the project that a node imports, or names in a string as MODULE.Class."""
    if isinstance(node, ast.Import):
        yield from (known(alias.name) for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield from (known(f"{node.module}.{alias.name}") for alias in node.names)
    elif isinstance(node, ast.Constant) and CLASS.fullmatch(str(node.value)):
        yield known(node.value)


def serves(path: str) -> bool:
    """Whether a file is an environment."""
    text = (ROOT / path).read_text(encoding="utf-8")
    return path.startswith("envs/") and bool(re.search("^AGENTS", text, re.M))


def imports(text: str) -> Iterator[Import]:
    """All imports of a file except those for types alone."""
    for top in ast.parse(text).body:
        if isinstance(top, ast.If) and "TYPE_CHECKING" in ast.unparse(top.test):
            continue
        lazy = not isinstance(top, ast.Import | ast.ImportFrom | ast.If | ast.Try)
        for node in ast.walk(top):
            yield from (Import(name, lazy) for name in named(node) if name)


# Which modules a call of importlib.import_module with a computed name may import.
COMPUTED = {
    "envs.registry": [name for name, path in MODULES.items() if serves(path)],
    "envs.check_rows": [*MECHANISMS.values()],
    "envs.sandbox.interpreter": [],  # libraries
    "prep.swe_tables": [],  # packages of data sets
    "launch.submit_check": [*MECHANISMS.values()],  # and the program that its command line names
    "grpo_async": [],  # itself
    "dpo": [],
    "mopd": [],
}


def graph() -> dict[str, set[Import]]:
    """The imports of each module."""
    found: dict[str, set[Import]] = defaultdict(set)
    for module, path in MODULES.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        found[module] = {i for i in imports(text) if i.name != module}
        found[module] |= {Import(name, True) for name in COMPUTED.get(module, ())}
    return found


GRAPH = graph()


def test_the_measure_measures():
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import grpo_async\n"
    assert not list(imports(text))
    lazy = "def f():\n    from runtime.engines import fleet\n"
    lazy += "    return 'policy.sync.receiver.WeightReceiver'\n"
    assert set(imports(lazy)) == {
        Import("runtime.engines.fleet", True),
        Import("policy.sync.receiver", True),
    }
    assert set(imports("from envs import Reward")) == {Import("envs", False)}
    assert (
        len(GRAPH) > 120 and Import("policy.sync.receiver", True) in GRAPH["runtime.engines.engine"]
    )
    assert Import("envs.maths.math", True) in GRAPH["envs.registry"]


def test_every_computed_import_is_listed():
    texts = {module: (ROOT / path).read_text() for module, path in MODULES.items()}
    assert {m for m, text in texts.items() if "importlib.import_module(" in text} == {*COMPUTED}
    assert not [m for m, text in texts.items() if "__import__" in text]


def test_no_files_import_each_other_in_a_circle():
    needs = {module: {i.name for i in found} for module, found in GRAPH.items()}
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_no_import_runs_up():
    up = [
        f"{module} -> {i.name}"
        for module, found in GRAPH.items()
        for i in found
        if FLOOR[module.partition(".")[0]] < FLOOR[i.name.partition(".")[0]]
    ]
    assert not up, up


def test_a_family_of_environments_uses_no_other_one_but_by_its_helpers():
    """Mechanisms and what all share do not know the families, which the registry finds."""
    families = {module.split(".")[1] for module, path in MODULES.items() if serves(path)}
    assert {"maths", "swe", "gym"} <= families and not {"rollout", "judge"} & families
    wrong = [
        f"{module} -> {i.name}"
        for module, found in GRAPH.items()
        for i in found
        if module.startswith("envs.") and module.split(".")[1] not in families
        if i.name.startswith("envs.") and [*i.name.split("."), ""][1] in families
        if module not in ("envs.registry", "envs.check_rows", "envs.__main__")
    ]
    assert not wrong, wrong


def loaded(entry: str) -> list[str]:
    """The project's files that `import ENTRY` really loads, in a process of its own."""
    code = f"import sys, {entry}; print(*(getattr(m, '__file__', 0) for m in sys.modules.values()))"
    out = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True)
    own = {path.removeprefix(f"{ROOT}/") for path in out.split() if path.startswith(f"{ROOT}/")}
    return sorted(own & set(FILES))


def test_pairs_need_no_engine_judge_sandbox_or_parser():
    needless = ("engine", "judge", "sandbox", "parsers", "sampler", "dispatch", "fleet", "drafts")
    assert not [path for path in loaded("dpo") if any(word in path for word in needless)]


ALGORITHM = """
import sys
sys.modules |= dict.fromkeys(("ray", "vllm", "megatron"))
import numpy as np, torch
from support.samples import make_sample
from grpo_async import Config, Group, RolloutBuffer, group_advantages, pack, plan_step, policy_loss
cfg = Config(prompts_per_step=1)
assert group_advantages(torch.tensor([1.0, 0.0]), cfg.advantage).tolist() == [1.0, -1.0]
samples = [make_sample(np.random.default_rng(i), 9) for i in range(2)]
buffer = RolloutBuffer(1, 1)
buffer.start(0)
buffer.put(Group(0, 0, 1, [sample.info() for sample in samples], samples))
(share,) = plan_step(buffer.take(0), cfg)
(update,) = share.updates
batch = pack([samples[j] for _, j in update.rows[0]], update, cfg)
assert policy_loss(-torch.ones(len(batch.tokens_T)), batch, cfg).loss.isfinite()
"""


def test_algorithm_packing_and_buffer_need_torch_alone():
    done = ran(sys.executable, "-c", ALGORITHM, env={"PYTHONPATH": f"{ROOT}/tests"})
    assert done.returncode == 0, done.stderr
