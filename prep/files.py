"""Reads row files line by line, and writes them under temporary names until all are complete."""

import contextlib
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from core import errors
from core.errors import InputError
from core.outputs import output_file
from envs import registry
from rollout.rows import LONGEST_LINE, decoded, raw_lines


class Line(NamedTuple):
    """A line of a file and its place."""

    path: str
    number: int
    start: int  # byte offset in the file
    text: str

    @property
    def place(self) -> str:
        """FILE:LINE, for messages."""
        return f"{self.path}:{self.number}"

    def row(self) -> dict:
        """Returns the line's JSON object. Raises InputError if it is not one, or not UTF-8."""
        try:
            self.text.encode()
            row = json.loads(self.text) if len(self.text) <= LONGEST_LINE else None
        except (ValueError, RecursionError) as error:
            raise InputError(f"{self.place}: expected JSON in UTF-8: {error}") from None
        if not isinstance(row, dict):
            raise InputError(f"{self.place}: {self.text[:60]!r}: expected a JSON object")
        return row


def lines(path: str | Path) -> Iterator[Line]:
    """Yields the non-blank lines of a file. Raises InputError if it cannot be read."""
    for number, (start, text) in enumerate(raw_lines(str(path)), 1):
        line = Line(str(path), number, start, decoded(text))
        if not line.text.isspace():
            yield line


def agent(row: dict) -> str:
    """Returns the row's `agent_ref.name`; "" if it has none."""
    ref = row.get("agent_ref")
    name = ref.get("name") if isinstance(ref, dict) else None
    return name if isinstance(name, str) else ""


def served() -> dict[str, str]:
    """Returns the modules of envs/ by the agents that they serve.

    Raises InputError if two modules claim the same agent.
    """
    try:
        return registry.served()
    except errors.ModuleError as error:
        raise InputError(str(error)) from None


def sha256(path: Path) -> str:
    """Returns the hash of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Output:
    """A file under construction, NAME.partial, and the manifest's counts of its rows.

    Raises InputError if its place is taken by anything but a file.
    """

    def __init__(self, path: Path):
        self.path = output_file(path)
        self.aside = self.path.with_name(f"{self.path.name}.partial")
        self.aside.parent.mkdir(parents=True, exist_ok=True)
        self.aside.unlink(missing_ok=True)
        self.file = open(self.aside, "xb")  # noqa: SIM115
        self.hash = hashlib.sha256()
        self.rows = 0
        self.environments: Counter[str] = Counter()
        self.datasets: Counter[str] = Counter()

    def write(self, row: dict, text: str = "") -> None:
        """Appends a row; if its line exists already, `text` is that line, which is kept as is."""
        line = f"{(text or json.dumps(row)).strip()}\n".encode()
        self.file.write(line)
        self.hash.update(line)
        self.rows += 1
        self.environments[agent(row)] += 1
        self.datasets[str(row.get("dataset") or "")] += 1

    def summary(self) -> dict[str, Any]:
        """Returns the output's entry in the manifest."""
        return {
            "rows": self.rows,
            "bytes": self.file.tell(),
            "sha256": self.hash.hexdigest(),
            "environments": dict(sorted(self.environments.items())),
            "datasets": dict(sorted(self.datasets.items())),
        }


@contextlib.contextmanager
def writing(*paths: Path) -> Iterator[list[Output]]:
    """Opens outputs that appear under their names together when the block ends, or not at all.

    An output without rows leaves no file; an earlier file of that name is removed.
    """
    outputs = [Output(path) for path in paths]
    try:
        yield outputs
        for output in outputs:
            output.file.flush()
            os.fsync(output.file.fileno())
        for output in outputs:
            if output.rows:
                output.aside.replace(output.path)
            else:
                output.path.unlink(missing_ok=True)
    finally:
        for output in outputs:
            with contextlib.suppress(OSError):  # the error of a full disk, which was raised before
                output.file.close()
            output.aside.unlink(missing_ok=True)


@contextlib.contextmanager
def rewriting(source: str, target: str) -> Iterator[Output]:
    """Opens the one output of a command that reads `source`.

    Raises InputError if both are the same file, or if no row was written.
    """
    if os.path.exists(source) and os.path.exists(target) and os.path.samefile(source, target):
        raise InputError(f"{target}: is both the input and the output, expected two files")
    with writing(Path(target)) as (output,):
        yield output
        if not output.rows:
            raise InputError(
                f"{source}: none of its rows is left for {target}, expected at least one"
            )
    print(f"{target}: {output.rows:,} rows")
