"""Reads a configuration: a file of assignments, overridden by command-line flags."""

import contextlib
import dataclasses
import io
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, get_origin

import pydantic
import tyro

from core.errors import InputError, reader_may_leave
from settings import names_of_other_trainers
from settings.error_messages import explain, refuse
from settings.hub import fetched, is_class
from settings.merging import Value, booleans, flatten, is_group, merge, unique, written

if TYPE_CHECKING:
    from settings.config import TrainingSettings

ROOT = Path(__file__).parent.parent
PATHS = {"run_dir", "model", "data.train", "data.val", "command.resume", "command.replay"}
PATHS |= {"services.lean", "services.images", "services.workplace"}
OPPOSITE = re.compile(r"(^--|\.)no-(?=[^.]*$)")  # --no-wandb is the opposite of --wandb
C = TypeVar("C", bound="TrainingSettings")


REGISTRY = tyro.constructors.ConstructorRegistry()


@REGISTRY.primitive_rule
def dictionaries(
    info: tyro.constructors.PrimitiveTypeInfo,
) -> tyro.constructors.PrimitiveConstructorSpec[dict[str, Value]] | None:
    """Reads a dictionary as JSON from the command line: --engine.args '{"max_num_seqs": 512}'."""
    if get_origin(info.type) is not dict:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="JSON",
        instance_from_str=lambda words: json.loads(words[0], object_pairs_hook=unique),
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=lambda value: [json.dumps(value)],
    )


def load(Config: type[C], argv: list[str], default: str) -> C:
    """Returns the `Config` of `[--config FILE] [--field value ...]`; FILE defaults to `default`.

    A config file is plain Python assignments to field names; it may `import *` from another one.
    Raises InputError for an unknown or malformed field; tyro exits with a message for bad flags.
    runtime/startup/preflight.py checks whether a run could start with these settings.
    """
    sys.excepthook = end_in_one_line
    path = ROOT / default
    flags = [part for flag in argv for part in split_config(flag)]
    names = [flag.partition("=")[0].replace("_", "-") for flag in flags if flag[:2] == "--"]
    for name, count in Counter(names).items():
        if count > 1:
            raise InputError(f"{name} is given {count} times, expected once")
        opposite = OPPOSITE.sub(r"\1", name)
        if opposite != name and opposite in names:
            raise InputError(f"{opposite} and {name} exclude each other")
    if "--config" in flags:
        at = flags.index("--config")
        if at + 1 == len(flags):
            raise InputError(f"--config: expected the path of a file, such as {default}")
        path = Path(flags[at + 1])
        del flags[at : at + 2]
    check_names(Config, flags)
    base = read(Config, path)
    source = str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)
    base = with_command(base, config=source)
    return with_paths(with_entries(base, overridden(base, flags)))


def check_names(Config: type[C], flags: list[str]) -> None:
    """Raises InputError for another program's key, naming the setting that is meant here."""
    if flags:
        names_of_other_trainers.refuse(flags, leaves(Config))


