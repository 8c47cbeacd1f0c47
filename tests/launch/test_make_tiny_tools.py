"""The rows, the teacher and the judgement of launch/make_tiny_tools.py."""

import itertools
import random

import pytest

from envs import check_rows
from launch import make_tiny, make_tiny_tools, tiny_model


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    return list(itertools.islice(make_tiny_tools.rows_of(make_tiny.problem_stream(0, ())), 40))


@pytest.fixture(scope="module")
def tokenizer():
    tags = [*tiny_model.TAGS, *make_tiny_tools.PIECES]
    return tiny_model.make_tokenizer(tags, template=make_tiny_tools.TEMPLATE)


def test_each_other_row_has_tools_and_all_can_be_judged(rows, tokenizer):
    for row in rows:
        check_rows.check_row(row)
    prompts = [make_tiny_tools.prompt_of(row, tokenizer) for row in rows]
    assert [prompt.startswith("<tools>") for prompt in prompts] == [False, True] * 20


def test_a_teacher_who_does_not_slip_is_right_but_for_calls(rows, tokenizer, monkeypatch):
    monkeypatch.setattr(make_tiny_tools, "SLIP", 0.0)
    monkeypatch.setattr(make_tiny_tools, "COPY_SLIP", 0.0)
    rng = random.Random(0)
    for row in rows * 4:
        text = make_tiny_tools.demonstration(row, rng)
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text
        fits = text.startswith("<tool_call>") == ("expected_action" in row)
        assert make_tiny_tools.reward(row, text) == float(fits)


def test_slips_are_wrong_and_hallucinations_as_frequent_as_said(rows):
    rng = random.Random(1)
    without = [make_tiny_tools.demonstration(row, rng) for row in rows[::2] * 100]
    share = sum(text.startswith("<tool_call>") for text in without) / len(without)
    assert abs(share - make_tiny_tools.HALLUCINATED) < 0.05
    row, action = rows[1], rows[1]["expected_action"]
    right = make_tiny_tools.CALL.format(action["name"], action["arguments"][10:-2])
    assert make_tiny_tools.reward(row, right) == 1.0
    for wrong in (right.replace("</tool_call>", ""), right[:-16] + right[-14:], right.upper()):
        assert make_tiny_tools.reward(row, wrong) == 0.0
