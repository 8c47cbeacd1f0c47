"""Thoughts and tool calls in the text of an answer, and whether their markup is whole."""

import json
import re
from typing import NamedTuple

# What may be wrong with an answer. The index is the code in Sample.flaw_T.
FLAWS = ("", "tool_call", "thinking")

CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
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
    if CALL_TAG.search(CALL.sub(_without_whole_call, parts.content)):
        return "tool_call"
    if any(THINK_TAG.search(part) for part in parts):
        return "thinking"
    return ""


def _without_whole_call(block: re.Match[str]) -> str:
    """Nothing in place of a call that can be parsed; any other block stays as it is."""
    body = block[1].strip()
    return "" if XML_FUNCTION.fullmatch(body) or _is_json_call(body) else block[0]


def _is_json_call(body: str) -> bool:
    """Whether a body is a call as Hermes writes it: {"name": ..., "arguments": {...}}."""
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):
        return False
    return isinstance(call, dict) and isinstance(call.get("name"), str)
