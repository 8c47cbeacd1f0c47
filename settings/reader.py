"""How a configuration is read: a file of assignments, then command-line flags over it."""

import contextlib
import dataclasses
import difflib
import gc
import io
import json
import os
import re
import sys
import time
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_origin

import pydantic
import tyro

from envs import located
from settings import nemo_rl

if TYPE_CHECKING:
    from settings.run import TrainingSettings

ROOT = Path(__file__).parent.parent
HUB_SECONDS = 10.0  # that the Hugging Face hub may take to say whether it has a model
MODEL_FILES = ("*.json", "*.txt", "*.model", "*.jinja")
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
        instance_from_str=lambda words: json.loads(words[0]),
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=lambda value: [json.dumps(value)],
    )


class InputError(SystemExit):
    """Something the user wrote is wrong: ends the program saying where, what and why."""

    def __init__(self, message: str):
        super().__init__(f"error: {message}")


class Merged(dict):
    """The names of a config file. A dictionary that is assigned again is merged into the old one.

    So a file that inherits `policy = {"tp": 4}` and assigns `policy = {"lr": 1e-6}` keeps tp.
    """

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, merge(self.get(name), value))


def merge(old: Any, new: Any) -> Any:
    """`new`; where both are dictionaries, `old` with the entries of `new`, at any depth.

    An empty dictionary takes the place of the old one.
    """
    if not (isinstance(old, dict) and isinstance(new, dict) and new):
        return new
    return old | {name: merge(old.get(name), value) for name, value in new.items()}


def load(Config: type[C], argv: list[str], default: str) -> C:
    """The `Config` that `[--config FILE] [--field value ...]` asks for; FILE defaults to `default`.

    A config file is plain Python assignments to field names; it may `import *` from another one.
    Raises InputError for an unknown or malformed field, and for all that runtime/preflight.py
    checks; tyro exits with a message for bad flags. With --dry_run it prints what the run would
    need, and raises SystemExit.
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
    refuse_nemo_rl(Config, flags)
    base = read(Config, path)
    source = str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)
    base = dataclasses.replace(base, command=dataclasses.replace(base.command, config=source))
    cfg = with_paths(with_entries(base, overridden(base, flags)))
    if cfg.command.dry_run:
        from dry_run import explain  # and transformers, which takes 3 s

        print(explain(cast(Any, cfg), Config))  # a fork has a class of its own
        raise SystemExit
    from runtime import preflight  # which imports this module

    gc.disable()  # it would go through a million objects again and again as libraries load
    try:
        preflight.check(cfg)
    finally:
        gc.enable()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a file must not hide what a run waits for
        sys.stdout.reconfigure(line_buffering=True)
    print(f"run folder: {shown(cfg.run_dir)}", flush=True)
    return cfg


def refuse_nemo_rl(Config: type[C], flags: list[str]) -> None:
    """Raises InputError for a key of NeMo-RL, saying what it is called here."""
    ours = leaves(Config)
    for flag in flags:
        key = nemo_rl.key_of(flag)
        here = "" if flag.startswith("--") and key in ours else nemo_rl.meaning(key)
        if here:
            raise InputError(f"{flag}: a key of NeMo-RL; here: {here} (docs/{nemo_rl.PAGE.name})")


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


def shown(path: str | Path) -> str:
    """A path as seen from where the user is, if it lies below."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


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
        if isinstance(value, str) and "\0" in value:
            raise InputError(f"{name} = {value!r}: expected text without the character NUL")
    run_dir = cfg.run_dir.replace("{time}", time.strftime("%Y%m%d-%H%M%S"))
    run_dir = run_dir.replace("{seed}", str(cfg.seed))
    command = cfg.command
    folders: dict[str, Any] = {}
    if command.resume not in ("", "auto"):
        folders["resume"] = str(Path(command.resume).resolve())
    if command.replayed:
        folders["replay"] = str(Path(command.replayed).resolve())
    return dataclasses.replace(
        cfg,
        run_dir=str(Path(run_dir).resolve()),
        model=fetched(cfg.model, weights=not command.dry_run),
        command=dataclasses.replace(command, **folders),
    )


def fetched(model: str, weights: bool) -> str:
    """The absolute path of a model's folder; ORG/NAME that is no folder comes from the hub.

    A folder that ORG names here, or models/, means a local path. Raises InputError where the hub
    and its cache have no such model.
    """
    folder = Path(model).resolve()
    is_name = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", model) and not re.search(r"--|\.\.", model)
    if (
        os.path.exists(folder)
        or not is_name
        or folder.parent.exists()
        or model.startswith("models/")
    ):
        return str(folder)
    from huggingface_hub import HfApi, constants, snapshot_download  # 0.4 s
    from huggingface_hub.errors import LocalEntryNotFoundError

    why = ""
    try:  # snapshot_download would ask the same without a deadline
        HfApi().model_info(model, timeout=HUB_SECONDS)
    except Exception as error:  # of the network or of the hub; the cache may have the model
        why = f"{type(error).__name__}: {error}; "
    patterns = [*MODEL_FILES, "*.safetensors"] if weights else [*MODEL_FILES]
    try:
        found = snapshot_download(model, allow_patterns=patterns, local_files_only=bool(why))
        lacking = missing_weights(Path(found)) if weights else []
        if not lacking:
            return found
        why += f"no {lacking[0]} in {found}"
    except Exception as error:
        absent = type(error) is LocalEntryNotFoundError
        cache = f"the cache {constants.HF_HUB_CACHE} does not hold it"
        why += cache if absent else f"{type(error).__name__}: {error}"
    raise InputError(
        f"model = {model!r}: there is no folder {folder} that holds config.json, and the Hugging "
        f"Face hub did not give such a model: {' '.join(why.split())}. Without network, download "
        f"it elsewhere (hf download {model}) and set model to the folder"
    )


