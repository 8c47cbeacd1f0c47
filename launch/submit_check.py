"""Looks before a run is submitted, and again in its job: may it start, and can it run there?

    python launch/submit_check.py --config configs/rlvr1.py --run_dir runs/rlvr1 --resume auto ...
    python launch/submit_check.py --node    what differs from node to node: GPUs, driver, compiler

Takes the arguments of grpo_async.py, or of the program that GRPO_PROGRAM names. Prints the dry run
and a line for each thing that was looked at. Exit status: 0 where all is well, 1 where something
must be mended, 3 where the run is over.

The machine that submits may have none of what the nodes have. So libraries, GPUs, limits and
services are looked at in a job alone (SLURM_JOB_ID), and with GRPO_EXECUTOR=local, where this
machine runs it. Before a job is submitted, a run that is alive is well: the job waits for it.
"""

import contextlib
import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from core.errors import InputError
from envs import services
from launch.host import disk

OVER = 3


def runs_here() -> bool:
    """Whether this machine is one of those that the run will have."""
    return "SLURM_JOB_ID" in os.environ or os.environ.get("GRPO_EXECUTOR") == "local"


def settings(argv: list[str]) -> Any:
    """The run, from configuration, model, folder and rows. Raises SystemExit as the program."""
    from dry_run import check, explain
    from envs.check_rows import load_rows
    from runtime.startup import modes, preflight
    from settings import reader

    name = os.environ.get("GRPO_PROGRAM", "grpo_async.py")
    if not (Path(__file__).parent.parent / name).is_file() or Path(name).name != name:
        expected = "expected a file beside grpo_async.py"
        raise InputError(f"GRPO_PROGRAM = {name!r}: {expected}")
    program: Any = importlib.import_module(Path(name).stem)
    has_pairs = hasattr(program, "load_pairs")
    read = program.load_pairs if has_pairs else load_rows
    loops_of: Any = modes.training_loops if has_pairs else modes.loops
    default = "configs/tiny_dpo.py" if has_pairs else "configs/tiny.py"
    cfg = reader.load(program.Config, argv, default=default)
    # Nodes that wait do not count the rows of each agent as well.
    told = explain(cfg, program.Config, check.Summary([], []) if runs_here() else None)
    print(told)
    if "\nPROBLEM: " in told:
        raise InputError("the dry run found these problems")
    try:
        preflight.check(cfg)
    except InputError as error:
        if "is in use by" not in str(error) or runs_here():
            raise
        print(f"ok: {str(error).removeprefix('error: ')}, for which the jobs wait")
        raise SystemExit from None
    if runs_here():
        preflight.check_installed(cfg)
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


def may_be_there(need: services.Need) -> bool:
    """Whether the nodes may have what this machine lacks; not if the setting for it is empty.

    Judges are checked: if settings and variables name none, no machine has one.
    """
    comes = need.name == "lean" and bool(os.environ.get("SANDBOX_CONTAINER"))  # which has Lean
    is_set = bool(getattr(services.current(), need.name.partition(".")[0], True))
    return need.of_node and (is_set or comes)


def modules(cfg: Any) -> Iterator[str]:
    """Libraries that the run imports in its actors."""
    needed = ["torch", "ray", "transformers", "safetensors"] + ["vllm"] * bool(cfg.demand.engines)
    needed += ["megatron.core"] * (cfg.policy.kind == "megatron") + ["wandb"] * cfg.wandb
    for name in needed:
        if not importlib.util.find_spec(name.partition(".")[0]):
            yield f"the library {name} is missing: bash launch/setup.sh on every node"


def gpus(cfg: Any = None) -> Iterator[str]:
    """Driver and GPUs of this node, where Slurm granted some."""
    from runtime.processes.ray_start import OLDEST_DRIVER

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
    elif int(versions[0].partition(".")[0]) < OLDEST_DRIVER and (why := torch_refuses()):
        needs = f"{OLDEST_DRIVER}, or its compatibility libraries (the package cuda-compat-13-0)"
        yield f"NVIDIA's driver is {versions[0]}, CUDA 13 needs {needs}; torch: {why}"


