"""Sums the training metrics over rows, ranks and updates.

Names are taken from NeMo-RL's loss_functions.py; docs/grpo_async.md defines each.
"""

import statistics
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from policy import Row

SYNC = ("sync_pause", "sync_transfer", "sync_resume")  # the phases of a weight update
TOKENS = "tokens/"  # prefix of a sum over kept tokens, which is reported as a mean
EXTREMES = {"_min": min, "_max": max}  # by the suffix of a metric's name
# Update metrics that are added up over a batch's updates.
COUNTS = (
    "num_masked_seqs",
    "num_valid_samples",
    "global_valid_toks",
    "nonfinite_engine_logprobs",
    "train_tokens",
    "train_keys",
)
# Sums and extremes over all rows of an update that serve as metrics unchanged.
AS_SUMMED = (
    "probs_ratio_min",
    "probs_ratio_max",
    "seq_mult_prob_error_max",
    "num_masked_seqs",
    "train_tokens",
    "train_keys",
    "nonfinite_engine_logprobs",
)


class Scored(Row, Protocol):
    """A packed row whose tokens an engine sampled, with the environment's rewards."""

    engine_logp_T: Tensor  # float32
    score_N: Tensor  # float32, before shaping


class Judged(Protocol):
    """The verdict of the sequence-error filter on each sequence of a row."""

    @property
    def keep_N(self) -> Tensor:
        """Bool, True for a sequence that is trained on."""

    @property
    def error_N(self) -> Tensor:
        """Mean exp|log pi_old - log pi_engine| of each sequence; 1 means no error."""


@torch.no_grad()
def row_stats(
    loss: Tensor, batch: Scored, mask_T: Tensor, judged: Judged, measured: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Returns what a packed row adds to the metrics: sums over its kept tokens, and counts.

    `mask_T` [T] marks the kept tokens. `measured` holds values [T] by name; their means over the
    kept tokens of all rows become metrics with these names.
    """
    error_N = judged.error_N
    sequences = len(error_N)
    present_N = torch.bincount(batch.seq_T[batch.mask_T], minlength=sequences) > 0
    kept_N = torch.bincount(batch.seq_T[mask_T], minlength=sequences) > 0
    dropped_N = present_N & ~judged.keep_N
    error_N = torch.where(present_N, error_N, 0.0)
    stats = {
        "loss": loss.detach(),
        "row_tokens": batch.mask_T.sum(),
        "row_sequences": present_N.sum(),
        "kept_tokens": mask_T.sum(),
        "kept_sequences": kept_N.sum(),
        "train_tokens": batch.mask_T.any() * len(mask_T),  # prompts included
        "train_keys": batch.positions_T.sum(),  # tokens that each token attends to, besides itself
        "nonfinite_engine_logprobs": (batch.mask_T & ~batch.engine_logp_T.isfinite()).sum(),
        "num_masked_seqs": dropped_N.sum(),
        "masked_correct_pct": (dropped_N & (batch.score_N == 1)).sum(),
        "seq_mult_prob_error": error_N.sum(),
        "seq_mult_prob_error_max": error_N.max(),
    }
    for name, x_T in measured.items():
        stats[TOKENS + name] = torch.where(mask_T, x_T.detach(), 0.0).sum()
    if "probs_ratio" in measured:
        ratio_T = torch.where(mask_T, measured["probs_ratio"].detach(), 1.0)
        stats["probs_ratio_min"] = ratio_T.min()
        stats["probs_ratio_max"] = ratio_T.max()
    return stats


def reduce_stats(
    rows: Sequence[dict[str, Tensor]], group: dist.ProcessGroup | None = None
) -> dict[str, float]:
    """Adds up the rows' stats over all rows and ranks.

    Stats whose names end in _min or _max become extremes. The ranks of `group` have different rows;
    None means all ranks.
    """
    names = list(rows[0])
    # The maximum of -x is the minimum of x, so one reduction serves both.
    sign_of = {"_min": -1, "_max": 1}
    signs = [sign_of.get(name[-4:], 0) for name in names]
    table = torch.stack([torch.stack([row[name].double() for name in names]) for row in rows])
    sign_K = torch.tensor(signs, device=table.device)
    sums_K = table.sum(0)
    peaks_K = (table * sign_K).amax(0)
    if dist.is_initialized():
        dist.all_reduce(sums_K, group=group)
        dist.all_reduce(peaks_K, dist.ReduceOp.MAX, group)
    reduced_K = torch.where(sign_K == 0, sums_K, torch.where(sign_K < 0, -peaks_K, peaks_K))
    return dict(zip(names, reduced_K.tolist(), strict=True))


def step_metrics(total: dict[str, float], batch_tokens: int, grad_scale: float) -> dict[str, float]:
    """Returns NeMo-RL's training metrics from the reduced stats of one update."""
    kept = total["kept_tokens"]
    found: dict[str, float] = {}
    if kept:  # if no reward differs within its group, nothing is computed: 0 would be false
        for name, summed in total.items():
            if name.startswith(TOKENS):
                found[name.removeprefix(TOKENS)] = summed / kept
    found |= {name: total[name] for name in AS_SUMMED if name in total}
    dropped_tokens = total["row_tokens"] - kept
    return found | {
        "loss": total["loss"] * grad_scale,
        "seq_mult_prob_error": total["seq_mult_prob_error"] / max(total["row_sequences"], 1),
        "masked_correct_pct": total["masked_correct_pct"] / max(total["num_masked_seqs"], 1),
        "num_valid_samples": total["kept_sequences"],
        "global_valid_toks": batch_tokens - dropped_tokens,
    }


def mean_metrics(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """Merges the metrics of a batch's updates: counts are added up, other metrics averaged.

    Metrics whose names end in _min or _max become extremes. Updates that lack a metric are skipped.
    """
    names = dict.fromkeys(name for metrics in updates for name in metrics)
    merged: dict[str, float] = {}
    for name in names:
        values = [metrics[name] for metrics in updates if name in metrics]
        if name in COUNTS:
            merged[name] = sum(values)
        else:
            merge = EXTREMES.get(name[-4:], statistics.fmean)
            merged[name] = merge(values)
    return merged
