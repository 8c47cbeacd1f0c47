"""How a configuration is read: a file of assignments, then command-line flags over it."""

import dataclasses
import difflib
import re
import runpy
import time
import types
from pathlib import Path

import pydantic
import tyro

ROOT = Path(__file__).parent.parent


class InputError(SystemExit):
    """Something the user wrote is wrong: ends the program saying where, what and why."""

    def __init__(self, message: str):
        super().__init__(f"error: {message}")


def load(Config: type, argv: list[str], default: str):
    """The `Config` that `[--config FILE] [--field value ...]` asks for; FILE defaults to `default`.

    A config file is plain Python assignments to field names; it may `import *` from another one.
    Raises InputError for an unknown or malformed field; tyro exits with a message for bad flags.
    """
    path, flags = ROOT / default, [part for flag in argv for part in split_config(flag)]
    if "--config" in flags:
        at = flags.index("--config")
        if at + 1 == len(flags):
            raise InputError(f"--config: expected the path of a file, such as {default}")
        path, flags = Path(flags[at + 1]), flags[:at] + flags[at + 2 :]
    cfg = tyro.cli(Config, default=read(Config, path), args=flags, prog="grpo_async.py")
    run_dir = cfg.run_dir.replace("{time}", time.strftime("%Y%m%d-%H%M%S"))
    run_dir = run_dir.replace("{seed}", str(cfg.seed))
    # Absolute, because actors have working directories of their own.
    paths = {name: str(Path(getattr(cfg, name)).resolve()) for name in ("model", *chosen(cfg))}
    return dataclasses.replace(cfg, run_dir=str(Path(run_dir).resolve()), **paths)


def chosen(cfg) -> list[str]:
    """The fields that name a folder to go on from."""
    folders = {"resume": cfg.resume.removeprefix("auto"), "replay": cfg.replay}
    return [name for name, folder in folders.items() if folder]


def split_config(flag: str) -> list[str]:
    """`--config=FILE` as the two words that it stands for; any other flag as it is."""
    return flag.split("=", 1) if flag.startswith("--config=") else [flag]


def read(Config: type, path: Path):
    """Runs a config file and checks its names and types. Raises InputError naming file and line."""
    if not path.is_file():
        found = ", ".join(sorted(f"configs/{p.name}" for p in ROOT.glob("configs/[!_]*.py")))
        raise InputError(f"{path}: no such config file; there are: {found}")
    try:
        assigned = runpy.run_path(str(path))
    except Exception as error:
        raise InputError(f"{path}: {type(error).__name__}: {error}") from error
    chosen = {
        name: value
        for name, value in assigned.items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType | type)
    }
    known = [field.name for field in dataclasses.fields(Config)]
    for name in sorted(chosen.keys() - set(known)):
        close = difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise InputError(f"{place(path, name)}: unknown field {name!r}{hint}")
    try:
        return Config(**chosen)
    except pydantic.ValidationError as error:
        field = error.errors()[0]["loc"][:1]
        at = place(path, str(field[0])) if field else path
        raise InputError(f"{at}: {explain(error)}") from None


def refuse_contradictions(cfg) -> None:
    """Raises ValueError for fields that exclude each other, naming both."""
    P, U, rule = cfg.prompts_per_step, cfg.updates_per_batch, cfg.correction
    kl, skip, dual = cfg.kl_coef, cfg.skip_zero_advantage, cfg.dual_clip
    waits, tries = cfg.rollout_attempts * cfg.timeouts.rollout, "rollout attempts * timeout"
    asked = [k for k in ("eval_only", "rollout_only", "replay", "export") if getattr(cfg, k)]
    goes_on = "resume = 'auto'" * (cfg.resume == "auto") or "export" * bool(cfg.export)
    val = f"val_period = {cfg.val_period} and val_data = {cfg.val_data!r}"
    ranks, unit = cfg.tp * cfg.pp * cfg.cp, 2 * cfg.cp * cfg.tp
    shared = f"tp * pp * cp = {cfg.tp} * {cfg.pp} * {cfg.cp}"
    experts = f"ep = {cfg.ep} must divide trainers / pp = {cfg.trainers // cfg.pp}"
    alone = ranks == cfg.ep == 1
    layout = f"{shared}, ep = {cfg.ep}"
    room = cfg.row_tokens // unit * unit or unit
    for holds, message in (
        (rule.low <= rule.high, f"correction.low = {rule.low} > correction.high = {rule.high}"),
        (P % U == 0, f"prompts_per_step = {P} is no multiple of updates_per_batch = {U}"),
        (dual is None or dual > 1, f"dual_clip = {dual}: expected more than 1"),
        (asked or cfg.group_size > 1, "group_size = 1: expected 2 or more, to compare"),
        (bool(cfg.val_period) == bool(cfg.val_data), f"{val}: expected both or neither"),
        (not (kl and skip), f"kl_coef = {kl} needs skip_zero_advantage = False, not True"),
        (len(asked) < 2, f"{' and '.join(asked)} exclude each other"),
        (cfg.eval_only or cfg.replay or not (asked and cfg.resume), f"resume excludes {asked}"),
        (cfg.val_data or not cfg.eval_only, "eval_only = True and val_data = '': no rows"),
        (not (goes_on and "{time}" in cfg.run_dir), f"{goes_on}: run_dir has {{time}}"),
        (waits < cfg.timeouts.batch, f"{tries} = {waits} leaves timeouts.batch no room"),
        (cfg.policy == "megatron" or alone, f"{layout} need policy = 'megatron', not 'fsdp'"),
        (
            cfg.policy == "megatron" or not cfg.replay_routing,
            "replay_routing = True needs policy = 'megatron', not 'fsdp'",
        ),
        (cfg.trainers % ranks == 0, f"trainers = {cfg.trainers} is no multiple of {shared}"),
        (cfg.trainers // cfg.pp % cfg.ep == 0, experts),
        (
            cfg.cp == 1 or cfg.row_tokens % unit == 0,
            f"row_tokens = {cfg.row_tokens} is no multiple of 2 * cp * tp = {unit}: try {room}",
        ),
    ):
        if not holds:
            raise ValueError(message)


def explain(error: pydantic.ValidationError) -> str:
    """The first problem in a line: field, value and what was expected, or a contradiction."""
    first = error.errors()[0]
    if not first["loc"]:
        return str(first["ctx"]["error"])
    return f"{'.'.join(map(str, first['loc']))} = {first['input']!r}: {first['msg']}"


def place(path: Path, name: str) -> str:
    """`file:line` of the last assignment to a name, or the file alone if it is inherited."""
    lines = path.read_text().splitlines()
    hits = [i for i, line in enumerate(lines, 1) if re.match(rf"{re.escape(name)}\s*[:=]", line)]
    return f"{path}:{hits[-1]}" if hits else str(path)


def check_model(path: str) -> None:
    """Raises InputError unless the folder is one that transformers' save_pretrained writes."""
    for name in ("config.json", "tokenizer_config.json"):
        if not (Path(path) / name).is_file():
            hint = " (launch/make_tiny.py makes it)" if path.endswith("models/tiny") else ""
            raise InputError(f"model = {path!r}: expected a folder that holds {name}{hint}")
    settings = (Path(path) / "tokenizer_config.json").read_text()
    if "chat_template" not in settings and not list(Path(path).glob("chat_template*")):
        raise InputError(f"model = {path!r}: its tokenizer has no chat_template, expected one")
