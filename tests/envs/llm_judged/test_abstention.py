"""Questions that may be left open: known answers, what a judge says, and rows that are refused."""

import asyncio
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs import Reward, check_rows, registry
from envs.llm_judged import abstention
from envs.needs import needs_of
from envs.services import CheckerError
from rollout.response import Response
from support.examples import tries
from support.judges import as_judge
from support.tables import gives, refused
from support.verifiers import HOSTILE

AGENT = "abstention_simple_agent"
ASKED = "Put your answer in \\boxed{}, or \\boxed{[IDK]} if you do not know it."
ROW = {"agent_ref": {"type": "responses_api_agents", "name": AGENT}, "id": "q7"}
ROW |= {"question": "Which river runs through Ulm?", "answer": "the Danube"}
INPUT = [{"role": "system", "content": ASKED}, {"role": "user", "content": ROW["question"]}]
ROW |= {"responses_create_params": {"input": INPUT, "tools": [], "parallel_tool_calls": False}}
RIGHT, WRONG, OPEN = abstention.LABELS


def judged(text: str, reply: str, row: dict = ROW) -> tuple[Reward, list[str]]:
    """What an answer earns from a judge that says `reply`, and what it was asked."""
    with as_judge("general", reply) as judge:
        found = asyncio.run(registry.verify(row, Response.of(text)))
    return found, [body["messages"][-1]["content"] for body in judge.asked]


@pytest.mark.parametrize(("reply", "value", "right", "abstained"), [
    (RIGHT, 1.0, 1.0, 0.0),
    (WRONG, 0.0, 0.0, 0.0),
    (OPEN, 0.5, 0.0, 1.0),
    (f"Not {RIGHT}, it is another river.\n**{WRONG}**", 0.0, 0.0, 0.0),
    (f"It says it does not know.\n{OPEN}\n", 0.5, 0.0, 1.0),
    ("A", 1.0, 1.0, 0.0),
    ("Another river.\n **B**.", 0.0, 0.0, 0.0),
    (f"A\n{OPEN}\nB", 0.5, 0.0, 1.0),
])  # fmt: skip
def test_the_last_label_of_the_judge_pays(reply, value, right, abstained):
    found, asked = judged("<think>hm \\boxed{Rhine}</think>It is \\boxed{the Iller}.", reply)
    assert found == Reward(value, {"right": right, "abstained": abstained})
    assert len(asked) == 1 and "<answer>\nthe Iller\n</answer>" in asked[0]
    assert "<gold>\nthe Danube\n</gold>" in asked[0] and "Rhine" not in asked[0]
    assert f"<question>\n{ROW['question']}\n</question>" in asked[0]


@pytest.mark.parametrize("reply", ["Answer: B", "CORRECT", "AB", "", "<think>hm"])
def test_a_reply_without_a_label_is_no_right_answer(reply):
    """Letters would be read from any word: a judge that says "Answer: B" means a wrong one."""
    found, _ = judged("\\boxed{Danube}", reply)
    assert found.value == 0 and found.info["reason"] == "no verdict"


def test_a_judge_that_never_gives_a_label_is_broken():
    with as_judge("general", "no label"), pytest.raises(CheckerError, match="no verdict in 20"):
        asyncio.run(at_length(25))


async def at_length(n: int) -> None:
    for _ in range(n):
        await registry.verify(ROW, Response.of("Danube"))


@pytest.mark.parametrize("text", [
    "\\boxed{[IDK]}", "I am not sure. \\boxed{[IDK]}", "<think>Rhine?</think>\\boxed{idk}", "IDK.",
    "\\boxed{Danube} or rather \\boxed{ [ IDK ] }", "The [IDK]", "An idk",
    "\\boxed{\\text} \\boxed{I.D.K}",
])  # fmt: skip
@pytest.mark.parametrize(("given", "value"), [(None, 0.5), (0.9, 0.9), (0.25, 0.25)])
def test_abstaining_pays_what_the_row_says_and_asks_no_judge(text, given, value):
    row = ROW | {"abstention_reward": given}
    check_rows.check_row(row)
    assert judged(text, RIGHT, row) == (Reward(value, {"right": 0.0, "abstained": 1.0}), [])
    found, asked = judged("\\boxed{who knows}", OPEN, row)
    assert found.value == value and len(asked) == 1


@pytest.mark.parametrize("text", [
    "i d k", "_IDK_", "IDK, the Danube", "\\boxed{\\text{[IDK]}}", "\\boxed{[IDK]",
    "[IDK] \\boxed{}",
])  # fmt: skip
def test_what_only_looks_like_it_is_judged(text):
    assert judged(text, WRONG)[0].value == 0


