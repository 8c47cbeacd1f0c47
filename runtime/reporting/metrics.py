"""What is measured beside the loss.

Names are those of NeMo-RL's loss_functions.py; docs/grpo_async.md defines each.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from policy import Row

TOKENS = "tokens/"  # begins the name of a sum over kept tokens, of which a mean is reported


def k3(log_ratio_T: Tensor) -> Tensor:
    """Schulman's k3 estimate of KL(p || q) per token [T]: log_ratio = log q - log p, x ~ p.

    Uses expm1, as in float32 exp(x) - 1 - x is negative for every third x near 1e-4.
    """
    log_ratio_T = log_ratio_T.clamp(-20, 20)
    return log_ratio_T.expm1() - log_ratio_T


def mismatch(logp_T: Tensor, old_logp_T: Tensor, engine_logp_T: Tensor) -> dict[str, Tensor]:
    """Per-token measures [T] of how far the trainer is from the engine that sampled."""
    gap_T = old_logp_T - engine_logp_T
    mixture_T = torch.logaddexp(old_logp_T, engine_logp_T) - math.log(2)
    divergence_T = k3(old_logp_T - mixture_T) + k3(engine_logp_T - mixture_T)
    return {
        "token_mult_prob_error": gap_T.abs().clamp(max=20).exp(),
        "gen_kl_error": k3(gap_T),
        "policy_kl_error": k3(-gap_T),
        "js_divergence_error": divergence_T / 2,
        "approx_entropy": -(logp_T - engine_logp_T).clamp(-20, 20).exp() * logp_T,
    }


class Scored(Row, Protocol):
    """A packed row whose tokens an engine sampled, with the environment's verdicts."""

    engine_logp_T: Tensor  # float32
    score_N: Tensor  # float32, before shaping
    old_logp_T: Tensor | None  # before the batch's first update, where there are several


class Judged(Protocol):
    """Which sequences of a row are trusted [N], and the mean error of each [N]."""

    @property
    def keep_N(self) -> Tensor:
        """Bool."""

    @property
    def error_N(self) -> Tensor:
        """1 means no error."""


@torch.no_grad()
def row_stats(
    loss: Tensor,
    logp_T: Tensor,
    batch: Scored,
    mask_T: Tensor,
    judged: Judged,
    measured: dict[str, Tensor],
) -> dict[str, Tensor]:
    """What a packed row adds to the metrics: sums over its kept tokens `mask_T`, and counts.

    `measured` holds values [T] by name, whose means become metrics of these names; `logp_T` [T]
    are the trainer's logprobs.
    """
    logp_T = logp_T.detach()
    old_logp_T = logp_T if batch.old_logp_T is None else batch.old_logp_T
    measured = {name: x_T.detach() for name, x_T in measured.items()}
    measured |= mismatch(logp_T, old_logp_T, batch.engine_logp_T)
    extremes = {}
    if "probs_ratio" in measured:  # PPO's
        clipped_T = measured["probs_ratio"] != measured["probs_ratio_clamped"]
        measured["clip_fraction"] = clipped_T.float()
        ratio_T = torch.where(mask_T, measured["probs_ratio"], 1.0)
        extremes = {"probs_ratio_min": ratio_T.min(), "probs_ratio_max": ratio_T.max()}
    error_N = judged.error_N
    sums = {TOKENS + k: torch.where(mask_T, v, 0.0).sum() for k, v in measured.items()}
    present_N = torch.bincount(batch.seq_T[batch.mask_T], minlength=len(error_N)) > 0
    kept_N = torch.bincount(batch.seq_T[mask_T], minlength=len(error_N)) > 0
    dropped_N = present_N & ~judged.keep_N
    return (
        sums
        | extremes
        | {
            "loss": loss.detach(),
            "row_tokens": batch.mask_T.sum(),
            "row_sequences": present_N.sum(),
            "kept_tokens": mask_T.sum(),
            "train_tokens": batch.mask_T.any() * len(mask_T),  # prompts included, as in the next
            "train_keys": batch.positions_T.sum(),  # that a token attends to, beside itself
            "kept_sequences": kept_N.sum(),
            "nonfinite_engine_logprobs": (batch.mask_T & ~batch.engine_logp_T.isfinite()).sum(),
            "num_masked_seqs": dropped_N.sum(),
            "masked_correct_pct": (dropped_N & (batch.score_N == 1)).sum(),
            "seq_mult_prob_error": torch.where(present_N, error_N, 0.0).sum(),
            "seq_mult_prob_error_max": torch.where(present_N, error_N, 0.0).max(),
        }
    )


def reduce_stats(
    rows: Sequence[dict[str, Tensor]], group: dist.ProcessGroup | None = None
) -> dict[str, float]:
    """One dict of the rows' stats, over all rows and ranks: sums, and extremes by their suffix.

    The ranks of `group` (None: all) have different rows.
    """
    sign = {k: {"_min": -1, "_max": 1}.get(k[-4:], 0) for k in rows[0]}
    table = torch.stack([torch.stack([r[k].double() for k in sign]) for r in rows])
    sign_K = torch.tensor(list(sign.values()), device=table.device)
    sums, peaks = table.sum(0), (table * sign_K).amax(0)
    if dist.is_initialized():
        dist.all_reduce(sums, group=group)
        dist.all_reduce(peaks, dist.ReduceOp.MAX, group)
    picked = torch.where(sign_K == 0, sums, peaks).tolist()
    return {k: -v if s < 0 else v for (k, s), v in zip(sign.items(), picked, strict=True)}


def step_metrics(total: dict[str, float], batch_tokens: int, grad_scale: float) -> dict[str, float]:
    """NeMo-RL's training metrics from the reduced stats of one update."""
    kept, sequences = max(total["kept_tokens"], 1), max(total["row_sequences"], 1)
    # Where every group agreed nothing was computed, and 0 would be a false value.
    per_token = [k for k in total if k.startswith(TOKENS) and total["kept_tokens"]]
    metrics = {k.removeprefix(TOKENS): total[k] / kept for k in per_token}
    whole = "probs_ratio_min probs_ratio_max seq_mult_prob_error_max num_masked_seqs train_tokens"
    whole += " train_keys nonfinite_engine_logprobs"
    metrics |= {k: total[k] for k in whole.split() if k in total}
    dropped_tokens = total["row_tokens"] - total["kept_tokens"]
    return metrics | {
        "loss": total["loss"] * grad_scale,
        "seq_mult_prob_error": total["seq_mult_prob_error"] / sequences,
        "masked_correct_pct": total["masked_correct_pct"] / max(total["num_masked_seqs"], 1),
        "num_valid_samples": total["kept_sequences"],
        "global_valid_toks": batch_tokens - dropped_tokens,
    }


def mean_metrics(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """A batch's metrics from its updates': extremes by their suffix, sums of counts, else means.

    Of those updates that have the metric.
    """
    counts = "num_masked_seqs num_valid_samples global_valid_toks nonfinite_engine_logprobs "
    counts += "train_tokens train_keys"
    merge: dict[str, Callable[[list[float]], float]] = dict.fromkeys(counts.split(), sum)
    by_suffix: dict[str, Callable[[list[float]], float]] = {"_min": min, "_max": max}
    names = {name: None for metrics in updates for name in metrics}
    for name in names:
        merge.setdefault(name, by_suffix.get(name[-4:], statistics.fmean))
    return {k: merge[k]([m[k] for m in updates if k in m]) for k in names}
