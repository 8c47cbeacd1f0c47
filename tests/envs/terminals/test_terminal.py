"""Actions in terminals: known answers, real rows, each harness's rules, and what is not paid."""

import asyncio
import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs import Reward
from envs.terminals import harnesses, terminal, terminus
from rollout.response import Response
from support.data import HERE, in_both
from support.examples import tries
from support.loop import at_once
from support.tables import refused, table
from support.verifiers import HOSTILE, known_answers, lines, rows_of

KEYS = [{"keystrokes": "ls -la /srv/project\n", "duration": 0.1}, {"keystrokes": "pwd\n"}]
ANSWER = {"analysis": "a", "plan": "b", "commands": KEYS, "task_complete": False}
ROW = {"expected_answer": json.dumps(ANSWER), "metadata": {"harness": "terminus_2"}}
HARNESSES = table(Path(__file__).with_name("harnesses.txt"))["harnesses"]
TYPE_5 = {"type": 5}
TOOLS = [{"type": "function", "name": "bash", "parameters": {"type": "object"}}]


def judged(response: str, of: dict = ROW) -> Reward:
    return asyncio.run(terminal.verify(of, response))


def called(arguments: dict | str, name: str = "bash") -> dict:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"type": "function_call", "name": name, "arguments": text}


@in_both
def test_known_answers(place):
    """All but three that a judge decides, and one whose server compared no commands."""
    other = []
    for name in ("terminus_judge", "terminal_multi_harness"):
        for of, response, reward, case in known_answers(name, name, 1, place):
            config = case.get("config") or {}
            if "string_similarity_threshold" in config:
                of["threshold"] = config["string_similarity_threshold"]
            if judged(response, of).value != reward:
                other.append((bool(case.get("judge_outputs")), config["enable_string_similarity"]))
    expected = [(False, False), (True, False), (True, True), (True, True)]
    assert sorted(other) == (expected if place == HERE else [])


def test_known_comparisons_of_calls():
    for case in lines("known_answers", "terminal_multi_harness_fns"):
        given = case["args"]
        tools = [tool.get("function", tool) for tool in given["declared_tools"]]
        wrong = harnesses.difference(
            given["expected_action"],
            given["actual_action"],
            {tool["name"]: tool["parameters"] for tool in tools},
            given.get("threshold_override") or given["self"]["string_similarity_threshold"],
            given.get("harness") or "",
        )
        assert (not wrong) == case["expected"]["matches"], (case, wrong)


def test_known_likeness():
    cases = [c for c in lines("known_answers", "terminus_judge_fns") if c["fn"][0] == "c"]
    assert len(cases) >= 20
    for case in cases:
        args = case["args"]
        if case["fn"] == "command_similarity" and args["gt"]["commands"]:
            texts = ["".join(c["keystrokes"] for c in args[k]["commands"]) for k in ("gt", "pred")]
            found = harnesses.ratio(*texts, 0.0) if texts[1] else 0.0
            assert found == pytest.approx(case["expected"])


@in_both
def test_rows(place):
    for name in ("terminal_pivot", "terminus_judge"):
        for of in rows_of(f"{name}_simple_agent", name, place):
            terminal.check(of)
            assert judged(of["expected_answer"], of).value == 1
            assert judged(f"<think>so</think>\n{of['expected_answer']}", of).value == 1
            assert judged("", of).value == judged(f"```{of['expected_answer']}```", of).value == 0


def test_wrong_answers_of_terminus_earn_nothing():
    rng = random.Random(0)

    def spoiled() -> str:
        answer = json.loads(json.dumps(ANSWER))
        match rng.randrange(6):
            case 0:
                return json.dumps(answer) + rng.choice(("x", "}", "\n[]", " no"))
            case 1:
                del answer[rng.choice(("analysis", "plan", "commands"))]
            case 2:
                answer[rng.choice(("more", "is_task_complete"))] = True
            case 3:
                answer["commands"] = rng.choice(([], ANSWER["commands"][:1] * 3, "ls", [{}]))
            case 4:
                answer["commands"][0]["keystrokes"] = rng.choice(("rm -rf /\n", "", 5, None))
            case 5:
                answer["commands"][1][rng.choice(("duration", "x"))] = rng.choice(("1", True, None))
        return json.dumps(answer)

    check = terminal.make_check()
    wanted = ROW | {"expected_action": None, "form": "terminus_2", "threshold": 0.9}
    for text in (spoiled() for _ in range(1000)):
        assert check(wanted, [], text)["reason"], text


def test_a_complete_task_must_be_called_so():
    done = ROW | {"expected_answer": json.dumps(ANSWER | {"task_complete": True})}
    assert judged(json.dumps(ANSWER), done).value == 0
    assert judged(json.dumps(ANSWER | {"task_complete": True}), done).value == 1
    other = json.dumps(ANSWER | {"commands": [{"keystrokes": "ls -la /srv\n"}]})
    assert judged(other).value == 0 and judged(other, ROW | {"threshold": 0.6}).value == 1


