"""Measures rollouts: their rewards, lengths and lags, and the mismatch of trainer and engine.

Axes, as suffixes:  T tokens    N tokens whose logprobs are compared    S samples    K table keys
"""

import itertools
import math
import statistics
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from rollout.episode import Sample, SampleInfo


# (by, key) -> tokens, tokens of trusted sequences, and sum, summed k3 and maximum of |gap|
MismatchTable = dict[tuple[str, str], list[float]]


def mismatch_table(
    samples: "list[Sample]", logp_T: np.ndarray, step: int, limit: float
) -> MismatchTable:
    """Measures how far apart trainer and engine are, by environment, lag and token position.

    `logp_T` [T] are the trainer's logprobs of the samples, one after the other. Returns for each
    (by, key): the tokens, the tokens of trusted sequences, and sum, summed k3 and maximum of
    |logp - engine_logp|. A sequence is trusted if its mean exp|logp - engine_logp| is at most
    `limit`. Tokens whose engine logprob is not finite are left out.
    """
    used = [np.flatnonzero(s.mask_T & np.isfinite(s.engine_logp_T)) for s in samples]
    count_S = np.array([len(at_N) for at_N in used], int)
    if not count_S.sum():
        return {}
    ends = np.cumsum([len(sample.tokens_T) for sample in samples])
    gaps = []
    versions = []
    for sample, of_sample_T, at_N in zip(samples, np.split(logp_T, ends[:-1]), used, strict=True):
        gaps.append((of_sample_T - sample.engine_logp_T)[at_N])
        versions.append(sample.version_T[at_N])
    gap_N = np.concatenate(gaps).astype(np.float64)
    size_N = np.abs(gap_N)
    clipped_N = gap_N.clip(-20, 20)
    k3_N = np.expm1(clipped_N) - clipped_N
    sample_N = np.repeat(np.arange(len(samples)), count_S)
    error_S = np.bincount(sample_N, np.exp(size_N.clip(max=20)), len(samples)) / count_S.clip(1)
    trusted_N = (error_S <= limit)[sample_N]
    labels = {
        "all": np.zeros(len(gap_N), "U1"),
        "env": np.array([sample.env for sample in samples])[sample_N],
        "lag": (step - np.concatenate(versions)).astype(str),
        "position": positions(count_S),
    }
    table = {}
    for by, label_N in labels.items():
        keys, key_N = np.unique(label_N, return_inverse=True)
        K = len(keys)
        tokens_K = np.bincount(key_N, minlength=K)
        trusted_K = np.bincount(key_N, trusted_N, K)
        sum_K = np.bincount(key_N, size_N, K)
        k3_K = np.bincount(key_N, k3_N, K)
        peak_K = np.zeros(K)
        np.maximum.at(peak_K, key_N, size_N)
        rows = np.stack([tokens_K, trusted_K, sum_K, k3_K, peak_K], 1)
        for key, row in zip(keys, rows, strict=True):
            table[by, str(key)] = row.tolist()
    return table


def positions(count_S: np.ndarray) -> np.ndarray:
    """Names each token's position in its answer, by powers of 4: "1-3", "4-15", "16-63", ..."""
    place_N = np.concatenate([1 + np.arange(count) for count in count_S])
    power_N = np.log2(place_N).astype(int) // 2
    names = [f"{4**power}-{4 ** (power + 1) - 1}" for power in range(power_N.max() + 1)]
    return np.array(names)[power_N]


def mismatch_rows(tables: list[MismatchTable]) -> list[dict]:
    """Returns a row for each (by, key) over all ranks: tokens, mean, max, k3 and kept fraction."""
    rows = []
    for by, key in sorted({at for table in tables for at in table}):
        of_ranks = np.array([table[by, key] for table in tables if (by, key) in table])
        tokens, trusted, total, k3_sum, _ = of_ranks.sum(0).tolist()
        row = {
            "by": by,
            "key": key,
            "tokens": int(tokens),
            "mean": total / tokens,
            "max": of_ranks[:, 4].max(),
            "k3": k3_sum / tokens,
            "kept": trusted / tokens,
        }
        rows.append(row)
    return rows


