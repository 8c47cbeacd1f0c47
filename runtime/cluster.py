"""Ray: the cluster and its actors."""

import asyncio
import contextlib
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import ray
import torch
from pydantic import PositiveFloat
from pydantic.dataclasses import dataclass as checked_dataclass


@checked_dataclass(frozen=True, config={"extra": "forbid"})
class Timeouts:
    """Seconds after which a wait ends with an error that names it."""

    start: PositiveFloat = 900.0
    """For actors to load models."""
    rollout: PositiveFloat = 3600.0
    """For one group's rollouts."""
    batch: PositiveFloat = 14400.0
    """For a step's groups, which the trainer waits for."""
    train: PositiveFloat = 3600.0
    """For one training step."""
    sync: PositiveFloat = 600.0
    """For one weight update, from pause to resume."""


def actor(cls: type, gpus: float, cfg, **options):
    """A Ray actor of a plain class; what it prints goes to a file in the run folder's logs.

    Without GPUs in the cluster it asks for none.
    """
    gpus = gpus if ray.cluster_resources().get("GPU") else 0
    groups = {k: options.pop(k) for k in ("concurrency_groups",) if k in options}

    class Logged(cls):
        def __init__(self, *args):
            redirect(Path(cfg.run_dir) / "logs", cls.__name__)
            super().__init__(*args)

    Logged.__name__ = Logged.__qualname__ = cls.__name__
    made = ray.remote(num_cpus=0, **groups)(Logged)
    return made.options(num_gpus=gpus, **options)


def shares_gpus(cfg) -> bool:
    """Whether trainers and engines use the same GPUs."""
    return cfg.trainer_gpus < 1 and bool(ray.cluster_resources().get("GPU"))


def redirect(folder: Path, name: str) -> None:
    """Sends this process's output, and that of its children, to a file of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    host = os.uname().nodename
    with open(folder / f"{name}-{host}-{os.getpid()}.log", "a", buffering=1) as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    faulthandler.enable()


def last_words(cfg, lines: int = 8) -> str:
    """The last lines of each actor's log, the latest first, for an error message."""
    paths = sorted(Path(cfg.run_dir).glob("**/logs/*.log"), key=os.path.getmtime, reverse=True)
    texts = [(path.name, path.read_text(errors="replace").splitlines()) for path in paths[:6]]
    return "\n".join(f"--- {name}\n" + "\n".join(t[-lines:]) for name, t in texts if t)


def on_signal(leave: Callable[[str], None], save_before: float) -> None:
    """Calls `leave` with a reason on SIGTERM and SIGUSR1, and before the Slurm job ends."""
    loop, end = asyncio.get_running_loop(), os.environ.get("SLURM_JOB_END_TIME")
    for name in ("SIGTERM", "SIGUSR1"):
        loop.add_signal_handler(getattr(signal, name), leave, name)
    if save_before and end:
        loop.call_later(max(0, float(end) - time.time() - save_before), leave, "end of the job")


@contextlib.contextmanager
def connected(cfg):
    """A cluster while it lasts; an error leaves with the last lines that the actors logged."""
    connect(cfg)
    try:
        yield
    except Exception:
        print(last_words(cfg), file=sys.stderr)
        raise
    finally:
        ray.shutdown()


def connect(cfg) -> None:
    """Joins the cluster that RAY_ADDRESS names, or starts one on this machine."""
    env = {
        "PYTHONPATH": f"{Path(__file__).parent.parent}:{os.environ.get('PYTHONPATH', '')}",
        "PYTHONDONTWRITEBYTECODE": "",  # without .pyc files each process recompiles 5,000 modules
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    if not torch.cuda.is_available():
        # Two busy processes with two threads each spin on two cores: 5 times slower.
        threads = max(1, (os.cpu_count() or 1) // (cfg.trainers + cfg.generators))
        env |= {
            "OMP_NUM_THREADS": str(threads),
            "TORCH_COMPILE_DISABLE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
    # Never a cluster that somebody else has left running here.
    local = {"address": "local", "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    ray.init(
        runtime_env={"env_vars": env},
        log_to_driver=False,
        logging_level="ERROR",
        **({} if os.environ.get("RAY_ADDRESS") else local),
    )
