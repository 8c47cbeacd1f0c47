"""Groups of samples on disk: one .npz file, written aside and renamed.

The file has a column for each field of `Sample`. Columns that end in `_T` hold the tokens of all
samples end to end, the others one entry for each sample. Texts, and dictionaries as JSON, are one
JSON list: numpy would make each text as wide as the longest. Columns that end in `_M` hold arrays
of any length end to end, and `ends_NAME` where that of each sample ends. Beside them are `slot`,
`version` and `line` of each group, `group` and `length` of each sample, and `logp_T`, the trainer's
logprobs, NaN where it computed none.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_origin

import numpy as np

from rollout.episode import Sample

HEAD = ("slot", "version", "line")
OWN = (*HEAD, "group", "length", "logp_T")  # columns that are no field of a sample


def write_groups(
    path: str, heads: list[tuple[int, int, int]], places: list[list[tuple[int, int]]], *refs: Any
) -> None:
    """Writes groups of samples as one .npz file: `heads` are (slot, version, line) of each.

    `refs` are first, for each list of places (group, place in it), the trainer's logprobs [T] of
    the samples there, end to end, or nothing. Then come the groups. Raises TypeError for a field of
    a sample that has no place in such a file.
    """
    groups = refs[len(places) :]
    logps: dict[tuple[int, int], np.ndarray] = {}
    for at, logp_T in zip(places, refs[: len(places)], strict=True):
        if len(logp_T):
            ends = np.cumsum([len(groups[g][j].tokens_T) for g, j in at])
            logps |= zip(at, np.split(logp_T, ends[:-1]), strict=True)
    samples = list(itertools.chain(*groups))
    lengths = [len(sample.tokens_T) for sample in samples]
    columns: dict[str, Any] = dict(zip(HEAD, np.array(heads).reshape(-1, 3).T, strict=True))
    columns["group"] = np.repeat(np.arange(len(groups), dtype=np.int32), [len(g) for g in groups])
    columns["length"] = np.array(lengths, np.int32)
    scored = [logps.get((g, j)) for g, group in enumerate(groups) for j in range(len(group))]
    nowhere = np.full(sum(lengths), np.nan, np.float32)
    columns["logp_T"] = _tokens("logp_T", scored, lengths) if logps else nowhere
    for field in dataclasses.fields(Sample):
        if field.name in OWN:
            raise TypeError(f"Sample.{field.name} has the name of a column, expected another name")
        values = [getattr(sample, field.name) for sample in samples]
        if get_origin(field.type) is dict:
            values = [json.dumps(value) for value in values]
        columns |= _columns(field.name, values, lengths)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    aside = f"{path}.partial.npz"
    np.savez(aside, **columns)
    os.replace(aside, path)


def _columns(name: str, values: list, lengths: list[int]) -> dict[str, np.ndarray]:
    """What the values of a field become; nothing where all of them are None."""
    known = [value for value in values if value is not None]
    if name.endswith("_M"):
        ends = np.cumsum([0 if value is None else len(value) for value in values])
        return {name: np.concatenate(known), f"ends_{name}": ends} if known else {}
    column = _tokens(name, values, lengths) if name.endswith("_T") else _plain(values)
    if column is None:
        return {}
    if column.dtype == object:
        raise TypeError(f"Sample.{name} is {values[0]!r}, expected numbers or text")
    return {name: column}


def _tokens(name: str, values: list, lengths: list[int]) -> np.ndarray | None:
    """One column from the arrays [T, ...] of a field; None where all of them are None."""
    known = [value for value in values if value is not None]
    if not known:
        return None if values else np.zeros(0)
    blank = _blank(known[0])
    shape = known[0].shape[1:]
    for value, n in zip(values, lengths, strict=True):
        if value is not None and len(value) != n:
            raise ValueError(f"{name} has {len(value)} entries, its sample {n} tokens")
    pieces = zip(values, lengths, strict=True)
    whole = [np.full((n, *shape), blank, known[0].dtype) if v is None else v for v, n in pieces]
    return np.concatenate(whole)


def _plain(values: list) -> np.ndarray | None:
    """One column from the values of a field; None where all of them are None."""
    known = [value for value in values if value is not None]
    if not known:
        return None if values else np.zeros(0)
    if isinstance(known[0], str):
        return np.array(json.dumps(["" if value is None else value for value in values]).encode())
    try:
        return np.array([_blank(known[0]) if value is None else value for value in values])
    except ValueError:  # sequences of different lengths
        return np.array([None])


def _blank(example: Any) -> Any:
    """What stands in a column for a missing value: NaN, -1 or False."""
    kind = np.asarray(example).dtype.kind
    return {"f": np.nan, "i": -1, "b": False}.get(kind)


def listed(column: np.ndarray) -> list:
    """The entries of a column that has one for each sample."""
    return column.tolist() if column.shape else json.loads(column.item())


@contextlib.contextmanager
def _opened(path: str) -> Iterator[Any]:
    """The columns of a file of groups; an error in reading them is a ValueError that names it."""
    try:
        with np.load(path, allow_pickle=False) as file:
            yield file
    except (OSError, EOFError, LookupError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: expected groups of samples: {error}") from None


def count_groups(path: str) -> int:
    """How many groups a file holds. Raises ValueError naming a file that is not of that kind."""
    with _opened(path) as columns:
        return len(columns["slot"])


def columns(path: str) -> set[str]:
    """The names of a file's columns. Raises ValueError as `count_groups` does."""
    with _opened(path) as file:
        return set(file.files)


