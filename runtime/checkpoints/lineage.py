"""Records the origin of a policy: run, code, settings and data of every training run behind it.

`lineage.json` is in a run's folder, in each of its checkpoints, and in each exported model. A
run that begins with such a model has that lineage as `parent`, so the file of the last stage holds
the whole chain:

    python -m runtime.checkpoints.lineage runs/rlhf/step_000100/hf
"""

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from core.errors import InputError
from settings.config import TrainingSettings

FILE = "lineage.json"
SAMPLED = 1 << 16  # bytes that are read at the start and at the end of a file


def begin(cfg: TrainingSettings, start: dict) -> None:
    """Writes the lineage of a run that starts; `start` is the content of its config.json."""
    resume = cfg.command.resume
    origin = Path(resume if resume not in ("", "auto") else cfg.model)
    trained = any(Path(cfg.writes_to).glob("step_*/complete.json"))
    resumed = read(Path(cfg.writes_to)) if resume == "auto" and trained else {}
    data = {"train": cfg.data.train, "val": cfg.data.val}
    lineage = {
        "run": cfg.writes_to,
        "program": start["program"],
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        "commit": start["commit"],
        "changes": digest(start["diff"].encode()) if start["diff"] else "",
        "config": {name: value for name, value in start.items() if hasattr(cfg, name)},
        "data": {name: source(path) for name, path in data.items() if path},
        "parent": resumed.get("parent") or read(origin) or identity(origin),
    }
    write(Path(cfg.writes_to), lineage)


def mark(cfg: TrainingSettings, folder: str, version: int) -> list[str]:
    """Writes the lineage of a policy version into its checkpoint and into the export there.

    Returns the names of the two files, relative to the checkpoint.
    """
    for place in (Path(folder), Path(folder, "hf")):
        write(place, read(Path(cfg.run_dir)) | {"version": version})
    return [FILE, f"hf/{FILE}"]


def write(folder: Path, lineage: dict) -> None:
    """Writes the file whole or not at all."""
    aside = folder / f"{FILE}.partial"
    aside.write_text(json.dumps(lineage, indent=1))
    aside.replace(folder / FILE)


def read(folder: Path) -> dict[str, Any]:
    """Reads the lineage in a folder; {} if it has none."""
    try:
        found = json.loads((folder / FILE).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and "parent" in found else {}


def source(path: str) -> dict[str, str]:
    """Describes a data file: its path, and a digest of the manifest of data_prep.py.

    The manifest is in the file's folder or in the one above; without it the digest is "".
    """
    places = [folder / "manifest.json" for folder in Path(path).parents[:2]]
    found = next((place.read_bytes() for place in places if place.is_file()), b"")
    return {"file": path, "manifest": digest(found) if found else ""}


def identity(folder: Path) -> dict[str, str]:
    """Describes a model without lineage: its path, and a digest of its files.

    The digest covers the size, the start and the end of each file.
    """
    parts = []
    for path in sorted(path for path in folder.glob("*") if path.is_file()):
        size = path.stat().st_size
        with open(path, "rb") as file:
            start = file.read(SAMPLED)
            file.seek(max(0, size - SAMPLED))
            parts.append(f"{path.name} {size} {digest(start)} {digest(file.read())}")
    return {"model": str(folder), "digest": digest("\n".join(parts).encode())}


def digest(content: bytes) -> str:
    """Returns the first 16 hexadecimal digits of a SHA-256."""
    return hashlib.sha256(content).hexdigest()[:16]


def chain(lineage: dict) -> list[str]:
    """Returns a line for each training run, last one first, and one for the initial model."""
    lines = []
    while "run" in lineage:
        version = lineage.get("version", "the newest")
        files = []
        for data in lineage["data"].values():
            manifest = f"manifest {data['manifest']}" if data["manifest"] else "no manifest"
            files.append(f"{data['file']} ({manifest})")
        commit = lineage["commit"][:12] or "unknown"
        changes = f" with changes {lineage['changes']}" if lineage["changes"] else ""
        lines.append(
            f"{lineage['run']}, version {version}, {lineage['time']}: commit {commit}{changes}; "
            f"data {', '.join(files)}"
        )
        lineage = lineage["parent"]
    return [*lines, f"{lineage['model']}, digest {lineage['digest']}: no run of this program"]


def main(folder: str) -> None:
    """Prints the chain of a run, a checkpoint or an exported model.

    Raises InputError if the folder has no lineage.
    """
    lineage = read(Path(folder))
    if not lineage:
        raise InputError(f"{folder}: expected a run, a checkpoint or an export with {FILE}")
    print("\n  from ".join(chain(lineage)))


if __name__ == "__main__":
    main(*sys.argv[1:] or ["."])
