"""AdamW as both back ends use it: its groups of parameters, and the course of its learning rate."""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import AdamW

if TYPE_CHECKING:
    from settings.network import PolicySettings


def learning_rate(update: int, settings: "PolicySettings") -> float:
    """The learning rate of an update, counted from 0.

    Linear from `warmup_lr` to `lr`, then the schedule, which ends at `min_lr`. The formulas are
    those of Megatron-Core's OptimizerParamScheduler.
    """
    peak, floor, warm = settings.lr, settings.min_lr, settings.warmup_steps
    if update < warm:
        return settings.warmup_lr * (1 - update / warm) + peak * update / warm
    if settings.lr_schedule == "constant":
        return peak
    end = settings.lr_decay_steps
    start = end - settings.wsd_decay_steps if settings.lr_schedule == "wsd" else warm
    done = min(max((update - start) / (end - start), 0.0), 1.0)
    left = (1 + math.cos(math.pi * done)) / 2 if settings.lr_schedule == "cosine" else 1 - done
    return floor + (peak - floor) * left


def adamw(parameters: Iterable[Tensor], settings: "PolicySettings") -> AdamW:
    """torch's AdamW. Norms and biases, which have one axis, do not decay."""
    every = list(parameters)
    decaying: dict[str, Any] = {"params": [p for p in every if p.ndim > 1]}
    others = {"params": [p for p in every if p.ndim <= 1], "weight_decay": 0.0}
    groups = [group for group in (decaying, others) if group["params"]]
    how: Any = {"lr": settings.lr, "betas": settings.betas, "fused": True}
    return AdamW(groups, weight_decay=settings.weight_decay, **how)