def missing_weights(folder: Path) -> list[str]:
    """The files of weights that a model's index names and its folder lacks."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        return [name for name in names if not (folder / name).exists()]
    return [] if any(folder.glob("*.safetensors")) else ["*.safetensors"]


def split_config(flag: str) -> list[str]:
    """`--config=FILE` as the two words that it stands for; any other flag as it is."""
    return flag.split("=", 1) if flag.startswith("--config=") else [flag]


def read(Config: type[C], path: Path) -> C:
    """Runs a config file and checks its names and types. Raises InputError naming file and line."""
    if not path.is_file():
        there = sorted(ROOT.glob("configs/**/[!_]*.py"))
        found = ", ".join(str(p.relative_to(ROOT)) for p in there)
        raise InputError(f"{path.resolve()}: no such config file; there are: {found} in {ROOT}")
    assigned = Merged(__file__=str(path), __name__=path.stem)
    try:
        exec(compile(path.read_text(), str(path), "exec"), assigned)
    except (Exception, SystemExit) as error:
        text = located(error, str(path)).removeprefix("None:None: ")  # the place of a NUL
        raise InputError(text if text.startswith(str(path)) else f"{path}: {text}") from error
    chosen = {
        name: value
        for name, value in assigned.items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType | type)
    }
    fields = {field.name: field.type for field in dataclasses.fields(Config)}
    if "command" in chosen:
        at = place(path, "command")
        raise InputError(f"{at}: command: expected on the command line, not in a config file")
    for name in sorted(chosen.keys() - fields.keys()):
        raise InputError(f"{place(path, name)}: unknown field {name!r}{hint(Config, name)}")
    for name, value in booleans(chosen, Config()):
        at = place(path, *name.split(".")[:2])
        raise InputError(f"{at}: {name} = {value}: expected a number")
    try:
        return with_entries(Config(), Config(**chosen))
    except pydantic.ValidationError as error:
        where = error.errors()[0]["loc"]
        at = place(path, *map(str, where[:2])) if where else str(path)
        raise InputError(f"{at}: {explain(Config, error)}") from None


def booleans(given: dict, usual: Any, prefix: str = "") -> Iterator[tuple[str, bool]]:
    """Numbers that are given as True or False, which pydantic takes for 1 and 0."""
    for name, value in given.items():
        default = getattr(usual, str(name), None)
        if isinstance(value, dict) and dataclasses.is_dataclass(default):
            yield from booleans(value, default, f"{prefix}{name}.")
        elif isinstance(value, bool) and type(default) in (int, float):
            yield f"{prefix}{name}", value


def leaves(Config: type) -> dict[str, Any]:
    """Every setting that is no group, by its dotted name, with its default."""
    return flatten(Config())


def flatten(settings: Any, prefix: str = "") -> dict[str, Any]:
    """The values of all settings that are no group, by their dotted names."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            found |= flatten(value, f"{prefix}{field.name}.")
        else:
            found[f"{prefix}{field.name}"] = value
    return found


def hint(Config: type, name: str) -> str:
    """The setting that was probably meant, as the end of an error message."""
    known = leaves(Config)
    by_leaf: dict[str, list[str]] = {}
    for path in known:
        by_leaf.setdefault(path.rpartition(".")[2], []).append(path)
    near = [name] if name in by_leaf else difflib.get_close_matches(name, by_leaf, 1)
    close = by_leaf[near[0]] if near else difflib.get_close_matches(name, known, 1)
    if close and close[0].startswith("command."):
        return f"; --{close[0].removeprefix('command.')} is a word of the command line"
    return f"; did you mean {' or '.join(close)}?" if close else ""


def explain(Config: type, error: pydantic.ValidationError) -> str:
    """The first problem in a line: field, value and what was expected, or a contradiction."""
    first = error.errors()[0]
    name = group_of(Config(), error.title) + ".".join(map(str, first["loc"]))
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    if first["type"] == "unexpected_keyword_argument":
        return f"unknown field {name!r}{hint(Config, str(first['loc'][-1]))}"
    return f"{name} = {first['input']!r}: {first['msg']}"


def group_of(settings: Any, title: str) -> str:
    """The dotted name, and a dot, of the group whose class is called `title`; "" for none."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            inner = group_of(value, title)
            if inner or type(value).__name__ == title:
                return f"{field.name}.{inner}".removeprefix("command.")
    return ""


def place(path: Path, name: str, leaf: str = "") -> str:
    """`file:line` of the last assignment to a name, or of its `leaf`; the file if inherited."""
    lines = path.read_text().splitlines()
    hits = [i for i, line in enumerate(lines, 1) if re.match(rf"{re.escape(name)}\s*[:=|]", line)]
    if not hits:
        return str(path)
    inside = [i for i, line in enumerate(lines, 1) if i >= hits[-1] and f'"{leaf}"' in line]
    return f"{path}:{inside[0] if leaf and inside else hits[-1]}"
