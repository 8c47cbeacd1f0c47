"""What is measured of rollouts: their rewards, lengths, lags, and the trainer's mismatch."""

import itertools
import math
import statistics
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from rollout.episode import Sample, SampleInfo


# (by, key) -> tokens, tokens of trusted sequences, and sum, summed k3 and maximum of the gap
MismatchTable = dict[tuple[str, str], list[float]]


def mismatch_table(
    samples: "list[Sample]", logp_T: np.ndarray, step: int, limit: float
) -> MismatchTable:
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


def by_origin(groups: "list[list[SampleInfo]]") -> "dict[str, list[list[SampleInfo]]]":
    """The groups by the suffix of their metrics: "" has all, "/ENV" and "/ENV/DATASET" some."""
    found: dict[str, list[list[SampleInfo]]] = {"": groups}
    for infos in groups:
        env, dataset = infos[0].env, infos[0].dataset
        for suffix in [f"/{env}", f"/{env}/{dataset}"] if dataset else [f"/{env}"]:
            found.setdefault(suffix, []).append(infos)
    return found


def rollout_metrics(groups: "list[list[SampleInfo]]", step: int) -> dict[str, float]:
    """What a batch of groups was made of; `step` is the version that trains on it."""
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
    # A summary begins a sequence, too, but breaks nothing.
    compactions = int(sum(info.components.get("compactions", 0) for info in answers))
    if broken := len(infos) - len(answers) - compactions:
        found["broken_prefixes"] = broken
    if hits := [info.cache_hits for info in infos if info.cache_hits >= 0]:
        found["prefix_cache_hits"] = statistics.fmean(hits)
    if cut := [info for info in infos if info.allowed_tokens >= 0]:
        sampled = max(1, sum(info.response_tokens for info in cut))
        found["allowed_tokens"] = sum(info.allowed_tokens for info in cut) / sampled
    for suffix, part in by_origin(groups).items():
        found |= {name + suffix: value for name, value in answer_metrics(part).items()}
    return found | component_metrics(answers)


def answer_metrics(groups: "list[list[SampleInfo]]") -> dict[str, float]:
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


def component_metrics(answers: "list[SampleInfo]") -> dict[str, float]:
    """The mean of each number in `Reward.info`, over the answers of an environment that have it."""
    values = defaultdict(list)
    for info in answers:
        for name, value in info.components.items():
            values[f"info/{name}/{info.env}"].append(value)
    return {name: statistics.fmean(found) for name, found in values.items()}


LIMIT = 0.05  # nats at lag 0: exp(0.05) is NeMo-RL's rule of thumb for token_mult_prob_error
FEW = 0.1  # of the tokens
RECENT = 10  # steps whose mean tells the present state


def gap(mismatch: list[dict]) -> float | None:
    """Mean |log p trainer - log p engine| over recent tokens at lag 0; None where they are few.

    The few are likely to end answers that began under an older policy, and read its KV.
    """
    rows = [row for table in mismatch[-RECENT:] for row in table["rows"]]
    fresh = [row for row in rows if (row["by"], row["key"]) == ("lag", "0")]
    tokens = sum(row["tokens"] for row in fresh)
    if not tokens or tokens < FEW * sum(row["tokens"] for row in rows if row["by"] == "all"):
        return None
    # A mean that is not finite was read as None.
    means = [math.nan if row.get("mean") is None else row["mean"] for row in fresh]
    return sum(mean * row["tokens"] for mean, row in zip(means, fresh, strict=True)) / tokens


def disagreement(table: dict) -> str:
    """How far trainer and engine are apart at lag 0, where that is too far; else "".

    Under an older policy they differ because the policy has moved, which is no error.
    """
    nats = gap([table])
    if nats is None or nats <= LIMIT:
        return ""
    return f"trainer and engine are {nats:.3f} nats a token apart at lag 0, more than {LIMIT}"
