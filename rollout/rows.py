"""Reads the lines of a data file: finds the good ones, and records the bad ones."""

import itertools
import json
import math
import os
import re
import reprlib
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from tqdm import tqdm

from core.errors import InputError, ModuleError

if TYPE_CHECKING:
    from settings.config import TrainingSettings

LONGEST_LINE = 1 << 26  # bytes; a longer line is not a row but a file without line breaks


class Rows(Sequence[dict]):
    """The good rows of a JSONL file, in order, each with its line number under `_line`.

    A row takes up only 16 bytes of memory, because a blend may have 50 GB: its offset in the file,
    its line number, and a checksum. Reading a row raises InputError if the file has changed.
    """

    def __init__(self, path: str):
        self.path = path
        self.file: BinaryIO | None = None  # opened when the first row is read
        self.starts = array("Q")
        self.lines = array("I")
        self.checksums = array("I")

    def add(self, start: int, line: int, text: bytes) -> None:
        """Adds a row that passed its checks."""
        self.starts.append(start)
        self.lines.append(line)
        # Without the line break: the last line gets one when rows are appended to the file.
        self.checksums.append(zlib.crc32(text.rstrip(b"\n")))

    def checksum(self, count: int) -> int:
        """Returns a CRC-32 of the first `count` rows, as they were when the file was read."""
        return zlib.crc32(self.checksums[:count].tobytes())

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: Any) -> Any:
        if self.file is None:
            self.file = open(self.path, "rb")  # noqa: SIM115
        self.file.seek(self.starts[index])
        text = self.file.readline()
        if zlib.crc32(text.rstrip(b"\n")) != self.checksums[index]:
            raise InputError(
                f"{self.path}:{self.lines[index]}: "
                "the file was changed while it was in use: start again"
            )
        return json.loads(text) | {"_line": self.lines[index]}


def read_lines(path: str) -> Iterator[str]:
    """Yields a file's lines, with bytes that are not UTF-8 as surrogates; truncates endless lines.

    Raises InputError if the file cannot be read.
    """
    return (decoded(text) for _, text in raw_lines(path))


def raw_lines(path: str) -> Iterator[tuple[int, bytes]]:
    """Yields the offset and the bytes of each line in a file; shows a progress bar if it is slow.

    Raises InputError if the file cannot be read.
    """
    start = 0
    try:
        progress = tqdm(
            desc=path,
            total=os.path.getsize(path),
            unit="B",
            unit_scale=True,
            delay=2,
            disable=None,
            leave=False,
        )
        with open(path, "rb") as file, progress:
            while line := file.readline(LONGEST_LINE + 1):
                yield start, line
                while len(line) > LONGEST_LINE and not line.endswith(b"\n"):
                    start += len(line)
                    line = file.readline(LONGEST_LINE + 1)
                start += len(line)
                progress.update(start - progress.n)
    except OSError as error:
        raise InputError(
            f"{os.path.abspath(path)}: expected a JSONL file: {error.strerror}"
        ) from None


def decoded(text: bytes) -> str:
    """Returns the text of a line, with bytes that are not UTF-8 as surrogates."""
    return text.decode("utf-8", "surrogateescape")


BAD: dict[str, list[dict]] = {}  # bad rows by file, until this process has claimed the run folder


def keep_bad(path: str, bad: list[dict], cfg: "TrainingSettings") -> None:
    """Keeps the bad rows of a file until `quarantine` writes them, and prints their number."""
    BAD[path] = bad
    if bad:
        # "responses_create_params.input[3].role is 5, expected ..." is counted under its field.
        kinds = (re.split(r" is |: ", row["reason"])[0] for row in bad)
        counts = Counter(re.sub(r"\[\d+\]", "[]", kind) for kind in kinds)
        summary = ", ".join(f"{kind} {count}" for kind, count in counts.most_common())
        print(f"{path}: {len(bad)} bad rows go to {cfg.run_dir}/quarantine.jsonl: {summary}")


