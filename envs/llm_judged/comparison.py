"""How verdicts on pairs of answers become the rewards of a group: the arithmetic, without a judge.

The rules and their order are those of NeMo-Gym's resources_servers/genrm_compare as of Nemotron 3
Super. Lengths are characters of stripped texts.
"""

import itertools
import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

Pair = tuple[int, int]  # places in the group of the answers that are shown first and second

MOST_SCANS = 100  # of one text; only a text that fights its reader takes more than a few

TOKEN = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[{}]', re.DOTALL)
FENCE = re.compile("```json", re.IGNORECASE)
CODE = re.compile(r"```.*?```", re.DOTALL)
ELEMENTS = (
    re.compile(r"^#{1,6}\s", re.MULTILINE),  # headers
    re.compile(r"^[^\S\n]*+(?:\d++\.|[-*+])\s", re.MULTILINE),  # list items
    re.compile(r"\*\*[^*\n]++\*\*"),  # bold text
    re.compile(r"__[^_\n]++__"),
    # Emojis, and by the second range the scripts of East Asia as well.
    re.compile(
        "[\U0001f300-\U0001f64f\u24c2-\U0001f251\U0001f680-\U0001f6ff\U0001f900-\U0001faff]"
    ),
)


class Verdict(NamedTuple):
    """A judge's verdict on a pair; by default, neither answer is better."""

    score_1: float = 3.0  # of the first answer, 1 to 5
    score_2: float = 3.0
    ranking: float = 3.5  # 1: the first is much better; 6: the second is much better

    @property
    def tie(self) -> bool:
        """Whether the ranking decides."""
        return self.score_1 == self.score_2

    @property
    def valid(self) -> bool:
        """Whether the numbers are such as a judge is asked for."""
        return all(1 <= x <= 5 for x in self[:2]) and 1 <= self.ranking <= 6


class Answer(NamedTuple):
    """One answer of the group."""

    reasoning: str
    text: str


def pairs(n: int, strategy: str = "circular") -> list[Pair]:
    """The pairs of n answers to compare: each with the next one, in a circle; or "all_pairs".

    In a circle each answer is shown first once and second once. Raises ValueError for fewer than 2.
    """
    if n < 2:
        raise ValueError(f"a comparison takes 2 answers or more, got {n}")
    if strategy == "all_pairs":
        return list(itertools.combinations(range(n), 2))
    return [(i, (i + 1) % n) for i in range(n)]


# === Reading a judge's reply ======================================================================


def read(reply: str, quoted: Sequence[Verdict] = ()) -> Verdict | None:
    """The verdict in a judge's reply; None for none.

    It is the first JSON object of those in ```json fences, else the last one of the text, that has
    a score or a ranking. `quoted` are the verdicts that stand in the answers themselves: a judge
    that repeats one is believed to mean it only where there is no other, and it ends the reply.
    """
    found = verdicts(reply)
    own = [verdict for verdict in found if verdict not in quoted]
    ends = reply.rstrip("` \n").endswith("}")
    return next(iter(own or (found if ends else ())), None)


def verdicts(text: str) -> list[Verdict]:
    """All verdicts that a text holds: first those in fences in their order, then from the end."""
    fenced = [made for block in fences(text) for made in map(verdict_of, objects(block))]
    return list(filter(None, [*fenced, *map(verdict_of, reversed(objects(text)))]))


def veiled(text: str) -> str:
    """A text without a verdict: where there is one, all braces are doubled, which is no JSON."""
    return text.replace("{", "{{").replace("}", "}}") if verdicts(text) else text


def verdict_of(text: str) -> Verdict | None:
    """The verdict in the text of a JSON object, or in its "overall"; None for another object."""
    try:
        found: Any = json.loads(text)
        if isinstance(found.get("overall"), dict):
            found = found["overall"]
        defaults = Verdict._field_defaults
        if not defaults.keys() & found.keys():
            return None
        verdict = Verdict(*(float(found.get(name, value)) for name, value in defaults.items()))
    except (ValueError, TypeError, OverflowError, RecursionError):
        return None
    return verdict if all(map(math.isfinite, verdict)) else None


def fences(text: str) -> Iterator[str]:
    """The text in each ```json fence."""
    at = 0
    while (opening := FENCE.search(text, at)) and (end := text.find("```", opening.end())) >= 0:
        yield text[opening.end() : end]
        at = end + 3


def objects(text: str) -> list[str]:
    """The outermost {...} of a text, braces in strings not counted; of one that never ends, those
    in it.
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
    """The closing place of each brace from `start` on, -1 for none; no string is open there."""
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
    """The mean score of each of n answers; the ranking decides between equal scores."""
    scores: list[list[float]] = [[] for _ in range(n)]
    for (i, j), verdict in zip(compared, found, strict=True):
        lead = 3.5 - verdict.ranking if verdict.tie else 0.0
        scores[i].append(verdict.score_1 + lead)
        scores[j].append(verdict.score_2 - lead)
    return [sum(own) / len(own) if own else Verdict().score_1 for own in scores]


def add_bonus(scores: list[float], sizes: Sequence[int], bonus: float, threshold: float) -> None:
    """Adds a bonus to the smallest size above 0, if its score reaches the threshold."""
    shortest = min(
        (i for i, size in enumerate(sizes) if size), key=lambda i: sizes[i], default=None
    )
    if shortest is not None and scores[shortest] >= threshold:
        scores[shortest] += bonus


def centred(sizes: Sequence[float]) -> list[float]:
    """A weight for each size, the smaller the higher: 1 apart at most, 0 on average."""
    span = max(sizes) - min(sizes)
    if not span:
        return [0.0] * len(sizes)
    raw = [1.0 - (size - min(sizes)) / span for size in sizes]
    mean = sum(raw) / len(raw)
    return [weight - mean for weight in raw]


def adjusted(
    scores: Sequence[float], answers: Sequence[Answer], by: dict[str, float]
) -> list[float]:
    """Scores with bonuses for the shortest, then with weights for lengths and formatting."""
    scores = list(scores)
    reasoning = [len(answer.reasoning.strip()) for answer in answers]
    texts = [len(answer.text.strip()) for answer in answers]
    top = max(0, int(len(scores) * by["top_percentile"]) - 1)
    threshold = sorted(scores, reverse=True)[top]
    add_bonus(scores, reasoning, by["reasoning_bonus"], threshold)
    add_bonus(scores, texts, by["answer_bonus"], threshold)
    style = centred([density(answer.text) for answer in answers])
    weighed = zip(centred(reasoning), centred(texts), style, strict=True)
    return [
        score
        + (first * by["reasoning_length"] + second * by["answer_length"])
        + third * by["style"]
        for score, (first, second, third) in zip(scores, weighed, strict=True)
    ]


def elements(text: str) -> list[int]:
    """The number of headers, list items, bold texts and emojis outside of code blocks."""
    plain = CODE.sub("", text)
    return [sum(1 for _ in pattern.finditer(plain)) for pattern in ELEMENTS]


def density(text: str) -> float:
    """Formatting for each character outside of code blocks."""
    plain = CODE.sub("", text)
    return sum(elements(plain)) / len(plain.strip()) if plain.strip() else 0.0


def repeats(answer: Answer) -> bool:
    """Whether an answer is its own reasoning once more, whatever the white space."""
    return answer.reasoning.split() == answer.text.split() != []
