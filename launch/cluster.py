"""Ray: the cluster, its actors, and waits that have a name and a deadline."""

import asyncio
import os
from collections.abc import Awaitable
from pathlib import Path

import ray
import torch


def actor(cls: type, gpus: float, **options):
    """A Ray actor of a plain class; without GPUs in the cluster it asks for none."""
    gpus = gpus if ray.cluster_resources().get("GPU") else 0
    return ray.remote(cls).options(num_cpus=0, num_gpus=gpus, **options)


def connect(cfg) -> None:
    """Joins the cluster that RAY_ADDRESS names, or starts one on this machine."""
    env = {
        "PYTHONPATH": str(Path(__file__).parent.parent),
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
    local = {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    ray.init(
        runtime_env={"env_vars": env},
        log_to_driver=False,
        logging_level="ERROR",
        **({} if os.environ.get("RAY_ADDRESS") else local),
    )


async def within(seconds: float, what: str, awaitable: Awaitable, state=lambda: ""):
    """Awaits under a named deadline. Raises TimeoutError with that name and `state`."""
    try:
        async with asyncio.timeout(seconds) as deadline:
            return await awaitable
    except TimeoutError:
        if not deadline.expired():
            raise
        raise TimeoutError(f"waited {seconds:.0f} s for {what}. {state()}") from None
