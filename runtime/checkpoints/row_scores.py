"""Numbers that are computed once for each row of a run, and kept in its folder.

A line of reference.jsonl holds those of neighbouring rows, and a key: what they were computed from.
Lines of another key are of another model or of other rows, and are not read.
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
    """The numbers of a file's rows, by the row's place among them."""

    def __init__(self, cfg: TrainingSettings, rows: Rows):
        model = lineage.identity(Path(cfg.model))["digest"]
        content = zlib.crc32(rows.checksums.tobytes())
        self.rows = rows
        self.key = f"{model} {content:08x} {cfg.template_variables[1]}"
        self.path = Path(cfg.run_dir) / FILE
        self.values: dict[int, list[float]] = {}
        for line in jsonl.read(self.path, LINE):
            if line["key"] == self.key:
                self.values |= dict(enumerate(line["values"], line["first"]))

    def lacks(self, places: range) -> bool:
        """Whether any of these rows has no numbers yet."""
        return any(i not in self.values for i in places)

    def add(self, first: int, values: list[list[float]]) -> None:
        """Keeps the numbers of rows from place `first` on; they are in the file when it returns.

        Raises FloatingPointError naming the row whose numbers are not finite.
        """
        for place, numbers in enumerate(values, first):
            if not all(map(math.isfinite, numbers)):
                at = f"{self.rows.path}:{self.rows.lines[place]}"
                raise FloatingPointError(f"{at}: logprobs of the reference are {numbers}")
        file = LineFile(self.path)
        found = {"key": self.key, "first": first, "values": values}
        file.append(json.dumps(found).encode() + b"\n")
        file.close()
        self.values |= dict(enumerate(values, first))
