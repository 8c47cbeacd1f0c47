"""Checks a run's folder, command and arguments before any actor starts.

Settings are checked where they are declared, rows where they are read (rollout/rows.py), and the
model in model_checks.py. Only the headers of weights are read.
"""

import ast
import dataclasses
import difflib
import functools
import gc
import importlib.util
import io
import os
import re
import sys
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pydantic

from core.errors import InputError, shown
from runtime.checkpoints.resume import first_whole
from runtime.engines.speculation import ageing
from runtime.processes.cluster import claim
from runtime.startup.model_checks import check_model
from runtime.startup.modes import of_export, sample_files
from settings import reader
from settings.config import RunSettings
from settings.merging import flatten
from settings.reader import C

if TYPE_CHECKING:
    from settings.config import TrainingSettings

SHORTEST = 1.0  # seconds; any wait of a run may take longer than this
LONGEST = 1e7  # seconds, 115 days; libraries count a timeout's milliseconds in 64 bits


class Declaration(NamedTuple):
    """The classes in which a library declares its arguments, and their files."""

    library: str
    classes: tuple[str, ...]
    files: tuple[str, ...]


class Argument(NamedTuple):
    """An argument of a library, as the library's source declares it."""

    annotation: str
    kind: Any  # the annotated type; Any if it is one of the library's own
    bounds: dict[str, Any]  # limits of the value, such as {"gt": 0}


DRAFTS = "engine.args['speculative_config']"
DECLARED = {  # the arguments that the dictionary of a setting may contain
    "engine.args": Declaration("vllm", ("EngineArgs", "AsyncEngineArgs"), ("engine/arg_utils.py",)),
    DRAFTS: Declaration("vllm", ("SpeculativeConfig",), ("config/speculative.py",)),
    "policy.megatron.model": Declaration(
        "megatron.core",
        ("TransformerConfig", "ModelParallelConfig"),
        ("transformer/transformer_config.py", "model_parallel_config.py"),
    ),
    "policy.megatron.ddp": Declaration(
        "megatron.core",
        ("DistributedDataParallelConfig",),
        ("distributed/distributed_data_parallel_config.py",),
    ),
    "policy.megatron.optimizer": Declaration(
        "megatron.core", ("OptimizerConfig",), ("optimizer/optimizer_config.py",)
    ),
}


def load(Config: type[C], argv: list[str], default: str) -> C:
    """Reads and prepares a configuration, for programs other than the algorithms' own."""
    cfg = reader.load(Config, argv, default)
    prepare(cfg)
    return cfg


def prepare(cfg: "TrainingSettings") -> None:
    """Checks what can be checked without an actor; prints the run folder, and possibly notes.

    The notes are about a warm-up that the run does not complete, and about a drafter that no update
    trains (runtime/engines/speculation.py). Raises InputError as `check` does.
    """
    gc.disable()  # it would search a million objects repeatedly while libraries load
    try:
        check(cfg)
        check_installed(cfg)
        check_device(cfg)
    finally:
        gc.enable()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a log file must show what a run waits for
        sys.stdout.reconfigure(line_buffering=True)
    print(f"run folder: {shown(cfg.run_dir)}", flush=True)
    for note in (short_of_warmup(cfg), ageing(cfg)):
        if note:
            print(note, flush=True)


def check(cfg: "TrainingSettings") -> None:
    """Raises InputError with field, value and remedy if the run could not start."""
    for name, seconds in dataclasses.asdict(cfg.timeouts).items():
        if seconds < SHORTEST:
            raise InputError(f"timeouts.{name} = {seconds:g}: expected {SHORTEST:g} s or more")
        if seconds > LONGEST:
            raise InputError(f"timeouts.{name} = {seconds:g}: expected {LONGEST:g} s or less")
    check_folder(cfg)
    check_command(cfg)
    check_arguments(cfg)
    check_model(cfg)


def short_of_warmup(cfg: "TrainingSettings") -> str:
    """Returns the note on a run that ends before its warm-up, such as a trial; "" for others."""
    if cfg.command.modes or cfg.updates >= cfg.policy.warmup_steps:
        return ""
    return (
        f"note: policy.warmup_steps = {cfg.policy.warmup_steps}, but the run has {cfg.updates} "
        f"optimizer steps: its learning rate stays below policy.lr = {cfg.policy.lr:g}"
    )


def check_installed(cfg: "TrainingSettings") -> None:
    """Raises InputError if this machine lacks a library that only some runs need."""
    if cfg.wandb and not importlib.util.find_spec("wandb"):
        python = shown(sys.executable)
        raise InputError(
            f"wandb = True: it is not installed; pip install wandb ({python} -m pip install wandb)"
        )
    if cfg.policy.kind == "megatron":
        from policy.megatron.model_check import check_kernels

        check_kernels(cfg.model)


def check_device(cfg: "TrainingSettings") -> None:
    """Raises InputError if the configuration sets an argument that nothing reads on a CPU.

    Of a cluster that runs elsewhere, this machine's GPUs say nothing.
    """
    if not isinstance(cfg, RunSettings) or os.environ.get("RAY_ADDRESS"):
        return
    share = cfg.engine.args.get("gpu_memory_utilization")
    if share is None:
        return
    import torch

    if not torch.cuda.is_available():
        raise InputError(
            f"engine.args sets gpu_memory_utilization = {share}, and this machine has no GPU: "
            "expected no such entry; VLLM_CPU_KVCACHE_SPACE=N in the environment gives an engine's "
            "cache N GiB (1)"
        )