test_what_of_an_answer_is_judged = gives(
    abstention.in_box,
    ("It is \\boxed{42}.", "42"),
    ("\\boxed{wrong}, then \\boxed{\\frac{1}{2}} }", "\\frac{1}{2}"),
    ("\\boxed{a} \\boxed{}", ""),
    ("\\boxed{} \\boxed{a}", "a"),
    ("\\boxed{a} \\boxed{b", "\\boxed{a} \\boxed{b"),
    ("no box }", "no box }"),
    ("\\boxed{", "\\boxed{"),
)


@given(st.lists(st.sampled_from(["i", "D", "k", "[", ".", " ", "a", "an", "the", "_", "\u0130"])))
@settings(max_examples=tries(2000), deadline=None)
def test_abstaining_is_what_equals_idk_once_articles_and_marks_are_gone(parts):
    text = "".join(parts)
    bare = re.sub(r"[^\w\s]", "", re.sub(r"\b(a|an|the)\b", " ", text.lower()))
    assert bool(abstention.IDK.fullmatch(text.lower())) == (bare.split() == ["idk"])


test_of_an_answer_with_a_label_only_a_sure_verdict_counts = gives(
    abstention.verdict,
    (f"It claims {RIGHT}. {WRONG}", f"x {RIGHT}", WRONG),
    (f"{WRONG}, though it says {RIGHT}", RIGHT, WRONG),
    (f"{WRONG}\nIt says: {OPEN}", "[[c]]", WRONG),
    (f"{RIGHT} is what it says.", "[ [A]]", WRONG),
    (f"{RIGHT} {RIGHT}", RIGHT, WRONG),
    (f"Fine.\n**{RIGHT}**", RIGHT, RIGHT),
    (OPEN, WRONG, OPEN),
    ("nothing", RIGHT, None),
    ("It says:\nA", "\n A. \n", None),
    ("Fine.\nA", "A or B", RIGHT),
)


@pytest.mark.parametrize("label", abstention.LABELS)
def test_a_judge_that_repeats_an_answer_has_said_nothing(label):
    for text in (label, f"\\boxed{{{label}}}", f"Danube {label.lower()} {label}", label * 100):
        with as_judge("general", lambda messages: messages[-1]["content"].partition("\n\n<q")[2]):
            assert asyncio.run(registry.verify(ROW, Response.of(text))).value == 0


@pytest.mark.parametrize("text", ["", " \n", "<think>It is \\boxed{[IDK]}", "<think>hm</think> "])
def test_no_answer_earns_nothing_unseen(text):
    found, asked = judged(text, OPEN)
    assert found.value == 0 and found.info["reason"] in ("empty", "truncated") and not asked


LONG = [*HOSTILE, "\\boxed{" * 10**5 + "}" * 10**5, ". the " * 10**5]


@pytest.mark.parametrize("text", LONG, ids=range(len(LONG)))
def test_any_text_is_judged(text):
    assert judged(text, WRONG)[0].value == 0


def test_the_last_question_stands_in_for_one_and_the_judge_is_asked_as_for_ultra():
    row = {key: value for key, value in ROW.items() if key != "question"}
    check_rows.check_row(row)
    assert [need.name for need in needs_of(row)] == ["judges.general"]
    with as_judge("general", RIGHT) as judge:
        assert asyncio.run(registry.verify(row, Response.of("Danube"))).value == 1
    body = judge.asked[0]
    assert f"<question>\n{ROW['question']}\n</question>" in body["messages"][-1]["content"]
    assert (body["temperature"], body["top_p"], body["max_tokens"]) == (0.0, 1.0, 8192)


test_bad_rows_are_refused_with_their_field = refused(
    lambda fields: check_rows.check_row(ROW | fields),
    ({"answer": None}, "answer is missing or null, expected an answer"),
    ({"answer": " "}, "answer is ' ', expected an answer"),
    ({"question": 7}, "question is 7, expected a text or null"),
    ({"question": " "}, "question is ' ', expected a question"),
    ({"question": "", "responses_create_params": {"input": INPUT[:1]}}, "question is ''"),
    *(({"abstention_reward": value}, f"abstention_reward is {value!r}, expected a number")
      for value in (0, 1, 1.5, -0.5, True, "0.9")),
    taken=({"abstention_reward": 0.9},),
)  # fmt: skip
