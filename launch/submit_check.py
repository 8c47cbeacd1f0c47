"""Checks, before a run is submitted and again in its job, whether it may start.

    python launch/submit_check.py --config configs/rlvr1.py --run_dir runs/rlvr1 --resume auto ...
    python launch/submit_check.py --node    what differs from node to node: GPUs, driver, compiler

Takes the arguments of grpo_async.py, or of the program that GRPO_PROGRAM names. Prints the dry run
and a line for each check. Exit status: 0 if all is well, 1 if something must be fixed, 3 if the run
has finished.

The machine that submits may lack what the nodes have. So libraries, GPUs, limits and services are
checked only in a job (SLURM_JOB_ID), or with GRPO_EXECUTOR=local, when the run uses this machine.
Before a job is submitted, a run in the same folder may still be alive: the job waits for it.
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
from types import ModuleType
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent.parent))
from core.errors import InputError
from envs import services
from launch.host import disk

if TYPE_CHECKING:
    from settings.config import RunSettings, TrainingSettings

OVER = 3


def runs_here() -> bool:
    """Returns True if the run will use this machine."""
    return "SLURM_JOB_ID" in os.environ or os.environ.get("GRPO_EXECUTOR") == "local"


def settings(argv: list[str]) -> "TrainingSettings":
    """Checks configuration, model, folder and rows; returns the settings.

    Raises InputError for a problem, and SystemExit if the program would end at once.
    """
    from dry_run import check, explain
    from envs.check_rows import load_rows
    from runtime.startup import modes, preflight
    from settings import reader

    name = os.environ.get("GRPO_PROGRAM", "grpo_async.py")
    if not (Path(__file__).parent.parent / name).is_file() or Path(name).name != name:
        raise InputError(f"GRPO_PROGRAM = {name!r}: expected a file next to grpo_async.py")
    program: ModuleType = importlib.import_module(Path(name).stem)
    if hasattr(program, "load_pairs"):
        default, read, loops_of = "configs/tiny_dpo.py", program.load_pairs, modes.training_loops
    else:
        default, read, loops_of = "configs/tiny.py", load_rows, modes.loops
    cfg = reader.load(program.Config, argv, default=default)
    # Rows are counted by agent before the job, not again while its nodes wait.
    data = check.Summary([], [], {}) if runs_here() else None
    table = explain(cfg, program.Config, data)
    print(table)
    if "\nPROBLEM: " in table:
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
    """Returns True if nodes may have what this machine lacks; False if its setting is empty.

    Judges are checked: if settings and variables name none, no machine has one.
    """
    comes = need.name == "lean" and bool(os.environ.get("SANDBOX_CONTAINER"))  # it has Lean
    is_set = bool(getattr(services.current(), need.name.partition(".")[0], True))
    return need.of_node and (is_set or comes)


# The first sentence of a check's docstring is its name in the lines that are printed.


def modules(cfg: "TrainingSettings") -> Iterator[str]:
    """Libraries that the run imports in its actors."""
    needed = ["torch", "ray", "transformers", "safetensors"]
    if cfg.demand.engines:
        needed.append("vllm")
    if cfg.policy.kind == "megatron":
        needed.append("megatron.core")
    if cfg.wandb:
        needed.append("wandb")
    for name in needed:
        if not importlib.util.find_spec(name.partition(".")[0]):
            yield f"the library {name} is missing: run bash launch/setup.sh on every node"


def gpus(cfg: "TrainingSettings | None" = None) -> Iterator[str]:
    """Driver and GPUs of this node, if Slurm granted any."""
    from runtime.processes.ray_start import OLDEST_DRIVER

    granted = os.environ.get("SLURM_GPUS_ON_NODE")
    if not granted or granted == "0":
        return
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        yield f"Slurm granted {granted} GPUs, but nvidia-smi fails: {error}"
        return
    versions = found.stdout.split()
    if len(versions) < int(granted):
        yield f"Slurm granted {granted} GPUs, but nvidia-smi shows {len(versions)}"
    elif int(versions[0].partition(".")[0]) < OLDEST_DRIVER and (why := torch_refuses()):
        yield (
            f"NVIDIA's driver is {versions[0]}, but CUDA 13 needs {OLDEST_DRIVER}, or its "
            f"compatibility libraries (the package cuda-compat-13-0); torch: {why}"
        )


def torch_refuses() -> str:
    """Returns why torch cannot use a GPU on this node; "" if it can.

    With compatibility libraries, it can use one even under an older driver.
    """
    tried = [sys.executable, "-c", "import torch; torch.ones(1, device='cuda').sum().item()"]
    try:
        found = subprocess.run(tried, capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return "".join(found.stderr.splitlines()[-1:]) if found.returncode else ""


def compilers(cfg: "TrainingSettings | None" = None) -> Iterator[str]:
    """Compilers for kernels built at first use, on a node whose GPUs Slurm granted."""
    if os.environ.get("SLURM_GPUS_ON_NODE", "0") == "0":
        return
    known = (os.environ.get("CC", ""), "gcc", "clang")  # in Triton's order (runtime/build.py)
    if not any(name and shutil.which(name) for name in known):
        yield "no C compiler is on PATH, so Triton's first kernel would fail: apt-get install gcc"
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        yield f"{header} is missing, so Triton's first kernel would fail: install python3-dev"
    if not (cfg and cfg.demand.engines):
        return
    beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    toolkit = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    has_nvcc = shutil.which("nvcc") or Path(toolkit, "bin/nvcc").exists()
    compiles = has_nvcc and shutil.which("ninja", path=beside)
    if not compiles and not importlib.util.find_spec("flashinfer_cubin"):
        print(
            "note: vLLM runs without FlashInfer's kernels, which are faster: there is no "
            "nvcc (CUDA_HOME) or ninja, nor the library flashinfer-cubin"
        )


def files(cfg: "TrainingSettings") -> Iterator[str]:
    """Files that a process may open."""
    from runtime.processes.ray_start import short_of_files

    met = cfg.policy.ranks + cfg.demand.engines * cfg.demand.engine_gpus
    if lack := short_of_files(met, beside=4096):
        yield lack


def images(cfg: "RunSettings") -> Iterator[str]:
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
        yield (
            f"{len(missing):,} of {len(missing) + len(found):,} images are missing, such as "
            f"{name}: bash launch/images.sh {path} {cfg.services.images}"
        )


def boxes(cfg: "RunSettings") -> Iterator[str]:
    """Boxes of agents that repair repositories."""
    from dry_run import boxes

    if hasattr(cfg, "services") and boxes.uses(cfg):
        yield from boxes.problems(cfg)


def variables(cfg: "TrainingSettings") -> Iterator[str]:
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
        yield "wandb = True, but neither WANDB_API_KEY nor ~/.netrc exists: run wandb login"


def sentences(check: Callable[..., Iterator[str]]) -> str:
    """Returns a check's name: the first sentence of its docstring."""
    return (check.__doc__ or check.__name__).partition(".")[0]


def main(argv: list[str]) -> int:
    """Runs all checks, or a node's checks; returns the number of problems."""
    if argv == ["--node"]:
        return report((gpus, compilers))
    with contextlib.nullcontext() if runs_here() else services.granting(may_be_there):
        cfg = settings(argv)
    of_job = (modules, gpus, compilers, files, images, boxes) if runs_here() else ()
    return report((*of_job, variables, disk), cfg)


def report(checks: Iterable[Callable[..., Iterator[str]]], *of: "TrainingSettings") -> int:
    """Runs checks `of` a run, prints a line for each problem, and returns their number."""
    problems = 0
    for check in checks:
        found = list(check(*of))
        problems += len(found)
        for problem in found:
            print(f"PROBLEM: {problem}")
        if not found:
            print(f"ok: {sentences(check)}")
    return problems


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1:])))
