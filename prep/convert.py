"""`rows`: turns a data set of questions and answers into rows."""

import json
import re
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from core.errors import InputError
from envs import check_rows
from prep import files, tables

FINAL = re.compile(r"####\s*\$?(-?\d[\d,]*(?:\.\d+)?)\s*\Z")  # as GSM8K ends a solution


@dataclass(frozen=True)
class Rows:
    """Turns questions and answers from any data set into rows that an environment verifies."""

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")]
    """A .jsonl, .json, .csv or .parquet; a folder of them; or ORG/NAME on the hub."""
    out: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="OUT")]
    """JSONL file to write."""
    prompt: str
    """Column with the question or a list of messages; a.b.0.c is a nested value."""
    agent: str
    """Environment: a name in the AGENTS of a module in envs/."""
    answer: str = ""
    """Column with the reference answer; empty: none, if the environment judges without one."""
    template: str = "{question}"
    """The user's message; {question} stands for the column."""
    answer_field: str = "expected_answer"
    """Field in which the environment looks for the answer."""
    keep: tuple[str, ...] = ()
    """Other columns to copy to the rows, for a reward that reads them."""
    dataset: str = ""
    """Name of these rows in the metrics."""
    split: str = "train"
    """Split of a folder or of a data set on the hub: files named after it, or else all."""

    def run(self) -> int:
        """Checks and writes the rows. Raises InputError for the first record that fails."""
        if "{question}" not in self.template:
            raise InputError(f"--template {self.template!r}: expected {{question}} in it")
        patterns = [f"*{kind}" for kind in tables.KINDS]
        paths = tables.data_files(tables.located(self.source, patterns, "SOURCE"), self.split)
        columns = [self.prompt.split(".")[0], *self.keep]
        if self.answer:
            columns.append(self.answer.split(".")[0])
        cut = 0
        left: dict[str, None] = {}  # columns that no row has
        with files.rewriting(self.source, self.out) as output:
            for _, (place, record) in tables.records(paths, columns):
                row = self.row(record, place)
                try:
                    check_rows.check_row(row)
                except ValueError as error:
                    raise InputError(f"{place}: {error}{self.missed(record, error)}") from None
                output.write(row)
                left |= dict.fromkeys(record.keys() - {*columns})
                if self.answer:
                    cut += bool(FINAL.search(str(tables.value(record, self.answer, place))))
        if cut:
            print(f"{cut:,} answers are the numbers after ####, without the solutions before them")
        if left:
            print(f"not copied: {', '.join(sorted(left))}; --keep names columns to copy")
        return 0

    def missed(self, record: dict, error: ValueError) -> str:
        """Returns advice for an error that names one of the record's columns, or ""."""
        named = [c for c in record if re.search(rf"\b{re.escape(c)}\b", str(error))]
        if self.answer in named:
            return f"; the answer is in {self.answer_field}: --answer_field {self.answer}"
        for column in named:
            if column not in (self.prompt, *self.keep):
                return f"; {column} is a column: --keep {column}"
        return ""

    def row(self, record: dict, place: str) -> dict[str, Any]:
        """Returns a record's row."""
        asked = tables.value(record, self.prompt, place)
        texts = {self.prompt: asked}
        answer = self.reference(record, place)
        if self.answer:
            texts[self.answer] = answer
        for column, text in texts.items():
            if tables.has_nul(text):
                raise InputError(f"{place}: {column} has the character NUL, expected text")
        messages = asked
        if not isinstance(asked, list):
            content = self.template.replace("{question}", str(asked))
            messages = [{"role": "user", "content": content}]
        row = {
            "responses_create_params": {"input": messages},
            "agent_ref": {"type": "responses_api_agents", "name": self.agent},
            "dataset": self.dataset,
            "question": asked,
            self.answer_field: answer,
        }
        kept = {name: tables.value(record, name, place) for name in self.keep}
        if taken := [name for name in kept if name in row]:
            raise InputError(f"--keep {taken[0]}: the rows already have a field of that name")
        row |= kept
        return {name: value for name, value in row.items() if value != ""}

    def reference(self, record: dict, place: str) -> str:
        """Returns a record's reference answer as text; "" if there is none."""
        if not self.answer:
            return ""
        answer = tables.value(record, self.answer, place)
        if not isinstance(answer, str):
            return json.dumps(answer)
        final = FINAL.search(answer)
        return final[1].replace(",", "") if final else answer
