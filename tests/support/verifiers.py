"""Known answers and real rows of environments, and answers that nobody should pay."""

import copy
import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import strategies as st

from rollout.messages import last_question
from rollout.response import Response
from support.data import HERE, texts
from support.tables import table

# Agent, file and line of a row of it, blends that have the agent.
AGENTS = table(Path(__file__).with_name("agents.txt"))["rows"]
OWN = Path(__file__).with_name("own_rows.jsonl")
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


def lines(folder: str, name: str, place: Path = HERE) -> list[dict]:
    """The lines of a file in tests/data, or, if `place` is SHARED, those that only SHARED has."""
    return [json.loads(line) for line in texts(f"{folder}/{name}.jsonl", place)]


def known_answers(name: str, agent: str, least: int = 1, place: Path = HERE) -> list[Known]:
    """The known answers of an environment, calls included, of which there are some."""
    found = []
    for case in lines("known_answers", name, place):
        row = {"agent_ref": {"name": agent}, "responses_create_params": {"input": "?"}}
        calls = [item for item in case.get("output", []) if item["type"] == "function_call"]
        response = Response(case["response"], tool_calls=calls)
        reward = float(case["expected_reward"])
        found.append(Known(row | case.get("metadata", {}), response, reward, case))
    assert len(found) >= least
    return found


def own_rows() -> list[dict]:
    """Rows that we wrote for the agents whose rows are not published, or may not be passed on."""
    return [json.loads(line) for line in OWN.read_text(encoding="utf-8").splitlines()]


def gym_rows(name: str, agent: str = "", place: Path = HERE) -> list[dict]:
    """NeMo-Gym's example rows of a file, of which there are some, each with an agent of the table.

    That is `agent`; if it is empty, the row's own, else the first that the table has for the file.
    """
    agents = [one for one, source, _ in AGENTS if source.partition(":")[0] == name]
    assert not agent or agent in {one for one, *_ in AGENTS}, f"agents.txt has no {agent}"
    given = {"agent_ref": {"type": "responses_api_agents", "name": agent or agents[0]}}
    read = lines("gym_rows", name, place)
    found = [given | row | (given if agent else {}) for row in read]
    assert found
    return found


def rows_of(agent: str, name: str, place: Path) -> list[dict]:
    """The rows that we wrote for an agent, or, if `place` is SHARED, NeMo-Gym's rows of a file.

    `agent` may be the end of an agent's name.
    """
    if place != HERE:
        return gym_rows(name, agent, place)
    found = [row for row in own_rows() if row["agent_ref"]["name"].endswith(agent)]
    assert found
    return found


def of_blend(blend: str) -> list[dict]:
    """The rows of a blend in the table, each under its agent."""
    found = []
    for agent, source, blends in AGENTS:
        if blend in blends.split():
            name, _, number = source.partition(":")
            row = (own_rows() if name == "own" else gym_rows(name))[int(number) - 1]
            found.append(row | {"agent_ref": {"type": "responses_api_agents", "name": agent}})
    return found


def shortened(row: dict) -> dict:
    """The row with the end of its question alone: a tiny model reads 96 tokens."""
    question = [{"role": "user", "content": last_question(row)[-40:]}]
    return row | {"responses_create_params": {"input": question}}
