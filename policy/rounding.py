"""Measures how much of training is left if weights are rounded to bf16.

A bf16 number has 8 significant bits. An update below half a unit in the last place leaves a
weight's bf16 value as it was: a reader that rounds weights to bf16 does not see that update.
"""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

SAMPLE = 1 << 18  # weights of a rank that are compared: a share is known to a tenth of a percent

Weights = Iterable[tuple[str, Tensor]]  # name and this rank's part of each weight


class Rounding:
    """Some of a rank's weights at the start of training, drawn at random; all if they are few."""

    def __init__(self, weights: Weights):
        held = dict(weights)
        total = sum(tensor.numel() for tensor in held.values())
        draw = torch.Generator().manual_seed(0)
        self.places: dict[str, Tensor] = {}  # in the flat weight
        self.start: dict[str, Tensor] = {}
        for name, tensor in held.items():
            size = tensor.numel()
            places = torch.arange(size)
            if total > SAMPLE and size:
                places = torch.randint(size, (math.ceil(SAMPLE * size / total),), generator=draw)
            self.places[name] = places.to(tensor.device)
            self.start[name] = self.drawn(name, tensor)

    def drawn(self, name: str, tensor: Tensor) -> Tensor:
        """Returns the weights of a tensor that are compared."""
        return tensor.detach().flatten()[self.places[name]]

    @torch.no_grad()
    def compare(self, weights: Weights) -> dict[str, float]:
        """Compares weights with those at the start; collective.

        The share of the update that rounding loses is 1 - <rounded update, update> / |update|^2,
        but at least 0: between weights that bf16 does not hold exactly, rounding loses as often as
        it adds. It is left out if nothing has changed, or if the weights are in bf16 themselves.
        """
        rows = []
        is_wide = True
        for name, tensor in weights:
            now = self.drawn(name, tensor)
            before = self.start[name]
            update = now.double() - before.double()
            rounded = now.bfloat16().double() - before.bfloat16().double()
            changed = rounded.count_nonzero().double()
            compared = torch.full_like(changed, len(now))
            rows.append(torch.stack([compared, changed, rounded @ update, update @ update]))
            is_wide = is_wide and tensor.dtype != torch.bfloat16
        sums = torch.stack(rows).sum(0)
        dist.all_reduce(sums)
        compared_weights, changed_weights, kept, square = sums.tolist()
        found = {"bf16_changed_weights": changed_weights / compared_weights}
        if is_wide and square > 0:
            found["bf16_lost_update"] = max(0.0, 1 - kept / square)
        return found
