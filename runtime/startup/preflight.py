"""Checks a run's folder, command and arguments before any actor starts; model_checks.py its model.

Settings are checked where they are declared, rows where they are read (rollout/rows.py). Of
weights only the headers are read.
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
from settings.merging import flatten
from settings.reader import C

if TYPE_CHECKING:
    from settings.config import TrainingSettings

SHORTEST = 1.0  # seconds; no wait of a run is always shorter


class Declaration(NamedTuple):
    """Where a library declares its arguments."""

    library: str
    classes: tuple[str, ...]
    files: tuple[str, ...]


DECLARED = {  # what the dictionary of a setting may name
    "engine.args": Declaration("vllm", ("EngineArgs", "AsyncEngineArgs"), ("engine/arg_utils.py",)),
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
    """A configuration that is read and prepared, for programs beside the algorithms' own."""
    cfg = reader.load(Config, argv, default)
    prepare(cfg)
    return cfg


def prepare(cfg: "TrainingSettings") -> None:
    """Checks what can be checked without a process, and shows the run folder and what ages.

    Raises InputError as `check` does.
    """
    gc.disable()  # it would go through a million objects again and again as libraries load
    try:
        check(cfg)
        check_installed(cfg)
    finally:
        gc.enable()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a file must not hide what a run waits for
        sys.stdout.reconfigure(line_buffering=True)
    print(f"run folder: {shown(cfg.run_dir)}", flush=True)
    if said := ageing(cfg):
        print(said, flush=True)


def check(cfg: "TrainingSettings") -> None:
    """Raises InputError, naming field, value and remedy, where the run could not start."""
    for name, seconds in dataclasses.asdict(cfg.timeouts).items():
        if seconds < SHORTEST:
            raise InputError(f"timeouts.{name} = {seconds:g}: expected {SHORTEST:g} s or more")
    check_folder(cfg)
    check_command(cfg)
    check_arguments(cfg)
    check_model(cfg)


def check_installed(cfg: "TrainingSettings") -> None:
    """Raises InputError where this machine lacks a library that not all runs need."""
    if cfg.wandb and not importlib.util.find_spec("wandb"):
        install = f"pip install wandb ({shown(sys.executable)} -m pip install wandb)"
        raise InputError(f"wandb = True: it is not installed; {install}")
    if cfg.policy.kind == "megatron":
        from policy.megatron.model_check import check_kernels

        check_kernels(cfg.model)


def check_folder(cfg: "TrainingSettings") -> None:
    """Raises InputError unless the run may have its folder, which is not made yet."""
    folder = Path(cfg.run_dir)
    field = f"run_dir = {cfg.run_dir!r}"
    expected = "expected a folder, or a path where one can be made"
    others = {"/", os.path.expanduser("~"), cfg.model, os.getcwd()}
    if str(folder) in others and not (folder / "starts.jsonl").exists():
        raise InputError(f"{field}: expected a folder of the run's own")
    try:
        there = next(path for path in (folder, *folder.parents) if path.exists())
    except OSError as error:
        raise InputError(f"{field}: {error.strerror}, {expected}") from None
    if not there.is_dir():
        raise InputError(f"{field}: {there} is a file, {expected}")
    if not os.access(there, os.W_OK | os.X_OK):
        raise InputError(f"{field}: {there} cannot be written to, {expected}")
    if there == folder:
        claim(cfg).close()


def check_command(cfg: "TrainingSettings") -> None:
    """Raises InputError where the command needs a checkpoint or samples that are not there.

    Whether they are of this stream of prompts is looked at when its rows have been read.
    """
    end = os.environ.get("SLURM_JOB_END_TIME", "")
    if cfg.save_before and end and not re.fullmatch(r"\d+(\.\d*)?", end):
        raise InputError(f"SLURM_JOB_END_TIME = {end!r}: save_before needs seconds since 1970")
    first_whole(of_export(cfg) if cfg.command.export else cfg)
    if cfg.command.replayed:
        sample_files(cfg.command.replayed)


def check_arguments(cfg: "TrainingSettings") -> None:
    """Raises InputError for an argument that its library does not have, or not of that type."""
    values = flatten(cfg)
    for field, declared in DECLARED.items():
        given = values.get(field) or {}  # a run without engines has none of theirs
        known = arguments(field) if given else {}
        for name in sorted(given.keys() - known.keys()) if known else ():
            close = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise InputError(f"{field} sets {name!r}, which {declared.library} does not have{hint}")
        for name, value in given.items():
            if wrong := misfit(value, known.get(name, "")):
                raise InputError(f"{field} sets {name} = {value!r}: {wrong}")


def misfit(value: Any, annotation: str) -> str:
    """Why a value is not of an annotated type; "" if it is, and for names of the library's own."""
    try:
        kind = eval(annotation, dict(vars(typing)))
    except Exception:
        return ""
    try:
        pydantic.TypeAdapter(kind, config={"strict": True}).validate_python(value)
    except pydantic.ValidationError as error:
        return f"{error.errors()[0]['msg']}, as its type is {annotation}"
    except pydantic.PydanticUserError:  # a type of the library's own
        return ""
    return ""


@functools.cache
def arguments(field: str) -> dict[str, str]:
    """Their names and annotations, from the library's source, as it takes seconds to import.

    Empty where that source is not as expected.
    """
    declared = DECLARED[field]
    spec = importlib.util.find_spec(declared.library)
    paths = [Path(str(spec and spec.origin)).parent / file for file in declared.files]
    nodes = [ast.parse(path.read_text(encoding="utf-8")) for path in paths if path.is_file()]
    classes = [node for module in nodes for node in module.body if isinstance(node, ast.ClassDef)]
    fields = [line for node in classes if node.name in declared.classes for line in node.body]
    every = [field for field in fields if isinstance(field, ast.AnnAssign)]
    return {ast.unparse(field.target): ast.unparse(field.annotation) for field in every}
