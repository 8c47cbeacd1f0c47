"""The next call of a coding agent: known answers, parts of it, and calls that are nearly right."""

import json
import random
import sys
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.swe import coding_calls, swe_pivot
from envs.tools.calls import arguments
from rollout.response import Response
from support.examples import tries
from support.scripts import call
from support.tables import refused
from support.verifiers import HOSTILE, known_answers, lines

AGENT = "swe_pivot_tool_simulation_agent"
EDIT = {"command": "str_replace", "path": "/workspace/proj/foo.py", "old_str": "    return None"}
EDIT |= {"new_str": "    return sum(values)"}
VIEW = {"command": "view", "path": "/workspace/proj/foo.py", "view_range": [200, 250]}
RUN = {"command": "pytest proj/tests/test_utils.py -q"}


def row(name: str, args: dict, mode: str | None = None) -> dict:
    return {"agent_ref": {"name": AGENT}, "expected_action": call(name, args), "reward_mode": mode}


def reward(judged: dict, *calls: dict, text: str = "") -> float:
    return swe_pivot.verify(judged, Response(text, tool_calls=list(calls))).value


def test_known_answers():
    """Their rows say no more what was expected; none of the answers has a call."""
    for answer in known_answers("swe_pivot", AGENT, least=5):
        assert answer.reward == swe_pivot.verify(answer.row, answer.response).value, answer.case
        swe_pivot.check(answer.row | row("bash", RUN))
        with pytest.raises(ValueError, match="expected_action is missing or null, expected a func"):
            swe_pivot.check(answer.row)


def of_one_kind(judge, rollout_cat: str, rollout_args, expected_cat: str, expected_args):
    """Calls of different kinds are another tool's, and are not compared any further."""
    return judge(rollout_cat, rollout_args, expected_args) if rollout_cat == expected_cat else None


FUNCTIONS = {
    "get_tool_category": lambda name: coding_calls.kind_of(name),
    "_parse_arguments": lambda raw: arguments({"arguments": raw}),
    "extract_file_path": lambda args: coding_calls.path_of(args),
    "extract_command": lambda args: coding_calls.command_of(args),
    "extract_edit_content": lambda args: coding_calls.edited(args),
    "extract_command_verb": lambda cmd: coding_calls.program_of(cmd),
    "_extract_paths_from_command": lambda cmd: coding_calls.paths_in(cmd),
    "verify_tool_name_match": lambda rollout_name, expected_name, **kinds: coding_calls.same_tool(
        rollout_name, expected_name
    ),
    "verify_target_match": partial(of_one_kind, coding_calls.same_target),
    "compute_argument_similarity": partial(of_one_kind, coding_calls.similarity),
    "compute_diff_size_penalty": lambda rollout_cat, rollout_args, alpha: coding_calls.size_penalty(
        rollout_cat, rollout_args, alpha
    ),
}


def is_judged_otherwise(case: dict) -> bool:
    """Calls of two kinds, see `of_one_kind`, and arguments that are no JSON: for us they are {}."""
    args = case["args"]
    two = args.get("rollout_cat") != args.get("expected_cat", args.get("rollout_cat"))
    no_json = case["fn"] == "_parse_arguments" and case["expected"] == {}
    return no_json or (two and case["fn"] in ("verify_target_match", "compute_argument_similarity"))


def test_known_functions():
    found = lines("known_answers", "swe_pivot_fns")
    cases = [c for c in found if c["fn"] in FUNCTIONS and not is_judged_otherwise(c)]
    assert len(cases) >= 44
    for case in cases:
        got, expected = FUNCTIONS[case["fn"]](**case["args"]), case["expected"]
        assert got == (pytest.approx(expected) if isinstance(got, float) else expected), case


def test_what_was_expected_may_stand_in_three_places():
    action = call("bash", RUN)
    for place in (
        {"expected_action": action},
        {"expected_answer": json.dumps(action)},
        {"expected_answer": "", "metadata": {"expected_action": action, "category": "bash"}},
    ):
        swe_pivot.check(place)
        assert [need.name for need in swe_pivot.needs(place)] == ["tool_parser"]
        assert reward(place, call("execute_bash", RUN)) == 1
        assert reward(place) == reward(place, text=json.dumps(RUN)) == 0


def test_the_same_purpose_is_enough():
    assert reward(row("str_replace_editor", EDIT), call("CodeEditor", EDIT)) == 1
    assert reward(row("my_tool", EDIT), call("My_Tool", EDIT)) == 1
    assert reward(row("my_tool", EDIT), call("your_tool", EDIT)) == 0
    assert reward(row("bash", RUN), call("grep", RUN)) == 0


@pytest.mark.parametrize(("lines", "value"), [
    ([200, 250], 1), ([210, 260], 1), ([211, 260], 0), ("[190, 300]", 1), ([240, 290], 0),
    (None, 1), ([1], 1), ("x", 1), ([1e999, 2], 1), ([10**400, 10**401], 0), ({}, 1),
])  # fmt: skip
def test_a_view_shows_the_lines(lines, value):
    judged = row("str_replace_editor", VIEW)
    assert reward(judged, call("str_replace_editor", VIEW | {"view_range": lines})) == value


