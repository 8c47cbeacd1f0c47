"""Finds data sets, also on the hub, and reads any common format one batch at a time."""

import csv
import json
import re
from collections.abc import Container, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from core.errors import InputError
from prep.files import lines
from rollout.rows import LONGEST_LINE
from settings.hub import HUB_SECONDS

if TYPE_CHECKING:
    from pyarrow import RecordBatch

KINDS = (".parquet", ".arrow", ".jsonl", ".json", ".csv")
ABOUT = ("dataset_dict.json", "dataset_info.json", "state.json")  # written by `datasets`
CHUNK = 1 << 20  # characters of a JSON array that are read at once
Record = tuple[str, dict]  # its place, for messages, and its columns
Batch = Union[list[dict], list[Record], "RecordBatch"]


def records(
    files: list[Path], columns: list[str], wanted: Container[int] | None = None
) -> Iterator[tuple[int, Record]]:
    """Yields the records of some files, or only the wanted ones, numbered from 0 across all files.

    `columns` are top-level columns: no others are read from parquet files. Raises InputError if a
    file does not have the format of its suffix.
    """
    start = 0
    for path in files:
        first = start
        try:
            for batch in batches(path, columns):
                places = [i for i in range(len(batch)) if wanted is None or start + i in wanted]
                for i, record in zip(places, picked(batch, places), strict=True):
                    yield start + i, placed(record, f"{path}, record {start + i - first + 1}")
                start += len(batch)
        except (OSError, ValueError, csv.Error) as error:  # pyarrow's errors are ValueErrors
            raise InputError(f"{path}: expected {path.suffix[1:]}: {error}") from None


def placed(record: dict | Record, place: str) -> Record:
    """Returns a record with its place, unless it has one already, as records read from lines do."""
    return record if isinstance(record, tuple) else (place, record)


def picked(batch: Batch, places: list[int]) -> list[dict | Record]:
    """Returns some records of a batch; only these become dictionaries."""
    if isinstance(batch, list):
        return [batch[place] for place in places]
    return batch.take(places).to_pylist() if places else []


def batches(path: Path, columns: list[str]) -> Iterator[Batch]:
    """Yields lists of one record, or pyarrow's batches of many."""
    if path.suffix == ".parquet":
        from pyarrow import parquet

        file = parquet.ParquetFile(path)
        yield from file.iter_batches(columns=[c for c in columns if c in file.schema_arrow.names])
    elif path.suffix == ".arrow":  # as `datasets` saves it
        from pyarrow import ipc, memory_map

        yield from ipc.open_stream(memory_map(str(path)))
    elif path.suffix == ".csv":
        csv.field_size_limit(LONGEST_LINE)
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            line = 2  # where the next record begins; the first line has the columns' names
            for record in reader:
                yield [(f"{path}:{line}", record)]
                line = reader.line_num + 1
    elif path.suffix == ".json" and is_array(path):
        yield from ([record] for record in objects(path))
    else:
        yield from ([(line.place, line.row())] for line in lines(path))


def is_array(path: Path) -> bool:
    """Returns True if a JSON file contains an array rather than one object per line."""
    with open(path, encoding="utf-8") as file:
        return file.read(CHUNK).lstrip().startswith("[")


def objects(path: Path) -> Iterator[dict]:
    """Yields the objects of a JSON array, read in chunks. Raises ValueError if it is malformed."""
    decode = json.JSONDecoder().raw_decode
    with open(path, encoding="utf-8") as file:
        text = file.read(CHUNK).lstrip()[1:]
        while not (text := text.lstrip(", \t\r\n")).startswith("]"):
            try:
                record, end = decode(text)
            except json.JSONDecodeError:
                more = file.read(max(CHUNK, len(text)))  # an object may be longer than a chunk
                if not more:
                    raise
                text += more
                continue
            if not isinstance(record, dict):
                raise ValueError(f"{record!r:.60} in the array is not an object")
            yield record
            text = text[end:]


def value(record: dict, column: str, place: str) -> Any:
    """Returns the value at a path such as a.b.0.c in a record.

    Raises InputError, with the value that was found instead, if it is missing or null.
    """
    found: Any = record
    for key in column.split("."):
        inner = None
        if isinstance(found, dict):
            inner = found.get(key)
        elif isinstance(found, list) and key.isdigit() and int(key) < len(found):
            inner = found[int(key)]
        if inner is None:
            has = f"it is {found!r:.60}"
            if isinstance(found, dict):
                has = f"columns are {list(found)}"
            raise InputError(f"{place}: {column} is missing or null at {key!r}: {has}")
        found = inner
    return found


def has_nul(found: Any) -> bool:
    """Returns whether a text, or one inside a list or a dictionary, has the character NUL."""
    if isinstance(found, dict):
        found = list(found.values())
    if isinstance(found, list):
        return any(map(has_nul, found))
    return isinstance(found, str) and "\0" in found


def data_files(source: Path, split: str) -> list[Path]:
    """Returns a file, or the files in a folder that have the first of KINDS found there.

    If some are named after the split, returns only these. Raises InputError if there is no file of
    a known kind.
    """
    every = sorted(source.rglob("*")) if source.is_dir() else [source]
    named = re.compile(rf"(^|[^a-z]){re.escape(split)}([^a-z]|$)")
    for kind in KINDS:
        found = [path for path in every if path.suffix == kind and path.name not in ABOUT]
        of_split = [path for path in found if named.search(str(path.relative_to(source)).lower())]
        if found:
            return of_split or found
    raise InputError(f"{source}: expected a file that ends in {', '.join(KINDS)}, or a folder")


def located(source: str, patterns: list[str], field: str) -> Path:
    """Returns a file or folder, or the hub's data set ORG/NAME in its cache.

    Raises InputError, which names the field that asks for it, if neither exists.
    """
    if Path(source).exists():
        return Path(source)
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", source):
        raise InputError(f"{field} = {source!r}: there is no such file or folder")
    from huggingface_hub import HfApi, snapshot_download  # 0.4 s

    why = ""
    try:  # snapshot_download would ask the same without a deadline
        HfApi().dataset_info(source, timeout=HUB_SECONDS)
    except Exception as error:  # from the network or the hub; the cache may have the data set
        why = f"{type(error).__name__}: {error}; "
    try:
        folder = snapshot_download(
            source, repo_type="dataset", allow_patterns=patterns, local_files_only=bool(why)
        )
    except Exception as error:
        why = " ".join(f"{why}{type(error).__name__}: {error}".split())
        raise InputError(
            f"{field} = {source!r}: neither a folder nor on the hub: {why}. Without a network, "
            f"run hf download --repo-type dataset {source} elsewhere, and name the folder"
        ) from None
    return Path(folder)
