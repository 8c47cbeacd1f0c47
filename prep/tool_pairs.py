"""`tool_pairs`: makes preference pairs from our rollouts, against calls to undeclared tools."""

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
    """One answer to a row."""

    start: int  # byte offset of its line in the file of rollouts
    is_right: bool
    calls: bool  # True if it calls a tool, or tries to


class Pair(NamedTuple):
    """The byte offsets of a row's line and of the lines of two answers to it."""

    row: int
    kind: str  # one of KINDS
    chosen: int
    rejected: int

    @property
    def order(self) -> bytes:
        """The sorting key of a pair: random, but the same each time."""
        return hashlib.sha256(repr(self).encode()).digest()


@dataclass(frozen=True)
class ToolPairs:
    """Pairs answers to rows with and without tools, for dpo.py or any other DPO trainer.

    If a row declares tools, a right answer is preferred to a wrong one. If it declares none, a
    right answer without a call is preferred to a wrong answer, and to any answer with a call. Each
    answer is rejected at most once, because the report on Nemotron 3 Nano has 50,000 pairs from
    64,000 answers (appendix C). Answers that were cut off are left out, because they did not end on
    their own. Multi-turn answers are left out, because rollouts.jsonl does not contain the tools'
    results.
    """

    file: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="FILE")]
    """JSONL file of rows, with and without tools."""
    rollouts: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="ROLLOUTS")]
    """rollouts.jsonl of a run or an evaluation on that file."""
    out: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="OUT")]
    """JSONL file to write: `prompt`, `chosen` and `rejected` as messages, `tools` of the row."""
    tool_parser: str = ""
    """The run's services.tool_parser. Empty: calls in the Hermes and Qwen3-Coder formats."""
    threshold: float = 1.0
    """Reward at which an answer is right."""
    per_row: int = 32
    """Maximum number of pairs per row."""

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
            without: list[Answer] = []  # answers to rows that declare no tools
            for line in files.lines(self.file):
                row = line.row()
                given = answers.pop(line.number, [])
                tools = (row.get("responses_create_params") or {}).get("tools")
                if not tools:
                    without += given
                pairs += list(of_row(line.start, bool(tools), given))[: self.per_row]
            if answers:
                raise InputError(
                    f"{self.rollouts}: has an answer to row {min(answers)}, "
                    f"expected a line of {self.file} that holds a row"
                )
            for pair in sorted(pairs, key=lambda pair: pair.order):
                output.write(self.preference(pair))
        counts = Counter(pair.kind for pair in pairs)
        print("  pairs: " + ", ".join(f"{counts[kind]:,} {kind}" for kind in KINDS))
        calls = sum(answer.calls for answer in without)
        if without:
            print(f"  answers to rows without tools that call one: {calls / len(without):.1%}")
        for why, number in left_out.items():
            print(f"  answers left out, {why}: {number:,}")
        return 0

    def answers(self, left_out: Counter[str]) -> dict[int, list[Answer]]:
        """Returns the usable answers to each row; counts the others in `left_out` by reason.

        Raises InputError if a line is not a rollout.
        """
        form = FORMS[self.tool_parser]
        answers = defaultdict(list)
        for line in files.lines(self.rollouts):
            rollout = line.row()
            try:
                number = int(rollout["row"])
                texts = list(rollout["response"])
                is_right = float(rollout["reward"]) >= self.threshold
                prompt = rollout["prompt"]
                ended = rollout["finish_reason"]
                if not all(isinstance(text, str) for text in (prompt, ended, *texts)):
                    raise TypeError("prompt, finish_reason or response is not text")
            except (LookupError, TypeError, ValueError) as error:
                raise InputError(f"{line.place}: expected a rollout: {error!r}") from None
            if ended == "length":
                left_out["cut off"] += 1
            elif len(texts) != 1:
                left_out["several turns"] += 1
            else:
                found = form.read(split(texts[0]).content)
                calls = found is None or found.number > 0
                answers[number].append(Answer(line.start, is_right, calls))
        return answers

    def preference(self, pair: Pair) -> dict:
        """Returns the line for a pair."""
        asked = object_at(self.file, pair.row)["responses_create_params"]
        line: dict[str, list[dict] | str] = {
            "prompt": chat(asked["input"]),
            "chosen": said(object_at(self.rollouts, pair.chosen)),
            "rejected": said(object_at(self.rollouts, pair.rejected)),
        }
        if tools := functions(asked.get("tools")):
            line["tools"] = tools
        line["dataset"] = pair.kind
        return line


def object_at(path: str, start: int) -> dict:
    """Returns the JSON object of the line that begins at this byte."""
    with open(path, "rb") as file:
        file.seek(start)
        return json.loads(file.readline())


def said(rollout: dict) -> list[dict]:
    """Returns a rollout's answer as a message, with the thinking tag if the prompt ends in it."""
    (text,) = rollout["response"]
    tag = THINK[0]
    if rollout["prompt"].rstrip().endswith(tag) and not text.lstrip().startswith(tag):
        text = f"{tag}\n{text}"
    return [{"role": "assistant", "content": text}]


def of_row(row: int, has_tools: bool, answers: list[Answer]) -> Iterator[Pair]:
    """Yields the pairs of the row that begins at byte `row`.

    Each wrong answer makes a pair with the next of the right answers.
    """
    right = [answer for answer in answers if answer.is_right and (has_tools or not answer.calls)]
    if not right:
        return
    chosen = cycle(right)
    for answer in answers:
        if answer in right:
            continue
        if has_tools:
            kind = "with_tools"
        elif answer.calls:
            kind = "hallucination"
        else:
            kind = "no_tools"
        yield Pair(row, kind, next(chosen).start, answer.start)
