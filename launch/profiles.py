"""Prints a profile of env.toml as shell variables for launch/submit.sh, except those already set.

    python launch/profiles.py NAME

env.toml is the nearest one in or above the working folder, or the file that GRPO_ENV_FILE or
NEMOTRON_ENV_FILE names. It has the keys of NVIDIA's nemotron command; launch/env.example.toml shows
them.
"""

import os
import shlex
import sys
import tomllib
from datetime import date, time
from pathlib import Path
from typing import NoReturn

Toml = bool | int | float | str | date | time | list["Toml"] | dict[str, "Toml"]
EXECUTORS = ("local", "slurm")
RESERVED = ("wandb", "artifacts", "cache", "cli")
VARIABLES = {
    "executor": "GRPO_EXECUTOR",
    "account": "SLURM_ACCOUNT",
    "partition": "SLURM_PARTITION",
    "run_partition": "SLURM_PARTITION",
    "batch_partition": "SLURM_PARTITION",
    "nodes": "PROFILE_NODES",
    "gpus_per_node": "GPUS_PER_NODE",
    "time": "SLURM_TIME_LIMIT",
    "container_image": "CONTAINER",
    "mounts": "EXTRA_MOUNTS",
    "persistent_cache": "PERSISTENT_CACHE",
    "cpus_per_task": "SBATCH_CPUS_PER_TASK",  # sbatch itself reads this variable and the next one
    "mem": "SBATCH_MEM_PER_NODE",
}
WANDB = {"project": "WANDB_PROJECT", "entity": "WANDB_ENTITY"}  # one table for all profiles
# Keys for other executors, or keys that mean nothing with one task per node.
IGNORED = (
    "extends",
    "env_vars",
    "ntasks_per_node",
    "nproc_per_node",
    "exclusive",
    "build_partition",
    "build_time",
    "build_cache_dir",
    "remote_job_dir",
    "lustre_mount",
)


def fail(message: str) -> NoReturn:
    """Ends the program with a message."""
    raise SystemExit(f"error: {message}")


def find() -> Path:
    """Finds the profiles file."""
    named = os.environ.get("GRPO_ENV_FILE") or os.environ.get("NEMOTRON_ENV_FILE")
    here = Path.cwd()
    paths = [Path(named)] if named else [folder / "env.toml" for folder in (here, *here.parents)]
    for path in paths:
        if path.is_file():
            return path
    fail(f"no {paths[0]}, and none above it: expected profiles as in launch/env.example.toml")


def profile(every: dict[str, Toml], name: str, seen: tuple[str, ...] = ()) -> dict[str, Toml]:
    """Returns a profile's keys, which override the keys of the profile that it extends."""
    known = {
        key: value
        for key, value in every.items()
        if isinstance(value, dict) and key not in RESERVED
    }
    if name not in known:
        fail(f"no profile {name!r}: expected one of {', '.join(known) or 'none'}")
    if name in seen:
        fail(f"profiles extend each other in a circle: {' -> '.join([*seen, name])}")
    own = known[name]
    above: dict[str, Toml] = {}
    if extended := own.get("extends"):
        above = profile(every, text("extends", extended), (*seen, name))
    return above | own | {"env_vars": table(above, "env_vars") | table(own, "env_vars")}


def table(keys: dict[str, Toml], name: str) -> dict[str, Toml]:
    """Returns a table by its name, empty if it is missing. Ends the program for any other value."""
    found = keys.get(name, {})
    if not isinstance(found, dict):
        fail(f"{name} = {found!r} in env.toml: expected a table")
    if odd := [key for key in found if not key.isidentifier()]:
        fail(f"[{name}] in env.toml has {odd[0]!r}: expected a variable's name")
    return found


def variables(keys: dict[str, Toml]) -> dict[str, str]:
    """Returns the variables that the keys stand for."""
    executor = keys.get("executor", "slurm")
    if executor not in EXECUTORS:
        fail(f"executor = {executor!r}: expected one of {', '.join(EXECUTORS)}")
    if "tunnel" in keys:
        fail(f"tunnel = {keys['tunnel']!r}: submit on a machine that has sbatch")
    if unknown := sorted(keys.keys() - VARIABLES.keys() - {*IGNORED}):
        fail(f"env.toml has {', '.join(unknown)}: expected {', '.join([*VARIABLES, *IGNORED])}")
    found = {name: text(name, value) for name, value in table(keys, "env_vars").items()}
    for key, variable in VARIABLES.items():
        if key in keys:
            value = keys[key]
            parts = value if isinstance(value, list) else [value]
            found[variable] = ",".join(text(key, part) for part in parts)
    return found


def text(key: str, value: Toml) -> str:
    """Returns a text or a number as text. Ends the program for any other value."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        fail(f"{key} = {value!r} in env.toml: expected a text or a number")
    return str(value)


def main(name: str) -> None:
    """Prints the lines for the shell."""
    path = find()
    try:
        every = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        fail(f"{path}: {error}")
    board = table(every, "wandb")
    if unknown := sorted(board.keys() - WANDB.keys()):
        fail(f"[wandb] in env.toml has {', '.join(unknown)}: expected {', '.join(WANDB)}")
    found = {WANDB[key]: text(key, value) for key, value in board.items()}
    for variable, value in (found | variables(profile(every, name))).items():
        if not os.environ.get(variable):
            print(f"export {variable}={shlex.quote(value)}")


if __name__ == "__main__":
    main(sys.argv[1])
