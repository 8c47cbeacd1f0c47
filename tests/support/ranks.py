"""Starts ranks as forks of a process that has imported what they need.

An import of torch and transformers costs each process of a test seconds. The process that runs the
tests has threads, beside which a fork may hang, so Python's fork server makes the forks.
"""

import multiprocessing
from collections.abc import Callable

from torch.multiprocessing import spawn, start_processes

IMPORTED = ["policy.fsdp", "policy.sync.weight_sync", "settings.config", "torch._dynamo"]
IMPORTED += ["transformers.models.qwen3.modeling_qwen3", "hypothesis", "pytest"]
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(IMPORTED)


def in_forks(work: Callable, args: tuple, world: int) -> None:
    """Calls `work(rank, *args)` in `world` processes; raises what one of them raises.

    They have the environment variables that the first process of the fork server had.
    """
    start_processes(work, args, nprocs=world, start_method="forkserver")


def in_fresh_forks(work: Callable, args: tuple, world: int) -> None:
    """Does the same with today's environment variables, in forks of a process that starts anew."""
    spawn(fork_all, (work, args, world), nprocs=1)


def fork_all(_: int, work: Callable, args: tuple, world: int) -> None:
    """Forks the ranks, in a process that has imported the module of `work`."""
    start_processes(work, args, nprocs=world, start_method="fork")
