"""Looks before a job starts: may this run start, and can this machine run it?

    python launch/preflight.py --config configs/rlvr1.py --run_dir runs/rlvr1 --resume auto ...

Takes the arguments of grpo_async.py. Prints a line for each thing that was looked at. Exit status:
0 where all is well, 1 where something must be mended, 3 where the run is over. Before a job is
submitted, a run that is alive is well: the job waits for it.
"""

import importlib.util
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

FREE = 5.0  # times a checkpoint of the policy that the run folder should have room for
FILES = 64  # assumed: that a process has open for each trainer rank and engine worker it meets
OVER = 3


def settings(argv: list[str]) -> Any:
    """The run, from configuration, model, folder and rows. Raises SystemExit as grpo_async.py."""
    import grpo_async
    from runtime import config, modes

    try:
        cfg = config.load(grpo_async.Config, argv, default="configs/tiny.py")
    except config.InputError as error:
        if "is in use by" not in str(error) or "SLURM_JOB_ID" in os.environ:
            raise
        print(f"ok: {str(error).removeprefix('error: ')}, for which the jobs wait")
        raise SystemExit from None
    rows = grpo_async.load_rows(cfg.data.train, cfg)
    val = grpo_async.load_rows(cfg.data.val, cfg) if cfg.data.val else []
    run = grpo_async.Run(cfg, rows, val)
    try:
        modes.loops(run)
    except SystemExit as stop:
        if stop.code is None:
            raise SystemExit(OVER) from None
        raise
    print(f"ok: {cfg.command.config}, {cfg.model}, {len(rows):,} rows, {len(val):,} for evaluation")
    return cfg


def modules(cfg: Any) -> Iterator[str]:
    """Libraries that the run imports in its actors."""
    needed = ["torch", "vllm", "ray", "transformers", "safetensors"]
    needed += ["megatron.core"] * (cfg.policy.kind == "megatron") + ["wandb"] * cfg.wandb
    for name in needed:
        if not importlib.util.find_spec(name.partition(".")[0]):
            yield f"the library {name} is missing: bash launch/setup.sh on every node"


def gpus(cfg: Any) -> Iterator[str]:
    """Driver and GPUs of this node, where Slurm granted some."""
    from runtime.preflight import OLDEST_DRIVER

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
    """Files that a process may open. Ray raises the soft limit of its own to the hard one."""
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    met = cfg.policy.ranks + cfg.engine.count * cfg.engine.tensor_parallel
    needed = 4096 + FILES * met
    if limit != resource.RLIM_INFINITY and limit < needed:
        told = f"ulimit -Hn is {limit}, {met} ranks and engine workers need {needed}"
        yield f"{told}: raise nofile in /etc/security/limits.conf, or LimitNOFILE of slurmd"


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
    """Room for checkpoints, whose size is guessed from the model's files."""
    there = next(path for path in (Path(cfg.run_dir), *Path(cfg.run_dir).parents) if path.exists())
    free = shutil.disk_usage(there).free
    model = sum(path.stat().st_size for path in Path(cfg.model).glob("*.safetensors"))
    needed = int(FREE * model * (cfg.keep_last + 1))
    if free < needed:
        told = f"{free >> 30} GiB are free, {cfg.keep_last + 1} checkpoints need {needed >> 30}"
        yield f"{there}: {told}: free some, or lower keep_last"


def sentences(check: Callable[[Any], Iterator[str]]) -> str:
    """What a check is of."""
    return (check.__doc__ or check.__name__).partition(".")[0]


def main(argv: list[str]) -> int:
    """Runs all checks; how many found something to mend."""
    cfg = settings(argv)
    problems = 0
    for check in (modules, gpus, files, variables, disk):
        found = list(check(cfg))
        problems += len(found)
        print("\n".join(f"PROBLEM: {problem}" for problem in found) or f"ok: {sentences(check)}")
    return problems


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1:])))
