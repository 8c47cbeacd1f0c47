"""Groups of samples on disk: one .npz file, written aside and renamed."""

import contextlib
import itertools
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from envs.episode import EMPTY, Sample, describe

HEAD = ("slot", "version", "line")
PER_TOKEN = ("tokens", "mask", "engine_logp", "version", "malformed")
PER_SAMPLE = ("reward", "advantage", "truncated", "env", "continues")


def write_groups(path: str, heads: list, places: list[list], *refs) -> None:
    """Writes groups of samples as one .npz file: `heads` are (slot, version, line) of each.

    `refs` are, for each list of places (group, place in it), the trainer's logprobs [T] of the
    samples there, or nothing; then the groups.
    """
    scores, groups = refs[: len(places)], refs[len(places) :]
    told = ((at, logps) for at, logps in zip(places, scores, strict=True) if logps)
    logps = dict(itertools.chain(*(zip(at, logps, strict=True) for at, logps in told)))
    every = [(at, sample) for g, group in enumerate(groups) for at, sample in _places(g, group)]
    columns = dict(zip(HEAD, np.array(heads).reshape(-1, 3).T, strict=True))
    columns["group"] = np.array([g for (g, _), _ in every], np.int32)
    columns["length"] = np.array([len(sample.tokens_T) for _, sample in every], np.int32)
    columns |= {k: np.array([getattr(sample, k) for _, sample in every]) for k in PER_SAMPLE}
    for name in PER_TOKEN:
        pieces = [getattr(sample, f"{name}_T") for _, sample in every]
        columns[f"{name}_T"] = np.concatenate([EMPTY.mask_T[:0], *pieces])
    routes = [sample.routes_T for _, sample in every]
    if shapes := {r.shape[1:] for r in routes if r is not None}:
        unknown = [np.full((n, *min(shapes)), -1, np.int16) for n in columns["length"]]
        known = (u if r is None else r for r, u in zip(routes, unknown, strict=True))
        columns["routes_T"] = np.concatenate(list(known))
    blank = [np.full(len(sample.tokens_T), np.nan, np.float32) for _, sample in every]
    pieces = [logps.get(at, nan) for (at, _), nan in zip(every, blank, strict=True)]
    columns["logp_T"] = np.concatenate([EMPTY.engine_logp_T[:0], *pieces])
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    aside = f"{path}.partial.npz"
    np.savez(aside, **columns)
    os.replace(aside, path)


def _places(g: int, group: list[Sample]) -> Iterator:
    return (((g, j), sample) for j, sample in enumerate(group))


@contextlib.contextmanager
def _opened(path: str):
    """The columns of a file of groups; what goes wrong with them is a ValueError that names it."""
    try:
        with np.load(path, allow_pickle=False) as file:
            yield file
    except (OSError, EOFError, LookupError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: expected groups of samples: {error}") from None


def count_groups(path: str) -> int:
    """How many groups a file holds. Raises ValueError naming a file that is not of that kind."""
    with _opened(path) as columns:
        return len(columns["slot"])


def read_groups(path: str) -> tuple:
    """What `write_groups` wrote: [(slot, version, line, infos)], then the samples of each group.

    Raises ValueError naming a file that is not of that kind.
    """
    with _opened(path) as file:
        columns = dict(file)
        heads = [tuple(map(int, h)) for h in zip(*(columns[k] for k in HEAD), strict=True)]
        groups = [[] for _ in heads]
        ends = np.cumsum(columns["length"])
        if (columns["length"] < 0).any() or (columns["group"] < 0).any():
            raise ValueError("lengths and groups must be 0 or more")
        if any(len(columns[f"{name}_T"]) != sum(columns["length"]) for name in PER_TOKEN):
            raise ValueError("its tokens must be as many as its lengths tell")
        for i, (g, end) in enumerate(zip(columns["group"], ends, strict=True)):
            part = slice(end - columns["length"][i], end)
            tokens = {f"{k}_T": columns[f"{k}_T"][part] for k in PER_TOKEN}
            tokens |= {k: columns[k][part] for k in ("routes_T",) if k in columns}
            groups[g].append(Sample(**tokens, **{k: columns[k][i].item() for k in PER_SAMPLE}))
    infos = ([describe(sample) for sample in group] for group in groups)
    return [(*head, info) for head, info in zip(heads, infos, strict=True)], *groups
