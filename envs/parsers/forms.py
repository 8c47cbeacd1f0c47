"""Recognises the tool calls that model families write; forms are named like vLLM's parsers."""

import json
import re
from collections.abc import Callable
from typing import NamedTuple

from rollout.answer_markup import (
    ANY,
    CALL_TAG,
    UNTIL,
    CallForm,
    Calls,
    Form,
    count_hermes,
    count_json,
    count_xml,
    is_call,
    tagged,
)

GLM_VALUE = UNTIL.format(r"/?arg_(?:key|value)")
GLM_CALL = re.compile(
    rf"\s*[^<>\s]+\s*(?:<arg_key>[^<]+</arg_key>\s*<arg_value>{GLM_VALUE}</arg_value>\s*)*+"
)
KIMI_CALL = re.compile(
    r"\s*<\|tool_call_begin\|>\s*[^<>\s]+:\d+\s*<\|tool_call_argument_begin\|>"
    rf"({UNTIL.format('[|]tool_call')})<\|tool_call_end\|>\s*"
)
DEEPSEEK_ARGUMENTS = UNTIL.format("｜tool▁")
DEEPSEEK_V3_CALL = re.compile(
    r"\s*<｜tool▁call▁begin｜>function<｜tool▁sep｜>[^<>\s]+\n```json\n"
    rf"({DEEPSEEK_ARGUMENTS})<｜tool▁call▁end｜>\s*"
)
DEEPSEEK_V31_CALL = re.compile(
    rf"\s*<｜tool▁call▁begin｜>[^<>\s]+<｜tool▁sep｜>({DEEPSEEK_ARGUMENTS})<｜tool▁call▁end｜>\s*"
)
MISTRAL_CALL = re.compile(r"\s*[^\s\[\]{}]+(?:\[ARGS\])?(\{[\s\S]*)")
PYTHON_TAG = "<|python_tag|>"
LLAMA_START = re.compile(r'^\{\s*(?:"|$)|\{"name"')
LLAMA_GAP = re.compile(r"\s*(?:;\s*(?={)|$)")
LLAMA_HEAD = re.compile(r'"name"\s*:\s*"[^"]*"\s*,\s*"parameters"\s*:')


class LlamaForm(NamedTuple):
    """Llama 3's calls: {"name": ..., "parameters": {...}}; ..., after any text."""

    def read(self, content: str) -> Calls | None:
        """Returns the complete calls in a message's content; None if one is broken.

        Without `<|python_tag|>`, an object that has no parameters is an answer in JSON.
        """
        before, tag, text = content.rpartition(PYTHON_TAG)
        text = text.strip()
        opened = LLAMA_START.search(text)
        at = opened.start() if opened else len(text)
        count = 0
        while at < len(text):
            try:
                call, end = json.JSONDecoder().raw_decode(text, at)
            except (ValueError, RecursionError):
                return None
            gap = LLAMA_GAP.match(text, end)
            if not is_call(call, "parameters") and not is_call(call):
                answers = not (tag or count or {"parameters", "arguments"} & set(call))
                return Calls(0, content) if answers else None
            if not gap:
                return None
            count += 1
            at = gap.end()
        rest = before + text[: opened.start()] if opened and count else content
        broken = CALL_TAG.search(rest) or LLAMA_HEAD.search(rest) or bool(tag) > bool(count)
        return None if broken else Calls(count, rest)


def is_object(text: str) -> bool:
    """Returns whether a text is a JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def count_mistral(body: str) -> int:
    """Counts the calls after a `[TOOL_CALLS]`: a JSON list, or a name and arguments."""
    named = MISTRAL_CALL.fullmatch(body)
    return is_object(named[1]) if named else count_json(body)


def count_all(call: re.Pattern[str]) -> Callable[[str], int]:
    """Returns a function that counts consecutive calls; group 1 of `call` is JSON arguments."""

    def count(body: str) -> int:
        at = found = 0
        while at < len(body):
            match = call.match(body, at)
            if not match or not is_object(match[1].strip().removesuffix("```")):
                return 0
            at = match.end()
            found += 1
        return found

    return count


def count_glm(body: str) -> int:
    """Returns 1 for a call in the form that GLM 4.5 and later write, else 0."""
    return int(bool(GLM_CALL.fullmatch(body)))


MISTRAL_TAG = re.compile(r'\[ARGS\]|\[\s*\{\s*"name"\s*:')
KIMI_TAG = re.compile(r"<\|tool_call")
DEEPSEEK_TAG = re.compile("<｜tool▁")
DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
KIMI = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
# Forms by the names of vLLM's tool parsers. For other parsers, the content that they leave is
# judged.
FORMS: dict[str, CallForm] = {
    "": ANY,
    "hermes": tagged(count_hermes),
    "qwen3_json": tagged(count_hermes),
    "qwen3_coder": tagged(count_xml),
    "qwen3_xml": tagged(count_xml),
    "glm45": tagged(count_glm),
    "glm47": tagged(count_glm),
    "kimi_k2": Form(*KIMI, count_all(KIMI_CALL), KIMI_TAG),
    "deepseek_v3": Form(*DEEPSEEK, count_all(DEEPSEEK_V3_CALL), DEEPSEEK_TAG),
    "deepseek_v31": Form(*DEEPSEEK, count_all(DEEPSEEK_V31_CALL), DEEPSEEK_TAG),
    "mistral": Form("[TOOL_CALLS]", "", count_mistral, MISTRAL_TAG),
    "llama3_json": LlamaForm(),
    "llama4_json": LlamaForm(),
}
