"""Downloads the models of judges from the Hugging Face hub, before a job's servers need them.

    .venv/bin/python launch/fetch_judges.py launch/judges/rlvr.txt

The models go to HF_HOME, by default PERSISTENT_CACHE/hf, where the servers of a job look for them.
A call resumes where the last one ended. HF_TOKEN is sent to the hub if it is set.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from core.errors import InputError
from launch import judges
from settings.hub import fetched


def main(argv: list[str]) -> None:
    """Fetches each model once. Raises InputError if the file or a model cannot be had."""
    if len(argv) != 1:
        raise InputError("expected a file of judges, such as launch/judges/rlvr.txt")
    try:
        found = judges.read(argv[0], sys.maxsize)
    except ValueError as error:
        raise InputError(f"{argv[0]}: {error}") from None
    os.environ["HF_HOME"] = str(judges.hub_folder())  # before the library reads it
    models: set[str] = set()
    for judge in found:
        if judge.model in models:
            continue
        models.add(judge.model)
        folder = Path(fetched(judge.model, True, judge.name))
        if not (folder / "config.json").is_file():
            raise InputError(f"{judge.name}: {folder}: expected a folder that holds config.json")
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        print(f"{judge.name}: {judge.model}: {size / 1e9:,.1f} GB in {folder}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
