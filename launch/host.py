"""Checks a run before it is submitted, on a machine that has nothing but Python 3.11.

    python3 launch/host.py --config configs/rlvr1.py --model models/super_sft --data.train ...

Takes the arguments of grpo_async.py, or of the program that GRPO_PROGRAM names. launch/submit.sh
calls it if CONTAINER names an image and the machine has no .venv: launch/submit_check.py, which
needs the project's libraries, then runs only in the job. From the configuration and the flags, this
script reads the settings that decide how many nodes the job has and when Slurm warns it. Rows must
be JSON objects, the model must be a folder with config.json, and the disk must have room.
"""

import json
import math
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, TypedDict, TypeVar

sys.path.insert(0, str(Path(__file__).parent.parent))
from core.errors import InputError
from runtime.processes.placement import shares
from settings import merging

ROOT = Path(__file__).parent.parent
FREE = 5.0  # checkpoint bytes per byte of the model's files
NODE_GPUS = 8
USED: dict[str, int | float | str] = {  # settings that matter here, and their defaults
    "run_dir": "runs/{time}",
    "model": "models/tiny",
    "data.train": "data/tiny/train.jsonl",
    "data.val": "",
    "policy.ranks": 1,
    "engine.count": 1,
    "engine.tensor_parallel": 1,
    "gpu_share": 1.0,
    "keep_last": 2,
    "steps": 1000,
    "save_period": 100,
    "save_before": 0,
}
Settings = TypedDict(
    "Settings",
    {
        "run_dir": str,
        "model": str,
        "data.train": str,
        "data.val": str,
        "policy.ranks": int,
        "engine.count": int,
        "engine.tensor_parallel": int,
        "gpu_share": float,
        "keep_last": int,
        "steps": int,
        "save_period": int,
        "save_before": int,
        "teacher_ranks": int,  # ranks of all teachers
    },
)
Value = TypeVar("Value", bound=int | float | str)


class Saving(Protocol):
    """The settings that decide how much disk a run takes."""

    run_dir: str
    model: str
    keep_last: int
    steps: int
    save_period: int


def settings(argv: list[str]) -> Settings:
    """Reads the settings that matter here from the configuration, overridden by the flags.

    Raises InputError for a value of the wrong type. Other settings are read in the job.
    """
    flags = dict(pairs(argv))
    path = Path(flags.get("config", ""))
    if not path.is_file():
        raise InputError(f"--config {path}: expected a file")
    written = merging.written(path)
    found = {}
    for name, default in USED.items():
        group, _, field = name.rpartition(".")
        values = written.get(group, {}) if group else written
        if not isinstance(values, dict):
            raise InputError(f"{path}: {group} = {values!r}: expected a dictionary")
        value = flags.get(name, values.get(field, default))
        least = 0 if name in ("save_before", "save_period") else 1
        taken = read(value, default, least)
        if taken is None:
            where = "the command line" if name in flags else path
            kinds = {
                int: f"a whole number, {least} or more",
                float: "a number above 0 and at most 1",
                str: "a text",
            }
            raise InputError(f"{where}: {name} = {value!r}: expected {kinds[type(default)]}")
        found[name] = taken
    return Settings(**found, teacher_ranks=teacher_ranks(written, flags))


def teacher_ranks(written: dict[str, Any], flags: dict[str, str]) -> int:
    """Counts the ranks of all teachers.

    Teachers with the same checkpoint share ranks, as does a teacher that is placed next to another.
    Raises InputError if a flag is not JSON, or a value is not a dictionary.
    """
    names = ("teachers", "teacher_layouts", "teacher_beside", "teacher_policy")
    values = []
    for name in names:
        try:
            values.append(written.get(name, {}) | json.loads(flags.get(name, "{}")))
        except (ValueError, TypeError):
            raise InputError(
                f"{name}: expected a dictionary, or JSON on the command line"
            ) from None
    teachers, layouts, beside, policy = values
    usual = flags.get("teacher_policy.ranks", policy.get("ranks", 1))
    firsts = {path: name for name, path in reversed(teachers.items())}
    found = 0
    for host in firsts.values():
        layout = layouts.get(host, {})
        if host in beside or not isinstance(layout, dict):
            continue  # the job refuses a value that is not a layout
        ranks = read(layout.get("ranks", usual), 1, 1)
        if ranks is None:
            raise InputError(f"ranks of the teacher {host!r}: expected a whole number, 1 or more")
        found += ranks
    return found


def read(value: Any, default: Value, least: int) -> Value | None:
    """Converts a value to its default's type; None if it has a wrong type or is out of range."""
    if isinstance(default, str):
        return value if isinstance(value, str) else None
    try:
        taken = type(default)(value)
        fits = least <= taken if isinstance(default, int) else 0 < taken <= 1
        return taken if fits and taken == float(value) else None
    except (TypeError, ValueError, OverflowError):
        return None


