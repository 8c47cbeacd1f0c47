"""Checks a run before it is submitted, on a machine that has nothing but Python 3.11.

    python3 launch/host.py --config configs/rlvr1.py --model models/super_sft --data.train ...

Takes the arguments of grpo_async.py, or of the program that GRPO_PROGRAM names. launch/submit.sh
calls it if CONTAINER names an image and the machine has no .venv: launch/submit_check.py, which
needs the project's libraries, then runs only in the job.

Names, types and ranges of settings are read from the sources (settings/declared.py), names of other
programs from docs/from_nemo_rl.md and docs/from_trl.md, and the judges that agents need from
docs/environments.md. Rows must be JSON objects, the model must be a folder with config.json, and
the disk must have room.
"""

import difflib
import itertools
import json
import math
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).parent.parent))
from core.errors import InputError
from envs.judge import endpoints
from runtime.processes.placement import shares
from settings import conflicts, merging, names_of_other_trainers
from settings.declared import Setting, declared

ROOT = Path(__file__).parent.parent
FREE = 5.0  # checkpoint bytes per byte of the model's files
NODE_GPUS = 8
WHOLE = "a whole number, 1 or more"
# In the column "needs" of docs/environments.md.
JUDGE = re.compile(r"[Tt]he judge `(\w+)`( if `services.judges` has it)?")


class Saving(Protocol):
    """The settings that decide how much disk a run takes."""

    run_dir: str
    model: str
    keep_last: int
    steps: int
    save_period: int


def settings(argv: list[str], program: Path = ROOT / "grpo_async.py") -> dict[str, Any]:
    """Returns all settings by dotted names, and the number of ranks of all teachers.

    They come from the defaults, the configuration and the flags. Raises InputError for an unknown
    name, and for a value of the wrong type or out of its range.
    """
    known = declared(program)
    flags = read_flags(argv, known)
    path = Path(flags.get("command.config", ""))
    if not path.is_file():
        raise InputError(f"--config {path}: expected a file")
    assigned = dict(read_file(path, merging.written(path), known))
    found = {}
    for name, setting in known.items():
        value = assigned.get(name, setting.default)
        found[name] = merging.merge(value, flags[name]) if name in flags else value
    return found | {"teacher_ranks": teacher_ranks(found) if "teachers" in known else 0}


def read_flags(argv: list[str], known: Mapping[str, Setting]) -> dict[str, Any]:
    """Reads flags of the forms `--name value`, `--name=value`, `--name` and `--no-name`.

    Raises InputError for a flag that is unknown or given twice, for a word that belongs to no flag,
    for a key of another program, and for a value that does not fit.
    """
    defaults = {name: "" if s.default is None else s.default for name, s in known.items()}
    names_of_other_trainers.refuse(argv, defaults)
    names = Counter(word.partition("=")[0].replace("-", "_") for word in argv if word[:2] == "--")
    for name, count in names.items():
        if count > 1:
            raise InputError(f"--{name.lstrip('_')} is given {count} times, expected once")
    found: dict[str, Any] = {}
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise InputError(f"{word}: expected a flag, such as --steps 5")
        flag, has_value, value = word.removeprefix("--").partition("=")
        name, opposite = name_of(flag.replace("-", "_"), known)
        if known[name].kind.name == "bool":
            found[name] = not opposite
            continue
        if has_value:
            words = [value]
        elif known[name].kind.name == "tuple":
            words = list(itertools.takewhile(lambda word: not word.startswith("--"), rest))
            del rest[: len(words)]
        else:
            words = [rest.pop(0)] if rest else []
        try:
            found[name] = known[name].kind.read(words)
        except ValueError:
            raise InputError(
                f"the command line: {name.removeprefix('command.')} = {' '.join(words)!r}: "
                f"expected {known[name].kind}"
            ) from None
    return found


def name_of(flag: str, known: Mapping[str, Setting]) -> tuple[str, bool]:
    """Returns the setting of a flag, and True if the flag is `--no-name`. Raises InputError."""
    group, dot, leaf = flag.rpartition(".")
    positive = f"{group}{dot}{leaf.removeprefix('no_')}"
    for name, opposite in ((flag, False), (positive, True)):
        for full in (name, f"command.{name}"):
            if full in known and (not opposite or known[full].kind.name == "bool"):
                return full, opposite
    names = [name.removeprefix("command.") for name in known]
    near = difflib.get_close_matches(flag, names, 1)
    meant = f"; did you mean --{near[0]}?" if near else ""
    raise InputError(f"--{flag}: there is no such flag{meant}")