def by_origin(groups: "list[list[SampleInfo]]") -> "dict[str, list[list[SampleInfo]]]":
    """Sorts groups by the suffix of their metrics: all in "", some in "/ENV" and "/ENV/DATASET"."""
    found: dict[str, list[list[SampleInfo]]] = {"": groups}
    for infos in groups:
        env = infos[0].env
        dataset = infos[0].dataset
        found.setdefault(f"/{env}", []).append(infos)
        if dataset:
            found.setdefault(f"/{env}/{dataset}", []).append(infos)
    return found


def rollout_metrics(groups: "list[list[SampleInfo]]", step: int) -> dict[str, float]:
    """Returns the metrics of a batch of groups; `step` is the version that trains on it."""
    infos = list(itertools.chain(*groups))
    answers = [info for info in infos if not info.continues]
    lags = [step - info.oldest_version for info in infos if info.response_tokens] or [0]
    mixed = [info.oldest_version < info.newest_version for info in infos]
    found = {
        "lag_mean": statistics.fmean(lags),
        "lag_max": max(lags),
        "mixed_version_samples": statistics.fmean(mixed),
        "judging_seconds": statistics.fmean(infos[0].judging for infos in groups),
    }
    # A summary begins a sequence as well, but breaks no prefix.
    compactions = int(sum(info.components.get("compactions", 0) for info in answers))
    broken = len(infos) - len(answers) - compactions
    if broken:
        found["broken_prefixes"] = broken
    cache_hits = [info.cache_hits for info in infos if info.cache_hits >= 0]
    if cache_hits:
        found["prefix_cache_hits"] = statistics.fmean(cache_hits)
    with_sets = [info for info in infos if info.allowed_tokens >= 0]  # top_p, top_k or min_p
    if with_sets:
        allowed = sum(info.allowed_tokens for info in with_sets)
        sampled = sum(info.response_tokens for info in with_sets)
        found["allowed_tokens"] = allowed / max(1, sampled)
    for suffix, part in by_origin(groups).items():
        for name, value in answer_metrics(part).items():
            found[name + suffix] = value
    return found | component_metrics(answers)


def answer_metrics(groups: "list[list[SampleInfo]]") -> dict[str, float]:
    """Returns reward, length, truncation and zero variance of some groups."""
    infos = list(itertools.chain(*groups))
    answers = [info for info in infos if not info.continues]
    teaches_nothing = [not any(info.has_gradient for info in infos) for infos in groups]
    return {
        "reward": statistics.fmean([info.reward for info in answers]),
        "response_tokens": statistics.fmean([info.response_tokens for info in infos]),
        "truncated_samples": statistics.fmean([info.truncated for info in answers]),
        "zero_variance_groups": statistics.fmean(teaches_nothing),
    }


def component_metrics(answers: "list[SampleInfo]") -> dict[str, float]:
    """Returns the mean of each number in `Reward.info`, by environment.

    Answers that lack a number do not count toward its mean.
    """
    values = defaultdict(list)
    for info in answers:
        for name, value in info.components.items():
            values[f"info/{name}/{info.env}"].append(value)
    return {name: statistics.fmean(found) for name, found in values.items()}


LIMIT = 0.05  # nats at lag 0: exp(0.05) is NeMo-RL's rule of thumb for token_mult_prob_error
FEW = 0.1  # share of the recent tokens: if fewer are at lag 0, their mean is not used
RECENT = 10  # steps whose mean describes the current state


def gap(mismatch: list[dict]) -> float | None:
    """Returns the mean |log p trainer - log p engine| over recent tokens at lag 0; None if few.

    If tokens at lag 0 are few, most of them end answers that began under an older policy, and
    attend to that policy's KV cache.
    """
    rows = [row for table in mismatch[-RECENT:] for row in table["rows"]]
    fresh = [row for row in rows if (row["by"], row["key"]) == ("lag", "0")]
    tokens = sum(row["tokens"] for row in fresh)
    if not tokens or tokens < FEW * sum(row["tokens"] for row in rows if row["by"] == "all"):
        return None
    total = 0.0
    for row in fresh:
        mean = row.get("mean")  # None if it was not finite
        total += row["tokens"] * (math.nan if mean is None else mean)
    return total / tokens


def disagreement(table: dict) -> str:
    """Returns a warning if trainer and engine are too far apart at lag 0; else "".

    At a larger lag they differ because the policy has moved, which is no error.
    """
    nats = gap([table])
    if nats is None or nats <= LIMIT:
        return ""
    return f"trainer and engine are {nats:.3f} nats a token apart at lag 0, more than {LIMIT}"
