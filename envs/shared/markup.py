"""Thoughts and tool calls in the text of an answer, and whether their markup is whole."""

import json
import re
from typing import NamedTuple

# What may be wrong with an answer. The index is the code in Sample.flaw_T.
FLAWS = ("", "tool_call", "thinking")

CALL_TAG = re.compile(r"</?(tool_call|function_call)>")
THINK_TAG = re.compile(r"</?think>")
# The body of a call as Qwen3-Coder and Nemotron write it: <function=NAME>...</function>.
XML_FUNCTION = re.compile(r"<function=[^<>\s]+>.*</function>", re.DOTALL)


class Parts(NamedTuple):
    """An answer, split as vLLM's reasoning parsers deepseek_r1 and qwen3 split it."""

    reasoning: str  # after the `<think>` that opens it
    content: str


def split(text: str) -> Parts:
    """What stands before the first `</think>` is reasoning, what follows is content.

    A text that opens a thought and never closes it is all reasoning. A text without think tags is
    all content.
    """
    before, closed, content = text.partition("</think>")
    if not closed and not text.lstrip().startswith("<think>"):
        return Parts("", text)
    head, opened, reasoning = before.partition("<think>")
    return Parts(reasoning if opened else head, content)


def flaw(text: str) -> str:
    """The flaw of an answer, one of FLAWS; tool calls come first, as in NeMo-RL's nemo_gym.py.

    "tool_call": the content holds tags of tool calls outside whole calls. "thinking": a think tag
    is in the content, or a second `<think>` in the reasoning. A thought that was cut off has no
    flaw, and nothing inside a thought is a tool call.
    """
    parts = split(text)
    if not _calls_are_whole(parts.content):
        return "tool_call"
    if any(THINK_TAG.search(part) for part in parts):
        return "thinking"
    return ""


def _calls_are_whole(content: str) -> bool:
    """Whether all tags of tool calls belong to calls that can be parsed; each is looked at once."""
    tags = list(CALL_TAG.finditer(content))
    if len(tags) % 2:
        return False
    for opening, closing in zip(tags[::2], tags[1::2], strict=True):
        if (opening[0], closing[0]) != ("<tool_call>", "</tool_call>"):
            return False
        body = content[opening.end() : closing.start()].strip()
        if not XML_FUNCTION.fullmatch(body) and not _is_json_call(body):
            return False
    return True


def _is_json_call(body: str) -> bool:
    """Whether a body is a call as Hermes writes it: {"name": ..., "arguments": {...}}."""
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):
        return False
    return isinstance(call, dict) and isinstance(call.get("name"), str)
