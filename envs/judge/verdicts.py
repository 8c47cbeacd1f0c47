"""What a judge is asked, and how its verdict is read: shared by the environments that use one."""

from collections.abc import Iterable
from typing import Any


def quoted(parts: dict[str, str], labels: Iterable[str] = ()) -> str:
    """Texts for a judge, each between <name> and </name>, which none of them can open or close.

    Labels in brackets are taken apart in it: a judge that quotes one has not given a verdict.
    """
    words = [word for name in parts for word in (f"<{name}>", f"</{name}>")]
    words += [label for label in labels if label[:1] == "["]
    shown = []
    for name, text in parts.items():
        for word in words:
            text = text.replace(word, f"{word[0]} {word[1:]}")
        shown.append(f"<{name}>\n{text.strip()}\n</{name}>")
    return "\n\n".join(shown)


def first_label(text: str, labels: Iterable[str]) -> str | None:
    """Which of the labels comes first in a text; None for none of them."""
    found = [(at, label) for label in labels if (at := text.find(label)) >= 0]
    return min(found)[1] if found else None


async def choose(name: str, question: str, labels: tuple[str, str], **sampling: Any) -> str | None:
    """The label that a judge gives first; None for none. Raises CheckerError."""
    from envs.judge import judge

    messages = [{"role": "user", "content": question}]
    return await judge.ask(name, messages, lambda text: first_label(text, labels), **sampling)
