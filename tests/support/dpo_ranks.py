"""Trains pairs under several layouts without Ray: python dpo_ranks.py JOB.json ... -> JOB.pt each.

A job has a name, a world size, the fields of a dpo.Config, its pairs file, and what is poisoned.
The ranks of a job are processes on gloo; tests/cpu stands in for CUDA where Megatron trains.
"""

import itertools
import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from dpo import Config, Scored, Trainer, load_pairs, plan_pairs
from envs.rollout.pairs import render_all
from policy import open_policy
from support.configs import changed


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The policy's weights; {} on ranks that do not get them."""
    return {name: w.clone() for name, w in trainer.policy.named_weights() if w is not None}


def watch_gradients(trainer: Trainer, found: dict) -> None:
    """Keeps what FSDP's ranks have summed before the first step."""
    plain = trainer.policy.optimizer_step

    def step() -> dict[str, float]:
        if trainer.cfg.policy.kind == "fsdp" and "gradients" not in found:
            named = trainer.policy.model.named_parameters()
            found["gradients"] = {name: p.grad.full_tensor().clone() for name, p in named}
        return plain()

    trainer.policy.optimizer_step = step


def parts(cfg: Config, scored: list[Scored], rank: int) -> list[list[Scored]]:
    """The rows of a rank."""
    plan = plan_pairs([one.pair for one in scored], cfg)
    return [[scored[i] for i in row] for row in plan[cfg.policy.replica_of(rank)]]


def train(job: dict, rank: int) -> dict:
    """Three steps on all pairs: metrics, gradients of the first, weights; or what poison does."""
    cfg = changed(Config(model=job["model"], data={"train": job["pairs"]}), **job["fields"])
    trainer = Trainer(cfg)
    trainer.policy = open_policy(cfg.model, cfg.policy, 1.0, cfg.seed)
    rows = load_pairs(cfg.data.train, cfg)
    pairs = render_all(rows, range(len(rows)), cfg)
    scored = [Scored(i, pair) for i, pair in enumerate(pairs)]
    mine: list = [None] * dist.get_world_size()
    dist.all_gather_object(mine, trainer.score(parts(cfg, scored, rank), len(pairs)))
    values = {place: logps for found in mine for place, logps in found.items()}
    if "poison" in job:
        values[0] = [job["poison"], 0.0]
    scored = [Scored(i, pair, values[i]) for i, pair in enumerate(pairs)]
    part = parts(cfg, scored, rank)
    found: dict = {"scores": [values[i] for i in range(len(pairs))], "steps": []}
    watch_gradients(trainer, found)
    before = weights(trainer)
    try:
        found["steps"] = [trainer.train_step(part, len(pairs)) for _ in range(3)]
        found["evaluation"] = trainer.evaluate(part, len(pairs))
    except FloatingPointError as error:
        found["error"] = str(error)
    found["weights"] = weights(trainer)
    found["unchanged"] = all(torch.equal(found["weights"][k], v) for k, v in before.items())
    every: list = [None] * dist.get_world_size()
    dist.all_gather_object(every, found.get("error"))
    return found | {"errors": every}


def rank_main(rank: int, world: int, store: str, paths: list[Path]) -> None:
    """Does jobs of one world size, one after the other."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    for path in paths:
        job = json.loads(path.read_text())
        found = train(job, rank)
        if rank == 0:
            torch.save(found, path.with_suffix(".pt"))
        dist.barrier()
        if job["fields"].get("kind") == "megatron":
            from policy.megatron import policy as megatron

            megatron.mpu.destroy_model_parallel()


def main(paths: list[Path]) -> None:
    """Does the jobs in their order; neighbours of one world size share their processes."""
    import policy.megatron.policy as megatron

    megatron.DTYPE = torch.float32
    torch.set_num_threads(1)
    jobs = [(json.loads(path.read_text())["world"], path) for path in paths]
    for world, group in itertools.groupby(jobs, lambda job: job[0]):
        with tempfile.TemporaryDirectory() as folder:
            args = (world, f"{folder}/store", [path for _, path in group])
            start_processes(rank_main, args, nprocs=world, start_method="fork")


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
