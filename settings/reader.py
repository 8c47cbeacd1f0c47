"""How a configuration is read: a file of assignments, then command-line flags over it."""

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
from typing import TYPE_CHECKING, Any, TypeVar, get_origin

import pydantic
import tyro

from core.errors import InputError
from settings import names_of_other_trainers
from settings.error_messages import explain, refuse
from settings.hub import fetched
from settings.merging import assigned, booleans, flatten, merge, unique

if TYPE_CHECKING:
    from settings.config import TrainingSettings

ROOT = Path(__file__).parent.parent
PATHS = {"run_dir", "model", "data.train", "data.val", "command.resume", "command.replay"}
PATHS |= {"services.lean", "services.images", "services.workplace"}
C = TypeVar("C", bound="TrainingSettings")


REGISTRY = tyro.constructors.ConstructorRegistry()


@REGISTRY.primitive_rule
def dictionaries(info: tyro.constructors.PrimitiveTypeInfo) -> Any:
    """On the command line a dictionary is JSON: --engine.args '{"max_num_seqs": 512}'."""
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
    """The `Config` that `[--config FILE] [--field value ...]` asks for; FILE defaults to `default`.

    A config file is plain Python assignments to field names; it may `import *` from another one.
    Raises InputError for an unknown or malformed field; tyro exits with a message for bad flags.
    Whether a run could start with it is checked by runtime/startup/preflight.py.
    """
    sys.excepthook = end_in_one_line
    path = ROOT / default
    flags = [part for flag in argv for part in split_config(flag)]
    names = (flag.partition("=")[0].replace("_", "-") for flag in flags if flag[:2] == "--")
    for name, count in Counter(names).items():
        if count > 1:
            raise InputError(f"{name} is given {count} times, expected once")
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
    """Raises InputError for a key of another program, naming the setting that is meant here."""
    if flags:
        names_of_other_trainers.refuse(flags, leaves(Config))


def end_in_one_line(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """For sys.excepthook: Ctrl-C is no error of the program, so it ends without a traceback."""
    if issubclass(kind, KeyboardInterrupt):
        print("stopped by Ctrl-C", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def overridden(base: C, flags: list[str]) -> C:
    """`base` with what the flags of the command line say. Raises InputError for a wrong value.

    tyro exits with a message of its own for --help and for flags that it does not know.
    """
    Config = type(base)
    source = base.command.config
    about = f"{(Config.__doc__ or '').strip()}\n\nThe defaults below are those of {source}."
    texts: dict[str, Any] = {"prog": Path(sys.argv[0]).name, "description": about}
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            return tyro.cli(Config, default=base, args=flags, registry=REGISTRY, **texts)
    except SystemExit as stop:
        cause = stop.__context__
        while cause and not isinstance(cause, pydantic.ValidationError):
            cause = cause.__context__
        if isinstance(cause, pydantic.ValidationError):
            raise InputError(explain(Config, cause)) from None
        sys.stderr.write(told.getvalue())
        raise


def with_command(cfg: C, **changes: Any) -> C:
    """`cfg` with other values in its command."""
    replacement: dict[str, Any] = {"command": dataclasses.replace(cfg.command, **changes)}
    return dataclasses.replace(cfg, **replacement)


def with_entries(base: C, cfg: C) -> C:
    """`cfg`, whose dictionaries keep the entries of those of `base` that they do not override."""
    changes = {}
    for field in dataclasses.fields(cfg):
        old, new = (getattr(settings, field.name) for settings in (base, cfg))
        if dataclasses.is_dataclass(new):
            changes[field.name] = with_entries(old, new)
        elif isinstance(new, dict):
            changes[field.name] = merge(old, new)
    return dataclasses.replace(cfg, **changes)


def with_paths(cfg: C) -> C:
    """The same with absolute paths, because actors have working directories of their own.

    A model of the Hugging Face hub is fetched. Raises InputError where it cannot be had, and for
    text that no path can hold.
    """
    for name, value in flatten(cfg).items():
        if isinstance(value, str):
            check_text(name, value)
    run_dir = cfg.run_dir.replace("{time}", time.strftime("%Y%m%d-%H%M%S"))
    run_dir = run_dir.replace("{seed}", str(cfg.seed))
    if left := re.search(r"\{\w*\}", run_dir):
        raise InputError(f"run_dir = {cfg.run_dir!r}: {left[0]}: expected {{time}} or {{seed}}")
    command = cfg.command
    folders: dict[str, Any] = {}
    if command.resume not in ("", "auto"):
        folders["resume"] = str(Path(command.resume).resolve())
    if command.replayed:
        folders["replay"] = str(Path(command.replayed).resolve())
    located: dict[str, Any] = {}
    if services := getattr(cfg, "services", None):  # a run without rollouts has none
        located["services"] = services.located()
    if teachers := getattr(cfg, "teachers", None):
        weights = not command.dry_run
        located["teachers"] = {name: folder_of(path, weights) for name, path in teachers.items()}
    cfg = dataclasses.replace(
        cfg,
        **located,
        run_dir=str(Path(run_dir).resolve()),
        model=folder_of(cfg.model, weights=not command.dry_run),
    )
    return with_command(cfg, **folders)


def check_text(name: str, value: str) -> None:
    """Raises InputError for text that no path can hold, and for a ~, which shells replace."""
    if "\0" in value:
        raise InputError(f"{name} = {value!r}: expected text without the character NUL")
    if any("\ud800" <= letter <= "\udfff" for letter in value):
        raise InputError(f"{name} = {value!r}: expected text in UTF-8")
    if name in PATHS and value.startswith("~"):
        raise InputError(f"{name} = {value!r}: expected a path without ~, as no shell replaces it")


def folder_of(model: str, weights: bool) -> str:
    """The absolute path of a model's folder, which may come from the hub. Raises InputError."""
    if os.path.exists(model):
        return str(Path(model).resolve())
    return fetched(model, weights)


def split_config(flag: str) -> list[str]:
    """`--config=FILE` as the two words that it stands for; any other flag as it is."""
    return flag.split("=", 1) if flag.startswith("--config=") else [flag]


def read(Config: type[C], path: Path) -> C:
    """Runs a config file and checks its names and types. Raises InputError naming file and line."""
    if not path.is_file():
        there = sorted(ROOT.glob("configs/**/[!_]*.py"))
        found = ", ".join(str(p.relative_to(ROOT)) for p in there)
        raise InputError(f"{path.resolve()}: no such config file; there are: {found} in {ROOT}")
    if path.suffix in (".yaml", ".yml"):
        expected = 'a YAML file, expected Python assignments, as policy = {"lr": 1e-6}, or JSON'
        raise InputError(
            f"{path}: {expected}: docs/from_nemo_rl.md and docs/from_trl.md have names"
        )
    chosen = of_json(path) if path.suffix == ".json" else assigned(path)
    fields = {field.name for field in dataclasses.fields(Config)} - {"command"}
    if chosen.keys() <= fields and not any(booleans(chosen, Config())):
        with contextlib.suppress(pydantic.ValidationError):
            make: Callable[..., C] = Config
            return with_entries(make(), make(**chosen))
    raise refuse(Config, path, chosen)


def of_json(path: Path) -> dict[str, Any]:
    """What a configuration in JSON assigns. Raises InputError naming file and line."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique)
    except ValueError as error:
        raise InputError(f"{path}: expected JSON: {error}") from None
    if not isinstance(found, dict):
        raise InputError(f'{path}: expected a JSON object, such as {{"steps": 5}}')
    return found


def leaves(Config: type) -> dict[str, Any]:
    """Every setting that is no group, by its dotted name, with its default."""
    return flatten(Config())
