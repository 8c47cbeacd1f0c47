"""How a configuration is read: a file of assignments, then command-line flags over it."""

import dataclasses
import difflib
import io
import json
import os
import re
import sys
import time
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_origin

import pydantic
import tyro

if TYPE_CHECKING:
    from runtime.settings import RunSettings

ROOT = Path(__file__).parent.parent
HUB_SECONDS = 10.0  # that the Hugging Face hub may take to say whether it has a model
MODEL_FILES = ("*.json", "*.txt", "*.model", "*.jinja")
C = TypeVar("C", bound="RunSettings")


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
    Raises InputError for an unknown or malformed field; tyro exits with a message for bad flags.
    With --dry_run it prints what the run would need, and raises SystemExit.
    """
    path = ROOT / default
    flags = [part for flag in argv for part in split_config(flag)]
    if flags.count("--config") > 1:
        raise InputError("--config is given twice, expected once")
    if "--config" in flags:
        at = flags.index("--config")
        if at + 1 == len(flags):
            raise InputError(f"--config: expected the path of a file, such as {default}")
        path = Path(flags[at + 1])
        del flags[at : at + 2]
    base = read(Config, path)
    source = str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)
    base = dataclasses.replace(base, command=dataclasses.replace(base.command, config=source))
    program = Path(sys.argv[0]).name
    about = f"{(Config.__doc__ or '').strip()}\n\nThe defaults below are those of {source}."
    cfg = tyro.cli(
        Config, default=base, args=flags, prog=program, description=about, registry=REGISTRY
    )
    cfg = with_paths(with_entries(base, cfg))
    if cfg.command.dry_run:
        from dry_run import explain  # and transformers, which takes 3 s

        print(explain(cast(Any, cfg), Config))  # a fork has a class of its own
        raise SystemExit
    check_model(cfg)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a file must not hide what a run waits for
        sys.stdout.reconfigure(line_buffering=True)
    print(f"run folder: {shown(cfg.run_dir)}", flush=True)
    return cfg


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

    A model of the Hugging Face hub is fetched. Raises InputError where it cannot be had.
    """
    run_dir = cfg.run_dir.replace("{time}", time.strftime("%Y%m%d-%H%M%S"))
    run_dir = run_dir.replace("{seed}", str(cfg.seed))
    command = cfg.command
    folders: dict[str, Any] = {}
    if command.resume not in ("", "auto"):
        folders["resume"] = str(Path(command.resume).resolve())
    if command.replay:
        folders["replay"] = str(Path(command.replay).resolve())
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
    if folder.exists() or not is_name or folder.parent.exists() or model.startswith("models/"):
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
        found = ", ".join(sorted(f"configs/{p.name}" for p in ROOT.glob("configs/[!_]*.py")))
        raise InputError(f"{path.resolve()}: no such config file; there are: {found} in {ROOT}")
    assigned = Merged(__file__=str(path), __name__=path.stem)
    try:
        exec(compile(path.read_text(), str(path), "exec"), assigned)
    except Exception as error:
        raise InputError(f"{path}: {type(error).__name__}: {error}") from error
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
    try:
        return with_entries(Config(), Config(**chosen))
    except pydantic.ValidationError as error:
        where = error.errors()[0]["loc"]
        at = place(path, *map(str, where[:2])) if where else str(path)
        raise InputError(f"{at}: {explain(Config, error)}") from None


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
    name = ".".join(map(str, first["loc"]))
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    if first["type"] == "unexpected_keyword_argument":
        return f"unknown field {name!r}{hint(Config, str(first['loc'][-1]))}"
    return f"{name} = {first['input']!r}: {first['msg']}"


def place(path: Path, name: str, leaf: str = "") -> str:
    """`file:line` of the last assignment to a name, or of its `leaf`; the file if inherited."""
    lines = path.read_text().splitlines()
    hits = [i for i, line in enumerate(lines, 1) if re.match(rf"{re.escape(name)}\s*[:=|]", line)]
    if not hits:
        return str(path)
    inside = [i for i, line in enumerate(lines, 1) if i >= hits[-1] and f'"{leaf}"' in line]
    return f"{path}:{inside[0] if leaf and inside else hits[-1]}"


def check_model(cfg: "RunSettings") -> None:
    """Raises InputError unless the folder is a model that this configuration can train."""
    model = cfg.model
    for name in ("config.json", "tokenizer_config.json"):
        if not (Path(model) / name).is_file():
            made = " (launch/make_tiny.py makes it)" if model.endswith("models/tiny") else ""
            raise InputError(f"model = {model!r}: expected a folder that holds {name}{made}")
    settings = (Path(model) / "tokenizer_config.json").read_text()
    if "chat_template" not in settings and not list(Path(model).glob("chat_template*")):
        raise InputError(f"model = {model!r}: its tokenizer has no chat_template, expected one")
    if cfg.policy.kind == "megatron":
        from policy.megatron.check import check_megatron

        check_megatron(model, cfg.policy)
