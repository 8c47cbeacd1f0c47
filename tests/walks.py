"""Counts how far a reader walks: the hops to the engine, and the files of three walks.

    python tests/walks.py           real Ray and vLLM: one minute

The hops lead from `RolloutWorker.rollout_group` to vLLM's `generate` (tests/test_walks.py checks
each of them). Then a run of the tiny model that loses an engine prints which of our files it has
entered on the walk of
- a prompt group, from `Run.fill` to the end of `Trainer.train_step`;
- a weight update to engines that serve, from `Engines.sync`, in all processes;
- an engine's death, from `Fleet.discard` until its successor has the policy, in the driver.
Some of the group's files get it, or a part of it, as an argument; the others help. For each walk it
names the functions of grpo_async.py that another file calls: there a reader returns to it.
Needs models/tiny (launch/make_tiny.py).
"""

import ast
import os
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from support.program import ROOT, Program, end

sys.path.insert(0, str(ROOT))
from grpo_async import Config
from runtime.startup import preflight

FLAGS = {"steps": 1000, "prompts_per_step": 8, "group_size": 4, "val_period": 0, "data.val": ""}
FLAGS |= {"sampling.max_response_tokens": 8, "save_period": 0, "engine.count": 2}


# Each function calls the next one; the environment is one of many turns.
HOPS = (
    ("grpo_async.py", "RolloutWorker.rollout_group"),
    ("envs/registry.py", "rollouts"),
    ("envs/workplace/workplace.py", "rollout"),
    ("rollout/sampler.py", "Sampler.chat"),
    ("rollout/sampler.py", "Sampler.generate"),
    ("rollout/drafts.py", "answers"),
    ("grpo_async.py", "Generator.generate"),
    ("grpo_async.py", "Generator.answer"),
    ("vllm", "AsyncLLM.generate"),
)


def called(file: str, function: str) -> set[str]:
    """The names that a function calls; of a call of an actor the method's."""
    tree = ast.parse((ROOT / file).read_text())
    body: list = tree.body
    for name in function.split("."):
        found = [node for node in body if getattr(node, "name", "") == name]
        if not found:
            raise LookupError(f"{file} has no {function}")
        body = found[0].body
    names = set()
    for node in ast.walk(found[0]):
        if isinstance(node, ast.Call):
            target = node.func
            if isinstance(target, ast.Attribute) and target.attr == "remote":
                target = target.value
            names.add(getattr(target, "attr", getattr(target, "id", "")))
    return names


class Call(NamedTuple):
    """A function of our files that a walk entered, and the nearest of our files that called it."""

    walk: str
    file: str
    function: str
    caller: str
    handed: str  # "1" where an argument is a group or a part of one


def trace(folder: Path) -> list[Call]:
    """The calls of a run that loses an engine and gets another."""
    walks = folder / "walks"
    walks.mkdir()
    os.environ["WALK_FOLDER"] = str(walks)
    hooks = [ROOT / "tests/support/path_trace", ROOT / "tests/cpu"]
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, hooks))
    words = [str(word) for flag in FLAGS.items() for word in (f"--{flag[0]}", flag[1])]
    words += ["--run_dir", str(folder / "run")]
    program = Program(preflight.load(Config, words, default="configs/tiny.py"))
    try:
        program.wait_until(lambda: len(program.steps()) >= 3)
        healthy = [call for call in read(walks) if call.walk in ("group", "update")]
        end(program.pids("Generator")[0])
        program.wait_until(lambda: program.steps()[-1]["engines"] == 1)
        program.wait_until(lambda: program.steps()[-1]["engines"] == 2)
    finally:
        program.stop()
    return healthy + [call for call in read(walks) if call.walk == "death"]


def read(walks: Path) -> list[Call]:
    lines = [line for path in sorted(walks.iterdir()) for line in path.read_text().splitlines()]
    return [Call(*line.split(" ")) for line in lines]


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        calls = trace(Path(name))
    print(f"{len(HOPS) - 1} hops: {' -> '.join(function for _, function in HOPS)}")
    for walk in ("group", "update", "death"):
        of_walk = [call for call in calls if call.walk == walk]
        files = sorted({call.file for call in of_walk})
        print(f"{walk}: {len(files)} files: {', '.join(files)}")
        if walk == "group":
            passed = sorted({call.file for call in of_walk if call.handed == "1"})
            print(f"  handed the group: {len(passed)} files: {', '.join(passed)}")
        back = {c.function for c in of_walk if c.file == "grpo_async.py" != c.caller}
        print(f"  into grpo_async.py: {', '.join(sorted(back))}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