def test_the_continuous_mode_pays_for_likeness():
    """Half from 0.4, all from 0.8, and up to a tenth less for a long edit."""
    judged = row("bash", {"command": "echo aaaaa"}, "continuous")
    assert reward(judged, call("bash", {"command": "echo aaaaa"})) == 1
    assert reward(judged, call("bash", {"command": "echo aabbb"})) == pytest.approx(0.875)
    assert reward(judged, call("bash", {"command": "echo bbbbbbbbbbbbbbbbbbbb"})) == 0
    edit = row("edit", {"path": "a", "content": "x" * 1000}, "continuous")
    assert reward(edit, call("edit", {"path": "a", "content": "x" * 1000})) == pytest.approx(0.9)
    same = call("edit", arguments(edit["expected_action"]))
    assert reward(edit | {"reward_mode": None}, same) == 1


@pytest.mark.parametrize(("tool", "args"), [
    ("bash", RUN), ("edit", EDIT), ("edit", VIEW), ("read_file", {"path": "a.py"}),
])  # fmt: skip
@pytest.mark.parametrize("empty", ["{}", "[]", "", "null", "{", '{"command": ""}', '{"path": " "}'])
def test_empty_calls_earn_nothing(tool, args, empty):
    """NeMo-Gym pays a call without a command, or a view without a file."""
    assert reward(row(tool, args), {"name": tool, "arguments": empty}) == 0


def changed(rng: random.Random) -> tuple[dict, list[dict]]:
    """A row, and its right call with one fault."""
    name, gold = rng.choice((("edit", EDIT), ("view", VIEW), ("bash", RUN)))
    tool = "bash" if name == "bash" else "str_replace_editor"
    args = dict(gold)
    match rng.randrange(6):
        case 0:
            del args["command" if name == "bash" else "path"]
        case 1 if name == "bash":
            args["command"] = rng.choice(("", "ls", "python -m " + RUN["command"], "pytest a/b.py"))
        case 1:
            args["path"] = rng.choice(("/workspace/foo.py", "foo.py", "/proj/bar.py", "proj", ""))
        case 2 if name == "edit":
            args["new_str"] = rng.choice(("", "pass", "    return None", "x" * 5000))
        case 2:
            args["command"] = rng.choice(("create", "undo_edit", "VIEW", "rm -rf /"))
        case 3:
            tool = rng.choice(("grep", "think", "", "finish", "unknown", "read_file"))
        case 4:
            good = call(tool, gold)
            text = good["arguments"] + rng.choice(("x", "}", "```"))
            return row(tool, gold), [good | {"arguments": text}]
        case 5:
            return row(tool, gold), rng.choice(([], [call("think", {}), call(tool, gold)]))
    gold_tool = "bash" if name == "bash" else "str_replace_editor"
    return row(gold_tool, gold), [call(tool, args)]


def test_wrong_calls_earn_nothing():
    """A thousand changes of right ones. The docstring of the module says what is paid."""
    rng = random.Random(0)
    for _ in range(1000):
        judged, calls = changed(rng)
        for mode in ("binary", "continuous"):
            value = reward(judged | {"reward_mode": mode}, *calls, text=json.dumps(EDIT))
            assert value == 0, (judged, calls)


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: repr(text[:8]))
def test_hostile_answers(text):
    for judged, key in ((row("edit", EDIT), "new_str"), (row("bash", RUN), "command")):
        tool = judged["expected_action"]["name"]
        args = arguments(judged["expected_action"])
        assert reward(judged, {"name": tool, "arguments": text}, text=text) == 0
        assert reward(judged, {"name": text, "arguments": "{}"}) == 0
        assert reward(judged, call(tool, args | {key: text})) == 0
        assert reward(judged, {}, {"name": None, "arguments": 5}) == 0
    nested = '{"command": ' + "[" * 900 + "]" * 900 + "}"
    assert reward(row("bash", RUN), {"name": "bash", "arguments": nested}) == 0


def test_arguments_of_any_depth_are_judged():
    """What can be parsed can be compared as well, at the deepest."""
    reasons = set()
    for depth in range(sys.getrecursionlimit()):
        nested = '{"command": ' + "[" * depth + "]" * depth + "}"
        response = Response("", tool_calls=[{"name": "bash", "arguments": nested}])
        found = swe_pivot.verify(row("bash", RUN), response)
        assert found.value == 0
        reasons.add(found.info["reason"])
    assert reasons >= {"another target", "arguments are not a JSON object"}


JSON = st.none() | st.integers() | st.floats() | st.text() | st.lists(st.integers() | st.text())
KEYS = st.sampled_from(["command", "path", "view_range", "old_str", "new_str", "content", "cmd"])


@given(st.dictionaries(KEYS, JSON), st.sampled_from(["edit", "bash", "grep", "think", "x"]))
@settings(max_examples=tries(2500))  # four cases each
def test_any_call_is_judged(args, tool):
    for judged in (row("edit", EDIT), row("edit", VIEW), row("bash", RUN)):
        assert reward(judged | {"reward_mode": "continuous"}, call(tool, args)) == 0
    assert 0.9 <= reward(row(tool, args, "continuous"), call(tool, args)) <= 1


test_bad_rows = refused(
    lambda change: swe_pivot.check(row("bash", RUN) | change),
    ({"expected_action": None}, "expected_action is missing or null, expected a function_call"),
    ({"expected_action": {"type": "message"}}, "expected_action is {'type': 'message'}, expec"),
    ({"expected_action": {"type": "function_call"}}, "expected_action.name is missing"),
    ({"expected_action": call("bash", [])}, r"expected_action.arguments is '\[\]', expected a"),
    ({"reward_mode": "soft"}, "reward_mode is 'soft', expected binary or continuous"),
    ({"reward_mode": 1}, "reward_mode is 1, expected a mode or null"),
)
