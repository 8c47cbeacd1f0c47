"""Calendars: known answers, real rows, and answers that are nearly right."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.questions import calendar
from support.data import in_both
from support.examples import tries
from support.tables import refused
from support.verifiers import HOSTILE, gym_rows, known_answers, lines

EXPECTED = {
    "0": {"duration": 60, "min_time": "10:00", "max_time": "16:00", "constraint": "before 12pm"},
    "1": {"duration": 30, "min_time": "10:00", "max_time": "16:00", "constraint": "at 12:15pm"},
    "2": {"duration": 45, "min_time": "10:00", "max_time": "16:00", "constraint": None},
}
GOLD = [{"event_id": 0, "event_name": "a [b] {c}", "start_time": "10:00", "duration": 60}]
GOLD += [{"event_id": 1, "event_name": "b", "start_time": "12:15", "duration": 30}]
GOLD += [{"event_id": 2, "event_name": "c", "start_time": "2:30pm", "duration": 45}]
ROW = {"exp_cal_state": EXPECTED}


def reward(events: object, row: dict = ROW) -> float:
    return calendar.verify(row, events if isinstance(events, str) else json.dumps(events)).value


def test_known_answers():
    known = [k for k in known_answers("calendar", "calendar") if "exp_cal_state" in k.row]
    assert len(known) >= 13
    for row, response, expected, case in known:
        calendar.check(row)
        assert calendar.verify(row, str(response)).value == expected, case


def test_known_functions():
    functions = {
        "time_to_minutes": lambda time_str: calendar.minutes(time_str),
        "grade_assistant_response": lambda assistant_response, exp_cal_state, **_: [
            int(reward(assistant_response, {"exp_cal_state": exp_cal_state}))
        ],
        "extract_json_list": lambda text: calendar.first_list(text) or None,
    }
    cases = [case for case in lines("known_answers", "calendar_fns") if case["fn"] in functions]
    assert len(cases) >= 29
    for case in cases:
        expected = case["expected"]
        if case["fn"] == "grade_assistant_response":
            expected = expected[:1]
        assert functions[case["fn"]](**case["args"]) == expected, case


@in_both
def test_real_rows(place):
    for row in gym_rows("calendar", place=place):
        calendar.check(row)
        assert reward("", row) == reward("I cannot do that.", row) == 0
        last = [m for m in row["responses_create_params"]["input"] if m["role"] == "assistant"]
        assert reward(last[-1]["content"], row) in (0, 1)


def test_the_right_calendar_in_any_order_and_with_words_around_it():
    told = f"Here [1] it is: {json.dumps(GOLD)} !"
    assert reward(GOLD) == reward(GOLD[::-1]) == reward(told) == 1
    assert reward(f"<think>{json.dumps(GOLD)}") == reward("<think>no</think>") == 0
    assert reward([*GOLD, GOLD[0]]) == 1  # as in NeMo-Gym: it does not overlap itself


def test_wrong_calendars_earn_nothing():
    """A thousand changes of the right one, each of which breaks a rule."""
    rng = random.Random(0)
    for _ in range(1000):
        events = json.loads(json.dumps(GOLD))
        event = rng.choice(events)
        match rng.randrange(6):
            case 0:
                events.remove(event)
            case 1:
                event["duration"] += rng.choice((-15, -1, 1, 15, 1000))
            case 2:
                events[0]["start_time"] = rng.choice(("11:01", "9:59", "12:15", "12pm", "25:00"))
            case 3:
                events[1]["start_time"] = rng.choice(("12:14", "12:16", "0:15", "12:15am", "noon"))
            case 4:
                event["event_id"] = rng.choice((3, 17, -1, None, "x", [0], True))
            case 5:
                events[2]["start_time"] = rng.choice(("12:00", "12:30", "10:30", "15:16", "", 14))
        assert reward(events) == 0, events


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_answers(text):
    assert reward(text) == 0


@given(st.text(max_size=40) | st.text(st.sampled_from('[{}]":,01 id'), max_size=40))
@settings(max_examples=tries(5000))  # two cases each
def test_any_text_is_judged(text):
    assert reward(text) == 0
    assert reward(f"[{{{text}") == 0


@given(st.lists(st.fixed_dictionaries({"event_id": st.integers(0, 3), "duration": st.floats()})))
def test_any_list_is_judged(events):
    assert reward(events) == 0
    assert reward([event | {"start_time": "10:00"} for event in events]) == 0


test_bad_rows = refused(
    lambda state: calendar.check({"exp_cal_state": state}),
    ([], r"exp_cal_state is \[\], expected"),
    ({"0": 5}, "exp_cal_state.0.duration is missing"),
)
test_bad_events = refused(
    lambda change: calendar.check({"exp_cal_state": {"0": EXPECTED["0"] | change}}),
    ({"duration": "60"}, "exp_cal_state.0.duration is '60', expected minutes"),
    ({"min_time": "soon"}, "exp_cal_state.0.min_time is 'soon', expected a time"),
    ({"max_time": None}, "exp_cal_state.0.max_time is missing"),
    ({"constraint": "maybe 10am"}, "exp_cal_state.0.constraint is 'maybe 10am'"),
    ({"constraint": "between 2pm"}, "exp_cal_state.0.constraint is 'between 2pm'"),
)
