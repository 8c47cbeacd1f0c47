"""Looks before a job starts: may this run start, and can this machine run it?

    python launch/preflight.py --config configs/rlvr1.py --run_dir runs/rlvr1 --resume auto ...

Takes the arguments of grpo_async.py, or of the program that GRPO_PROGRAM names. Prints a line for
each thing that was looked at. Exit status: 0 where all is well, 1 where something must be mended, 3
where the run is over. Before a job is submitted, a run that is alive is well: the job waits for it.
"""

import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

FREE = 5.0  # times a checkpoint of the policy that the run folder should have room for
OVER = 3


def settings(argv: list[str]) -> Any:
    """The run, from configuration, model, folder and rows. Raises SystemExit as the program."""
    from envs.check_rows import load_rows
    from runtime import modes, preflight
    from settings import errors

    name = os.environ.get("GRPO_PROGRAM", "grpo_async.py")
    if not (Path(__file__).parent.parent / name).is_file() or Path(name).name != name:
        expected = "expected a file beside grpo_async.py"
        raise errors.InputError(f"GRPO_PROGRAM = {name!r}: {expected}")
    program: Any = importlib.import_module(Path(name).stem)
    has_pairs = hasattr(program, "load_pairs")
    read = program.load_pairs if has_pairs else load_rows
    loops_of: Any = modes.training_loops if has_pairs else modes.loops
    default = "configs/tiny_dpo.py" if has_pairs else "configs/tiny.py"
    try:
        cfg = preflight.load(program.Config, argv, default=default)
    except errors.InputError as error:
        if "is in use by" not in str(error) or "SLURM_JOB_ID" in os.environ:
            raise
        print(f"ok: {str(error).removeprefix('error: ')}, for which the jobs wait")
        raise SystemExit from None
    rows = read(cfg.data.train, cfg)
    val = read(cfg.data.val, cfg) if cfg.data.val else []
    try:
        loops_of(program.Run(cfg, rows, val))
    except SystemExit as stop:
        if stop.code is None:
            raise SystemExit(OVER) from None
        raise
    print(f"ok: {cfg.command.config}, {cfg.model}, {len(rows):,} rows, {len(val):,} for evaluation")
    return cfg


def modules(cfg: Any) -> Iterator[str]:
    """Libraries that the run imports in its actors."""
    needed = ["torch", "ray", "transformers", "safetensors"] + ["vllm"] * bool(cfg.demand.engines)
    needed += ["megatron.core"] * (cfg.policy.kind == "megatron") + ["wandb"] * cfg.wandb
    for name in needed:
        if not importlib.util.find_spec(name.partition(".")[0]):
            yield f"the library {name} is missing: bash launch/setup.sh on every node"


def gpus(cfg: Any) -> Iterator[str]:
    """Driver and GPUs of this node, where Slurm granted some."""
    from runtime.ray_start import OLDEST_DRIVER

    granted = os.environ.get("SLURM_GPUS_ON_NODE")
    if not granted or granted == "0":
        return
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        yield f"Slurm granted {granted} GPUs, and nvidia-smi fails: {error}"
        return
    versions = found.stdout.split()
    if len(versions) < int(granted):
        yield f"Slurm granted {granted} GPUs, nvidia-smi shows {len(versions)}"
    elif int(versions[0].partition(".")[0]) < OLDEST_DRIVER:
        yield f"NVIDIA's driver is {versions[0]}, CUDA 13 needs {OLDEST_DRIVER}: update it"


def files(cfg: Any) -> Iterator[str]:
    """Files that a process may open."""
    from runtime.ray_start import short_of_files

    met = cfg.policy.ranks + cfg.demand.engines * cfg.demand.engine_gpus
    if lack := short_of_files(met, beside=4096):
        yield lack


def variables(cfg: Any) -> Iterator[str]:
    """Variables that a job must have, and folders that they name."""
    if os.environ.get("SLURM_JOB_ID") and not os.environ.get("SLURM_JOB_END_TIME"):
        yield "SLURM_JOB_END_TIME is missing, so save_before does nothing: submit with --time"
    if "{time}" in " ".join(sys.argv) and "auto" in sys.argv:
        yield "run_dir has {time}: each job would begin anew"
    cache = os.environ.get("PERSISTENT_CACHE")
    if cache and not os.access(cache, os.W_OK):
        yield f"PERSISTENT_CACHE = {cache!r} cannot be written to"
    if cfg.wandb and not (
        os.environ.get("WANDB_API_KEY") or Path("~/.netrc").expanduser().exists()
    ):
        yield "wandb = True, and neither WANDB_API_KEY nor ~/.netrc is there: wandb login"


def disk(cfg: Any) -> Iterator[str]:
    """Room for checkpoints; their size is estimated from the model's files."""
    there = next(path for path in (Path(cfg.run_dir), *Path(cfg.run_dir).parents) if path.exists())
    free = shutil.disk_usage(there).free
    model = sum(path.stat().st_size for path in Path(cfg.model).glob("*.safetensors"))
    needed = int(FREE * model * (cfg.keep_last + 1))
    if free < needed:
        lacking = f"{free >> 30} GiB are free, {cfg.keep_last + 1} checkpoints need {needed >> 30}"
        yield f"{there}: {lacking}: free some, or lower keep_last"


def sentences(check: Callable[[Any], Iterator[str]]) -> str:
    """The name of a check."""
    return (check.__doc__ or check.__name__).partition(".")[0]


def main(argv: list[str]) -> int:
    """Runs all checks; returns the number of problems."""
    cfg = settings(argv)
    problems = 0
    for check in (modules, gpus, files, variables, disk):
        found = list(check(cfg))
        problems += len(found)
        print("\n".join(f"PROBLEM: {problem}" for problem in found) or f"ok: {sentences(check)}")
    return problems


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1:])))