@pytest.mark.parametrize(("harness", "name", "expected", "right", "wrong"), HARNESSES)
def test_rules_of_harnesses(harness, name, expected, right, wrong):
    tools = [{"name": name, "parameters": {"type": "object"}}]
    of = {"expected_action": called(expected, name), "declared_tools": tools, "harness": harness}
    of["threshold"] = 0.85
    terminal.check(of)
    for arguments, reward in ((expected, 1), (right, 1), (wrong, 0)):
        response = Response("", tool_calls=[called(arguments, name)])
        assert judged(response, of).value == reward, arguments


def test_calls_and_messages_are_no_stand_in_for_each_other():
    of = {"expected_action": called({"command": "ls"}), "declared_tools": TOOLS}
    call = called({"command": "ls"})
    assert judged(Response("", tool_calls=[call]), of).value == 1
    assert judged("ls", of).value == judged(Response("", tool_calls=[call, call]), of).value == 0
    undeclared = Response("", tool_calls=[called({}, "rm")])
    assert judged(undeclared, of).info == {"reason": "no such tool"}
    for broken in ("", "5", "[" * 10**5, '{"command": '):
        assert judged(Response("", tool_calls=[called(broken)]), of).value == 0
    message = {"expected_action": {"type": "message", "content": "x"}}
    assert judged("y", message).value == 1
    assert judged("", message).value == judged(Response("y", tool_calls=[call]), message).value == 0


def test_calls_of_any_form_are_judged():
    """A tool may have no parameters, or recursive ones; an answer may nest as deep as it likes."""
    items = {"items": {"$ref": "#/$defs/x"}}
    schema = {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": items}}
    free, nested = {"name": "free"}, {"name": "nested", "parameters": schema}
    arguments = {"a": [1]}
    for tool in (free, nested, {"function": free}, free | {"parameters": None}):
        name = tool.get("function", tool)["name"]
        of = {"expected_action": called(arguments, name), "declared_tools": [tool]}
        terminal.check(of)
        assert judged(Response("", tool_calls=[called(arguments, name)]), of).value == 1
    deep = Response("", tool_calls=[called('{"a": ' + "[" * 500 + "]" * 500 + "}", "nested")])
    row = {"expected_action": called(arguments, "nested"), "declared_tools": [nested]}
    assert judged(deep, row).info == {"reason": "nested too deep"}
    for odd in ({"name": ["free"], "arguments": "{}"}, {"name": "nested", "arguments": {"a": 1}}):
        assert judged(Response("", tool_calls=[odd]), row).value == 0


@pytest.mark.slow
def test_hostile_answers():
    long = json.dumps(ANSWER | {"commands": [{"keystrokes": "ls -la /srv/" * 10**4}]})
    of = ROW | {"expected_answer": long}
    texts = [*HOSTILE, long.replace("ls", "sl"), long[:-3]]
    rewards = at_once(terminal.verify(of, text) for text in texts)
    assert {reward.value for reward in rewards} == {0.0}


@given(st.text(max_size=40) | st.text(st.sampled_from('[{}]":,01 truenls'), max_size=40))
@settings(max_examples=tries(5000))  # two cases each
def test_any_text_is_judged(text):
    wanted = ROW | {"expected_action": None, "form": "terminus_2", "threshold": 0.9}
    assert terminus.difference(wanted, text)
    assert terminus.difference(wanted, json.dumps(ANSWER | {"commands": text}))


test_bad_rows = refused(
    lambda change: terminal.check(ROW | change),
    ({"metadata": {"harness": "x"}}, "metadata.harness is 'x', expected one of: terminus_1"),
    ({"expected_answer": "{}"}, "expected_answer is '{}', expected an answer of terminus_2"),
    ({"threshold": 2}, "threshold is 2, expected from 0 to 1"),
    ({"expected_action": {"type": "x"}}, "expected_action.type is 'x', expected one of"),
    ({"expected_action": called("x")}, "expected_action.arguments is 'x', expected JSON"),
    ({"expected_action": {"type": "function_call_batch", "calls": [{}]}},
     r"expected_action.calls\[0\].name is missing"),
    ({"expected_action": called({}), "declared_tools": {}}, "declared_tools is {}, expected a"),
    ({"expected_action": called({}), "declared_tools": [5]},
     r"declared_tools\[0\].name is missing"),
    ({"expected_action": called({}), "declared_tools": [TOOLS[0] | {"parameters": "{}"}]},
     r"declared_tools\[0\].parameters is '{}', expected a JSON schema or null"),
    ({"expected_action": called({}), "declared_tools": [TOOLS[0] | {"parameters": TYPE_5}]},
     r"declared_tools\[0\].parameters is {'type': 5}, expected a JSON schema .draft 2020-12"),
)  # fmt: skip
