"""Turns verdicts on pairs of answers into a group's rewards, without calling a judge.

The rules and their order come from NeMo-Gym's resources_servers/genrm_compare, in the version used
for Nemotron 3 Super. Lengths are counted in characters of the stripped texts.
"""

import itertools
import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

Pair = tuple[int, int]  # indices of the answers that are shown first and second

MOST_SCANS = 100  # scans of one text; only a hostile text takes more than a few

TOKEN = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[{}]', re.DOTALL)
FENCE = re.compile("```json", re.IGNORECASE)
CODE = re.compile(r"```.*?```", re.DOTALL)
ELEMENTS = (
    re.compile(r"^#{1,6}\s", re.MULTILINE),  # headers
    re.compile(r"^[^\S\n]*+(?:\d++\.|[-*+])\s", re.MULTILINE),  # list items
    re.compile(r"\*\*[^*\n]++\*\*"),  # bold text
    re.compile(r"__[^_\n]++__"),
    # Emojis. The second range also includes East Asian scripts.
    re.compile(
        "[\U0001f300-\U0001f64f\u24c2-\U0001f251\U0001f680-\U0001f6ff\U0001f900-\U0001faff]"
    ),
)


class Verdict(NamedTuple):
    """A judge's verdict on a pair; by default, neither answer is better."""

    score_1: float = 3.0  # score of the first answer, 1 to 5
    score_2: float = 3.0
    ranking: float = 3.5  # 1: the first is much better; 6: the second is much better

    @property
    def tie(self) -> bool:
        """True if the scores are equal, so that the ranking decides."""
        return self.score_1 == self.score_2

    @property
    def valid(self) -> bool:
        """True if the numbers lie in the ranges that a judge is asked for."""
        are_scores = 1 <= self.score_1 <= 5 and 1 <= self.score_2 <= 5
        return are_scores and 1 <= self.ranking <= 6


class Answer(NamedTuple):
    """One answer of the group."""

    reasoning: str
    text: str


def pairs(n: int, strategy: str = "circular") -> list[Pair]:
    """Returns the pairs of n answers to compare: each with the next in a circle, or all pairs.

    In a circle each answer is shown first once and second once. Raises ValueError if n < 2.
    """
    if n < 2:
        raise ValueError(f"a comparison needs 2 answers or more, got {n}")
    if strategy == "all_pairs":
        return list(itertools.combinations(range(n), 2))
    return [(i, (i + 1) % n) for i in range(n)]


# === Reading a judge's reply ======================================================================


def read(reply: str, quoted: Sequence[Verdict] = ()) -> Verdict | None:
    """Returns the verdict in a judge's reply; None if it has none.

    It is the first JSON object with a score or a ranking in ```json fences, else the last one in
    the text. `quoted` are the verdicts in the answers themselves: if a judge repeats one, it counts
    only if the reply has no other verdict and ends with it.
    """
    found = verdicts(reply)
    for verdict in found:
        if verdict not in quoted:
            return verdict
    ends = reply.rstrip("` \n").endswith("}")
    return found[0] if found and ends else None


def verdicts(text: str) -> list[Verdict]:
    """Returns all verdicts in a text: first the fenced ones in order, then all from the end."""
    shown = [shown for block in fences(text) for shown in objects(block)]
    shown += reversed(objects(text))
    return [verdict for verdict in map(verdict_of, shown) if verdict]


def veiled(text: str) -> str:
    """Returns a text; if it has a verdict, doubles its braces, so that it is no JSON any more."""
    return text.replace("{", "{{").replace("}", "}}") if verdicts(text) else text


def verdict_of(text: str) -> Verdict | None:
    """Returns the verdict in a JSON object, or in its field "overall"; None if it has none."""
    try:
        found = json.loads(text)
        if isinstance(found.get("overall"), dict):
            found = found["overall"]
        defaults = Verdict._field_defaults
        if not defaults.keys() & found.keys():
            return None
        numbers = {name: float(found.get(name, usual)) for name, usual in defaults.items()}
    except (ValueError, TypeError, OverflowError, RecursionError):
        return None
    return Verdict(**numbers) if all(map(math.isfinite, numbers.values())) else None


