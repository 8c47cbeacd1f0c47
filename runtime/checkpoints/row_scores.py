"""Keeps, in the run's folder, numbers that are computed once per row.

A line of reference.jsonl holds the numbers for neighbouring rows, and a key for what they were
computed from. Lines with another key belong to another model or other rows, and are ignored.
"""

import json
import math
import zlib
from pathlib import Path

from core import jsonl
from core.jsonl import LineFile
from rollout.rows import Rows
from runtime.checkpoints import lineage
from settings.config import TrainingSettings

FILE = "reference.jsonl"
LINE = {"key": str, "first": int, "values": [list]}


class Scores:
    """The numbers for a data file's rows, by the row's place."""

    def __init__(self, cfg: TrainingSettings, rows: Rows):
        model = lineage.identity(Path(cfg.model))["digest"]
        content = zlib.crc32(rows.checksums.tobytes())
        self.rows = rows
        self.key = f"{model} {content:08x} {cfg.template_variables.values}"
        self.path = Path(cfg.run_dir) / FILE
        self.values: dict[int, list[float]] = {}
        for line in jsonl.read(self.path, LINE):
            if line["key"] == self.key:
                self.values |= dict(enumerate(line["values"], line["first"]))

    def lacks(self, places: range) -> bool:
        """True if any of these rows has no numbers yet."""
        return any(i not in self.values for i in places)

    def add(self, first: int, values: list[list[float]]) -> None:
        """Stores the numbers for rows from place `first` on; they are in the file when it returns.

        Raises FloatingPointError, with the row, if its numbers are not finite.
        """
        for place, numbers in enumerate(values, first):
            if not all(map(math.isfinite, numbers)):
                raise FloatingPointError(
                    f"{self.rows.path}:{self.rows.lines[place]}: "
                    f"logprobs of the reference are {numbers}"
                )
        file = LineFile(self.path)
        line = {"key": self.key, "first": first, "values": values}
        file.append(json.dumps(line).encode() + b"\n")
        file.close()
        self.values |= dict(enumerate(values, first))
