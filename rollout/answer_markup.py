"""Thoughts and tool calls in the text of an answer, and whether their markup is whole."""

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

# What may be wrong with an answer. The index is the code in Sample.flaw_T.
FLAWS = ("", "tool_call", "thinking")

THINK = ("<think>", "</think>")
CALL_TAG = re.compile(r"</?(tool_call|function_call)>")  # those that NeMo-RL looks for
# A text without the marks that end it; every part is matched once, whatever follows.
UNTIL = r"[^<]*+(?:<(?!{})[^<]*+)*+"
XML_VALUE = UNTIL.format(r"/parameter|parameter=|/function")
XML_CALL = re.compile(
    rf"\s*<function=[^<>\s]+>\s*(?:<parameter=[^<>]+>{XML_VALUE}</parameter>\s*)*+</function>\s*"
)


class Parts(NamedTuple):
    """An answer, split as vLLM's reasoning parsers deepseek_r1 and qwen3 split it."""

    reasoning: str  # after the `<think>` that opens it
    content: str


class Calls(NamedTuple):
    """What a content holds: whole calls, and the text around them."""

    number: int
    rest: str


class CallForm(Protocol):
    """How a family of models writes its calls (envs/parsers/forms.py has those of vendors)."""

    def read(self, content: str) -> Calls | None:
        """The whole calls of a content; None where one is broken."""


class Form(NamedTuple):
    """Calls between an opening and a closing tag."""

    opening: str
    closing: str  # "" where the next call or the end of the text closes one
    whole: Callable[[str], int]  # calls in what stands between the two, 0 for none that is whole
    tags: re.Pattern[str] = CALL_TAG  # what may stand in no other place

    def read(self, content: str) -> Calls | None:
        """The whole calls of a content; None where one is broken. Each is looked at once."""
        at = count = 0
        rest = []
        while (start := content.find(self.opening, at)) >= 0:
            rest.append(content[at:start])
            start += len(self.opening)
            end = content.find(self.closing or self.opening, start)
            if end < 0 and self.closing:
                return None
            end = end if end >= 0 else len(content)
            found = self.whole(content[start:end])
            count += found
            if not found:
                return None
            at = end + len(self.closing)
        calls = Calls(count, " ".join([*rest, content[at:]]))
        # A tag of several tokens may be cut off.
        cut = any(calls.rest.endswith(self.opening[:n]) for n in range(2, len(self.opening)))
        tag = self.tags.search(calls.rest) or CALL_TAG.search(calls.rest)
        return None if cut or tag else calls


def is_call(call: Any, arguments: str = "arguments") -> bool:
    """Whether a JSON value is {"name": ..., "arguments": {...}}, as Hermes writes a call."""
    named = isinstance(call, dict) and isinstance(call.get("name"), str)
    return named and isinstance(call.get(arguments), dict)


def count_json(body: str) -> int:
    """Calls in a JSON text, which is one or a list of them; 0 unless all are whole."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return 0
    found = found if isinstance(found, list) else [found]
    return len(found) * all(map(is_call, found))


def count_hermes(body: str) -> int:
    """1 for a call as Hermes writes it, else 0."""
    return count_json(body) * (not body.lstrip().startswith("["))


def count_xml(body: str) -> int:
    """1 for a call as Qwen3-Coder and Nemotron write it, else 0."""
    return int(bool(XML_CALL.fullmatch(body)))


def tagged(count: Callable[[str], int]) -> Form:
    """A form whose calls stand in tags of their own."""
    return Form("<tool_call>", "</tool_call>", count)


ANY = tagged(lambda body: count_hermes(body) or count_xml(body))


def split(text: str, marks: tuple[str, str] = THINK) -> Parts:
    """What stands before the first `</think>` is reasoning, what follows is content.

    A text that opens a thought and never closes it is all reasoning. A text without think tags is
    all content. `marks` are the two tags.
    """
    opening, closing = marks
    before, closed, content = text.partition(closing)
    if not closed and not text.lstrip().startswith(opening):
        return Parts("", text)
    head, opened, reasoning = before.partition(opening)
    return Parts(reasoning if opened else head, content)


def flaw(
    text: str, form: CallForm = ANY, marks: tuple[str, str] = THINK, parsed: int | None = None
) -> str:
    """The flaw of an answer, one of FLAWS; tool calls come first, as in NeMo-RL's nemo_gym.py.

    "tool_call": the content holds tags of tool calls outside whole calls, or more or fewer calls
    than the `parsed` ones, as a parser may repair a call or drop it. "thinking": a think tag is in
    the content outside calls, or a second `<think>` in the reasoning. A thought that was cut off
    has no flaw, and nothing inside a thought is a tool call.
    """
    parts = split(text, marks)
    calls = form.read(parts.content)
    if calls is None or parsed not in (None, calls.number):
        return "tool_call"
    if marks[0] in parts.reasoning or any(mark in calls.rest for mark in marks):
        return "thinking"
    return ""
