"""The commands of the guides, as the pages write them, in their dry form.

They run in a copy of the project, one page after the other, beside stand-ins for what is not here:
sbatch, docker and the like only note that they were called, data sets lie in the hub's cache, and
the model of Super has its published tensors, whose bytes are holes in a file.
"""

import csv
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch import judges
from support import blends, forked_python, issues, shapes, verifiers
from support.program import ROOT, copy, ran

PAGES = ("data", "cluster", "judges", "swe", "recipe", "ultra")
LONG = ("recipe", "ultra")  # a dry run of each stage; test_recipe.py reads each configuration
# What is not run here, and the test that does.
ELSEWHERE = {
    "data_prep.py profile": "prep/test_profile.py",
    "data_prep.py tool_pairs": "prep/test_tool_pairs.py",
    "bench/gpu_first_hour.sh": "bench/test_first_hour.py",
    "vllm serve": "launch/test_judge_protocol.py",
    "runtime.checkpoints.lineage": "runtime/checkpoints/test_lineage.py",
    "launch/setup.sh": "launch/test_setup.py",
    "launch/fetch_judges.py": "launch/test_fetch_judges.py",
    "launch/judge_prompts.py": "launch/test_judge_prompts.py",
    "launch/attach.sh": "test_slurm.py",
    "data_prep.py pivot": "prep/test_pivot.py",
    "data_prep.py model": "prep/test_model_folder.py",
    "--check": "prep/test_swe_rows.py",
    ".venv-swe": "prep/test_swe_rows.py",
}
STAGES = ("rlvr1", "rlvr2", "rlvr3", "swe1", "swe2", "rlhf")
ULTRA = ("rlvr1", "rlvr2", "ifbench", "rlhf", "reasoning", "swe", "mopd")
IN_HUB = {  # the folder that stands for each
    "nvidia/Nemotron-RL-Super-Training-Blends": "SUPER",
    "nvidia/Nemotron-RL-Ultra-Training-Blends": "ULTRA",
    "nvidia/Nemotron-3-Nano-RL-Training-Blend": "NANO",
    "BytedTsinghua-SIA/DAPO-Math-17k": "ORIGINALS/DAPO-Math-17k",
    "Skywork/Skywork-OR1-RL-Data": "ORIGINALS/Skywork/Skywork-OR1-RL-Data",
    "ORG/NAME": "OWN",
    "R2E-Gym/R2E-Gym-Subset": "R2E",
    "SWE-Gym/SWE-Gym": "R2E",
}
NOTE = """#!/bin/bash
echo "$(basename "$0") $*" >>"$CALLED"
while [ $# -gt 0 ]; do [ "$1" != --output ] || touch "$2"; shift; done
"""
DISK = """
import shutil
shutil.disk_usage = lambda path, real=shutil.disk_usage: real(path)._replace(free=1 << 50)
"""  # of a cluster, for checkpoints that would take terabytes
PROGRAMS = ("sbatch", "squeue", "scancel", "srun", "docker", "enroot", "git")


def scripts(page: str) -> list[str]:
    """What a page has one type: its blocks, and the commands in cells of its tables."""
    text = (ROOT / f"docs/{page}.md").read_text(encoding="utf-8")
    cells = re.findall(r"`((?:EXP_NAME=|python )[^`]+)`", text)
    blocks = re.findall(r"^```bash\n(.*?)^```$", text, re.M | re.S)
    return [*blocks, *dict.fromkeys(cells)]


def dry(script: str, place: Path) -> str:
    """It starts nothing: programs get their flag, and scripts look at DRY_RUN.

    A dry run may name what this machine lacks, such as Lean, but must print its whole table.
    """
    lines = re.sub(r"\s*\\\n\s*", " ", script).split("\n")
    kept = [line for line in lines if not any(name in line for name in ELSEWHERE)]
    for i, line in enumerate(kept):
        if "grpo_async.py" not in line:
            continue
        if "--dry_run" not in line:
            line = line.replace("grpo_async.py", "grpo_async.py --dry_run", 1)
        kept[i] = f'told=$({line}\n) || grep "^PROBLEM: " <<<"$told"'
    return "\n".join(kept).replace("/shared/", f"{place}/")


