"""Preferences from rollouts: which answers become pairs, and which do not."""

import json
from collections import Counter
from pathlib import Path

import pytest
from conftest import write_rows

import data_prep
from core.errors import InputError
from rollout.messages import functions
from support.blends import math_row
from support.tables import table

CASES = table(Path(__file__).with_name("cases.txt"))

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
TOOLS = [{"type": "function", "name": "f", "parameters": {}}]


def answer(row: int, text: str | list[str], reward: float, ended: str = "stop") -> dict:
    said = [text] if isinstance(text, str) else text
    line = {"row": row, "prompt": f"<user>{row}<assistant>", "response": said, "reward": reward}
    return line | {"finish_reason": ended}


def row(number: int, tools: list | None = None) -> dict:
    made = math_row(number)
    made["responses_create_params"] |= {"tools": tools} if tools is not None else {}
    return made


def text(items: list[dict]) -> str:
    """What the one message of an answer says."""
    (item,) = items
    assert item["role"] == "assistant"
    return item["content"]


@pytest.fixture
def pairs(tmp_path, capsys):
    """The pairs of three rows, the second with tools, and what is printed."""

    def run(answers: list[dict], *words: str) -> tuple[list[dict], str]:
        rows = write_rows(tmp_path / "in.jsonl", [row(0), row(1, TOOLS), row(2, [])])
        rollouts = write_rows(tmp_path / "rollouts.jsonl", answers)
        out = tmp_path / "out.jsonl"
        assert data_prep.main(["tool_pairs", rows, rollouts, str(out), *words]) == 0
        return [json.loads(line) for line in out.read_text().splitlines()], capsys.readouterr().out

    return run


def test_without_tools_a_right_answer_beats_a_wrong_one_and_any_call(pairs):
    calls = [CALL, f"It is 4. {CALL}", "<tool_call>{broken"]
    answers = [answer(1, "4", 1.0), answer(1, "5", 0.0), answer(1, calls[0], 0.0)]
    answers += [answer(1, calls[1], 1.0), answer(1, calls[2], 0.0)]
    found, said = pairs(answers)
    assert {text(pair["chosen"]) for pair in found} == {"4"}
    asked = row(0)["responses_create_params"]["input"]
    assert all(pair["prompt"] == asked and "tools" not in pair for pair in found)
    kinds = {text(pair["rejected"]): pair["dataset"] for pair in found}
    assert kinds == {"5": "no_tools"} | dict.fromkeys(calls, "hallucination")
    assert "1 no_tools, 0 with_tools, 3 hallucination" in said
    assert "answers to rows without tools that call one: 60.0%" in said


def test_with_tools_a_call_is_an_answer_as_any_other(pairs):
    found, said = pairs([answer(2, CALL, 1.0), answer(2, "4", 0.0), answer(2, "5", 1.0)])
    (pair,) = found
    assert (text(pair["chosen"]), text(pair["rejected"])) == (CALL, "4")
    assert pair["dataset"] == "with_tools" and pair["tools"] == functions(TOOLS)
    assert "that call one" not in said


def test_a_call_within_a_thought_is_none(pairs):
    found, _ = pairs([answer(1, f"<think>{CALL}</think>4", 1.0), answer(1, "5", 0.0)])
    assert [pair["dataset"] for pair in found] == ["no_tools"]


def test_a_thought_that_the_prompt_opens_is_opened_in_the_message(pairs):
    opened = {"prompt": "<user>1<assistant><think>\n"}
    answers = [answer(1, "2 + 2</think>4", 1.0), answer(1, "<think>2</think>5", 0.0)]
    ((pair,), _) = pairs([line | opened for line in answers])
    assert text(pair["chosen"]) == "<think>\n2 + 2</think>4"
    assert text(pair["rejected"]) == "<think>2</think>5"


def test_each_answer_is_rejected_once_and_right_ones_take_turns(pairs):
    answers = [answer(3, f"right {i}", 1.0) for i in range(3)]
    answers += [answer(3, f"wrong {i}", 0.0) for i in range(7)]
    found, _ = pairs(answers)
    assert sorted(text(pair["rejected"]) for pair in found) == [f"wrong {i}" for i in range(7)]
    assert sorted(Counter(text(pair["chosen"]) for pair in found).values()) == [2, 2, 3]
    assert len(pairs(answers, "--per_row", "2")[0]) == 2


def test_answers_of_one_kind_make_no_pair(pairs):
    alike = [answer(1, "4", 1.0), answer(2, "5", 0.0), answer(3, CALL, 0.0)]
    with pytest.raises(InputError, match="none of its rows is left"):
        pairs(alike)


def test_what_cannot_be_a_pair_is_counted(pairs):
    answers = [answer(1, "4", 1.0), answer(1, "5", 0.0), answer(1, "6 7 8", 0.0, "length")]
    found, said = pairs([*answers, answer(1, [CALL, "4"], 1.0)])
    assert len(found) == 1
    assert "left out, cut off: 1" in said and "left out, several turns: 1" in said


def test_other_parsers_and_thresholds(pairs):
    answers = [answer(1, "4", 0.5), answer(1, '[TOOL_CALLS]f{"x": 1}', 0.0)]
    with pytest.raises(InputError, match="none of its rows is left"):
        pairs(answers)
    found, _ = pairs(answers, "--threshold", "0.5", "--tool_parser", "mistral")
    assert [pair["dataset"] for pair in found] == ["hallucination"]


def test_the_order_is_random_and_the_same_each_time(pairs):
    answers = [answer(n, f"{i}", float(i < 2)) for n in (1, 2, 3) for i in range(20)]
    first = [text(pair["rejected"]) for pair in pairs(answers)[0]]
    assert first == [text(pair["rejected"]) for pair in pairs(answers)[0]]
    assert len(first) == 54 and first != sorted(first)


@pytest.mark.parametrize(("change", "told"), CASES["no rollout"])
def test_a_line_that_is_no_rollout_is_named(pairs, change, told):
    good = [answer(1, "4", 1.0), answer(1, "5", 0.0)]
    with pytest.raises(InputError, match=told) as error:
        pairs([*good, answer(1, "6", 0.0) | change])
    assert "rollouts.jsonl:3" in str(error.value) or "row 9" in str(error.value)


@pytest.mark.parametrize(
    ("words", "told"),
    [(("--tool_parser", "hermetic"), "one of: hermes"), (("--per_row", "0"), "1 or more")],
)
def test_an_option_that_makes_no_sense_is_named(pairs, words, told):
    with pytest.raises(InputError, match=told):
        pairs([answer(1, "4", 1.0)], *words)
