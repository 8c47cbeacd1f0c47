"""The house: imports run one way, stand at the top, and know no environment but by the registry."""

import ast
import re
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

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
REGISTRY = "envs.registry"
BY_NAME = "a string"  # where a library imports the module, as vLLM does
COMPUTED_NAME = "a computed name"


class Import(NamedTuple):
    """One module needs another; `function` says where it is imported, "" at the top of the file."""

    name: str
    function: str = ""


def known(name: str) -> str:
    """The module of the project that a dotted name is, or is in; "" if it is another's."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name


def named(node: ast.AST) -> Iterator[str]:
    """The modules that a node imports, ours or not."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield known(alias.name) or alias.name
    elif isinstance(node, ast.ImportFrom) and node.module:
        for alias in node.names:
            yield known(f"{node.module}.{alias.name}") or node.module


def imports(text: str) -> Iterator[Import]:
    """All imports of a file except those for types alone."""
    for top in ast.parse(text).body:
        if isinstance(top, ast.If) and "TYPE_CHECKING" in ast.unparse(top.test):
            continue
        at_top = isinstance(top, ast.Import | ast.ImportFrom | ast.If | ast.Try)
        function = "" if at_top else getattr(top, "name", "a statement")
        for node in ast.walk(top):
            yield from (Import(name, function) for name in named(node))
            is_class = isinstance(node, ast.Constant) and CLASS.fullmatch(str(node.value))
            if is_class and (name := known(node.value)):
                yield Import(name, BY_NAME)


def serves(path: str) -> bool:
    """Whether a file is an environment."""
    text = (ROOT / path).read_text(encoding="utf-8")
    return path.startswith("envs/") and bool(re.search("^AGENTS", text, re.M))


FAMILIES = {module.split(".")[1] for module, path in MODULES.items() if serves(path)}


def is_family(module: str) -> bool:
    """Whether a module is of a family of environments, not a mechanism that families share."""
    return module.startswith("envs.") and module.split(".")[1] in FAMILIES


# Modules that call importlib.import_module with a computed name, and what of ours that may be.
COMPUTED = {
    REGISTRY: [module for module in MODULES if is_family(module)],
    "envs.sandbox.interpreter": [],  # libraries
    "prep.swe_tables": [],  # packages of data sets
    "launch.submit_check": ["grpo_async", "dpo", "mopd"],  # which its command line names
    "grpo_async": [],  # itself
    "dpo": [],
    "mopd": [],
}


def graph() -> dict[str, set[Import]]:
    """The imports of each module, of ours and of others."""
    found: dict[str, set[Import]] = defaultdict(set)
    for module, path in MODULES.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        found[module] = {i for i in imports(text) if i.name != module}
        found[module] |= {Import(name, COMPUTED_NAME) for name in COMPUTED.get(module, ())}
    return found


GRAPH = graph()
OURS = {module: {i for i in found if i.name in MODULES} for module, found in GRAPH.items()}


def test_the_measure_measures():
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import grpo_async\n"
    assert set(imports(text)) == {Import("typing")}
    lazy = "def f():\n    from runtime.engines import fleet\n"
    lazy += "    return 'policy.sync.receiver.WeightReceiver'\n"
    expected = {Import("runtime.engines.fleet", "f"), Import("policy.sync.receiver", BY_NAME)}
    assert set(imports(lazy)) == expected
    assert set(imports("from envs import Reward")) == {Import("envs")}
    assert len(OURS) > 120 and "policy.sync.receiver" in {
        i.name for i in OURS["runtime.engines.engine"]
    }
    assert {"maths", "swe", "gym"} <= FAMILIES and not {"judge", "sandbox"} & FAMILIES


def test_every_computed_import_is_listed():
    texts = {module: (ROOT / path).read_text() for module, path in MODULES.items()}
    assert {m for m, text in texts.items() if "importlib.import_module(" in text} == {*COMPUTED}
    assert not [m for m, text in texts.items() if "__import__" in text]


def test_no_files_import_each_other_in_a_circle():
    needs = {module: {i.name for i in found} for module, found in OURS.items()}
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_no_import_runs_up():
    up = [
        f"{module} -> {i.name}"
        for module, found in OURS.items()
        for i in found
        if FLOOR[module.partition(".")[0]] < FLOOR[i.name.partition(".")[0]]
        if i.function != COMPUTED_NAME
    ]
    assert not up, up


