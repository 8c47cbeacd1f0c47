"""Answers that are compared as texts: known answers, refused rows, and hostile ones."""

import asyncio
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs import Reward, check_rows, registry
from envs.questions import equivalence_rule
from rollout.response import Response
from support.examples import tries
from support.tables import gives, refused
from support.verifiers import HOSTILE

ASKED = "Find the 2nd toast about rivers, and put 'Xy7' in front of it."
ROW = {"agent_ref": {"name": "lc_equivalence_rule_simple_agent"}, "question": ASKED}
ROW |= {"responses_create_params": {"input": [{"role": "user", "content": ASKED}]}}
ROW |= {"expected_answer": "Xy7To the Danube\u2014*wide*!\n\nCheers!", "dataset": "mrcr"}


def reward(text: str, expected: str = ROW["expected_answer"]) -> float:
    row = ROW | {"expected_answer": expected}
    check_rows.check_row(row)
    return asyncio.run(registry.verify(row, Response.of(text))).value


test_case_and_blanks_alone_do_not_count = gives(
    reward,
    ("Xy7To the Danube\u2014*wide*!\n\nCheers!", 1.0),
    ("<think>Is it 'Xy7'?</think>\n\nxy7to THE danube\u2014*wide*!  cheers! \n", 1.0),
    ("To the Danube\u2014*wide*!\n\nCheers!", 0.0),
    ("Xy7 To the Danube\u2014*wide*!\n\nCheers!", 0.0),
    ("Xy7To the Danube-*wide*!\n\nCheers!", 0.0),
    ("Xy7To the Danube\u2014wide!\n\nCheers!", 0.0),
    ("Xy7To the Danube\u2014*wide*!Cheers!", 0.0),
    ("The toast is:\nXy7To the Danube\u2014*wide*!\n\nCheers!", 0.0),
    ("6", "6", 1.0),
    (" 6\n", "6 ", 1.0),
    ("6.", "6", 0.0),
    ("66", "6", 0.0),
    ("\\boxed{6}", "6", 0.0),
    ("There are 6.", "6", 0.0),
    ("\uff16", "6", 0.0),
    ("", "6", 0.0),
    ("<think>6", "6", 0.0),
    ("<think>6</think>", "6", 0.0),
)


def test_why_nothing_is_compared():
    for text, reason in (("", "empty"), ("<think>6", "truncated")):
        assert equivalence_rule.verify(ROW, Response.of(text)) == Reward(0.0, {"reason": reason})


@given(st.text(), st.text(st.sampled_from(" \t\n\xa0\x1c\x85\u2003aA\u0130")))
@settings(max_examples=tries(500), deadline=None)
def test_blanks_are_those_of_the_published_rule(one, other):
    def published(text: str) -> str:
        return re.sub(r"\s+", " ", text.strip().lower())

    for left, right in ((one, other), (other, other.swapcase()), (other, other.replace("\n", " "))):
        if right.strip() and left.strip() and "<think>" not in left and "</think>" not in left:
            expected = float(published(left) == published(right))
            row = ROW | {"expected_answer": right}
            assert equivalence_rule.verify(row, left).value == expected


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_any_text_is_judged(text):
    assert reward(text) == 0


test_bad_rows_are_refused_with_their_field = refused(
    lambda fields: check_rows.check_row(ROW | fields),
    ({"expected_answer": None}, "expected_answer is missing or null, expected an answer"),
    ({"expected_answer": " \n"}, "expected_answer is ' .n', expected an answer"),
    ({"expected_answer": 6}, "expected_answer is 6, expected an answer"),
    taken=({},),
)
