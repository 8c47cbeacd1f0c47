"""`tool_pairs`: preferences against calls of tools that were not given, from our own rollouts."""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Annotated, NamedTuple

import tyro

from core.errors import InputError
from envs.parsers.forms import FORMS
from prep import files
from rollout.answer_markup import THINK, split
from rollout.messages import chat, functions

KINDS = ("no_tools", "with_tools", "hallucination")


class Answer(NamedTuple):
    """One answer to a row, and where its line begins in the file of rollouts."""

    start: int
    is_right: bool
    calls: bool  # a tool, or tries to


class Pair(NamedTuple):
    """The byte offsets of the lines of a row and of two answers to it."""

    row: int
    kind: str  # one of KINDS
    chosen: int
    rejected: int

    @property
    def order(self) -> bytes:
        """The sorting key of a pair: random, and the same each time."""
        return hashlib.sha256(repr(self).encode()).digest()


@dataclass(frozen=True)
class ToolPairs:
    """Pairs of answers to rows with and without tools, for dpo.py and for any other DPO trainer.

    Where a row declares tools, a right answer is preferred to a wrong one. Where it declares none,
    a right one that calls no tool is preferred to a wrong one, and to any that calls one. Each
    answer is rejected once at most, as the report of Nemotron 3 Nano has 50,000 pairs of 64,000
    answers (appendix C). Answers that were cut off are left out: none of them ended by itself.
    So are those of several turns, as rollouts.jsonl does not hold the tools' results.
    """

    file: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="FILE")]
    """JSONL file of rows, with and without tools."""
    rollouts: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="ROLLOUTS")]
    """rollouts.jsonl of a run or an evaluation on that file."""
    out: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="OUT")]
    """JSONL file to write: `prompt`, `chosen` and `rejected` as messages, `tools` of the row."""
    tool_parser: str = ""
    """services.tool_parser of the run. Empty: calls are those of Hermes and of Qwen3-Coder."""
    threshold: float = 1.0
    """Reward from which on an answer is right."""
    per_row: int = 32
    """Pairs of a row at most."""

    def run(self) -> int:
        """Writes the pairs, in random order, and prints their kinds."""
        known = ", ".join(name for name in FORMS if name)
        if self.tool_parser not in FORMS:
            raise InputError(f"--tool_parser {self.tool_parser!r}: expected one of: {known}")
        if self.per_row < 1:
            raise InputError(f"--per_row {self.per_row}: expected 1 or more")
        left_out: Counter[str] = Counter()
        answers = self.answers(left_out)
        pairs: list[Pair] = []
        with files.rewriting(self.file, self.out) as output:
            without = []  # tools
            for line in files.lines(self.file):
                row = line.row()
                given = answers.pop(line.number, [])
                tools = (row.get("responses_create_params") or {}).get("tools")
                without += [] if tools else given
                pairs += list(of_row(line.start, bool(tools), given))[: self.per_row]
            if answers:
                places = f"{self.rollouts}: an answer to row {min(answers)}"
                raise InputError(f"{places}, expected a line of {self.file} that holds a row")
            for pair in sorted(pairs, key=lambda pair: pair.order):
                output.write(self.preference(pair))
        counts = Counter(pair.kind for pair in pairs)
        print("  pairs: " + ", ".join(f"{counts[kind]:,} {kind}" for kind in KINDS))
        calls = sum(answer.calls for answer in without)
        if without:
            print(f"  answers without tools that call one: {calls / len(without):.1%}")
        for why, number in left_out.items():
            print(f"  answers left out, {why}: {number:,}")
        return 0

    def answers(self, left_out: Counter[str]) -> dict[int, list[Answer]]:
        """The answers to each row that can be used. Raises InputError for a line that is none."""
        form = FORMS[self.tool_parser]
        answers = defaultdict(list)
        for line in files.lines(self.rollouts):
            rollout = line.row()
            try:
                number, said = int(rollout["row"]), list(rollout["response"])
                is_right = float(rollout["reward"]) >= self.threshold
                prompt, ended = rollout["prompt"], rollout["finish_reason"]
                if not all(isinstance(text, str) for text in (prompt, ended, *said)):
                    raise TypeError("prompt, finish_reason or response holds something but text")
            except (LookupError, TypeError, ValueError) as error:
                raise InputError(f"{line.place}: expected a rollout: {error!r}") from None
            if ended == "length" or len(said) != 1:
                left_out["cut off" if ended == "length" else "of several turns"] += 1
                continue
            found = form.read(split(said[0]).content)
            answers[number].append(Answer(line.start, is_right, found is None or found.number > 0))
        return answers

    def preference(self, pair: Pair) -> dict:
        """The line of a pair. Raises InputError where the row's prompt is none."""
        asked = object_at(self.file, pair.row)["responses_create_params"]
        line = {
            "prompt": chat(asked["input"]),
            "chosen": said(object_at(self.rollouts, pair.chosen)),
            "rejected": said(object_at(self.rollouts, pair.rejected)),
        }
        tools = {"tools": functions(asked["tools"])} if asked.get("tools") else {}
        return line | tools | {"dataset": pair.kind}


def object_at(path: str, start: int) -> dict:
    """The JSON object of the line that begins at this byte."""
    with open(path, "rb") as file:
        file.seek(start)
        return json.loads(file.readline())


def said(rollout: dict) -> list[dict]:
    """A rollout's one answer as a message, with the tag of a thought that its prompt has opened."""
    (text,) = rollout["response"]
    tag = THINK[0]
    is_opened = rollout["prompt"].rstrip().endswith(tag) and not text.lstrip().startswith(tag)
    return [{"role": "assistant", "content": f"{tag}\n{text}" if is_opened else text}]


def of_row(row: int, has_tools: bool, answers: list[Answer]) -> Iterator[Pair]:
    """The pairs of the row that begins at byte `row`.

    Every wrong answer makes one, with the next of the right ones.
    """
    right = [answer for answer in answers if answer.is_right and (has_tools or not answer.calls)]
    if not right:
        return
    chosen = cycle(right)
    for answer in answers:
        if answer in right:
            continue
        kind = "with_tools" if has_tools else "hallucination" if answer.calls else "no_tools"
        yield Pair(row, kind, next(chosen).start, answer.start)
