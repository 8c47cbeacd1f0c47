"""Turns of trajectories become rows of one step, and rows whose answers vary are kept."""

import json
from pathlib import Path

import pytest
from conftest import write_rows

import data_prep
from core.errors import InputError
from envs import check_rows
from envs.swe import swe_pivot
from rollout.response import Response
from support.scripts import call
from support.tables import table

CASES = table(Path(__file__).with_name("cases.txt"))
TOOLS = [{"type": "function", "function": {"name": "execute_bash", "parameters": {}}}]


def said(*calls: dict, text: str = "") -> dict:
    """A turn of the assistant as trajectories of chats have it."""
    made = [{"id": f"c{i}", "type": "function", "function": f} for i, f in enumerate(calls)]
    return {"role": "assistant", "content": text, "tool_calls": made}


def run(command: str) -> dict:
    return {"name": "execute_bash", "arguments": json.dumps({"command": command})}


def seen(text: str) -> dict:
    return {"role": "tool", "tool_call_id": "c0", "content": text}


MESSAGES = [
    {"role": "system", "content": "You repair code."},
    {"role": "user", "content": "half(3) is 1"},
    said(run("ls"), text="I look."),
    seen("calc.py"),
    said(text="I think."),
    {"role": "user", "content": "Go on."},
    said(run("sed -i s,//,/, calc.py"), run("pytest")),
    seen(""),
]
TRAJECTORY = {"messages": MESSAGES, "tools": TOOLS, "instance_id": "me__calc-12"}


@pytest.fixture
def pivot(tmp_path, capsys):
    """The rows of some lines, and what is printed."""

    def made(lines: list[dict], *words: str) -> tuple[list[dict], str]:
        source = write_rows(tmp_path / "in.jsonl", lines)
        out = tmp_path / "out.jsonl"
        assert data_prep.main(["pivot", source, str(out), *words]) == 0
        return [json.loads(line) for line in out.read_text().splitlines()], capsys.readouterr().out

    return made


def test_each_turn_with_a_call_is_a_row_of_what_came_before(pivot):
    (first, second), told = pivot([TRAJECTORY], "--dataset", "own")
    assert first["responses_create_params"] == {"input": MESSAGES[:2], "tools": TOOLS}
    assert json.loads(first["expected_action"]["arguments"]) == {"command": "ls"}
    assert (first["turn"], second["turn"]) == (2, 6)
    assert "sed" in second["expected_action"]["arguments"], "the first of two calls"
    assert second["trajectory_id"] == "me__calc-12" and second["dataset"] == "own"
    asked = second["responses_create_params"]["input"]
    assert len(asked) == 6 and asked[2]["content"] == "I look."
    assert "left out, turns without a call: 1" in told
    for row in (first, second):
        check_rows.check_row(row)
        expected = swe_pivot.expected_call(row)
        right = Response("", tool_calls=[call("bash", json.loads(expected["arguments"]))])
        assert swe_pivot.verify(row, right).value == 1.0
    wrong = Response("", tool_calls=[call("bash", {"command": "rm -rf calc.py"})])
    assert swe_pivot.verify(second, wrong).value == 0.0


def test_messages_may_be_json_or_items_of_responses(pivot):
    as_text = {name: json.dumps(TRAJECTORY[name]) for name in ("messages", "tools")}
    items = [{"role": "user", "content": "half(3) is 1"}]
    items += [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}]
    items += [{"type": "function_call", "call_id": "c0", **run("ls")}]
    items += [{"type": "function_call_output", "call_id": "c0", "output": "calc.py"}]
    items += [{"type": "function_call", "call_id": "c1", **run("cat calc.py")}]
    of_gym = {"responses_create_params": {"input": items, "tools": TOOLS}}
    rows, _ = pivot([as_text, of_gym], "--reward_mode", "continuous")
    assert [row["turn"] for row in rows] == [2, 6, 1, 3]
    assert rows[0]["trajectory_id"] == "1" and rows[3]["trajectory_id"] == "2"
    before = rows[3]["responses_create_params"]["input"]
    assert before[1]["reasoning_content"] == "Hm." and before[2]["content"] == "calc.py"
    assert all(row["reward_mode"] == "continuous" for row in rows)


def test_trajectories_that_did_not_end_well_may_be_left_out(pivot):
    lines = [TRAJECTORY | {"resolved": value} for value in (True, False, None, 1.0)]
    rows, told = pivot(lines, "--resolved", "resolved")
    assert len(rows) == 4 and "trajectories that are not resolved: 2" in told


def test_rows_whose_answers_vary_are_kept(pivot):
    rows, _ = pivot([TRAJECTORY])
    rates = (0, 0.125, 0.875, 1, 1.0, None)
    profiled = [rows[0] | {"pass_rate": rate} for rate in rates]
    kept, told = pivot(profiled)
    assert [row["pass_rate"] for row in kept] == [0.125, 0.875]
    assert "never rewarded: 1" in told and "always rewarded: 2" in told
    assert "without a pass rate: 1" in told


@pytest.mark.parametrize(("line", "words", "message"), CASES["pivot"])
def test_bad_input_is_named(tmp_path, line, words, message):
    source = write_rows(tmp_path / "in.jsonl", [TRAJECTORY, TRAJECTORY | line])
    with pytest.raises(InputError, match=message):
        data_prep.main(["pivot", source, str(tmp_path / "out.jsonl"), *words])
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