def read_file(
    path: Path, written: Mapping[str, Any], known: Mapping[str, Setting], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yields the settings that a configuration assigns. Raises InputError for a wrong one."""
    groups = {
        ".".join(name.split(".")[:i]) for name in known for i in range(1, name.count(".") + 1)
    }
    for key, value in written.items():
        name = f"{prefix}{key}"
        if name in groups - {"command"}:
            if not isinstance(value, dict):
                raise InputError(f"{path}: {name} = {value!r}: expected a dictionary")
            yield from read_file(path, value, known, f"{name}.")
        elif name not in known:
            raise InputError(f"{path}: unknown field {name!r}{meaning(name, value, known)}")
        elif not known[name].kind.holds(value):
            raise InputError(f"{path}: {name} = {value!r}: expected {known[name].kind}")
        else:
            yield name, value


def meaning(name: str, value: Any, known: Mapping[str, Setting]) -> str:
    """Returns what an unknown name in a configuration probably means, as the end of a message."""
    if name == "command" or f"command.{name}" in known:
        return ": expected on the command line, not in a config file"
    for key in names_of_other_trainers.within(name, value):
        if here := names_of_other_trainers.meaning(key, known):
            return f": {key}: {here}"
    near = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {near[0]}?" if near else ""


def teacher_ranks(cfg: Mapping[str, Any]) -> int:
    """Counts the ranks of all teachers.

    Teachers with the same checkpoint share ranks, as does a teacher that is placed next to another.
    Raises InputError if a layout's number of ranks is wrong.
    """
    firsts = {path: name for name, path in reversed(cfg["teachers"].items())}
    found = 0
    for host in firsts.values():
        layout = cfg["teacher_layouts"].get(host, {})
        if host in cfg["teacher_beside"] or not isinstance(layout, dict):
            continue  # the job refuses a value that is not a layout
        ranks = layout.get("ranks", cfg["teacher_policy.ranks"])
        if not isinstance(ranks, int) or ranks < 1:
            raise InputError(f"ranks of the teacher {host!r}: expected {WHOLE}")
        found += ranks
    return found


def gpus(cfg: Mapping[str, Any], has_engines: bool) -> int:
    """Counts GPUs for engines, trainers and teachers as runtime/processes/placement.py does."""
    ranks = cfg["policy.ranks"]
    if not has_engines:
        return ranks
    size = cfg["engine.tensor_parallel"]
    demand = SimpleNamespace(engine_gpus=size, share=cfg["gpu_share"])
    share = shares(SimpleNamespace(demand=demand))
    workers = cfg["engine.count"] * size
    own = ranks + math.ceil(max(0, workers - ranks * share.beside) / share.alone)
    return own + cfg["teacher_ranks"]


def agents_of(path: str) -> Counter[str]:
    """Counts a file's rows by agent; "" if a row names none.

    Raises InputError naming the file and line if a row is malformed.
    """
    agents: Counter[str] = Counter()
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.isspace():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise InputError(f"{path}:{number}: expected a JSON object")
                named = row.get("agent_ref")
                agents[str(named.get("name", "")) if isinstance(named, dict) else ""] += 1
    except OSError as error:
        raise InputError(f"{path}: expected a JSONL file: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}:{number}: expected JSON: {error}") from None
    if not agents:
        raise InputError(f"{path}: holds no rows, expected at least one")
    return agents


def missing_judges(agents: Counter[str], judges: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    """Yields a line for each judge that rows need and that neither a url nor JUDGES provides."""
    lacking: dict[str, list[str]] = {}
    page = (ROOT / "docs/environments.md").read_text(encoding="utf-8")
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("| [") or len(cells) < 4:
            continue
        ours = sorted({name for name in agents if f"`{name}`" in cells[1]})
        for judge, only_if_configured in JUDGE.findall(cells[3]):
            if ours and (judge in judges or not only_if_configured):
                lacking.setdefault(judge, []).extend(ours)
    for judge, names in sorted(lacking.items()):
        if problem := endpoints.problem(judge, judges.get(judge, {})):
            others = f" and {len(names) - 1} more lack" if names[1:] else " lacks"
            yield f"{names[0]}{others} judges.{judge}: {problem}"


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
    program = ROOT / os.environ.get("GRPO_PROGRAM", "grpo_async.py")
    if not program.is_file() or program.parent != ROOT:
        raise InputError(f"GRPO_PROGRAM = {program.name!r}: expected a file next to grpo_async.py")
    cfg = settings(argv, program)
    if not Path(cfg["model"], "config.json").is_file():
        raise InputError(f"model = {cfg['model']!r}: expected a folder that holds config.json")
    if not cfg["save_before"]:
        raise InputError(
            "save_before = 0: the dry run, which estimates the seconds of a step, runs only in "
            "the job: set SAVE_BEFORE"
        )
    agents = [agents_of(path) for path in (cfg["data.train"], cfg["data.val"]) if path]
    has_engines = "engine.count" in cfg
    problems = [*disk(SimpleNamespace(**cfg))]
    if has_engines:
        total = agents[0].total()
        passes = conflicts.of_passes(cfg["steps"], cfg["prompts_per_step"], total)
        problems += [passes] if passes else []
        problems += missing_judges(sum(agents, Counter()), cfg["services.judges"])
    if problems:
        raise InputError("; ".join(problems))
    taken = gpus(cfg, has_engines)
    rows = [f"{of_file.total():,}" for of_file in agents]
    evaluation = f", {rows[1]} for evaluation" if rows[1:] else ""
    print(f"ok: {cfg['model']}, {rows[0]} rows{evaluation}; the dry run follows in the job")
    print(f"  GPUs: {taken}, save_before {cfg['save_before']}")
    nodes = math.ceil(taken / NODE_GPUS)
    here = min(taken, NODE_GPUS)
    seconds = min(65535, cfg["save_before"])  # Slurm accepts 16 bits
    print(f"  --nodes={nodes} --ntasks-per-node=1 --gpus-per-node={here} --signal=B:USR1@{seconds}")


if __name__ == "__main__":
    main(sys.argv[1:])