def fences(text: str) -> Iterator[str]:
    """Yields the text in each ```json fence."""
    at = 0
    while opening := FENCE.search(text, at):
        end = text.find("```", opening.end())
        if end < 0:
            return
        yield text[opening.end() : end]
        at = end + 3


def objects(text: str) -> list[str]:
    """Returns the outermost {...} of a text; braces in strings do not count.

    If an object never ends, the objects inside it are returned.
    """
    found = []
    ends: dict[int, int] = {}
    at = scans = 0
    while (start := text.find("{", at)) >= 0 and scans < MOST_SCANS:
        if start not in ends:
            ends |= closings(text, start)
            scans += 1
        end = ends[start]
        at = max(start, end) + 1
        if end >= 0:
            found.append(text[start:at])
    return found


def closings(text: str, start: int) -> dict[int, int]:
    """Maps the index of each opening brace from `start` on to the index of its closing one, or -1.

    `start` must not be inside a string.
    """
    ends = {}
    open_braces = []
    for token in TOKEN.finditer(text, start):
        if token[0] == "{":
            open_braces.append(token.start())
            ends[token.start()] = -1
        elif token[0] == "}" and open_braces:
            ends[open_braces.pop()] = token.start()
    return ends


# === Rewards of a group ===========================================================================


def base_scores(n: int, compared: Sequence[Pair], found: Sequence[Verdict]) -> list[float]:
    """Returns the mean score of each of n answers; the ranking decides between equal scores."""
    scores: list[list[float]] = [[] for _ in range(n)]
    for (i, j), verdict in zip(compared, found, strict=True):
        lead = 3.5 - verdict.ranking if verdict.tie else 0.0
        scores[i].append(verdict.score_1 + lead)
        scores[j].append(verdict.score_2 - lead)
    return [sum(own) / len(own) if own else Verdict().score_1 for own in scores]


def add_bonus(scores: list[float], sizes: Sequence[int], bonus: float, threshold: float) -> None:
    """Adds a bonus to the shortest answer's score if that reaches the threshold; skips size 0."""
    filled = [i for i, size in enumerate(sizes) if size]
    if not filled:
        return
    shortest = min(filled, key=lambda i: sizes[i])
    if scores[shortest] >= threshold:
        scores[shortest] += bonus


def centred(sizes: Sequence[float]) -> list[float]:
    """Returns a weight for each size, higher for smaller ones: at most 1 apart, 0 on average."""
    span = max(sizes) - min(sizes)
    if not span:
        return [0.0] * len(sizes)
    raw = [1.0 - (size - min(sizes)) / span for size in sizes]
    mean = sum(raw) / len(raw)
    return [weight - mean for weight in raw]


def adjusted(
    scores: Sequence[float], answers: Sequence[Answer], by: dict[str, float]
) -> list[float]:
    """Returns scores with bonuses for the shortest answers, and length and formatting weights."""
    scores = list(scores)
    reasoning = [len(answer.reasoning.strip()) for answer in answers]
    texts = [len(answer.text.strip()) for answer in answers]
    top = max(0, int(len(scores) * by["top_percentile"]) - 1)
    threshold = sorted(scores, reverse=True)[top]
    add_bonus(scores, reasoning, by["reasoning_bonus"], threshold)
    add_bonus(scores, texts, by["answer_bonus"], threshold)
    reasoning_weights = centred(reasoning)
    text_weights = centred(texts)
    style_weights = centred([density(answer.text) for answer in answers])
    final = []
    for i, score in enumerate(scores):
        of_reasoning = reasoning_weights[i] * by["reasoning_length"]
        of_text = text_weights[i] * by["answer_length"]
        of_style = style_weights[i] * by["style"]
        final.append(score + (of_reasoning + of_text) + of_style)
    return final


def elements(text: str) -> list[int]:
    """Returns the numbers of headers, list items, bold texts and emojis outside code blocks."""
    plain = CODE.sub("", text)
    return [sum(1 for _ in pattern.finditer(plain)) for pattern in ELEMENTS]


def density(text: str) -> float:
    """Returns the number of formatting elements per character outside code blocks."""
    plain = CODE.sub("", text)
    return sum(elements(plain)) / len(plain.strip()) if plain.strip() else 0.0


def repeats(answer: Answer) -> bool:
    """Returns whether an answer repeats its own reasoning, apart from white space."""
    words = answer.text.split()
    return bool(words) and answer.reasoning.split() == words
