"""Sets up AdamW's parameter groups and computes the learning rate, for both back ends."""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor
from torch.optim import AdamW

if TYPE_CHECKING:
    from settings.network import PolicySettings


def learning_rate(update: int, settings: "PolicySettings") -> float:
    """Returns the learning rate for an update, counted from 0.

    The rate changes linearly from `warmup_lr` to `lr` and then follows the schedule, which ends at
    `min_lr`. The formulas match Megatron-Core's OptimizerParamScheduler.
    """
    peak, floor, warm = settings.lr, settings.min_lr, settings.warmup_steps
    if update < warm:
        return settings.warmup_lr * (1 - update / warm) + peak * update / warm
    if settings.lr_schedule == "constant":
        return peak
    end = settings.lr_decay_steps
    start = end - settings.wsd_decay_steps if settings.lr_schedule == "wsd" else warm
    done = min(max((update - start) / (end - start), 0.0), 1.0)
    if settings.lr_schedule == "cosine":
        left = (1 + math.cos(math.pi * done)) / 2
    else:
        left = 1 - done
    return floor + (peak - floor) * left


def adamw(parameters: Iterable[Tensor], settings: "PolicySettings") -> AdamW:
    """Returns torch's AdamW. Norms and biases, which have one axis, do not decay."""
    every = list(parameters)
    decaying = [p for p in every if p.ndim > 1]
    others = [p for p in every if p.ndim <= 1]
    groups: list[dict[str, list[Tensor] | float]] = []
    if decaying:
        groups.append({"params": decaying, "weight_decay": settings.weight_decay})
    if others:
        groups.append({"params": others, "weight_decay": 0.0})
    return AdamW(groups, lr=settings.lr, betas=settings.betas, fused=True)
