"""Looks at a run before it is submitted, on a machine that has nothing but Python 3.11.

    python3 launch/host.py --config configs/rlvr1.py --model models/super_sft --data.train ...

Takes the arguments of grpo_async.py, or of the program that GRPO_PROGRAM names. launch/submit.sh
calls it where CONTAINER names an image and there is no .venv: launch/submit_check.py, which needs
the project's libraries, then runs in the job alone. Of the configuration and its flags those
settings are read here that say how many nodes the job has and when Slurm warns it. Rows must be
JSON objects, the model a folder with config.json, and the disk must have room.
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
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from core.errors import InputError
from runtime.processes.placement import shares
from settings.merging import assigned

ROOT = Path(__file__).parent.parent
FREE = 5.0  # times a checkpoint of the policy that the run folder should have room for
NODE_GPUS = 8
USED = {  # settings that count here, and their defaults
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


def settings(argv: list[str]) -> dict[str, Any]:
    """What the configuration and the flags over it make of the settings that count.

    Raises InputError for a value of another type. Other settings are read in the job.
    """
    flags = dict(pairs(argv))
    path = Path(flags.get("config", ""))
    if not path.is_file():
        raise InputError(f"--config {path}: expected a file")
    written = assigned(path)
    found = {}
    for name, default in USED.items():
        group, _, field = name.rpartition(".")
        values = written.get(group, {}) if group else written
        if not isinstance(values, dict):
            raise InputError(f"{path}: {group} = {values!r}: expected a dictionary")
        value = flags.get(name, values.get(field, default))
        least = name not in ("save_before", "save_period")
        if (taken := read(value, default, least)) is None:
            where = "the command line" if name in flags else path
            kinds = {
                int: f"a whole number, {least:d} or more",
                float: "a number above 0, 1 at most",
            }
            expected = kinds.get(type(default), "a text")
            raise InputError(f"{where}: {name} = {value!r}: expected {expected}")
        found[name] = taken
    return found | {"teacher_ranks": teacher_ranks(written, flags)}


def teacher_ranks(written: dict[str, Any], flags: dict[str, str]) -> int:
    """The ranks of all teachers: those of one checkpoint share theirs, as do those beside another.

    Raises InputError for a flag that is no JSON, or a value that is no dictionary.
    """
    names = ("teachers", "teacher_layouts", "teacher_beside", "teacher_policy")
    values = []
    for name in names:
        try:
            values.append(written.get(name, {}) | json.loads(flags.get(name, "{}")))
        except (ValueError, TypeError):
            raise InputError(f"{name}: expected a dictionary, on the command line JSON") from None
    teachers, layouts, beside, policy = values
    usual = flags.get("teacher_policy.ranks", policy.get("ranks", 1))
    firsts = {path: name for name, path in reversed(teachers.items())}
    found = 0
    for host in firsts.values():
        layout = layouts.get(host, {})
        if host in beside or not isinstance(layout, dict):
            continue  # what is no layout, the job refuses
        if (ranks := read(layout.get("ranks", usual), 1, 1)) is None:
            raise InputError(f"ranks of the teacher {host!r}: expected a whole number, 1 or more")
        found += ranks
    return found


def read(value: Any, default: Any, least: int) -> Any:
    """A value as the type of its default; None where it is of another, or out of its range."""
    if isinstance(default, str):
        return value if isinstance(value, str) else None
    try:
        taken = type(default)(value)
        fits = least <= taken if isinstance(default, int) else 0 < taken <= 1
        return taken if fits and taken == float(value) else None
    except (TypeError, ValueError, OverflowError):
        return None


def pairs(argv: list[str]) -> Iterator[tuple[str, str]]:
    """Flags with their values, of the form `--name value` or `--name=value`.

    Raises InputError for one that is given twice.
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


def gpus(cfg: dict[str, Any], has_engines: bool) -> int:
    """GPUs that engines, trainers and teachers take, as runtime/processes/placement.py counts."""
    size = cfg["engine.tensor_parallel"]
    workers = cfg["engine.count"] * size * has_engines
    demand = SimpleNamespace(engine_gpus=size, share=cfg["gpu_share"])
    share = shares(SimpleNamespace(demand=demand))
    ranks = cfg["policy.ranks"]
    own = ranks + math.ceil(max(0, workers - ranks * share.beside) / share.alone)
    return own + cfg["teacher_ranks"]


def count(path: str) -> int:
    """The rows of a file. Raises InputError, naming file and line, for one that is no object."""
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


def disk(cfg: Any) -> Iterator[str]:
    """Room for checkpoints; their size is estimated from the model's files.

    Each save leaves an export, which its owner may delete. Where those do not fit, a note says so.
    """
    there = next(path for path in (Path(cfg.run_dir), *Path(cfg.run_dir).parents) if path.exists())
    free = shutil.disk_usage(there).free
    model = sum(path.stat().st_size for path in Path(cfg.model).glob("*.safetensors"))
    needed = int(FREE * model * (cfg.keep_last + 1))
    if free < needed:
        lacking = f"{free >> 30} GiB are free, {cfg.keep_last + 1} checkpoints need {needed >> 30}"
        yield f"{there}: {lacking}: free some, or lower keep_last"
    saves = math.ceil(cfg.steps / (cfg.save_period or cfg.steps))
    left = saves - len(list(Path(cfg.run_dir).glob("step_*/hf")))
    if needed <= free < needed + left * model:
        stay = f"{left} exports of {model >> 30} GiB stay, {free - needed >> 30} GiB are left"
        print(f"note: {there}: {stay}: delete on the way those that no stage needs")


def main(argv: list[str]) -> None:
    """Prints what was looked at, and the flags of sbatch. Raises InputError."""
    cfg = settings(argv)
    program = ROOT / os.environ.get("GRPO_PROGRAM", "grpo_async.py")
    if not program.is_file() or program.parent != ROOT:
        expected = "expected a file beside grpo_async.py"
        raise InputError(f"GRPO_PROGRAM = {program.name!r}: {expected}")
    if not Path(cfg["model"], "config.json").is_file():
        raise InputError(f"model = {cfg['model']!r}: expected a folder that holds config.json")
    if not cfg["save_before"]:
        counts = "the dry run, which counts the seconds of a step, runs in the job alone"
        raise InputError(f"save_before = 0: {counts}: set SAVE_BEFORE")
    rows = [count(path) for path in (cfg["data.train"], cfg["data.val"]) if path]
    for problem in disk(SimpleNamespace(**cfg)):
        raise InputError(problem)
    taken = gpus(cfg, "load_pairs" not in program.read_text(encoding="utf-8"))
    told = ", ".join([f"{rows[0]:,} rows", *(f"{n:,} for evaluation" for n in rows[1:])])
    print(f"ok: {cfg['model']}, {told}; the dry run follows in the job")
    print(f"  GPUs: {taken}, save_before {cfg['save_before']}")
    nodes, here = math.ceil(taken / NODE_GPUS), min(taken, NODE_GPUS)
    warning = f"--signal=B:USR1@{min(65535, cfg['save_before'])}"  # Slurm takes 16 bits
    print(f"  --nodes={nodes} --ntasks-per-node=1 --gpus-per-node={here} {warning}")


if __name__ == "__main__":
    main(sys.argv[1:])
