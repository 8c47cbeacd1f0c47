"""Thoughts and tool calls in the text of an answer, and whether their markup is whole."""

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

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


class Parts(NamedTuple):
    """An answer, split as vLLM's reasoning parsers deepseek_r1 and qwen3 split it."""

    reasoning: str  # after the `<think>` that opens it
    content: str


class Calls(NamedTuple):
    """What a content holds: whole calls, and the text around them."""

    number: int
    rest: str


class Form(NamedTuple):
    """How a family of models writes its calls."""

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


class LlamaForm(NamedTuple):
    """How Llama 3 writes its calls: {"name": ..., "parameters": {...}}; ..., after any text."""

    def read(self, content: str) -> Calls | None:
        """The whole calls of a content; None where one is broken.

        Without `<|python_tag|>` an object that has no parameters is an answer in JSON.
        """
        before, tag, text = content.rpartition(PYTHON_TAG)
        text = text.strip()
        opened = LLAMA_START.search(text)
        at, count = opened.start() if opened else len(text), 0
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
    """Whether a text is a JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


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


def count_mistral(body: str) -> int:
    """Calls after a `[TOOL_CALLS]`: a list in JSON, or NAME and arguments."""
    named = MISTRAL_CALL.fullmatch(body)
    return is_object(named[1]) if named else count_json(body)


def count_all(call: re.Pattern[str]) -> Callable[[str], int]:
    """What counts calls that follow each other; the group of `call` holds arguments in JSON."""

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


def count_hermes(body: str) -> int:
    """1 for a call as Hermes writes it, else 0."""
    return count_json(body) * (not body.lstrip().startswith("["))


def count_xml(body: str) -> int:
    """1 for a call as Qwen3-Coder and Nemotron write it, else 0."""
    return int(bool(XML_CALL.fullmatch(body)))


def count_glm(body: str) -> int:
    """1 for a call as GLM 4.5 and later write it, else 0."""
    return int(bool(GLM_CALL.fullmatch(body)))


def tagged(count: Callable[[str], int]) -> Form:
    """A form whose calls stand in tags of their own."""
    return Form("<tool_call>", "</tool_call>", count)


MISTRAL_TAG = re.compile(r'\[ARGS\]|\[\s*\{\s*"name"\s*:')
KIMI_TAG = re.compile(r"<\|tool_call")
DEEPSEEK_TAG = re.compile("<｜tool▁")
DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
KIMI = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")

ANY = tagged(lambda body: count_hermes(body) or count_xml(body))
# By the names of vLLM's tool parsers. Of the others what they leave in the content is judged.
FORMS: dict[str, Form | LlamaForm] = {
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
    text: str,
    form: Form | LlamaForm = ANY,
    marks: tuple[str, str] = THINK,
    parsed: int | None = None,
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
