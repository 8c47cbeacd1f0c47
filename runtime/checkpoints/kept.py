"""The checkpoints that a run has: whether one is whole, and which of them are deleted."""

import json
import math
import shutil
from pathlib import Path

from runtime.checkpoints.folders import EXPORT, MARKER, crc32, newest_first, step_of


def damage(folder: str, part: int = 0, parts: int = 1, largest: float = math.inf) -> str:
    """What is wrong with every `parts`-th file of a checkpoint; empty if nothing is.

    Files of more than `largest` bytes are judged by their size alone. A file that cannot be read is
    damaged: an older checkpoint may be whole.
    """
    path = Path(folder, MARKER)
    try:
        files = sorted((name, tuple(sizes)) for name, sizes in json.loads(path.read_text()).items())
        if {len(sizes) for _, sizes in files} != {2}:
            raise ValueError("expected the size and CRC-32 of each file")
        for name, (size, crc) in files[part::parts]:
            path = Path(folder, name)
            actual = path.stat().st_size if path.is_file() else None
            if actual != size:
                return f"{path}: {actual} bytes, expected {size}"
            if size <= largest and crc32(path) != crc:
                return f"{path}: its CRC-32 is not the one in {MARKER}"
    except (OSError, TypeError, ValueError, AttributeError) as error:
        return f"{path}: {error}"
    return ""


def flaw(model: str, part: int = 0, parts: int = 1, largest: float = math.inf) -> str:
    """`damage` of a model that a run exported, which has a marker; "" for any other model."""
    if not Path(model, MARKER).is_file():
        return ""
    found = damage(model, part, parts, largest)
    return found and f"{found}; delete {MARKER} to use a model that you changed"


def prune(run_dir: str, keep: int) -> list[str]:
    """Deletes what resuming needs from all but the newest `keep` checkpoints; hf/ stays.

    Also what is left of those that were given up, or were half deleted when their run died. One
    whose export is damaged is kept, as the only copy of its policy; returns what is wrong there.
    """
    kept = newest_first(run_dir)[:keep]
    problems = []
    for folder in Path(run_dir).glob("step_*"):
        if step_of(folder) < 0 or folder in kept:
            continue
        export = folder / EXPORT
        marked = (folder / MARKER).exists() and (export / MARKER).exists()
        if marked and (problem := damage(str(export))):
            problems.append(problem)
            continue
        (folder / MARKER).unlink(missing_ok=True)  # first: half of it must not look complete
        for path in folder.iterdir():
            if path.name == "hf":
                continue
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if not any(folder.iterdir()):
            folder.rmdir()
    return problems
