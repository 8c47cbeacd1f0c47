"""What is measured beside the loss.

Names are those of NeMo-RL's loss_functions.py; docs/grpo_async.md defines each.
"""

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from envs.rollout.episode import Sample, SampleInfo

if TYPE_CHECKING:
    from grpo_async import Batch, Group


def excess(log_ratio_T: Tensor) -> Tensor:
    """exp(x) - 1 - x of each log-ratio [T]: the k3 estimate of a KL divergence, never negative."""
    log_ratio_T = log_ratio_T.clamp(-20, 20)
    return log_ratio_T.expm1() - log_ratio_T


def mismatch(logp_T: Tensor, old_logp_T: Tensor, engine_logp_T: Tensor) -> dict[str, Tensor]:
    """Per-token measures [T] of how far the trainer is from the engine that sampled."""
    gap_T = old_logp_T - engine_logp_T
    mixture_T = torch.logaddexp(old_logp_T, engine_logp_T) - math.log(2)
    divergence_T = excess(old_logp_T - mixture_T) + excess(engine_logp_T - mixture_T)
    return {
        "token_mult_prob_error": gap_T.abs().clamp(max=20).exp(),
        "gen_kl_error": excess(gap_T),
        "policy_kl_error": excess(-gap_T),
        "js_divergence_error": divergence_T / 2,
        "approx_entropy": -(logp_T - engine_logp_T).clamp(-20, 20).exp() * logp_T,
    }


@torch.no_grad()
def row_stats(
    loss: Tensor,
    batch: "Batch",
    mask_T: Tensor,
    error_N: Tensor,
    trusted_N: Tensor,
    measured: dict[str, Tensor],
) -> dict[str, Tensor]:
    """What a packed row adds to the metrics: sums over its kept tokens `mask_T`, and counts.

    `measured` holds values [T] by name, and the trainer's `logp` and `old_logp`; a sequence's mean
    error [N] decided whether it is trusted.
    """
    measured = {name: x_T.detach() for name, x_T in measured.items()}
    logp_T = measured.pop("logp")
    measured |= mismatch(logp_T, measured.pop("old_logp"), batch.engine_logp_T)
    sums = {k: torch.where(mask_T, v, 0.0).sum() for k, v in measured.items()}
    ratio_T = torch.where(mask_T, measured["probs_ratio"], 1.0)
    present_N = torch.bincount(batch.seq_T[batch.mask_T], minlength=len(error_N)) > 0
    kept_N = torch.bincount(batch.seq_T[mask_T], minlength=len(error_N)) > 0
    dropped_N = present_N & ~trusted_N
    return sums | {
        "loss": loss.detach(),
        "probs_ratio_min": ratio_T.min(),
        "probs_ratio_max": ratio_T.max(),
        "row_tokens": batch.mask_T.sum(),
        "row_sequences": present_N.sum(),
        "kept_tokens": mask_T.sum(),
        "kept_sequences": kept_N.sum(),
        "nonfinite_engine_logprobs": (batch.mask_T & ~batch.engine_logp_T.isfinite()).sum(),
        "num_masked_seqs": dropped_N.sum(),
        "masked_correct_pct": (dropped_N & (batch.score_N == 1)).sum(),
        "seq_mult_prob_error": torch.where(present_N, error_N, 0.0).sum(),
        "seq_mult_prob_error_max": torch.where(present_N, error_N, 0.0).max(),
    }


