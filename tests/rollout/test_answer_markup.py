"""Thoughts and tool calls in an answer: how it is split, and which markup is a flaw."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.answer_markup import FLAWS, flaw, split

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
XML_CALL = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1 < 2\n</parameter>\n</function>\n</tool_call>"
)


@pytest.mark.parametrize(("text", "reasoning", "content"), [
    ("an answer", "", "an answer"),
    ("", "", ""),
    ("<think>a</think>b", "a", "b"),
    ("a</think>b", "a", "b"),  # the prompt opened the thought
    ("<think>a", "a", ""),  # cut off
    ("\n<think>a", "a", ""),
    ("<think>", "", ""),
    ("<think>a</think>", "a", ""),
    ("a</think>b</think>c", "a", "b</think>c"),
    ("a<think>b</think>c", "b", "c"),  # vLLM drops what stands before the thought
    ("an answer<think>b", "", "an answer<think>b"),
])  # fmt: skip
def test_split(text, reasoning, content):
    assert split(text) == (reasoning, content)


@pytest.mark.parametrize(("text", "expected"), [
    ("plain", ""),
    ("", ""),
    ("a < b and think > c", ""),
    ("I call a tool_call", ""),
    ("a thought</think>an answer", ""),
    ("<think>a thought</think>an answer", ""),
    ("</think>an answer", ""),
    ("<think>a thought that was cut", ""),
    ("<think>", ""),
    ("\n<think>\na thought that was cut", ""),
    ("a</think>b</think>c", "thinking"),
    ("a</think>b<think>c", "thinking"),
    ("<think><think>a</think>b", "thinking"),
    ("<think><think>a", "thinking"),
    ("<think>a</think><think>b</think>c", "thinking"),
    ("an answer<think>and a thought", "thinking"),
    ("a<tool_call>b", "tool_call"),
    ("a</tool_call>", "tool_call"),
    ("<function_call>", "tool_call"),
    ("</function_call>", "tool_call"),
    ("a<tool_call></think>an answer", ""),
    ("<think>I could <tool_call> here</think>an answer", ""),
    ("<think>I could <tool_call> here", ""),
    (CALL, ""),
    (XML_CALL, ""),
    (f"<think>a</think>First this.{CALL}\n{XML_CALL}", ""),
    (f"{CALL}<tool_call>", "tool_call"),
    (f"{CALL}</tool_call>", "tool_call"),
    (f"<tool_call>{CALL}", "tool_call"),
    ('<tool_call>{"arguments": {}}</tool_call>', "tool_call"),
    ('<tool_call>{"name": 5}</tool_call>', "tool_call"),
    ('<tool_call>{"name": "add"</tool_call>', "tool_call"),
    ('<tool_call>["add"]</tool_call>', "tool_call"),
    ("<tool_call></tool_call>", "tool_call"),
    ("<tool_call><function=add></tool_call>", "tool_call"),
    ("<tool_call><function=></function></tool_call>", "tool_call"),
    ("<tool_call>" + "[" * 100_000 + "</tool_call>", "tool_call"),
    ("a</think>b</think><tool_call>", "tool_call"),  # the worse flaw first
    (f"a</think>b</think>{CALL}", "thinking"),
], ids=lambda text: text[:40])  # fmt: skip
def test_flaw(text, expected):
    assert flaw(text) == expected and expected in FLAWS


NAMES = st.text(st.characters(exclude_characters="<>", exclude_categories=["Cs"]), min_size=1)


@given(NAMES, st.dictionaries(NAMES, NAMES, max_size=2), NAMES)
def test_every_whole_call_is_well_formed_and_no_part_of_one_is(name, arguments, text):
    call = json.dumps({"name": name, "arguments": arguments})
    whole = f"{text}<tool_call>{call}</tool_call>"
    assert flaw(whole) == "" and flaw(f"<think>{text}</think>{whole}") == ""
    assert flaw(whole.removesuffix("</tool_call>")) == "tool_call"
    assert flaw(whole.replace("<tool_call>", "")) == "tool_call"


@pytest.mark.parametrize("piece", ["<tool_call>", "<tool_call><function=a>", "</tool_call>", "<"])
def test_an_answer_of_tags_alone_is_judged_in_linear_time(piece):
    """Repeated 65,536 times; what looked for each tag's end again and again took 15 minutes."""
    began = time.process_time()
    assert flaw(piece * 65_536) == ("tool_call" if "tool" in piece else "")
    assert time.process_time() - began < 20  # 0.1
