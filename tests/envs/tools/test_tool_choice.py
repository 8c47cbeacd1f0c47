"""The next step of an agent: known answers, real rows, and calls that are nearly right."""

import json
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.tools import tool_choice
from envs.tools.calls import matching, same
from rollout.response import Response
from support.data import in_both
from support.examples import tries
from support.scripts import call
from support.tables import gives, refused
from support.verifiers import HOSTILE, json_values, known_answers, lines, rows_of

AGENT = "single_step_tool_use_with_argument_comparison_agent"
GOLD = {"user": "GROOM2024", "count": 75, "price": 9.5, "seats": ["A1", "A2"], "notify": True}
GOLD |= {"note": None, "address": {"city": "Ulm", "zip": 89073}}
GOLD |= {"summary": "User wants adjacent seats for seven people"}


def row(action: dict, agent: str = AGENT, **config: object) -> dict:
    fields = {"agent_ref": {"name": agent}, "expected_action": action}
    return fields | {"tool_call_comparator_config": config}


def batch(*queries: str) -> dict:
    return {"type": "function_call_batch", "calls": [call("search", {"q": q}) for q in queries]}


def reward(judged: dict, *calls: dict, text: str = "") -> float:
    return tool_choice.verify(judged, Response(text, tool_calls=list(calls))).value


ROW = row(call("book", GOLD))
MESSAGE = row({"type": "message", "content": "Which seats?"})


@in_both
def test_known_answers(place):
    for answer in known_answers("single_step_tool_use", AGENT, 4, place):
        judged = answer.row | answer.case.get("config", {})
        tool_choice.check(judged)
        assert tool_choice.verify(judged, answer.response).value == answer.reward, answer.case


def test_known_functions():
    """Rewards are compared, and not NeMo-Gym's words for them."""
    found = lines("known_answers", "single_step_tool_use_with_argument_comparison_fns")
    cases = [case for case in found if case["fn"] == "ActionComparator.compare_action"]
    assert len(cases) >= 31
    for case in cases:
        args = case["args"]
        judged = row(args["expected_action"], **args["self"])
        tool_choice.check(judged)
        actual = args["actual_action"]
        calls = actual.get("calls", [actual] if actual["type"] == "function_call" else [])
        text = actual.get("content", "")
        assert reward(judged, *calls, text=text) == case["expected"]["reward"], case


@in_both
def test_rows(place):
    for judged in rows_of(AGENT, "single_step_tool_use_with_argument_comparison", place):
        tool_choice.check(judged)
        assert [need.name for need in tool_choice.needs(judged)] == ["tool_parser"]
        action = judged["expected_action"]
        is_call = action["type"] == "function_call"
        assert reward(judged, *[action] * is_call, text=action.get("content", "")) == 1
        assert reward(judged) == reward(judged, call("x", {})) == 0
        assert reward(judged, text="<think>hm") == reward(judged, text="<think>hm</think>\n") == 0


def test_each_agent_has_its_threshold():
    """Of "the cat sat" and "the dog ran" a sixth of the words is shared."""
    expected = {"search_pivot": 0, "toolcall_schema": 1, "swe_pivot": 1, "droid_pivot": 1}
    for name, value in expected.items():
        agent = f"{name}_single_step_tool_use_with_argument_comparison_agent"
        assert agent in tool_choice.AGENTS
        judged = row(call("f", {"q": "the cat sat"}), agent)
        assert reward(judged, call("f", {"q": "the dog ran"})) == value
        assert reward(judged, call("f", {"q": "the dog sat"})) == 1  # two of six
        assert reward(judged, call("f", {"q": "a dog ran"})) == (
            name in ("swe_pivot", "droid_pivot")
        )
        assert reward(judged, call("f", {"q": "the"})) == 0
    both = row(batch("a", "b"), "parallel_tool_calls_" + AGENT)
    assert reward(both, call("search", {"q": "a"})) == pytest.approx(2 / 3)


test_what_is_the_same = gives(
    lambda expected, actual: same(expected, actual, 0.1, 1e-6),
    (1, True, False),  # NeMo-Gym takes true for 1
    (True, True, True),
    (1, 1.0, False),
    (1.5, 1.5 + 9e-7, True),
    (1.5, 1.5 + 2e-6, False),
    (1.5, float("nan"), False),
    (1.5, float("inf"), False),
    (None, None, True),
    (None, "None", False),
    ("one", "One", False),
    ("one two", "TWO one", True),
    ("the cat", "the dog", True),
    ("the cat ate some food", "the dog ran to the store", False),
    ("the dog", "the", False),
    ([1, 2], [2, 1], False),
    ([1, 2], [1, 2, 3], False),
    ({"a": 1}, {"a": 1, "b": 2}, False),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
    ({"a": 1}, {}, False),
)

test_the_most_calls_are_matched = gives(
    matching,
    ([[0, 1], [0]], 2),
    ([[0], [0]], 1),
    ([[], [3]], 1),
    ([[0, 1], [0, 2], [1], [0]], 4 - 1),
)


def test_one_call_can_be_taken_for_several_expected_ones():
    """The first call fits both expected ones, the second only the first."""
    judged = row(batch("red and blue", "red and green"))
    both, one = call("search", {"q": "red and blue"}), call("search", {"q": "a blue one"})
    assert reward(judged, both, one) == 1
    assert reward(judged, one, one) == 0


