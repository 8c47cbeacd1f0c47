"""Where a policy comes from: run, code, settings and data of each training, back to the first.

`lineage.json` stands in the folder of a run, in each of its checkpoints, and in each exported
model. A run that begins with such a model has its lineage as `parent`, so a chain of stages is
whole in the file of the last one:

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
SAMPLED = 1 << 16  # bytes at the start and at the end of a file


def begin(cfg: TrainingSettings, start: dict) -> None:
    """Writes the lineage of a run that starts; `start` is what config.json holds of it."""
    resume = cfg.command.resume
    origin = Path(resume if resume not in ("", "auto") else cfg.model)
    trained = any(Path(cfg.writes_to).glob("step_*/complete.json"))
    goes_on = read(Path(cfg.writes_to)) if resume == "auto" and trained else {}
    data = {"train": cfg.data.train, "val": cfg.data.val}
    lineage = {
        "run": cfg.writes_to,
        "program": start["program"],
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        "commit": start["commit"],
        "changes": digest(start["diff"].encode()) if start["diff"] else "",
        "config": {name: value for name, value in start.items() if hasattr(cfg, name)},
        "data": {name: source(path) for name, path in data.items() if path},
        "parent": goes_on.get("parent") or read(origin) or identity(origin),
    }
    write(Path(cfg.writes_to), lineage)


def mark(cfg: TrainingSettings, folder: str, version: int) -> list[str]:
    """Writes the lineage of a policy version into its checkpoint, and into the export there.

    Returns the names of both files in the checkpoint.
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
    """The lineage in a folder; {} where there is none."""
    try:
        found = json.loads((folder / FILE).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and "parent" in found else {}


def source(path: str) -> dict[str, Any]:
    """A data file, and the manifest that data_prep.py wrote beside it or above it, if any."""
    places = [folder / "manifest.json" for folder in Path(path).parents[:2]]
    found = next((place.read_bytes() for place in places if place.is_file()), b"")
    return {"file": path, "manifest": digest(found) if found else ""}


def identity(folder: Path) -> dict[str, Any]:
    """A model without lineage: its path, and a digest of its files' sizes, starts and ends."""
    parts = []
    for path in sorted(path for path in folder.glob("*") if path.is_file()):
        size = path.stat().st_size
        with open(path, "rb") as file:
            start = file.read(SAMPLED)
            file.seek(max(0, size - SAMPLED))
            parts.append(f"{path.name} {size} {digest(start)} {digest(file.read())}")
    return {"model": str(folder), "digest": digest("\n".join(parts).encode())}


def digest(content: bytes) -> str:
    """The start of a SHA-256."""
    return hashlib.sha256(content).hexdigest()[:16]


def chain(lineage: dict) -> list[str]:
    """A line for each training, the last one first, and one for the model at the beginning."""
    lines = []
    while "run" in lineage:
        version = lineage.get("version", "the newest")
        data = ", ".join(
            f"{of['file']} ({'manifest ' + of['manifest'] if of['manifest'] else 'no manifest'})"
            for of in lineage["data"].values()
        )
        code = lineage["commit"][:12] or "unknown"
        changes = f" with changes {lineage['changes']}" if lineage["changes"] else ""
        place = f"{lineage['run']}, version {version}, {lineage['time']}"
        lines.append(f"{place}: commit {code}{changes}; data {data}")
        lineage = lineage["parent"]
    return [*lines, f"{lineage['model']}, digest {lineage['digest']}: no run of this program"]


def main(folder: str) -> None:
    """Prints the chain of a run, a checkpoint or an exported model. Raises InputError."""
    lineage = read(Path(folder))
    if not lineage:
        raise InputError(f"{folder}: expected a run, a checkpoint or an export with {FILE}")
    print("\n  from ".join(chain(lineage)))


if __name__ == "__main__":
    main(*sys.argv[1:] or ["."])
