"""Steps of mopd.py's trainer on random batches, dealt over ranks: JOB.json -> JOB.pt.

A job has a world size, a seed and a number of cases. Found is, for each case, the gradient of its
table of logprobs, summed over the ranks as it reaches the optimizer.
"""

import random
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from test_algorithm import TablePolicy
from test_mopd import Case, trainer

from policy.packing import Update
from rollout.episode import Sample
from support.megatron_jobs import in_ranks


def work(job: dict, folder: Path) -> dict:
    """The gradients of all cases."""
    dice = random.Random(job["seed"])  # every rank makes the same cases
    return {"gradients": [gradient(Case(dice), dice) for _ in range(job["cases"])]}


def gradient(case: Case, dice: random.Random) -> list[float]:
    """That of one case, whose samples are dealt over ranks, parts of a step and rows."""
    samples, table = made(case)
    policy = TablePolicy(table, lr=0.0)
    policy.table_V.data = torch.tensor(table, dtype=torch.float64)
    used = trainer(
        policy,
        correction=case.cfg.correction,
        loss=case.cfg.loss,
        group_size=2,
        advantage=case.cfg.advantage,
    )
    parts = dice.choice([1, 2, 3])
    homes = [dice.randrange(parts * dist.get_world_size() * 2) for _ in samples]
    for part in [*range(parts)] * 2:  # the second step begins anew
        here = [i for i, home in enumerate(homes) if home % parts == part]
        planned = sum(int(samples[i].mask_T.sum()) for i in here)
        mine = [i for i in here if homes[i] // parts % dist.get_world_size() == dist.get_rank()]
        rows = [[(i, 0) for i in mine if homes[i] % 2 == k] for k in (0, 1)]
        update = Update(planned, len(here), rows, more=part + 1 < parts)
        used.train_step(0, [update], *([sample] for sample in samples))
    once, total = policy.grads
    assert torch.equal(once, total)
    dist.all_reduce(total)
    return total.tolist()


def made(case: Case) -> tuple[list[Sample], list[float]]:
    """Its sequences as samples, each after a prompt's token, and a logprob for each token."""
    samples, table = [], []
    for i, student in enumerate(case.student):
        first = len(table)
        table += [0.0, *student]
        arrays = {
            "tokens_T": np.arange(first, len(table), dtype=np.int32),
            "mask_T": np.array([False, *case.mask[i]]),
            "engine_logp_T": np.array([np.nan, *case.engine[i]], np.float32),
            "version_T": np.zeros(1 + len(student), np.int32),
            "flaw_T": np.zeros(1 + len(student), np.int8),
            "teacher_logp_T": np.array([-55.0, *case.teacher[i]], np.float32),
        }
        samples.append(
            Sample(**arrays, truncated=False, reward=0.0, score=0.0, advantage=case.A[i])
        )
    return samples, table


if __name__ == "__main__":
    in_ranks(work, [Path(name) for name in sys.argv[1:]])