def test_a_message_is_any_text_without_a_call():
    assert reward(MESSAGE, text="No.") == 1
    assert reward(MESSAGE, call("book", GOLD), text="No.") == 0
    broken = '<tool_call>{"name": "book"'
    assert tool_choice.verify(MESSAGE, f"I book: {broken}").value == 0
    assert tool_choice.verify(MESSAGE, "<think>I wonder").value == 0
    assert tool_choice.verify(MESSAGE, "<think>x</think> Which?").value == 1


def changed(rng: random.Random) -> list[dict]:
    """The right call with one fault."""
    data = json.loads(json.dumps(GOLD))
    key = rng.choice(list(GOLD))
    match rng.randrange(9):
        case 0:
            del data[key]
        case 1:
            data[key + "_"] = data[key]
        case 2:
            data[key.upper()] = data.pop(key)
        case 3:
            data[key] = rng.choice(({}, [], "x", 76, [data[key]], str(data[key]) + "!"))
            data["summary"] = GOLD["summary"] if key != "summary" else "x"
        case 4:
            data["user"] = rng.choice(("groom2024", "GROOM2024 ", "GROOM2025", "", "GROOM 2024"))
        case 5:
            data["count"] = rng.choice((74, 75.0, "75", -75, 750, None))
        case 6:
            data["seats"] = rng.choice((["A2", "A1"], ["A1"], ["A1", "A2", "A3"], "A1, A2"))
        case 7:
            good = call("book", GOLD)
            junk = rng.choice(("x", "}", "```", "null"))
            return [good | {"arguments": good["arguments"] + junk}]
        case 8:
            return rng.choice(([], [call("Book", GOLD)], [call("book", [GOLD])], [call("", {})]))
    return [call("book", data)]


def test_wrong_calls_earn_nothing():
    """A thousand changes of the right one; other texts of several words are a known leak."""
    rng = random.Random(0)
    for _ in range(1000):
        calls = changed(rng)
        assert reward(ROW, *calls, text=json.dumps(GOLD)) == 0, calls
    assert reward(ROW, call("book", GOLD | {"summary": "seats for a horse"})) == 1
    assert reward(ROW, call("rob", {}), call("book", GOLD)) == 1


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: repr(text[:8]))
def test_hostile_answers(text):
    for arguments in (text, json.dumps(text), json.dumps(GOLD | {"summary": text})):
        assert reward(ROW, {"name": "book", "arguments": arguments}, text=text) == 0
    assert reward(ROW, {"name": text, "arguments": "{}"}) == 0
    assert reward(row(batch("a b")), call("search", {"q": text})) == 0


def test_many_calls_take_linear_time():
    judged = row(batch(*(f"word {i}" for i in range(20))), word_count_similarity_threshold=0)
    calls = [call("search", {"q": "x y"})] * 5_000
    assert reward(judged, *calls) == 1
    assert reward(judged, *[call("search", {"q": "x"})] * 5_000) == 0
    assert reward(judged, {}, {"name": None, "arguments": None}, {"arguments": 5}) == 0
    long = row(batch("word " * 50_000))
    began = time.process_time()
    assert reward(long, *[call("search", {"q": "x y"})] * 2_000) == 0
    assert time.process_time() - began < 30


@given(json_values(), st.sampled_from(list(GOLD)))
@settings(max_examples=tries(2500), deadline=None)  # two cases each
def test_any_arguments_are_judged(data, key):
    assert reward(ROW, call("book", data)) == 0
    assert reward(ROW, call("book", GOLD | {key: data})) == same(GOLD[key], data, 0.1, 1e-6)


@given(st.text(), st.text())
@settings(max_examples=tries(5000), deadline=None)
def test_any_text_is_judged(name, text):
    assert reward(ROW, {"name": name, "arguments": text}, text=text) == 0


test_bad_rows = refused(
    lambda action: tool_choice.check(row(action)),
    (None, "expected_action.type is missing or null, expected function_call"),
    ({"type": "call"}, "expected_action.type is 'call', expected function_call"),
    ({"type": "message"}, "expected_action.content is missing"),
    ({"type": "function_call"}, "expected_action.name is missing"),
    (call("f", []), r"expected_action.arguments is '\[\]', expected a JSON object"),
    ({"type": "function_call", "name": "f", "arguments": {}}, "expected_action.arguments is {}"),
    ({"type": "function_call_batch"}, "expected_action.calls is missing"),
    ({"type": "function_call_batch", "calls": []}, r"expected_action.calls is \[\], expected at"),
    ({"type": "function_call_batch", "calls": [5]}, "expected_action.calls.0.name is missing"),
)

test_bad_settings = refused(
    lambda config: tool_choice.check(ROW | {"tool_call_comparator_config": config}),
    (5, "tool_call_comparator_config is 5, expected settings or null"),
    ({"threshold": 1}, "tool_call_comparator_config.threshold is 1, expected one of: word_co"),
    ({"word_count_similarity_threshold": 0.7}, "threshold is 0.7, expected a number from 0 to"),
    ({"floating_point_comparison_threshold": True}, "is True, expected a number"),
    ({"allow_subset": 1}, "allow_subset is 1, expected true or false"),
    ({"parallel_tool_call_reward_mode": "f2"}, "is 'f2', expected one of: binary_strict"),
)
