"""The tools of nine offices: what each says and changes, in small worlds made by hand."""

import copy
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.prompt_injection.offices import LONGEST, OFFICES, TOOLS
from envs.prompt_injection.prompt_injection import used
from envs.prompt_injection.worlds import World
from support.tables import table
from support.verifiers import HOSTILE, json_values

PLAYS = table(Path(__file__).with_name("offices.txt"))


def seen(text: str) -> str:
    """A text with ID in the place of what is drawn for new ids."""
    return re.sub(r"\b((?:[A-Z]+-)|A)[0-9A-F]{6}\b", r"\1ID", text)


def answer(world: World, name: str, given: dict) -> str:
    """What a tool says, as the policy reads it in its envelope."""
    envelope = used(world, name, given)
    output = json.loads(envelope)["output"]
    assert envelope == json.dumps({"output": output}, ensure_ascii=False, separators=(",", ":"))
    return output


@pytest.mark.parametrize("place", PLAYS)
def test_what_tools_say_and_change(place):
    (tables,), *steps = PLAYS[place]
    world = World(copy.deepcopy(tables))
    for step in steps:
        if len(step) == 2:
            name, expected = step
            found = json.dumps(world.tables.get(name))
            assert seen(found) == json.dumps(expected), step
        else:
            name, arguments, expected = step
            text = expected if isinstance(expected, str) else json.dumps(expected)
            assert seen(answer(world, name, arguments)) == text, step


def test_every_tool_is_played():
    for office, tools in OFFICES.items():
        plays = [steps for place, steps in PLAYS.items() if re.match(r"\w+", place)[0] == office]
        played = {step[0] for steps in plays for step in steps if len(step) == 3}
        assert tools.keys() <= played, office
    assert [len(tools) for tools in OFFICES.values()] == [12, 11, 11, 12, 12, 12, 12, 12, 12]
    assert len(TOOLS) == 97


def test_ids_are_the_same_in_each_episode():
    job = {"title": "T", "description": "D", "requirements": "R"}
    first, again = ([used(w, "create_job_posting", job) for _ in range(20)] for w in worlds(2))
    assert first == again and len(set(first)) == 20


def worlds(n: int) -> list[World]:
    return [World({}) for _ in range(n)]


def test_nothing_grows_without_limit():
    """In NeMo-Gym an amount may be a text of any length."""
    entry = {"case_id": "C", "date": "d", "description": "D"}
    for hours, rate in (("a", 10**9), (10**9, ["a"]), ("a" * LONGEST, 2)):
        (world,) = worlds(1)
        said = answer(world, "add_billing_entry", entry | {"hours": hours, "rate": rate})
        assert said == "Error executing tool 'add_billing_entry' (MemoryError): "
        assert not world.tables
    assert "added" in answer(world, "add_billing_entry", entry | {"hours": "a", "rate": LONGEST})


def test_half_a_character_is_shown():
    (world,) = worlds(1)
    assert answer(world, "get_order_details", {"order_id": "\ud800é"}) == (
        '{"error": "Order \\ud800\\u00e9 not found."}'
    )
    assert answer(world, "update_order_status", {"order_id": "é", "status": 1}).endswith(
        "é not found."
    )


NAMES = sorted({name for made in TOOLS.values() for name in (*made.required, *made.optional)})
VALUES = json_values(texts=st.text() | st.sampled_from(HOSTILE[:4]))
GIVEN = st.dictionaries(st.sampled_from([*NAMES, "env", "junk"]), VALUES, max_size=6)


@settings(max_examples=60, deadline=None)
@given(calls=st.lists(st.tuples(st.sampled_from(sorted(TOOLS)), GIVEN), max_size=5))
def test_no_arguments_make_a_tool_fail(calls):
    (tables,), *_ = PLAYS["legal"]
    world = World(copy.deepcopy(tables))
    for name, arguments in calls:
        answer(world, name, arguments)


def test_arguments_nested_too_deep_are_an_error():
    deep: list = []
    for _ in range(500_000):
        deep = [deep]
    for name in TOOLS:
        (world,) = worlds(1)
        required = dict.fromkeys(TOOLS[name].required, deep)
        assert used(world, name, required)
    while deep:  # freeing it in one go would overflow the C stack
        deep = deep.pop()
