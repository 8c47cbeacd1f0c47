"""The lines of a data file: which are good, where each begins, and a record of the bad ones."""

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
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from core.errors import InputError, ModuleError

if TYPE_CHECKING:
    from settings.config import TrainingSettings

LONGEST_LINE = 1 << 26  # bytes; what is longer is no row but a file without line breaks


class Rows(Sequence[dict]):
    """The good rows of a JSONL file, in order, each with its line number under `_line`.

    Memory holds 16 bytes of a row, as a blend may have 50 GB: where it begins, its number, and a
    checksum. Asking for a row raises InputError where the file has changed since.
    """

    def __init__(self, path: str):
        self.path = path
        self.file: Any = None  # opened when the first row is asked for
        self.starts = array("Q")
        self.lines = array("I")
        self.checksums = array("I")

    def add(self, start: int, line: int, text: bytes) -> None:
        """Adds a row that is known to be good."""
        self.starts.append(start)
        self.lines.append(line)
        self.checksums.append(zlib.crc32(text.rstrip(b"\n")))  # rows may be appended

    def checksum(self, count: int) -> int:
        """CRC-32 of the first `count` rows' lines, as they were when the file was read."""
        return zlib.crc32(self.checksums[:count].tobytes())

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: Any) -> Any:
        self.file = self.file or open(self.path, "rb")  # noqa: SIM115
        self.file.seek(self.starts[index])
        text = self.file.readline()
        if zlib.crc32(text.rstrip(b"\n")) != self.checksums[index]:
            place = f"{self.path}:{self.lines[index]}"
            raise InputError(f"{place}: the file was changed while it was used: start again")
        return json.loads(text) | {"_line": self.lines[index]}


def read_lines(path: str) -> Iterator[str]:
    """The lines of a file, bytes that are no UTF-8 as surrogates; an endless one is cut off.

    Raises InputError where the file cannot be read.
    """
    return (decoded(text) for _, text in raw_lines(path))


def raw_lines(path: str) -> Iterator[tuple[int, bytes]]:
    """Where each line of a file begins, and its bytes; a bar is shown where it takes a while."""
    start = 0
    try:
        bar: dict[str, Any] = {"total": os.path.getsize(path), "unit": "B", "unit_scale": True}
        progress = tqdm(desc=path, delay=2, disable=None, leave=False, **bar)
        with open(path, "rb") as file, progress:
            while line := file.readline(LONGEST_LINE + 1):
                yield start, line
                while len(line) > LONGEST_LINE and not line.endswith(b"\n"):
                    start += len(line)
                    line = file.readline(LONGEST_LINE + 1)
                start += len(line)
                progress.update(start - progress.n)
    except OSError as error:
        tried = os.path.abspath(path)
        raise InputError(f"{tried}: expected a JSONL file: {error.strerror}") from None


def decoded(text: bytes) -> str:
    """The text of a line, bytes that are no UTF-8 as surrogates."""
    return text.decode("utf-8", "surrogateescape")


BAD: dict[str, list[dict]] = {}  # of each file that was loaded, until the run folder is ours


def keep_bad(path: str, bad: list[dict], cfg: "TrainingSettings") -> None:
    """Keeps the bad rows of a file until `quarantine` writes them, and says how many they are."""
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
    """The rows of a JSONL file that are used, and what is wrong with the bad ones.

    `is_used` raises ValueError for a bad line. Raises InputError where more than `allowed` are bad,
    and for an environment's module that cannot be used.
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
            raise InputError(first_of(bad) + limit)
    return rows, bad


def refuse_none(rows: Rows, bad: list[dict]) -> None:
    """Raises InputError where a file holds no good row."""
    if not rows:
        all_bad = f"; {first_of(bad)}" if bad else ""
        raise InputError(f"{rows.path}: holds no good rows, expected at least one{all_bad}")


def first_of(bad: list[dict]) -> str:
    """What is wrong with the first bad row, and where the others are."""
    lines = ", ".join(str(row["line"]) for row in bad[:10]) + ", ..." * (len(bad) > 10)
    more = f" ({len(bad)} bad rows: lines {lines})" if len(bad) > 1 else ""
    return f"{bad[0]['file']}:{bad[0]['line']}: {bad[0]['reason']}{more}"


def quarantine(cfg: "TrainingSettings") -> None:
    """Writes the bad rows of the files that were loaded to the run folder, which is ours by now.

    Each has its file, line number, reason and first characters. Where nothing is trained the file
    stays as it is.
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
    """The JSON value of a line, and its bytes. Raises ValueError saying what is wrong with it."""
    if len(line) > LONGEST_LINE:
        raise ValueError(f"the line is longer than {LONGEST_LINE:,} bytes")
    try:
        size = len(line.encode())
        row = json.loads(line, object_pairs_hook=unique, parse_float=finite, parse_constant=finite)
        if re.search(r"\\u[dD][89a-fA-F]", line):  # half a surrogate pair is no character
            json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        code = ord(error.object[error.start])
        is_byte = 0xDC80 <= code <= 0xDCFF
        what = f"byte {code - 0xDC00:#x}" if is_byte else f"half a pair, \\u{code:x},"
        raise ValueError(f"expected UTF-8: {what} at character {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected JSON: {error}") from None
    return row, size


def unique(pairs: list[tuple]) -> dict:
    """A JSON object. Raises ValueError for one that has a key twice."""
    row = dict(pairs)
    if len(row) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {reprlib.repr(twice)} appears twice")
    return row


def finite(number: str) -> float:
    """A JSON number. Raises ValueError for NaN, and for what overflows."""
    if not math.isfinite(float(number)):
        raise ValueError(f"{reprlib.repr(number)} is not finite")
    return float(number)