def write(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def in_hub(home: Path, name: str, made: Path) -> None:
    """A folder as a data set in the hub's cache."""
    folder = home / "hub" / f"datasets--{name.replace('/', '--')}"
    for part in ("refs", "snapshots"):
        (folder / part).mkdir(parents=True)
    (folder / "refs/main").write_text("abc")
    (folder / "snapshots/abc").symlink_to(made)


@pytest.fixture(scope="module")
def place(tmp_path_factory, chat_model) -> Path:
    """A copy of the project with the data and the models that the pages name."""
    root = copy(tmp_path_factory.mktemp("place") / "grpo_async")
    for name in PROGRAMS:
        (root / "programs").mkdir(exist_ok=True)
        (root / "programs" / name).write_text(NOTE)
        (root / "programs" / name).chmod(0o755)
    (root / "programs/sitecustomize.py").write_text(DISK)
    rows = [blends.math_row(i) for i in range(120)]
    for stage in STAGES:
        real = verifiers.of_blend(stage.rstrip("123") if "rlvr" in stage else stage)
        real = [issues.published()] if stage == "swe2" else real
        write(root / f"SUPER/{stage}.jsonl", real * (1 + 120 // len(real)))
    for stage in ULTRA:
        real = verifiers.of_blend(f"ultra_{stage.rstrip('12')}")
        real = [issues.published()] if stage == "swe" else real
        write(root / f"ULTRA/{stage}.jsonl", real * (1 + 120 // len(real)))
    write(root / "NANO/train.jsonl", rows * 10)
    asked = {"prompt": [{"content": "1 + 1?"}], "reward_model": {"ground_truth": "2"}}
    write(root / "OWN/train.jsonl", [asked])
    write(root / "R2E/train.jsonl", [issues.R2E])
    (root / "list.txt").write_text("IMAGE OWNER/NAME\n")
    for name in ("rlvr1", "a", "b"):
        write(root / f"FOLDER/{name}.jsonl", [*rows, *blends.placeholders()])
    blends.write_sources(root / "ORIGINALS")
    for name, folder in IN_HUB.items():
        in_hub(root / "home", name, root / folder)
    write(root / "tasks.jsonl", rows[:3])
    shutil.copy(root / "configs/gsm8k.py", root / "CONFIG")
    (root / "MODEL").symlink_to(chat_model)
    with open(root / "questions.csv", "w", newline="") as file:
        csv.writer(file).writerows([("question", "answer"), ("1 + 1?", "2")])
    write(root / "profiled.jsonl", [row | {"pass_rate": i / 120} for i, row in enumerate(rows)])
    for model in ("models/super_sft", "models/nano_sft", "models/ultra_sft"):
        shapes.write_checkpoint(model, root / model, chat_model)
    write(root / "data/aime25.jsonl", rows[:3])
    for stage, steps in zip(STAGES, (540, 605, 415, 795, 80, 195), strict=True):
        model = root / f"runs/{stage}/step_{steps:06d}/hf"
        model.parent.mkdir(parents=True)
        model.symlink_to(root / "models/super_sft")
    made = (("rlvr", 178), ("ifbench", 100), ("rlhf", 100), ("reasoning", 100), ("swe", 960))
    for stage, steps in made:
        model = root / f"runs/ultra_{stage}/step_{steps:06d}/hf"
        model.parent.mkdir(parents=True)
        model.symlink_to(root / "models/ultra_sft")
    return root


@pytest.fixture(scope="module")
def env(place) -> Iterator[dict[str, str]]:
    """What a shell has set there; its Python has its libraries imported already."""
    path = f"{place}/programs:{place}/.venv/bin:{os.environ['PATH']}"
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH"))}
    env = kept | {"PATH": path, "DRY_RUN": "true", "CALLED": str(place / "called")}
    env |= {"HF_HOME": str(place / "home"), "HF_HUB_OFFLINE": "1"}
    env |= {"SLURM_PARTITION": "batch", "SLURM_ACCOUNT": "me"}
    env["PYTHONPATH"] = str(place / "programs")
    for file in (ROOT / "launch/judges").glob("*.txt"):  # as launch/fetch_judges.py leaves them
        for judge in judges.read(str(file), 8):
            cached = place / "home/hub" / f"models--{judge.model.replace('/', '--')}/snapshots/a"
            cached.mkdir(parents=True, exist_ok=True)
            (cached / "config.json").write_text("{}")
    (place / ".venv/bin").mkdir(parents=True)
    with forked_python.python(place / ".venv/bin/python", env):
        yield env


def marked(pages: tuple[str, ...]) -> list:
    """The pages as parameters: those that take minutes are long."""
    return [pytest.param(page, marks=[pytest.mark.long] * (page in LONG)) for page in pages]


@pytest.mark.e2e  # so that it is not left over at the end
@pytest.mark.xdist_group("the pages")
@pytest.mark.parametrize("page", marked(PAGES))
def test_every_command_of_a_page_is_taken(page, place, env):
    refused = []
    for script in scripts(page):
        done = ran("bash", "-euo", "pipefail", "-c", dry(script, place), root=place, env=env)
        if done.returncode:
            refused.append(f"{script}\n{(done.stdout + done.stderr)[-1500:]}")
    assert not refused, "\n\n".join(refused)


def test_what_is_tried_elsewhere_is():
    for name, test in ELSEWHERE.items():
        assert any(name in script for page in PAGES for script in scripts(page)), name
        assert (ROOT / "tests" / test).is_file(), test