def torch_refuses() -> str:
    """Why torch cannot use a GPU of this node, "" if it can: an older driver may have libraries."""
    tried = [sys.executable, "-c", "import torch; torch.ones(1, device='cuda').sum().item()"]
    try:
        found = subprocess.run(tried, capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return "".join(found.stderr.splitlines()[-1:]) if found.returncode else ""


def compilers(cfg: Any = None) -> Iterator[str]:
    """What compiles kernels at the first use, on a node whose GPUs Slurm granted."""
    if os.environ.get("SLURM_GPUS_ON_NODE", "0") == "0":
        return
    known = (os.environ.get("CC", ""), "gcc", "clang")  # in Triton's order (runtime/build.py)
    if not any(name and shutil.which(name) for name in known):
        yield "no C compiler is on PATH, so Triton's first kernel would fail: apt-get install gcc"
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        yield f"{header} is missing, so Triton's first kernel would fail: get python3-dev"
    if not (cfg and cfg.demand.engines):
        return
    beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    toolkit = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    has_nvcc = shutil.which("nvcc") or Path(toolkit, "bin/nvcc").exists()
    compiles = has_nvcc and shutil.which("ninja", path=beside)
    if not compiles and not importlib.util.find_spec("flashinfer_cubin"):
        what = "nvcc (CUDA_HOME) or ninja, nor the library flashinfer-cubin"
        print(f"note: vLLM goes without FlashInfer's kernels, which are faster: there is no {what}")


def files(cfg: Any) -> Iterator[str]:
    """Files that a process may open."""
    from runtime.processes.ray_start import short_of_files

    met = cfg.policy.ranks + cfg.demand.engines * cfg.demand.engine_gpus
    if lack := short_of_files(met, beside=4096):
        yield lack


def images(cfg: Any) -> Iterator[str]:
    """Images of repositories that rows name."""
    from envs.boxes import image_names

    missing: dict[str, str] = {}
    found = set()
    for path in filter(None, (cfg.data.train, cfg.data.val)):
        for name in image_names.named(path):
            there = image_names.folder_of(name)
            if there.is_dir() or there.with_name(f"{there.name}.sif").is_file():
                found.add(name)
            else:
                missing.setdefault(name, path)
    if missing:
        name, path = next(iter(missing.items()))
        remedy = f"bash launch/images.sh {path} {cfg.services.images}"
        of = f"{len(missing):,} of {len(missing) + len(found):,} images"
        yield f"{of} are missing, such as {name}: {remedy}"


def boxes(cfg: Any) -> Iterator[str]:
    """Boxes of agents that repair repositories."""
    from dry_run import boxes

    if hasattr(cfg, "services") and boxes.uses(cfg):
        yield from boxes.problems(cfg)


def variables(cfg: Any) -> Iterator[str]:
    """Variables that a job must have, and folders that they name."""
    if os.environ.get("SLURM_JOB_ID") and not os.environ.get("SLURM_JOB_END_TIME"):
        yield "SLURM_JOB_END_TIME is missing, so save_before does nothing: submit with --time"
    if "{time}" in " ".join(sys.argv) and "auto" in sys.argv:
        yield "run_dir has {time}: each job would begin anew"
    cache = os.environ.get("PERSISTENT_CACHE")
    if cache and not os.access(cache, os.W_OK):
        yield f"PERSISTENT_CACHE = {cache!r} cannot be written to"
    talks = cfg.wandb and os.environ.get("WANDB_MODE", "online") not in ("offline", "disabled")
    if talks and not (os.environ.get("WANDB_API_KEY") or Path("~/.netrc").expanduser().exists()):
        yield "wandb = True, and neither WANDB_API_KEY nor ~/.netrc is there: wandb login"


def sentences(check: Callable[..., Iterator[str]]) -> str:
    """The name of a check."""
    return (check.__doc__ or check.__name__).partition(".")[0]


def main(argv: list[str]) -> int:
    """Runs all checks, or those of a node; returns the number of problems."""
    if argv == ["--node"]:
        return report((gpus, compilers))
    with contextlib.nullcontext() if runs_here() else services.granting(may_be_there):
        cfg = settings(argv)
    of_job = (modules, gpus, compilers, files, images, boxes) if runs_here() else ()
    return report((*of_job, variables, disk), cfg)


def report(checks: Iterable[Callable[..., Iterator[str]]], *of: Any) -> int:
    """Runs checks `of` a run and prints a line for each problem; returns how many there are."""
    problems = 0
    for check in checks:
        found = list(check(*of))
        problems += len(found)
        print("\n".join(f"PROBLEM: {problem}" for problem in found) or f"ok: {sentences(check)}")
    return problems


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1:])))