def pairs(argv: list[str]) -> Iterator[tuple[str, str]]:
    """Yields flags with their values, of the form `--name value` or `--name=value`.

    Raises InputError for a flag that is given twice.
    """
    words = [word for word in argv if word.startswith("--")]
    names = Counter(word.partition("=")[0].replace("-", "_") for word in words)
    for name, count in names.items():
        if count > 1:
            raise InputError(f"--{name.lstrip('_')} is given {count} times, expected once")
    for word, after in zip(argv, [*argv[1:], ""], strict=True):
        name, has_value, value = word.removeprefix("--").partition("=")
        if word.startswith("--"):
            yield name.replace("-", "_"), value if has_value else after


def gpus(cfg: Settings, has_engines: bool) -> int:
    """Counts GPUs for engines, trainers and teachers as runtime/processes/placement.py does."""
    size = cfg["engine.tensor_parallel"]
    workers = cfg["engine.count"] * size * has_engines
    demand = SimpleNamespace(engine_gpus=size, share=cfg["gpu_share"])
    share = shares(SimpleNamespace(demand=demand))
    ranks = cfg["policy.ranks"]
    own = ranks + math.ceil(max(0, workers - ranks * share.beside) / share.alone)
    return own + cfg["teacher_ranks"]


def count(path: str) -> int:
    """Counts a file's rows. Raises InputError naming the file and line if a row is malformed."""
    rows = 0
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.isspace():
                    continue
                if not isinstance(json.loads(line), dict):
                    raise InputError(f"{path}:{number}: expected a JSON object")
                rows += 1
    except OSError as error:
        raise InputError(f"{path}: expected a JSONL file: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}:{number}: expected JSON: {error}") from None
    if not rows:
        raise InputError(f"{path}: holds no rows, expected at least one")
    return rows


def disk(cfg: Saving) -> Iterator[str]:
    """Room for checkpoints; their size is estimated from the model's files.

    Each save leaves an export, which its owner may delete. Prints a note if the exports do not fit.
    """
    there = next(path for path in (Path(cfg.run_dir), *Path(cfg.run_dir).parents) if path.exists())
    free = shutil.disk_usage(there).free
    model = sum(path.stat().st_size for path in Path(cfg.model).glob("*.safetensors"))
    needed = int(FREE * model * (cfg.keep_last + 1))
    if free < needed:
        yield (
            f"{there}: {free >> 30} GiB are free, but {cfg.keep_last + 1} checkpoints need "
            f"{needed >> 30}: free some space, or lower keep_last"
        )
    saves = math.ceil(cfg.steps / (cfg.save_period or cfg.steps))
    left = saves - len(list(Path(cfg.run_dir).glob("step_*/hf")))
    if needed <= free < needed + left * model:
        print(
            f"note: {there}: {left} exports of {model >> 30} GiB stay, but {free - needed >> 30} "
            "GiB are left: delete exports during the run if no stage needs them"
        )


def main(argv: list[str]) -> None:
    """Prints what was checked, and sbatch's flags. Raises InputError if a check fails."""
    cfg = settings(argv)
    program = ROOT / os.environ.get("GRPO_PROGRAM", "grpo_async.py")
    if not program.is_file() or program.parent != ROOT:
        raise InputError(f"GRPO_PROGRAM = {program.name!r}: expected a file next to grpo_async.py")
    if not Path(cfg["model"], "config.json").is_file():
        raise InputError(f"model = {cfg['model']!r}: expected a folder that holds config.json")
    if not cfg["save_before"]:
        raise InputError(
            "save_before = 0: the dry run, which estimates the seconds of a step, runs only in "
            "the job: set SAVE_BEFORE"
        )
    rows = [count(path) for path in (cfg["data.train"], cfg["data.val"]) if path]
    for problem in disk(SimpleNamespace(**cfg)):
        raise InputError(problem)
    taken = gpus(cfg, "load_pairs" not in program.read_text(encoding="utf-8"))
    evaluation = f", {rows[1]:,} for evaluation" if rows[1:] else ""
    print(f"ok: {cfg['model']}, {rows[0]:,} rows{evaluation}; the dry run follows in the job")
    print(f"  GPUs: {taken}, save_before {cfg['save_before']}")
    nodes = math.ceil(taken / NODE_GPUS)
    here = min(taken, NODE_GPUS)
    seconds = min(65535, cfg["save_before"])  # Slurm accepts 16 bits
    print(f"  --nodes={nodes} --ntasks-per-node=1 --gpus-per-node={here} --signal=B:USR1@{seconds}")


if __name__ == "__main__":
    main(sys.argv[1:])