def sort_lines(
    path: str, allowed: float, is_used: Callable[[str], bool]
) -> tuple[Rows, list[dict]]:
    """Returns the rows of a JSONL file that are used, and a record of each bad line.

    `is_used` raises ValueError for a bad line. Raises InputError if more than `allowed` lines are
    bad, or if an environment's module cannot be used.
    """
    rows = Rows(path)
    bad: list[dict] = []
    for number, (start, text) in enumerate(raw_lines(path), 1):
        line = decoded(text)
        if line.isspace():
            continue
        try:
            if is_used(line):
                rows.add(start, number, text)
        except ModuleError as error:
            raise InputError(str(error)) from None
        except (ValueError, RecursionError) as error:
            shown = line[:200].rstrip("\n")
            bad.append({"file": path, "line": number, "reason": str(error), "text": shown})
        if len(bad) > allowed:
            limit = f", more than data.max_bad_rows = {allowed}" if allowed else ""
            raise InputError(f"{first_of(bad)}{limit}")
    return rows, bad


def refuse_none(rows: Rows, bad: list[dict]) -> None:
    """Raises InputError if a file contains no good row."""
    if not rows:
        all_bad = f"; {first_of(bad)}" if bad else ""
        raise InputError(f"{rows.path}: holds no good rows, expected at least one{all_bad}")


def first_of(bad: list[dict]) -> str:
    """Describes the first bad row, and lists the lines of the others."""
    first = bad[0]
    more = ""
    if len(bad) > 1:
        lines = ", ".join(str(row["line"]) for row in bad[:10])
        dots = ", ..." if len(bad) > 10 else ""
        more = f" ({len(bad)} bad rows: lines {lines}{dots})"
    return f"{first['file']}:{first['line']}: {first['reason']}{more}"


def quarantine(cfg: "TrainingSettings") -> None:
    """Writes the bad rows of all loaded files to the run folder, which this process has claimed.

    Each line has a row's file, line number, reason and first characters. If nothing is trained,
    the file stays as it is.
    """
    if cfg.command.eval_only or cfg.command.export:
        return
    path = Path(cfg.run_dir) / "quarantine.jsonl"
    bad = list(itertools.chain(*BAD.values()))
    if bad or path.exists():
        aside = path.with_suffix(".partial")
        aside.write_text("".join(json.dumps(row) + "\n" for row in bad))
        aside.replace(path)


def loads(line: str) -> tuple[Any, int]:
    """Returns the JSON value of a line, and its size in bytes.

    Raises ValueError, with the reason, for a bad line.
    """
    if len(line) > LONGEST_LINE:
        raise ValueError(f"the line is longer than {LONGEST_LINE:,} bytes")
    try:
        size = len(line.encode())
        row = json.loads(line, object_pairs_hook=unique, parse_float=finite, parse_constant=finite)
        if re.search(r"\\u[dD][89a-fA-F]", line):  # encode() refuses a lone surrogate
            json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        code = ord(error.object[error.start])
        if 0xDC80 <= code <= 0xDCFF:  # a byte, as `decoded` shows it
            raise ValueError(
                f"expected UTF-8: byte {code - 0xDC00:#x} at character {error.start}"
            ) from None
        raise ValueError(
            f"expected UTF-8: a lone surrogate, \\u{code:x}, at character {error.start}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected JSON: {error}") from None
    return row, size


def unique(pairs: list[tuple]) -> dict:
    """Makes a JSON object. Raises ValueError if a key appears twice."""
    row = dict(pairs)
    if len(row) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {reprlib.repr(twice)} appears twice")
    return row


def finite(number: str) -> float:
    """Makes a JSON number. Raises ValueError for NaN, and for a number that overflows."""
    if not math.isfinite(float(number)):
        raise ValueError(f"{reprlib.repr(number)} is not finite")
    return float(number)
