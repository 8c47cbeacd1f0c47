"""Fills in rows whose question, for licence reasons, is in another data set: DAPO or Skywork.

Such a row has `_hf_placeholder`: {row, question_template}. Templates in the released blends are
{"prefix"} or {"suffix"} around DAPO's bare question, and {"template"}, or a string, with {question}
in it. NVIDIA's resolver accepts only the string for Skywork, so with it other rows lose their
instruction.
"""

import json
from collections.abc import Set
from pathlib import Path
from typing import IO, Any, NamedTuple

from core.errors import InputError
from prep.files import sha256
from prep.tables import data_files, located, records, value

FIELD = "_hf_placeholder"
# DAPO-Math-17k puts these texts around each of its questions.
DAPO_PREFIX = (
    "Solve the following math problem step by step. The last line of your response should be of the"
    " form Answer: $Answer (without quotes) where $Answer is the answer to the problem."
)
DAPO_SUFFIX = 'Remember to put your answer on its own line after "Answer:".'


class Origin(NamedTuple):
    """A data set that placeholders point to, and a part of the `dataset` field of their rows."""

    tag: str
    hub: str
    split: str


ORIGINS = (
    Origin("dapo", "BytedTsinghua-SIA/DAPO-Math-17k", "train"),
    Origin("skywork", "Skywork/Skywork-OR1-RL-Data", "math"),
)
Target = tuple[Origin, int]  # a data set, and the number of a record in it


def target(row: dict, place: str) -> Target:
    """Returns the place of a row's question. Raises InputError if the row names none."""
    name = row.get("dataset")
    origin = next((origin for origin in ORIGINS if origin.tag in str(name).lower()), None)
    number = row[FIELD].get("row") if isinstance(row[FIELD], dict) else None
    if not origin:
        known = " or ".join(origin.tag for origin in ORIGINS)
        raise InputError(f"{place}: dataset is {name!r}, expected one with {known} in its name")
    if type(number) is not int or number < 0:
        raise InputError(f"{place}: {FIELD}.row is {number!r}, expected a number of 0 or more")
    return origin, number


class Questions:
    """The questions and answers that placeholders refer to, on disk, with an index in memory."""

    def __init__(self, folder: str):
        """Looks for ORG/NAME or NAME in `folder`; if it is "", takes the data sets from the hub."""
        self.folder = folder
        self.starts: dict[Target, int] = {}
        self.files: dict[str, list[Path]] = {}  # the files of each data set

    def hashes(self, wanted: Set[Target]) -> dict[str, list[str]]:
        """Returns hashes of each wanted data set's files. Raises InputError if one is absent."""
        for origin in {origin for origin, _ in wanted}:
            self.files[origin.hub] = data_files(self._source(origin), origin.split)
        return {hub: list(map(sha256, files)) for hub, files in sorted(self.files.items())}

    def _source(self, origin: Origin) -> Path:
        if not self.folder:
            return located(origin.hub, ["*.parquet"], "placeholders")
        tried = [Path(self.folder, name) for name in (origin.hub, origin.hub.split("/")[1])]
        found = next((path for path in tried if path.exists()), None)
        if not found:
            raise InputError(f"--sources {self.folder}: expected {tried[0]} or {tried[1]} there")
        return found

    def read(self, wanted: Set[Target], spool: IO[bytes]) -> None:
        """Copies all wanted records to a file. Raises InputError if a record does not exist."""
        self.spool = spool
        for origin in sorted({origin for origin, _ in wanted}):
            numbers = {number for other, number in wanted if other == origin}
            files = self.files[origin.hub]
            for number, (place, record) in records(files, ["prompt", "reward_model"], numbers):
                found = value(record, "prompt.0.content", place)
                answer = value(record, "reward_model.ground_truth", place)
                self.starts[origin, number] = spool.tell()
                spool.write(json.dumps([found, bare(answer)]).encode() + b"\n")
                numbers.discard(number)
            if numbers:
                raise InputError(
                    f"{files[0].parent}: {origin.hub} ({origin.split}): a placeholder asks for "
                    f"record {min(numbers)}, which does not exist"
                )

    def fill(self, row: dict, place: str) -> dict:
        """Returns the row with question, answer and prompt in place of its placeholder."""
        origin, number = target(row, place)
        self.spool.seek(self.starts[origin, number])
        question, answer = json.loads(self.spool.readline())
        prompt = wrapped(question, row[FIELD].get("question_template"), origin, place)
        params = row.get("responses_create_params") or {}
        filled = {name: inner for name, inner in row.items() if name != FIELD}
        return filled | {
            "question": prompt if origin.tag == "dapo" else question,
            "expected_answer": answer,
            "responses_create_params": params | {"input": [{"role": "user", "content": prompt}]},
        }


def bare(answer: Any) -> str:
    """Returns an answer as text; the first item of a list or its JSON, as in Skywork's rows."""
    text = str(answer).strip()
    if not isinstance(answer, list) and text[:1] + text[-1:] not in ("[]", "{}"):
        return text
    try:
        several = json.loads(text) if isinstance(answer, str) else answer
    except ValueError:  # an interval, or a set
        return text
    if isinstance(several, dict):
        several = list(several.values())
    return str(several[0]).strip() if several else ""


def wrapped(question: str, template: dict | str | None, origin: Origin, place: str) -> str:
    """Returns the prompt for a question. Raises InputError if the template has no known form."""
    if origin.tag == "dapo":
        before, prefix, rest = question.partition(DAPO_PREFIX)
        middle, suffix, after = rest.rpartition(DAPO_SUFFIX)
        if not (prefix and suffix) or (before + after).strip():
            raise InputError(f"{place}: DAPO's question begins {question[:60]!r}: no known frame")
        question = middle
        if isinstance(template, dict) and template.get("prefix"):
            return f"{template['prefix']}{question}".removesuffix("\n\n")
        if isinstance(template, dict) and template.get("suffix"):
            return f"{question}{template['suffix']}"
    inner = template.get("template") if isinstance(template, dict) else template
    if not isinstance(inner, str) or "{question}" not in inner:
        also = ", or a `prefix` or `suffix`" if origin.tag == "dapo" else ""
        raise InputError(
            f"{place}: {FIELD}.question_template is {template!r:.80}, expected {{question}} in it "
            f"or in its `template`{also}"
        )
    if origin.tag == "dapo":
        question = question.strip()
    return inner.replace("{question}", question)
