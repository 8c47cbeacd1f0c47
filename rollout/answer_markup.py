"""Finds reasoning and tool calls in an answer's text, and checks that their markup is complete."""

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

# An answer's flaws; the index is the code in Sample.flaw_T.
FLAWS = ("", "tool_call", "thinking")

THINK = ("<think>", "</think>")
CALL_TAG = re.compile(r"</?(tool_call|function_call)>")  # the tags that NeMo-RL looks for
# A text up to the marks that end it, without backtracking.
UNTIL = r"[^<]*+(?:<(?!{})[^<]*+)*+"
XML_VALUE = UNTIL.format(r"/parameter|parameter=|/function")
XML_CALL = re.compile(
    rf"\s*<function=[^<>\s]+>\s*(?:<parameter=[^<>]+>{XML_VALUE}</parameter>\s*)*+</function>\s*"
)


class Parts(NamedTuple):
    """An answer, split as vLLM's reasoning parsers deepseek_r1 and qwen3 split it."""

    reasoning: str  # without the `<think>` that opens it
    content: str


class Calls(NamedTuple):
    """The complete calls in an answer's content: their number, and the text around them."""

    number: int
    rest: str


class CallForm(Protocol):
    """The form in which a model family writes its calls; envs/parsers/forms.py has other forms."""

    def read(self, content: str) -> Calls | None:
        """Returns the complete calls in the content; None if a call is broken."""


class Form(NamedTuple):
    """A form with calls between an opening and a closing tag."""

    opening: str
    closing: str  # "" if the next call or the end of the text closes a call
    whole: Callable[[str], int]  # counts the calls in text between the tags, 0 if one is broken
    tags: re.Pattern[str] = CALL_TAG  # tags that may not appear anywhere else

    def read(self, content: str) -> Calls | None:
        """Returns the complete calls in the content, in linear time; None if a call is broken."""
        at = 0
        count = 0
        rest = []
        while (start := content.find(self.opening, at)) >= 0:
            rest.append(content[at:start])
            start += len(self.opening)
            end = content.find(self.closing or self.opening, start)
            if end < 0 and self.closing:
                return None
            if end < 0:
                end = len(content)
            found = self.whole(content[start:end])
            if not found:
                return None
            count += found
            at = end + len(self.closing)
        calls = Calls(count, " ".join([*rest, content[at:]]))
        # An opening tag of several tokens may be cut off.
        cut = any(calls.rest.endswith(self.opening[:n]) for n in range(2, len(self.opening)))
        tag = self.tags.search(calls.rest) or CALL_TAG.search(calls.rest)
        return None if cut or tag else calls


def is_call(call: Any, arguments: str = "arguments") -> bool:
    """Returns whether a JSON value is {"name": ..., "arguments": {...}}, as Hermes writes calls."""
    named = isinstance(call, dict) and isinstance(call.get("name"), str)
    return named and isinstance(call.get(arguments), dict)


def count_json(body: str) -> int:
    """Returns the number of calls in a JSON text, one call or a list; 0 if any is broken."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return 0
    calls = found if isinstance(found, list) else [found]
    return len(calls) if all(map(is_call, calls)) else 0


def count_hermes(body: str) -> int:
    """Returns 1 for a call as Hermes writes it, else 0."""
    if body.lstrip().startswith("["):
        return 0
    return count_json(body)


def count_xml(body: str) -> int:
    """Returns 1 for a call as Qwen3-Coder and Nemotron write it, else 0."""
    return 1 if XML_CALL.fullmatch(body) else 0


def tagged(count: Callable[[str], int]) -> Form:
    """Makes a form whose calls are in `<tool_call>` tags."""
    return Form("<tool_call>", "</tool_call>", count)


ANY = tagged(lambda body: count_hermes(body) or count_xml(body))


def split(text: str, marks: tuple[str, str] = THINK) -> Parts:
    """Splits an answer at the first `</think>`: reasoning before it, content after it.

    Text that opens with `<think>` and never closes it is all reasoning. Text without think tags is
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
    """Returns the flaw in an answer, one of FLAWS.

    Tool calls are checked first, as in NeMo-RL's nemo_gym.py.

    "tool_call": the content has tool-call tags outside complete calls, or a number of calls other
    than `parsed`, because a parser may repair or drop a call. "thinking": a think tag is in the
    content outside calls, or a second `<think>` is in the reasoning. Reasoning that was cut
    off is not a flaw, and nothing inside the reasoning is a tool call.
    """
    parts = split(text, marks)
    calls = form.read(parts.content)
    if calls is None:
        return "tool_call"
    if parsed is not None and parsed != calls.number:
        return "tool_call"
    if marks[0] in parts.reasoning or any(mark in calls.rest for mark in marks):
        return "thinking"
    return ""
