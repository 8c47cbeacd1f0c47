"""Answers with tool calls in every form that answer_markup.py knows, whole ones and broken ones."""

import json
import random
import re
from typing import Any, NamedTuple

THOUGHTS = ("", "I add.\n", "if a < b: pass\n", "Ünïcode 思考 🤔, 2 > 1\n")
TEXTS = ("", "I call it.", "Let me look: a < b, x -> y, 50 % &amp; more.\n", "Zuerst das.\n\n")
STRINGS = (
    "1",
    "",
    "two\nlines\n\tand a tab",
    "for i in range(3):\n    if i < 2 and i > 0:\n        print('<b>', \"</b>\")",
    "naïve 日本語 🎉 \u2028 end",
    "\\boxed{<x>} & \\n \"quoted\" 'single'",
    "#include <stdio.h>\nint main() { return a<b ? 1 : 0; }",
    '<html><body><p class="x">1 > 0</p></body></html>',
)
# What only a JSON string may hold: in XML it would end a value.
JSON_STRINGS = ("a </parameter> b", "<parameter=x>", "</function>", '{"name": "f"}', "[}")
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("add", "write_file", "mcp__list-files", "a.b")
]


class Answer(NamedTuple):
    """An answer, and the calls in it."""

    text: str
    start: int  # where the first call begins
    last: int  # and the last one
    calls: list[tuple[str, dict[str, Any]]]


def arguments(rng: random.Random, is_json: bool) -> dict[str, Any]:
    """Arguments of a call; XML holds strings alone."""
    texts = STRINGS + JSON_STRINGS * is_json
    made: dict[str, Any] = {}
    for key in rng.sample(["text", "path", "options", "n"], rng.randint(0, 4)):
        made[key] = rng.choice(texts)
        if is_json and rng.random() < 0.5:
            nested = {"a": [1, 2.5, None, {"b": rng.choice(texts)}], "c": {}, "d": [[], True]}
            made[key] = rng.choice([rng.randint(-9, 9), True, None, [], nested, [nested, "x"]])
    return made


def hermes(name: str, given: dict, rng: random.Random) -> str:
    """As Hermes and Qwen write a call; the templates print JSON as it is."""
    text = json.dumps({"name": name, "arguments": given}, ensure_ascii=rng.random() < 0.3)
    if rng.random() < 0.3:
        text = json.dumps({"name": name, "arguments": given}, indent=2)
    return f"<tool_call>\n{text}\n</tool_call>"


def xml(name: str, given: dict, rng: random.Random) -> str:
    """As Qwen3-Coder and Nemotron write a call."""
    lines = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in given.items()]
    return f"<tool_call>\n<function={name}>\n{''.join(lines)}</function>\n</tool_call>"


def glm(name: str, given: dict, rng: random.Random) -> str:
    """As GLM 4.5 writes a call."""
    pairs = [f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in given.items()]
    return f"<tool_call>{name}\n{''.join(pairs)}</tool_call>"


def llama(name: str, given: dict, rng: random.Random) -> str:
    """As Llama 3.1 writes a call."""
    return json.dumps({"name": name, "parameters": given})


# As Kimi K2, DeepSeek V3 and V3.1, Mistral since its tokenizer v11, and Mistral before write it.
KIMI = "<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{given}"
KIMI += "<|tool_call_end|>"
DEEPSEEK = (
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{given}\n```<｜tool▁call▁end｜>"
)
DEEPSEEK31 = "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{given}<｜tool▁call▁end｜>"
MISTRAL = "[TOOL_CALLS]{name}[ARGS]{given}"
OLD_MISTRAL = '{{"name": "{name}", "arguments": {given}}}'


class Form(NamedTuple):
    """How calls are written: by what, between what, and whether text may come before them."""

    write: Any
    before: str = ""
    between: str = "\n"
    after: str = ""
    is_json: bool = True

    def call(self, name: str, given: dict, rng: random.Random) -> str:
        """One call, by a function or by a template for name, arguments as JSON and a number."""
        if callable(self.write):
            return self.write(name, given, rng)
        number = rng.randint(0, 9) if "{number}" in self.write else 0
        shown = json.dumps(given, ensure_ascii=False)
        return self.write.format(name=name, given=shown, number=number)


FORMS = {
    "hermes": Form(hermes),
    "qwen3_coder": Form(xml, is_json=False),
    "glm47": Form(glm, is_json=False),
    "llama3_json": Form(llama, between="; "),
    "kimi_k2": Form(KIMI, "<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>"),
    "deepseek_v3": Form(DEEPSEEK, "<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>"),
    "deepseek_v31": Form(DEEPSEEK31, "<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>"),
    "mistral": Form(MISTRAL, between=""),
    "old_mistral": Form(OLD_MISTRAL, "[TOOL_CALLS][", ", ", "]"),
}


def answer(form: str, thinks: bool, rng: random.Random) -> Answer:
    """An answer with one to three whole calls, after a thought and a text."""
    thought, text = rng.choice(THOUGHTS), rng.choice(TEXTS)
    head = f"<think>\n{thought}</think>\n\n" if thinks else ""
    head += text * (form != "llama3_json")
    how = FORMS[form]
    calls = []
    for _ in range(rng.randint(1, 3)):
        calls.append((rng.choice(TOOLS)["function"]["name"], arguments(rng, how.is_json)))
    *first, last = (how.call(*call, rng) + how.between for call in calls)
    written = head + how.before + "".join(first)
    text = (written + last).removesuffix(how.between) + how.after
    return Answer(text, len(head), len(written) if first else len(head), calls)


JSON_MARK = re.compile(r"</?tool_call>|<\|tool_\w+\|>|<｜tool▁[^｜]*｜>|\[TOOL_CALLS\]")
MARK = re.compile(r"</?(?:tool_call>|(?:function|parameter)\b=?|arg_(?:key|value)>)")


def broken(whole: Answer, form: str, rng: random.Random) -> str:
    """The answer with a call cut off, a mark missing or doubled, or a brace missing."""
    text, start = whole.text, whole.start
    is_json = FORMS[form].is_json
    marks = [m.span() for m in (JSON_MARK if is_json else MARK).finditer(text, start)]
    kind = rng.choice(["cut", "missing", "doubled", "brace"][: 4 if is_json else 3])
    if kind == "brace":
        place = text.rindex("}") if rng.random() < 0.5 else text.index("{", start)
        return text[:place] + text[place + 1 :]
    if kind == "cut" or not marks:
        end = max(text.rfind("<", start), text.rfind("}", start))
        return text[: rng.randint(whole.last + 2, max(whole.last + 2, end))]
    i, k = rng.choice(marks)
    return text[:i] + text[i:k] * 2 * (kind == "doubled") + text[k:]