def test_no_two_files_have_one_name():
    """Besides __init__.py and the configurations of other machines."""
    homes = defaultdict(list)
    for path in [*FILES, *(p.name for p in (ROOT / "configs").glob("*.py"))]:
        if not path.endswith(("__init__.py", "__main__.py")):
            homes[Path(path).name].append(path)
    assert not {name: paths for name, paths in homes.items() if len(paths) > 1}


# --- rule A: the core reaches no environment but through the registry -----------------------------


def reached(module: str, without: str) -> dict[str, str]:
    """All modules that one needs in the end, each with a module that imports it."""
    found = {module: ""}
    todo = [module]
    while todo:
        at = todo.pop()
        if at == without:
            continue
        for name in {i.name for i in OURS[at]} - found.keys():
            found[name] = at
            todo.append(name)
    return found


CORE = ("core", "settings", "policy", "rollout", "runtime", "prep", "dry_run")


@pytest.mark.parametrize("module", [m for m in MODULES if "." not in m or m.startswith(CORE)])
def test_the_core_reaches_no_family_of_environments_but_by_the_registry(module):
    found = reached(module, without=REGISTRY)
    assert not {name: by for name, by in found.items() if is_family(name)}


def test_a_mechanism_uses_no_family_and_a_family_no_other_one_but_by_its_helpers():
    wrong = [
        f"{module} -> {i.name}"
        for module, found in OURS.items()
        for i in found
        if module.startswith("envs.") and not is_family(module) and is_family(i.name)
        if module != REGISTRY
    ]
    assert not wrong, wrong


# --- rule B: an import inside a function brings a library -----------------------------------------


def libraries(module: str) -> set[str]:
    """The third-party libraries that `import MODULE` loads, by the imports at the top of files."""
    seen: set[str] = set()
    todo = [module]
    while todo:
        at = todo.pop()
        if at not in seen:
            seen.add(at)
            todo += [i.name for i in GRAPH[at] if not i.function]
            if at in MODULES:
                parents = [at.rsplit(".", i)[0] for i in range(1, at.count(".") + 1)]
                todo += [parent for parent in parents if parent in MODULES]
    own = {*MODULES}
    return {name.partition(".")[0] for name in seen - own} - sys.stdlib_module_names


@pytest.mark.parametrize("module", MODULES)
def test_an_import_inside_a_function_brings_a_library_that_its_file_lacks(module):
    """`main` is exempt: a program begins there, and may end before it needs most of them."""
    has = libraries(module)
    free = ("", "main", BY_NAME, COMPUTED_NAME)
    inside = {i for i in OURS[module] if i.function not in free}
    needless = sorted(i for i in inside if libraries(i.name) <= has)
    assert not needless, needless


# --- rule D: a variant is one file ----------------------------------------------------------------


def test_a_fork_touches_one_file_and_few_lines():
    diffs = {path.name: path.read_text() for path in sorted((ROOT / "docs/forks").glob("*.diff"))}
    files = {name: len(re.findall(r"^--- ", text, re.M)) for name, text in diffs.items()}
    lines = {
        name: len(re.findall(r"^[+-](?!\+\+ |-- )", text, re.M)) for name, text in diffs.items()
    }
    assert len(diffs) >= 20
    assert sum(count == 1 for count in files.values()) >= 0.95 * len(files), files
    assert statistics.median(lines.values()) <= 12 and max(lines.values()) <= 70, lines


# --- the algorithm needs torch alone --------------------------------------------------------------


def loaded(entry: str) -> list[str]:
    """The project's files that `import ENTRY` really loads, in a process of its own."""
    code = f"import sys, {entry}; print(*(getattr(m, '__file__', 0) for m in sys.modules.values()))"
    out = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True)
    own = {path.removeprefix(f"{ROOT}/") for path in out.split() if path.startswith(f"{ROOT}/")}
    return sorted(own & set(FILES))


def test_pairs_need_no_engine_judge_sandbox_or_parser():
    needless = ("/engines/", "judge", "sandbox", "parsers", "sampler", "/rollouts/", "drafts")
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