def end_in_one_line(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Prints an error as sys.excepthook does; prints one line for Ctrl-C, which is not an error."""
    if issubclass(kind, KeyboardInterrupt):
        print("stopped by Ctrl-C", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def overridden(base: C, flags: list[str]) -> C:
    """Returns `base` with the command-line flags applied. Raises InputError for a wrong value.

    tyro exits with its own message for --help and for flags that it does not know.
    """
    Config = type(base)
    source = base.command.config
    about = f"{(Config.__doc__ or '').strip()}\n\nThe defaults below are those of {source}."
    program = Path(sys.argv[0]).name
    printed = io.StringIO()
    try:
        with reader_may_leave(), contextlib.redirect_stderr(printed):
            return tyro.cli(
                Config,
                prog=program,
                description=about,
                args=flags,
                default=base,
                registry=REGISTRY,
            )
    except SystemExit as stop:
        cause = stop.__context__
        while cause and not isinstance(cause, pydantic.ValidationError):
            cause = cause.__context__
        if isinstance(cause, pydantic.ValidationError):
            raise InputError(explain(Config, cause)) from None
        sys.stderr.write(printed.getvalue())
        raise


def with_command(cfg: C, **changes: Any) -> C:
    """Returns `cfg` with changed values in its command."""
    replacement: dict[str, Any] = {"command": dataclasses.replace(cfg.command, **changes)}
    return dataclasses.replace(cfg, **replacement)


def with_entries(base: C, cfg: C) -> C:
    """Returns `cfg`, whose dictionaries keep the entries of `base` that they do not override."""
    changes = {}
    for field in dataclasses.fields(cfg):
        old = getattr(base, field.name)
        new = getattr(cfg, field.name)
        if is_group(new):
            changes[field.name] = with_entries(old, new)
        elif isinstance(new, dict):
            changes[field.name] = merge(old, new)
    return dataclasses.replace(cfg, **changes)


def with_paths(cfg: C) -> C:
    """Returns `cfg` with absolute paths, because actors have working directories of their own.

    A model on the Hugging Face hub is fetched. Raises InputError if that fails, and for text that
    no path can contain.
    """
    for name, value in flatten(cfg).items():
        if isinstance(value, str):
            check_text(name, value)
    run_dir = cfg.run_dir.replace("{time}", time.strftime("%Y%m%d-%H%M%S"))
    run_dir = run_dir.replace("{seed}", str(cfg.seed))
    left = re.search(r"\{\w*\}", run_dir)
    if left:
        raise InputError(f"run_dir = {cfg.run_dir!r}: {left[0]}: expected {{time}} or {{seed}}")
    command = cfg.command
    folders = {}
    if command.resume not in ("", "auto"):
        folders["resume"] = str(Path(command.resume).resolve())
    if command.replayed:
        folders["replay"] = str(Path(command.replayed).resolve())
    located: dict[str, Any] = {}
    weights = not command.dry_run
    services = getattr(cfg, "services", None)
    if services:  # only runs with rollouts have services
        located["services"] = services.located()
    teachers = getattr(cfg, "teachers", None)
    if teachers:
        located["teachers"] = {
            name: folder_of(path, weights, f"teachers[{name!r}]") for name, path in teachers.items()
        }
    engine = getattr(cfg, "engine", None)
    if engine:
        located["engine"] = dataclasses.replace(engine, args=with_drafter(engine.args, weights))
    cfg = dataclasses.replace(
        cfg,
        **located,
        run_dir=str(Path(run_dir).resolve()),
        model=folder_of(cfg.model, weights),
    )
    return with_command(cfg, **folders)


def check_text(name: str, value: str) -> None:
    """Raises InputError for text that cannot appear in a path, and for a leading ~.

    Only shells expand a ~.
    """
    if "\0" in value:
        raise InputError(f"{name} = {value!r}: expected text without the character NUL")
    if any("\ud800" <= letter <= "\udfff" for letter in value):
        raise InputError(f"{name} = {value!r}: expected text in UTF-8")
    if name in PATHS and not value.isprintable():
        raise InputError(f"{name} = {value!r}: expected a path of characters that can be printed")
    if name in PATHS and value.startswith("~"):
        raise InputError(
            f"{name} = {value!r}: expected a path without ~, because no shell replaces it here"
        )


def with_drafter(args: dict[str, Any], weights: bool) -> dict[str, Any]:
    """Returns vLLM's arguments with the absolute path of the folder that a drafter is read from."""
    drafts = args.get("speculative_config")
    if not isinstance(drafts, dict):
        return args
    model = drafts.get("model")
    if not isinstance(model, str) or is_class(model):
        return args
    if not os.path.isdir(model) and "/" not in model:  # a method, such as ngram
        return args
    setting = "engine.args['speculative_config']['model']"
    return args | {"speculative_config": drafts | {"model": folder_of(model, weights, setting)}}


def folder_of(model: str, weights: bool, setting: str = "model") -> str:
    """Returns the absolute path of a model's folder; the hub may provide it. Raises InputError."""
    if os.path.exists(model):
        return str(Path(model).resolve())
    return fetched(model, weights, setting)


def split_config(flag: str) -> list[str]:
    """Splits `--config=FILE` into the two words that it stands for; no other flag is changed."""
    return flag.split("=", 1) if flag.startswith("--config=") else [flag]


def read(Config: type[C], path: Path) -> C:
    """Runs a config file and checks names and types. Raises InputError naming the file and line."""
    if not path.is_file():
        files = sorted(ROOT.glob("configs/**/[!_]*.py"))
        names = ", ".join(str(file.relative_to(ROOT)) for file in files)
        raise InputError(f"{path.resolve()}: no such config file; there are: {names} in {ROOT}")
    chosen = written(path)
    fields = {field.name for field in dataclasses.fields(Config)} - {"command"}
    if chosen.keys() <= fields and not any(booleans(chosen, Config())):
        with contextlib.suppress(pydantic.ValidationError):
            make: Callable[..., C] = Config
            return with_entries(make(), make(**chosen))
    raise refuse(Config, path, chosen)


def leaves(Config: type) -> dict[str, Value]:
    """Returns the default of every setting that is not a group, by its dotted name."""
    return flatten(Config())