def reduce_stats(
    rows: list[dict[str, Tensor]], group: dist.ProcessGroup | None = None
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
    per_token = (
        "probs_ratio probs_ratio_clamped sampling_importance_ratio is_oob_ratio kl_penalty "
        "token_mult_prob_error gen_kl_error policy_kl_error js_divergence_error approx_entropy"
    )
    # Where every group agreed nothing was computed, and 0 would be a false value.
    metrics = {k: total[k] / kept for k in per_token.split() if total["kept_tokens"]}
    whole = "probs_ratio_min probs_ratio_max seq_mult_prob_error_max num_masked_seqs"
    metrics |= {k: total[k] for k in (whole + " nonfinite_engine_logprobs").split()}
    dropped_tokens = total["row_tokens"] - total["kept_tokens"]
    return metrics | {
        "loss": total["loss"] * grad_scale,
        "seq_mult_prob_error": total["seq_mult_prob_error"] / sequences,
        "masked_correct_pct": total["masked_correct_pct"] / max(total["num_masked_seqs"], 1),
        "num_valid_samples": total["kept_sequences"],
        "global_valid_toks": batch_tokens - dropped_tokens,
    }


def mean_metrics(updates: list[dict[str, float]]) -> dict[str, float]:
    """A batch's metrics from its updates': extremes by their suffix, sums of counts, else means.

    Of those updates that have the metric.
    """
    counts = "num_masked_seqs num_valid_samples global_valid_toks nonfinite_engine_logprobs"
    merge: dict[str, Callable[[list[float]], float]] = dict.fromkeys(counts.split(), sum)
    by_suffix: dict[str, Callable[[list[float]], float]] = {"_min": min, "_max": max}
    names = {name: None for metrics in updates for name in metrics}
    for name in names:
        merge.setdefault(name, by_suffix.get(name[-4:], statistics.fmean))
    return {k: merge[k]([m[k] for m in updates if k in m]) for k in names}


def mismatch_table(
    samples: list[Sample], logp_T: np.ndarray, step: int, limit: float
) -> dict[tuple[str, str], list[float]]:
    """How far trainer and engine are apart, by environment, lag and place in the answer.

    `logp_T` [T] are the trainer's logprobs of the samples, one after the other. Returns for each
    (by, key): tokens, those of trusted sequences, and sum, summed k3 and maximum of
    |logp - engine_logp|. Tokens whose engine logprob is not finite are left out.
    """
    used = [np.flatnonzero(s.mask_T & np.isfinite(s.engine_logp_T)) for s in samples]
    count_S = np.array([len(at) for at in used], int)
    if not count_S.sum():
        return {}
    logps = np.split(logp_T, np.cumsum([len(s.tokens_T) for s in samples])[:-1])
    triples = zip(samples, logps, used, strict=True)
    gap_N = np.concatenate([(logp - s.engine_logp_T)[at] for s, logp, at in triples])
    gap_N = gap_N.astype(np.float64)
    size_N = np.abs(gap_N)
    of_N = np.repeat(np.arange(len(samples)), count_S)
    error_S = np.bincount(of_N, np.exp(size_N.clip(max=20)), len(samples)) / count_S.clip(1)
    k3_N = np.expm1(gap_N.clip(-20, 20)) - gap_N.clip(-20, 20)
    versions = [s.version_T[at] for s, at in zip(samples, used, strict=True)]
    power_N = np.log2(np.concatenate([1 + np.arange(n) for n in count_S])).astype(int) // 2
    bins = np.array([f"{4**p}-{4 ** (p + 1) - 1}" for p in range(power_N.max() + 1)])
    labels = {
        "all": np.zeros(len(gap_N), "U1"),
        "env": np.array([s.env for s in samples])[of_N],
        "lag": (step - np.concatenate(versions)).astype(str),
        "position": bins[power_N],
    }
    table = {}
    for by, label_N in labels.items():
        keys, index_N = np.unique(label_N, return_inverse=True)
        peak_K = np.zeros(len(keys))
        np.maximum.at(peak_K, index_N, size_N)
        weights = None, (error_S <= limit)[of_N], size_N, k3_N
        columns = [*(np.bincount(index_N, w, len(keys)) for w in weights), peak_K]
        for key, row in zip(keys, np.stack(columns, 1), strict=True):
            table[by, str(key)] = row.tolist()
    return table


def mismatch_rows(tables: list[dict]) -> list[dict]:
    """One row for each (by, key) over all ranks: tokens, mean, max, k3 and kept fraction."""
    rows = []
    for by, key in sorted({at for table in tables for at in table}):
        found = np.array([table[by, key] for table in tables if (by, key) in table])
        n, kept, total, k3_sum, _ = found.sum(0).tolist()
        row = {"by": by, "key": key, "tokens": int(n), "mean": total / n}
        rows.append(row | {"max": found[:, 4].max(), "k3": k3_sum / n, "kept": kept / n})
    return rows


def by_origin(groups: list[list[SampleInfo]]) -> dict[str, list[list[SampleInfo]]]:
    """The groups by the suffix of their metrics: "" has all, "/ENV" and "/ENV/DATASET" some."""
    found: dict[str, list[list[SampleInfo]]] = {"": groups}
    for infos in groups:
        env, dataset = infos[0].env, infos[0].dataset
        for suffix in [f"/{env}", f"/{env}/{dataset}"] if dataset else [f"/{env}"]:
            found.setdefault(suffix, []).append(infos)
    return found


def validation_metrics(
    answered: list[list[SampleInfo]], k: int, dropped: int = 0
) -> dict[str, float]:
    """Mean reward, share of right answers (score 1) and, where k > 1, of prompts with one of those.

    `answered` holds the answers to each prompt but those that were dropped. Rewards are shaped,
    scores are not.
    """
    # An episode in pieces counts once.
    last = [[info for info in infos if not info.continues] for infos in answered]
    found: dict[str, float] = {"validation_dropped": dropped} if dropped else {}
    for suffix, prompts in by_origin(last).items():
        answers = list(itertools.chain(*prompts))
        found[f"validation_reward{suffix}"] = statistics.fmean(i.reward for i in answers)
        found[f"validation_exact{suffix}"] = statistics.fmean(i.score >= 1 for i in answers)
        if k > 1:
            right = statistics.fmean(any(i.score >= 1 for i in infos) for infos in prompts)
            found[f"validation_pass@{k}{suffix}"] = right
    return found


def rollout_metrics(groups: list["Group"], step: int) -> dict[str, float]:
    """What a batch of groups was made of; `step` is the version that trains on it."""
    of_group = [group.infos for group in groups]
    infos = list(itertools.chain(*of_group))
    answers = [info for info in infos if not info.continues]
    lags = [step - info.oldest_version for info in infos if info.response_tokens] or [0]
    mixed = [info.oldest_version < info.newest_version for info in infos]
    found = {
        "lag_mean": statistics.fmean(lags),
        "lag_max": max(lags),
        "mixed_version_samples": statistics.fmean(mixed),
    }
    if broken := len(infos) - len(answers):
        found["broken_prefixes"] = broken
    if hits := [info.cache_hits for info in infos if info.cache_hits >= 0]:
        found["prefix_cache_hits"] = statistics.fmean(hits)
    for suffix, part in by_origin(of_group).items():
        found |= {name + suffix: value for name, value in answer_metrics(part).items()}
    return found | component_metrics(answers)


def answer_metrics(groups: list[list[SampleInfo]]) -> dict[str, float]:
    """Reward, length, truncation and zero variance of some groups."""
    infos = list(itertools.chain(*groups))
    answers = [info for info in infos if not info.continues]
    return {
        "reward": statistics.fmean([info.reward for info in answers]),
        "response_tokens": statistics.fmean([info.response_tokens for info in infos]),
        "truncated_samples": statistics.fmean([info.truncated for info in answers]),
        "zero_variance_groups": statistics.fmean(
            not any(info.has_gradient for info in infos) for infos in groups
        ),
    }


def component_metrics(answers: list[SampleInfo]) -> dict[str, float]:
    """The mean of each number in `Reward.info`, over the answers of an environment that have it."""
    values = defaultdict(list)
    for info in answers:
        for name, value in info.components.items():
            values[f"info/{name}/{info.env}"].append(value)
    return {name: statistics.fmean(found) for name, found in values.items()}
