"""Trains pairs under several layouts without Ray: python dpo_ranks.py JOB.json ... -> JOB.pt each.

A job has a name, a world size, the fields of a dpo.Config, its pairs file, and what is poisoned.
The ranks of a job are processes on gloo; tests/cpu stands in for CUDA where Megatron trains.
"""

import sys
from pathlib import Path

import torch

from dpo import Config, Scored, Trainer, load_pairs, plan_pairs
from policy.factory import open_policy
from rollout.preference_rows import render_all
from support.configs import changed
from support.megatron_jobs import gathered_objects, in_ranks, weights


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


def train(job: dict, folder: Path) -> dict:
    """Three steps on all pairs: metrics, gradients of the first, weights; or what poison does."""
    cfg = changed(Config(model=job["model"], data={"train": job["pairs"]}), **job["fields"])
    trainer = Trainer(cfg)
    trainer.policy = open_policy(cfg.model, cfg.policy, 1.0, cfg.seed)
    rows = load_pairs(cfg.data.train, cfg)
    pairs = render_all(rows, range(len(rows)), cfg)
    scored = [Scored(i, pair) for i, pair in enumerate(pairs)]
    rank = torch.distributed.get_rank()
    mine = trainer.score(parts(cfg, scored, rank), len(pairs))
    values = dict(gathered_objects(list(mine.items())))
    if "poison" in job:
        values[0] = [job["poison"], 0.0]
    scored = [Scored(i, pair, values[i]) for i, pair in enumerate(pairs)]
    part = parts(cfg, scored, rank)
    found: dict = {"scores": [values[i] for i in range(len(pairs))], "steps": []}
    watch_gradients(trainer, found)
    before = weights(trainer.policy)
    try:
        found["steps"] = [trainer.train_step(part, len(pairs)) for _ in range(3)]
        found["evaluation"] = trainer.evaluate(part, len(pairs))
    except FloatingPointError as error:
        found["error"] = str(error)
    found["weights"] = weights(trainer.policy)
    found["unchanged"] = all(torch.equal(found["weights"][k], v) for k, v in before.items())
    return found | {"errors": gathered_objects([found.get("error")])}


if __name__ == "__main__":
    import policy.megatron.policy as megatron

    megatron.DTYPE = torch.float32
    in_ranks(train, [Path(name) for name in sys.argv[1:]])