def read_groups(path: str) -> tuple:
    """What `write_groups` wrote: [(slot, version, line, infos)], then the samples of each group.

    A column that the file lacks gets the default of its field. Raises ValueError naming a file
    that is not of that kind.
    """
    with _opened(path) as file:
        columns: dict[str, Any] = dict(file)
        heads = [tuple(map(int, h)) for h in zip(*(columns[k] for k in HEAD), strict=True)]
        groups: list[list[Sample]] = [[] for _ in heads]
        lengths = columns["length"]
        if (lengths < 0).any() or (columns["group"] < 0).any():
            raise ValueError("lengths and groups must be 0 or more")
        for name, column in columns.items():
            if name.endswith("_T") and len(column) != sum(lengths):
                raise ValueError(f"{name} has {len(column)} tokens, expected {sum(lengths)}")
            if name.endswith("_M") and not name.startswith("ends_"):
                columns[f"ends_{name}"] = _ends(name, column, columns[f"ends_{name}"])
        for name in columns.keys() - OWN:
            if not name.endswith(("_T", "_M")):
                columns[name] = listed(columns[name])
        starts = np.cumsum(lengths) - lengths
        for i, g in enumerate(columns["group"]):
            part = slice(starts[i], starts[i] + lengths[i])
            groups[g].append(Sample(**_fields(columns, i, part)))
    infos = ([sample.info() for sample in group] for group in groups)
    return [(*head, info) for head, info in zip(heads, infos, strict=True)], *groups


def _ends(name: str, column: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Where each sample's part of a `_M` column begins, and the end. Raises ValueError."""
    starts = np.concatenate([[0], ends])
    if (np.diff(starts) < 0).any() or starts[-1] != len(column):
        raise ValueError(f"{name} has {len(column)} entries, expected {starts[-1]}")
    return starts


def _fields(columns: dict[str, Any], i: int, part: slice) -> dict[str, Any]:
    """The fields of sample i, whose tokens are `part` of the columns."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(Sample):
        if field.name in columns:
            column = columns[field.name]
            if field.name.endswith("_M"):
                ends = columns[f"ends_{field.name}"]
                values[field.name] = column[ends[i] : ends[i + 1]]
                continue
            value: Any = column[part] if field.name.endswith("_T") else column[i]
            values[field.name] = json.loads(value) if get_origin(field.type) is dict else value
    return values
