"""Known answers and real rows of environments, and answers that nobody should pay."""

import copy
import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import strategies as st

from rollout.messages import last_question
from rollout.response import Response
from support.tables import table

# Agent, file and line of a row of it, blends that have the agent.
AGENTS = table(Path(__file__).with_name("agents.txt"))["rows"]
OWN = Path(__file__).with_name("own_rows.jsonl")
DATA = Path(__file__).resolve().parents[3] / "shared/data"
TEXT = st.text()
# What a judge of all roles may reply, for a test in which no verdict matters.
VERDICT = '{"score_1": 4, "score_2": 2, "ranking": 2} [[A=B]] [[NO]] FAIL Response harm: harmful'
REPEATED = ("[", "{", '[{"a":', "<a>", "\\boxed{", "word, ", "<think>", "```")
HOSTILE = ["", " ", "\x00", "\ud800", *(text * 10**5 for text in REPEATED)]
HOSTILE += ["(a+)+" * 10**4, "a" * 10**6, "\n" * 10**6, "9" * 10**6]


def json_values(keys=TEXT, texts=TEXT, leaves: int = 3) -> st.SearchStrategy:
    """JSON values of these keys and texts, with `leaves` of them at most."""
    leaf = st.none() | st.booleans() | st.integers() | st.floats() | texts
    return st.recursive(
        leaf, lambda inner: st.lists(inner) | st.dictionaries(keys, inner), max_leaves=leaves
    )


def replaced(row: dict, path: Iterable, value: Any) -> dict:
    """The row with another value at a path of keys and indices."""
    row = copy.deepcopy(row)
    *outer, last = path
    functools.reduce(lambda part, key: part[key], outer, row)[last] = value
    return row


class Known(NamedTuple):
    """An answer, its row, and the reward that NeMo-Gym or the reference gives it."""

    row: dict[str, Any]
    response: Response
    reward: float
    case: dict[str, Any]  # as the file has it


def lines(folder: str, name: str) -> list[dict]:
    """The lines of a shared data file; skips the test where there is none."""
    path = OWN if name == "own" else DATA / folder / f"{name}.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not there: this test needs the shared data beside the project")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def known_answers(name: str, agent: str, least: int = 1) -> list[Known]:
    """The known answers of an environment, calls included, of which there are some."""
    found = []
    for case in lines("known_answers", name):
        row = {"agent_ref": {"name": agent}, "responses_create_params": {"input": "?"}}
        calls = [item for item in case.get("output", []) if item["type"] == "function_call"]
        response = Response(case["response"], tool_calls=calls)
        reward = float(case["expected_reward"])
        found.append(Known(row | case.get("metadata", {}), response, reward, case))
    assert len(found) >= least
    return found


def gym_rows(name: str, agent: str = "") -> list[dict]:
    """NeMo-Gym's example rows of a file, of which there are some.

    Rows of a file that names no agent get the first one that the table has for it, or `agent`,
    which the table must have for it.
    """
    agents = [one for one, place, _ in AGENTS if place.partition(":")[0] == name]
    assert (agent or agents[0]) in agents, f"agents.txt has {agents} for {name}"
    given = {"agent_ref": {"type": "responses_api_agents", "name": agent or agents[0]}}
    found = [given | row | (given if agent else {}) for row in lines("gym_rows", name)]
    assert found
    return found


def of_blend(blend: str) -> list[dict]:
    """The real rows of a blend in the table, each under its agent."""
    found = []
    for agent, place, blends in AGENTS:
        if blend in blends.split():
            name, _, number = place.partition(":")
            found.append(gym_rows(name, agent)[int(number) - 1])
    return found


def shortened(row: dict) -> dict:
    """The row with the end of its question alone: a tiny model reads 96 tokens."""
    question = [{"role": "user", "content": last_question(row)[-40:]}]
    return row | {"responses_create_params": {"input": question}}
