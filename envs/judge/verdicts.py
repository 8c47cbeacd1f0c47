"""How the verdict of a judge is read: shared by the environments whose judge gives a label.

An answer may hold a label, which the judge may quote. Then only a label counts that nothing in the
reply contradicts, and that stands where a judge was asked to put it, at the end.
"""

import re
import unicodedata
from collections.abc import Iterable
from typing import Any

from envs.judge import judge

MARKS = " \t\r\n*_`\"'.:!>#-"  # around a word that is a line of its own


def first_label(text: str, labels: Iterable[str]) -> str | None:
    """Which of the labels comes first in a text; None for none of them."""
    found = [(at, label) for label in labels if (at := text.find(label)) >= 0]
    return min(found)[1] if found else None


def stated(reply: str, good: str, bad: str, answer: str) -> str | None:
    """The first label of a reply to a question about `answer`; None for none.

    Where the answer holds one itself, `good` only where it ends the reply and `bad` is not there.
    """
    first = first_label(reply, (good, bad))
    if first is None or not holds(answer, (good, bad)):
        return first
    return good if ends(reply, good) and bad not in reply else bad


def holds(answer: str, labels: Iterable[str]) -> bool:
    """Whether an answer holds a label: one in brackets in any spelling, a word as it is."""
    known = unicodedata.normalize("NFKC", answer)
    bare = re.sub(r"[\s\u200b-\u200f\u2060\ufeff]", "", known).casefold()
    return any(label.casefold() in bare if label[:1] == "[" else label in known for label in labels)


def ends(reply: str, label: str) -> bool:
    """Whether a reply ends with a label, whatever marks follow it."""
    return reply.rstrip(MARKS).endswith(label)


def own_line(reply: str, answer: str, words: Iterable[str]) -> str | None:
    """Which of the words is the last line of a reply, and no line of the answer; None for none."""
    word = reply.strip().rpartition("\n")[2].strip(MARKS).upper()
    quoted = (line.strip(MARKS).upper() for line in answer.split("\n"))
    return word if word in words and word not in quoted else None


async def choose(
    name: str, question: str, labels: tuple[str, str], answer: str, **sampling: Any
) -> str | None:
    """The label, of a good and a bad one, that a judge gives an answer; None for none.

    Raises CheckerError.
    """
    messages = [{"role": "user", "content": question}]
    return await judge.ask(name, messages, lambda reply: stated(reply, *labels, answer), **sampling)