def check_folder(cfg: "TrainingSettings") -> None:
    """Raises InputError if the run cannot use its folder; the folder is not created yet."""
    folder = Path(cfg.run_dir)
    others = {"/", os.path.expanduser("~"), cfg.model, os.getcwd()}
    if str(folder) in others and not (folder / "starts.jsonl").exists():
        raise InputError(f"run_dir = {cfg.run_dir!r}: expected a folder of the run's own")
    try:
        nearest = next(path for path in (folder, *folder.parents) if path.exists())
    except OSError as error:
        raise InputError(
            f"run_dir = {cfg.run_dir!r}: {error.strerror}, "
            "expected a folder, or a path where one can be created"
        ) from None
    if not nearest.is_dir():
        raise InputError(
            f"run_dir = {cfg.run_dir!r}: {nearest} is a file, "
            "expected a folder, or a path where one can be created"
        )
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise InputError(
            f"run_dir = {cfg.run_dir!r}: {nearest} cannot be written to, "
            "expected a folder, or a path where one can be created"
        )
    if nearest == folder:
        claim(cfg).close()


def check_command(cfg: "TrainingSettings") -> None:
    """Raises InputError if the command needs a checkpoint or samples that do not exist.

    Their stream of prompts is compared with the run's later, once the rows have been read.
    """
    end = os.environ.get("SLURM_JOB_END_TIME", "")
    if cfg.save_before and end and not re.fullmatch(r"\d+(\.\d*)?", end):
        raise InputError(f"SLURM_JOB_END_TIME = {end!r}: save_before needs seconds since 1970")
    first_whole(of_export(cfg) if cfg.command.export else cfg)
    if cfg.command.replayed:
        sample_files(cfg.command.replayed)


def check_arguments(cfg: "TrainingSettings") -> None:
    """Raises InputError for an argument that its library lacks or declares differently."""
    values = flatten(cfg)
    engine = values.get("engine.args")
    if isinstance(engine, dict):
        values[DRAFTS] = engine.get("speculative_config")
    for field, declared in DECLARED.items():
        given = values.get(field)
        if not isinstance(given, dict) or not given:  # a run without engines lacks their settings
            continue
        known = arguments(field)
        unknown = sorted(given.keys() - known.keys())
        if known and unknown:
            name = unknown[0]
            close = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise InputError(f"{field} sets {name!r}, which {declared.library} does not have{hint}")
        for name, value in given.items():
            if name in known and (wrong := misfit(value, known[name])):
                raise InputError(f"{field} sets {name} = {value!r}: {wrong}")


def argument(annotation: str, names: Mapping[str, Any], bounds: dict[str, float]) -> Argument:
    """Returns an argument, whose annotation may use these names and those of `typing`."""
    try:
        kind = eval(annotation, {**vars(typing), **names})
    except Exception:  # it uses a type that is imported or defined elsewhere
        kind = Any
    return Argument(annotation, kind, bounds)


def misfit(value: Any, declared: Argument) -> str:
    """Explains why a value does not match an argument's type or limits; "" if it does.

    A type that is the library's own is not checked.
    """
    kind = declared.kind
    if declared.bounds and kind is not Any:
        kind = typing.Annotated[kind, pydantic.Field(**declared.bounds)]
    strict = "tuple" not in declared.annotation  # JSON has only lists
    try:
        pydantic.TypeAdapter(kind, config={"strict": strict}).validate_python(value)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        if first["type"].startswith(("greater_than", "less_than")):
            return first["msg"]
        return f"{first['msg']}, because its type is {declared.annotation}"
    except pydantic.PydanticUserError:  # a type of the library's own
        return ""
    return ""


@functools.cache
def arguments(field: str) -> dict[str, Argument]:
    """Reads the arguments of a setting's library from its source.

    Importing the library would take seconds. Returns {} if its source is not as expected.
    """
    declared = DECLARED[field]
    spec = importlib.util.find_spec(declared.library)
    paths = [Path(str(spec and spec.origin)).parent / file for file in declared.files]
    found = {}
    for path in paths:
        if not path.is_file():
            continue
        source = ast.parse(path.read_text(encoding="utf-8"))
        names = literals(source)
        for node in source.body:
            if not isinstance(node, ast.ClassDef) or node.name not in declared.classes:
                continue
            for line in node.body:
                if isinstance(line, ast.AnnAssign):
                    annotation = ast.unparse(line.annotation)
                    found[ast.unparse(line.target)] = argument(annotation, names, bounds_of(line))
    return found


def literals(source: ast.Module) -> dict[str, Any]:
    """Returns the types `Literal[...]` to which a library's source gives names."""
    found: dict[str, Any] = {}
    for node in source.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("Literal["):
            kind = argument(ast.unparse(node.value), found, {}).kind
            found[ast.unparse(node.targets[0])] = kind
    return found


def bounds_of(line: ast.AnnAssign) -> dict[str, float]:
    """Returns the limits in an argument's default, such as `Field(default=None, gt=0)`."""
    found: dict[str, float] = {}
    for word in getattr(line.value, "keywords", ()):
        value = getattr(word.value, "value", None)  # of a constant
        if word.arg in ("gt", "ge", "lt", "le") and isinstance(value, int | float):
            found[word.arg] = value
    return found
