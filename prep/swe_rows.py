"""`swe`: turns repository issues from several data sets into rows for envs/swe."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from core.errors import InputError
from core.outputs import output_file
from prep import files, swe_check, swe_formats, tables
from prep.swe_formats import Refused
from prep.swe_scripts import Scripts


@dataclass
class Found:
    """The records of one data set."""

    rows: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # by reason
    first: dict[str, str] = field(default_factory=dict)  # reason -> place and instance of the first


@dataclass(frozen=True)
class Swe:
    """Turns repository issues into rows for envs/swe/swe.py, if they can be graded.

    Records come from SWE-bench, SWE-Gym, R2E-Gym, SWE-smith and SWE-rebench-V2, from NeMo-Gym rows
    that hold one in their `metadata`, as in the SWE 2 blend, and from rows that this command has
    written.
    """

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")]
    """A .jsonl, .json or .parquet; a folder of them; or ORG/NAME on the hub."""
    out: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="OUT")]
    """JSONL file to write."""
    dataset: str = ""
    """Name of the data set, such as SWE-Gym/SWE-Gym. Empty: the record's own, or SOURCE."""
    sources: tuple[str, ...] = ()
    """Data sets, given like SOURCE, that supply the fields that records lack, by instance_id."""
    tables: str = ""
    """A Python with swebench 4.1 or swesmith, for records without a test script."""
    agent: str = swe_formats.AGENT
    """Agent for records that name no agent."""
    harness: str = ""
    """Tool set for the rows; empty: the environment chooses one for each instance."""
    split: str = "train"
    """Split of a folder or of a data set on the hub: files named after it, or else all."""
    check: bool = False
    """Keep rows that their own repair resolves, and that are not resolved without it."""
    images: str = "data/images"
    """Image folder for --check, as in a run's services.images."""
    at_once: int = 0
    """Number of rows that --check judges at once; 0: one per CPU."""

    def run(self) -> int:
        """Writes the rows and prints what was left out; returns 1 if some were not judged."""
        if self.at_once < 0:
            raise InputError(f"--at_once {self.at_once}: expected 0 or more")
        found: dict[str, Found] = {}
        judged = None
        if self.check:
            output_file(self.out)  # it may be written hours later
            judged = swe_check.Checked(Path(f"{self.out}.check.jsonl"), self.images)
            judged.judge(self.rows({}), self.at_once)
        with files.rewriting(self.source, self.out) as output:
            for row in self.rows(found):
                if not judged or judged.keeps(row):
                    output.write(row)
            lines = summary(found)
            if judged:
                lines += judged.lines()
            print("\n".join(lines))
        return int(bool(judged and judged.unjudged))

    def rows(self, found: dict[str, Found]) -> Iterator[dict]:
        """Yields the rows of all records that can be graded; counts all records in `found`."""
        known = self.known()
        own = {"harness": self.harness} if self.harness else {}
        with Scripts(self.tables) as scripts:
            for place, record in records(self.source, self.split):
                issue = swe_formats.issue(place, record, self.dataset or name_of(self.source))
                issue = issue.completed(known.get(issue.id, {}))
                of_name = found.setdefault(issue.dataset, Found())
                of_name.rows += 1
                try:
                    row = swe_formats.row(issue, scripts.of, self.agent)
                except Refused as refused:
                    why = str(refused)
                    of_name.refused[why] += 1
                    of_name.first.setdefault(why, f"{place}, {issue.id or 'without an id'}")
                    continue
                yield row | own

    def known(self) -> dict[str, dict]:
        """Returns the records of `sources` that SOURCE may need, by their instance_id."""
        if not self.sources:
            return {}
        name = self.dataset or name_of(self.source)
        asked = {
            swe_formats.issue(place, record, name).id
            for place, record in records(self.source, self.split)
        }
        known: dict[str, dict] = {}
        for source in self.sources:
            for _, record in records(source, self.split, "--sources"):
                if (instance := record.get("instance_id")) in asked:
                    known.setdefault(instance, record)
        return known


def records(source: str, split: str, field: str = "SOURCE") -> Iterator[tables.Record]:
    """Yields the records of a data set, each with its place; `field` names it in errors."""
    patterns = [f"*{kind}" for kind in tables.KINDS]
    paths = tables.data_files(tables.located(source, patterns, field), split)
    for _, (place, record) in tables.records(paths, swe_formats.COLUMNS):
        yield place, record


def name_of(source: str) -> str:
    """Returns a file's or folder's name without its suffix, else the data set's name on the hub."""
    return Path(source).stem if Path(source).exists() else source


def summary(found: dict[str, Found]) -> list[str]:
    """Returns a line for each data set, and one for each reason why its records were refused."""
    text = []
    for name, of_name in sorted(found.items()):
        refused = of_name.refused.total()
        text.append(f"  {name:<40} {of_name.rows:>9,} records, {refused:,} refused")
        for why, count in of_name.refused.most_common():
            text.append(f"REFUSED {count:,} of {name}: {why} ({of_name.first[why]})")
    return text
