"""Reads a judge's verdict, for environments whose judge replies with a label.

An answer may contain a label, which the judge may quote. In that case, a label counts only if
nothing in the reply contradicts it, and if it is at the end, where the judge was asked to put it.
"""

import re
import unicodedata
from collections.abc import Iterable

from envs import Json
from envs.judge import judge

MARKS = " \t\r\n*_`\"'.:!>#-"  # characters around a word on its own line


def first_label(text: str, labels: Iterable[str]) -> str | None:
    """Returns the label that comes first in a text, or None."""
    found = [(at, label) for label in labels if (at := text.find(label)) >= 0]
    return min(found)[1] if found else None


def stated(reply: str, good: str, bad: str, answer: str) -> str | None:
    """Returns the first label in a reply to a question about `answer`, or None.

    If the answer itself contains a label, returns `good` only if it ends the reply and `bad` is not
    in the reply.
    """
    first = first_label(reply, (good, bad))
    if first is None or not holds(answer, (good, bad)):
        return first
    return good if ends(reply, good) and bad not in reply else bad


def holds(answer: str, labels: Iterable[str]) -> bool:
    """Returns whether an answer contains a label: in brackets in any spelling, else verbatim."""
    known = unicodedata.normalize("NFKC", answer)
    bare = re.sub(r"[\s\u200b-\u200f\u2060\ufeff]", "", known).casefold()
    return any(label.casefold() in bare if label[:1] == "[" else label in known for label in labels)


def ends(reply: str, label: str) -> bool:
    """Returns whether a reply ends with a label, possibly followed by marks."""
    return reply.rstrip(MARKS).endswith(label)


def own_line(reply: str, answer: str, words: Iterable[str]) -> str | None:
    """Returns the word that makes up a reply's last line, but no line of the answer; or None."""
    word = reply.strip().rpartition("\n")[2].strip(MARKS).upper()
    quoted = (line.strip(MARKS).upper() for line in answer.split("\n"))
    return word if word in words and word not in quoted else None


async def choose(
    name: str, question: str, labels: tuple[str, str], answer: str, **sampling: Json
) -> str | None:
    """Asks a judge to give an answer the good or the bad label; returns the label, or None.

    Raises CheckerError.
    """
    messages = [{"role": "user", "content": question}]

    def read(reply: str) -> str | None:
        return stated(reply, *labels, answer)

    return await judge.ask(name, messages, read, 1, **sampling)
