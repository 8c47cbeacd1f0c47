"""A profile of env.toml as variables of the shell, for launch/submit.sh; those that are set win.

    python launch/profiles.py NAME

env.toml is the nearest one above the working folder, or what GRPO_ENV_FILE or NEMOTRON_ENV_FILE
names. Its keys are those of NVIDIA's nemotron command; launch/env.example.toml shows them.
"""

import os
import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any

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
    "cpus_per_task": "SBATCH_CPUS_PER_TASK",  # which sbatch itself reads, as the next one
    "mem": "SBATCH_MEM_PER_NODE",
}
WANDB = {"project": "WANDB_PROJECT", "entity": "WANDB_ENTITY"}  # of its own table, for all profiles
# Keys that other executors or one task per node leave without meaning here.
IGNORED = ("extends", "env_vars", "ntasks_per_node", "nproc_per_node", "exclusive")
IGNORED += ("build_partition", "build_time", "build_cache_dir", "remote_job_dir", "lustre_mount")


def fail(message: str) -> None:
    """Ends the program with a message."""
    raise SystemExit(f"error: {message}")


def find() -> Path:
    """The file of profiles."""
    named = os.environ.get("GRPO_ENV_FILE") or os.environ.get("NEMOTRON_ENV_FILE")
    here = Path.cwd()
    paths = [Path(named)] if named else [folder / "env.toml" for folder in (here, *here.parents)]
    found = next((path for path in paths if path.is_file()), None)
    if not found:
        fail(f"no {paths[0]}, nor one above it: expected profiles as in launch/env.example.toml")
    return found or Path()


def profile(every: dict[str, Any], name: str, seen: tuple[str, ...] = ()) -> dict[str, Any]:
    """The keys of a profile, with those of the one that it extends."""
    known = [key for key in every if isinstance(every[key], dict) and key not in RESERVED]
    if name not in known:
        fail(f"no profile {name!r}: expected one of {', '.join(known) or 'none'}")
    if name in seen:
        fail(f"profiles extend each other in a circle: {' -> '.join([*seen, name])}")
    own = every[name]
    above = profile(every, own["extends"], (*seen, name)) if own.get("extends") else {}
    return above | own | {"env_vars": table(above, "env_vars") | table(own, "env_vars")}


def table(keys: dict[str, Any], name: str) -> dict[str, Any]:
    """A table by its name, empty where there is none. Ends the program for any other value."""
    found = keys.get(name, {})
    if not isinstance(found, dict):
        fail(f"{name} = {found!r} of env.toml: expected a table")
    if odd := [key for key in found if not key.isidentifier()]:
        fail(f"[{name}] of env.toml has {odd[0]!r}: expected a variable's name")
    return found


def variables(keys: dict[str, Any]) -> dict[str, str]:
    """The variables that the keys stand for."""
    executor = keys.get("executor", "slurm")
    if executor not in EXECUTORS:
        fail(f"executor = {executor!r}: expected one of {', '.join(EXECUTORS)}")
    if "tunnel" in keys:
        fail(f"tunnel = {keys['tunnel']!r}: submit on a machine that has sbatch")
    if unknown := sorted(keys.keys() - VARIABLES.keys() - {*IGNORED}):
        fail(f"env.toml has {', '.join(unknown)}: expected {', '.join([*VARIABLES, *IGNORED])}")
    found = {name: text(name, value) for name, value in keys["env_vars"].items()}
    for key, variable in VARIABLES.items():
        if key in keys:
            parts = keys[key] if isinstance(keys[key], list) else [keys[key]]
            found[variable] = ",".join(text(key, part) for part in parts)
    return found


def text(key: str, value: Any) -> str:
    """The text of a value, or of a list's part. Ends the program for any other."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        fail(f"{key} = {value!r} of env.toml: expected a text or a number")
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
        fail(f"[wandb] of env.toml has {', '.join(unknown)}: expected {', '.join(WANDB)}")
    found = {WANDB[key]: text(key, value) for key, value in board.items()}
    for variable, value in (found | variables(profile(every, name))).items():
        if not os.environ.get(variable):
            print(f"export {variable}={shlex.quote(value)}")


if __name__ == "__main__":
    main(sys.argv[1])
