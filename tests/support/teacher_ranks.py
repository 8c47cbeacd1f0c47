"""Scores samples under several layouts without Ray: python teacher_ranks.py JOB.json ... -> JOB.pt.

A job has a name, a world size, a model and the fields of the teacher's layout. Found are the
logprobs of each sample; of two equal networks, also the student's in the pass that trains, and the
norm of the gradient of the loss with that teacher and with another one.
"""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import torch

from mopd import Config, Teacher, distillation_loss, pack
from policy.factory import network, open_policy
from policy.packing import Update
from rollout.episode import Group
from runtime.rollouts.teachers import plan_scoring
from settings.network import PolicySettings
from support.megatron_jobs import gathered_objects, in_ranks
from support.samples import make_sample


def groups() -> list[Group]:
    """Some groups of samples of unequal lengths, of which one trains nothing."""
    found = []
    for slot, lengths in enumerate([(9, 14), (30,), (5, 4, 3), (17,)]):
        draw = np.random.default_rng(slot)
        samples = [make_sample(draw, n) for n in lengths]
        for one in samples:
            one.tokens_T %= 100
            one.mask_T[0] = False
        samples[-1].mask_T[:] = samples[-1].mask_T & (slot != 2)
        found.append(Group(slot, 0, 1, [one.info() for one in samples], samples))
    return found


def score(job: dict, folder: Path) -> dict:
    """The logprobs of all samples, as the ranks of a teacher find them."""
    rank = torch.distributed.get_rank()
    layout = PolicySettings(**{"row_tokens": 32, "activation_checkpointing": False} | job["layout"])
    usual = {"teachers": {"t": job["model"]}, "default_teacher": "t", "teacher_policy": layout}
    cfg = Config(**usual).of_host("t")
    teacher = Teacher(cfg)
    teacher.networks = {cfg.model: network(cfg.model, cfg.policy, 1.0, 1, 600.0)}
    asked = groups()
    share = plan_scoring([one.infos for one in asked], cfg)[cfg.policy.replica_of(rank)]
    samples = [asked[g].samples for g in share.groups]
    _, infos, *scored = teacher.score(cfg.model, share.rows, *samples)
    reported = {asked[g].slot: of for g, of in zip(share.groups, scored, strict=True) if infos}
    mine = [(slot, [s.teacher_logp_T for s in of]) for slot, of in reported.items()]
    found = {"scores": dict(gathered_objects(mine)), "reports": gathered_objects([len(infos)])}
    return found | equal(cfg, asked)


def equal(cfg: Config, asked: list[Group]) -> dict:
    """Of a student that is its teacher: whether logprobs are the same bits; norms of gradients.

    Bits are compared on each rank that has the student's logprobs.
    """
    model, layout = cfg.model, cfg.policy
    student = open_policy(model, layout, 1.0, 1)
    teacher = network(model, layout, 1.0, 1, 600.0)
    samples = [one for group in asked for one in group.samples]
    planned = Update(sum(int(one.mask_T.sum()) for one in samples), len(samples), [])
    for one in samples:
        one.teacher_logp_T = np.zeros(len(one.tokens_T), np.float32)
    batch = pack(samples, planned, cfg)
    (scored_T,) = teacher.logprobs([batch])
    norms, same = [], []
    loose = dataclasses.replace(cfg.correction, sequence_error_limit=float("inf"))
    cfg = dataclasses.replace(cfg, correction=loose)
    for other in (0.0, 0.5):
        row = dataclasses.replace(batch, teacher_logp_T=scored_T + other * torch.sin(scored_T))

        def loss_fn(logp_T, of):
            same.append(torch.equal(logp_T.detach(), scored_T))
            return distillation_loss(logp_T, of, cfg)

        student.forward_backward([row], loss_fn)
        norms.append(student.optimizer_step()["grad_norm"])
    return {"same": gathered_objects(same), "norms": norms}


if __name__ == "__main__":
    import policy.megatron.policy as megatron

    megatron.DTYPE = torch.float32
    in_ranks(score, [Path(name) for name in sys.argv[1:]])
