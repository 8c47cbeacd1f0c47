"""Commits checkpoint folders whole or not at all: written aside, flushed, renamed, marked last."""

import json
import math
import os
import re
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path

MARKER = "complete.json"
REPLACED = ".replaced"  # added to the name of a checkpoint while a new one takes its place
EXPORT = "hf/"
BLOCK = 1 << 24


def crc32(path: Path) -> int:
    """Returns the CRC-32 of a file, in O(1) memory."""
    value = 0
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            value = zlib.crc32(block, value)
    return value


def listing(folder: str) -> list[str]:
    """Returns the relative names of the files that this process sees below a folder."""
    files = (path for path in Path(folder).rglob("*") if path.is_file())
    return [str(path.relative_to(folder)) for path in files]


def split(listings: Sequence[Sequence[str]]) -> list[list[str]]:
    """Chooses the files that each rank flushes: each file once, by a rank that sees it.

    On a shared file system a rank may still see the folder without the others' newest files.
    """
    seen = [set(names) for names in listings]
    parts: list[list[str]] = [[] for _ in seen]
    for i, name in enumerate(sorted(set().union(*seen))):
        ranks = [rank for rank, names in enumerate(seen) if name in names]
        parts[ranks[i % len(ranks)]].append(name)
    return parts


def checksums(folder: str, names: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Flushes files below a folder; returns the size and CRC-32 of each by its relative name."""
    paths = {name: Path(folder, name) for name in names}
    for path in paths.values():
        flush(path)
        flush(path.parent)
    return {name: (path.stat().st_size, crc32(path)) for name, path in paths.items()}


def flush(path: Path) -> None:
    """Calls fsync on a file or a folder. Raises OSError, naming it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(handle)


def commit(aside: str, folder: str, files: dict[str, tuple[int, int]]) -> None:
    """Renames a written folder to its final name, then marks it; both are flushed.

    The export gets its own marker because it stays when the rest is deleted. If there is a
    checkpoint of that name, it stays whole under another one until the new one is marked.
    """
    export = {name.removeprefix(EXPORT): files[name] for name in files if name.startswith(EXPORT)}
    mark(f"{aside}/{EXPORT}", export)
    older = Path(folder + REPLACED)
    if Path(folder, MARKER).exists():
        remove(older)  # left by an attempt that failed after it had marked its folder
        os.rename(folder, older)
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(aside, folder)
    mark(folder, {name: sums for name, sums in files.items() if not name.startswith(EXPORT)})
    flush(Path(folder).parent)
    if older.exists():
        remove(older)


def mark(folder: str, files: dict[str, tuple[int, int]]) -> None:
    """Writes the marker of a folder whose files are flushed and whole."""
    marker = Path(folder) / f"{MARKER}.partial"
    marker.write_text(json.dumps(files, indent=1))
    flush(marker)
    marker.rename(marker.with_name(MARKER))
    flush(Path(folder))


def remove(folder: Path) -> None:
    """Deletes a checkpoint, its markers first, so that it never looks complete while it is not."""
    for marker in (folder / MARKER, folder / EXPORT / MARKER):
        marker.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def put_back(run_dir: str) -> None:
    """Gives each checkpoint its name back if the process that was to replace it was killed."""
    for older in Path(run_dir).glob(f"step_*{REPLACED}"):
        folder = older.with_suffix("")
        if (folder / MARKER).exists():
            remove(older)
        else:
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(older, folder)


def step_of(folder: Path) -> int:
    """Returns the step of a folder named like step_000100; -1 for any other name.

    While the checkpoint is being replaced, its name is step_000100.replaced.
    """
    match = re.fullmatch(r"step_(\d+)", folder.name.removesuffix(REPLACED))
    return int(match[1]) if match else -1


def newest_first(run_dir: str) -> list[Path]:
    """Returns the checkpoint folders of a run that have a marker, newest first."""
    folders = sorted(path.parent for path in Path(run_dir).glob(f"step_*/{MARKER}"))
    # Of two with the same step, the one that has been replaced stays behind the other.
    return sorted(folders, key=step_of, reverse=True)


def damage(folder: str, part: int = 0, parts: int = 1, largest: float = math.inf) -> str:
    """Describes the first damaged file of a checkpoint; "" if all checked files are whole.

    Checks every `parts`-th file, from number `part` on. For files of more than `largest` bytes,
    only the size is compared. A file that cannot be read counts as damaged: an older checkpoint may
    be whole.
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
    """Describes the damage to a model that a run exported, with a marker; "" for other models."""
    if not Path(model, MARKER).is_file():
        return ""
    found = damage(model, part, parts, largest)
    if not found:
        return ""
    return f"{found}; delete {MARKER} to use a model that you changed"


def exported_before(run_dir: str, step: int) -> list[Path]:
    """Returns the folders of steps below this one that hold an exported model, newest first."""
    folders = [path.parents[1] for path in Path(run_dir).glob(f"step_*/{EXPORT}{MARKER}")]
    return sorted((f for f in folders if 0 <= step_of(f) < step), key=step_of, reverse=True)


def prune(run_dir: str, keep: int, exports: int = 0) -> list[str]:
    """Deletes what resuming needs from all but the newest `keep` checkpoints; hf/ stays.

    If `exports` is not 0, only that many of the newest keep it. Also removes the remains of
    abandoned or half-deleted checkpoints. A checkpoint whose export is damaged is kept, as the only
    copy of its policy. Returns a description of each damaged export.
    """
    kept = newest_first(run_dir)[:keep]
    surplus = exported_before(run_dir, step_of(kept[0]) + 1)[exports:] if exports else []
    problems = []
    for folder in Path(run_dir).glob("step_*"):
        if step_of(folder) < 0 or folder in kept:
            continue
        if folder in surplus:
            remove(folder)
            continue
        export = folder / EXPORT
        marked = (folder / MARKER).exists() and (export / MARKER).exists()
        if marked and (problem := damage(str(export))):
            problems.append(problem)
            continue
        # First, so that a half-deleted checkpoint does not look complete.
        (folder / MARKER).unlink(missing_ok=True)
        for path in folder.iterdir():
            if path.name == "hf":
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        if not any(folder.iterdir()):
            folder.rmdir()
    return problems
