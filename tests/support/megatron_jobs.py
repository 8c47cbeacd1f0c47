"""Starts megatron_ranks.py, or a script like it, for tests; and what its ranks share."""

import functools
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

from support.program import ROOT, ran


def compute(jobs: list[dict], folder: Path, script: str = "megatron_ranks.py") -> Callable:
    """What a script of this folder found, by a job's name; if a rank fails, the others end."""
    paths = [folder / f"{job['name']}.json" for job in jobs]
    for path, job in zip(paths, jobs, strict=True):
        path.write_text(json.dumps(job))
    run(script, *map(str, paths))
    return functools.cache(lambda name: torch.load(folder / f"{name}.pt", weights_only=False))


def in_ranks(work: Callable[[dict, Path], dict], paths: list[Path]) -> None:
    """Does jobs in their order; neighbours of one world size share the forked processes.

    On each rank it calls `work(job, folder)`; what that returns on rank 0 is JOB.pt.
    """
    torch.set_num_threads(1)
    jobs = [(json.loads(path.read_text())["world"], path) for path in paths]
    for world, group in itertools.groupby(jobs, lambda job: job[0]):
        with tempfile.TemporaryDirectory() as folder:
            args = (world, f"{folder}/store", work, [path for _, path in group])
            start_processes(rank_main, args, nprocs=world, start_method="fork")


def rank_main(rank: int, world: int, store: str, work: Callable, paths: list[Path]) -> None:
    """Does jobs of one world size, one after the other."""
    megatron = sys.modules.get("policy.megatron.policy")  # to import it takes each rank seconds
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    for path in paths:
        found = work(json.loads(path.read_text()), path.parent)
        if rank == 0:
            torch.save(found, path.with_suffix(".pt"))
        dist.barrier()
        if megatron:
            megatron.mpu.destroy_model_parallel()


def weights(policy) -> dict[str, torch.Tensor]:
    """The policy's weights on rank 0; {} on ranks that do not get them."""
    return {name: w.clone() for name, w in policy.named_weights() if w is not None}


def gathered_objects(mine: list) -> list:
    """What all ranks have, in the order of their ranks."""
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return [item for items in every for item in items]


def run(program: str, *arguments: str) -> str:
    """What a program of tests/support prints where Megatron-Core runs on a CPU."""
    env = os.environ | {"PYTHONPATH": f"{ROOT}/tests/cpu:{ROOT}:{ROOT}/tests"}
    env |= {"OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
    command = (sys.executable, "-W", "ignore", f"tests/support/{program}", *arguments)
    done = ran(*command, env=env, seconds=400)
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout
