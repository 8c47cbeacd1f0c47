"""Writes groups of samples to one .npz file, atomically by a rename, and reads them back.

The file has a column for each field of `Sample`. Columns that end in `_T` hold the tokens of all
samples end to end, the others one entry per sample. Texts, and dictionaries as JSON, are one
JSON list, because numpy would pad each text to the longest. Columns that end in `_M` hold arrays
of any length end to end, and `ends_NAME` where each sample's array ends. The file also has
`slot`, `version` and `line` of each group, `group` and `length` of each sample, and `logp_T`, the
trainer's logprobs, NaN for tokens without one.
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
from numpy.lib.npyio import NpzFile

from rollout.episode import Sample

HEAD = ("slot", "version", "line")
OWN = (*HEAD, "group", "length", "logp_T")  # columns that are not fields of a sample


def write_groups(
    path: str, heads: list[tuple[int, int, int]], places: list[list[tuple[int, int]]], *refs: Any
) -> None:
    """Writes groups of samples as one .npz file: `heads` are each group's (slot, version, line).

    `refs` begin with one array for each list of `places`: the trainer's logprobs [T] of the samples
    at these places (group, place in it), end to end, or an empty array. The groups follow. They are
    separate arguments because Ray fetches no reference inside a list. Raises TypeError for a
    field of a sample that such a file cannot hold, and OSError with the name of the file.
    """
    groups: tuple[list[Sample], ...] = refs[len(places) :]
    logps: dict[tuple[int, int], np.ndarray] = {}
    for at, logp_T in zip(places, refs[: len(places)], strict=True):
        if len(logp_T):
            ends = np.cumsum([len(groups[g][j].tokens_T) for g, j in at])
            logps |= zip(at, np.split(logp_T, ends[:-1]), strict=True)
    samples = list(itertools.chain(*groups))
    lengths = [len(sample.tokens_T) for sample in samples]
    head_columns = np.array(heads).reshape(-1, 3).T
    columns: dict[str, Any] = dict(zip(HEAD, head_columns, strict=True))  # for np.savez
    columns["group"] = np.repeat(np.arange(len(groups), dtype=np.int32), [len(g) for g in groups])
    columns["length"] = np.array(lengths, np.int32)
    columns["logp_T"] = np.full(sum(lengths), np.nan, np.float32)
    scored = [logps.get((g, j)) for g, group in enumerate(groups) for j in range(len(group))]
    found_T = _tokens("logp_T", scored, lengths) if logps else None
    if found_T is not None:
        columns["logp_T"] = found_T
    for field in dataclasses.fields(Sample):
        if field.name in OWN:
            raise TypeError(f"Sample.{field.name} has the name of a column, expected another name")
        values = [getattr(sample, field.name) for sample in samples]
        if get_origin(field.type) is dict:
            values = [json.dumps(value) for value in values]
        columns |= _columns(field.name, values, lengths)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    aside = f"{path}.partial.npz"
    try:
        np.savez(aside, **columns)
    except OSError as error:
        raise OSError(error.errno, error.strerror, aside) from None
    os.replace(aside, path)


def _columns(name: str, values: list, lengths: list[int]) -> dict[str, np.ndarray]:
    """Makes the columns from a field's values; {} if all of them are None."""
    known = [value for value in values if value is not None]
    if name.endswith("_M"):
        if not known:
            return {}
        ends = np.cumsum([0 if value is None else len(value) for value in values])
        return {name: np.concatenate(known), f"ends_{name}": ends}
    column = _tokens(name, values, lengths) if name.endswith("_T") else _plain(values)
    if column is None:
        return {}
    if column.dtype == object:
        raise TypeError(f"Sample.{name} is {values[0]!r}, expected numbers or text")
    return {name: column}


def _tokens(name: str, values: list, lengths: list[int]) -> np.ndarray | None:
    """Makes one column from the arrays [T, ...] of a field; None if all of them are None."""
    known = [value for value in values if value is not None]
    if not known:
        return None if values else np.zeros(0)
    shape = known[0].shape[1:]
    pieces = []
    for value, n in zip(values, lengths, strict=True):
        if value is None:
            value = np.full((n, *shape), _blank(known[0]), known[0].dtype)
        if len(value) != n:
            raise ValueError(f"{name} has {len(value)} entries, but its sample has {n} tokens")
        pieces.append(value)
    return np.concatenate(pieces)


def _plain(values: list) -> np.ndarray | None:
    """Makes one column from the values of a field; None if all of them are None."""
    known = [value for value in values if value is not None]
    if not known:
        return None if values else np.zeros(0)
    if isinstance(known[0], str):
        return np.array(json.dumps(["" if value is None else value for value in values]).encode())
    try:
        blank = _blank(np.asarray(known[0]))
        return np.array([blank if value is None else value for value in values])
    except ValueError:  # sequences of different lengths
        return np.array([None])


def _blank(example: np.ndarray) -> float | None:
    """Returns a column's entry for a missing value, by the others' dtype: NaN, -1 or False."""
    return {"f": np.nan, "i": -1, "b": False}.get(example.dtype.kind)


def listed(column: np.ndarray) -> list:
    """Returns the entries of a column that has one per sample."""
    return column.tolist() if column.shape else json.loads(column.item())


@contextlib.contextmanager
def _opened(path: str) -> Iterator[NpzFile]:
    """Opens the columns of a file of groups. Raises ValueError, naming the file, if that fails."""
    try:
        with np.load(path, allow_pickle=False) as file:
            yield file
    except (OSError, EOFError, LookupError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: expected groups of samples: {error}") from None


def count_groups(path: str) -> int:
    """Returns the number of groups in a file. Raises ValueError if it holds no groups."""
    with _opened(path) as columns:
        return len(columns["slot"])


def columns(path: str) -> set[str]:
    """Returns the names of a file's columns. Raises ValueError as `count_groups` does."""
    with _opened(path) as file:
        return set(file.files)


def read_groups(path: str) -> tuple:
    """Reads what `write_groups` wrote: [(slot, version, line, infos)], then each group's samples.

    A column that the file lacks gets its field's default. Raises ValueError, with the name of
    the file, if it does not hold groups.
    """
    with _opened(path) as file:
        columns = dict(file)
        head_columns = [columns[name] for name in HEAD]
        heads = [tuple(map(int, head)) for head in zip(*head_columns, strict=True)]
        groups: list[list[Sample]] = [[] for _ in heads]
        _check_sizes(columns)
        fields: dict[str, list] = {}
        for field in dataclasses.fields(Sample):
            if field.name in columns:
                fields[field.name] = _entries(field, columns)
        for i, g in enumerate(columns["group"]):
            values = {name: entries[i] for name, entries in fields.items()}
            groups[g].append(Sample(**values))
    with_infos = []
    for (slot, version, line), group in zip(heads, groups, strict=True):
        with_infos.append((slot, version, line, [sample.info() for sample in group]))
    return with_infos, *groups


def _check_sizes(columns: dict[str, np.ndarray]) -> None:
    """Raises ValueError unless each column has the length that lengths or ends give."""
    lengths = columns["length"]
    if (lengths < 0).any() or (columns["group"] < 0).any():
        raise ValueError("lengths and groups must be 0 or more")
    for name, column in columns.items():
        if name.endswith("_T") and len(column) != sum(lengths):
            raise ValueError(f"{name} has {len(column)} tokens, expected {sum(lengths)}")
        if name.endswith("_M") and not name.startswith("ends_"):
            starts = _starts(columns[f"ends_{name}"])
            if (np.diff(starts) < 0).any() or starts[-1] != len(column):
                raise ValueError(f"{name} has {len(column)} entries, expected {starts[-1]}")


def _starts(ends: np.ndarray) -> np.ndarray:
    """Returns the starts of the samples' parts of a `_M` column, and the end of the last part."""
    return np.concatenate([[0], ends])


def _entries(field: dataclasses.Field, columns: dict[str, np.ndarray]) -> list:
    """Returns the value of a field for each sample of a file that has a column for it."""
    column = columns[field.name]
    if field.name.endswith("_M"):
        starts = _starts(columns[f"ends_{field.name}"])
        return [column[start:end] for start, end in itertools.pairwise(starts)]
    if field.name.endswith("_T"):
        lengths = columns["length"]
        ends = np.cumsum(lengths)
        return [column[end - n : end] for end, n in zip(ends, lengths, strict=True)]
    values = listed(column)
    if get_origin(field.type) is dict:
        return [json.loads(value) for value in values]
    return values
