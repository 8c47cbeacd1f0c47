"""Known answers and real rows of environments, and answers that nobody should pay."""

import copy
import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import strategies as st

from envs.rollout.response import Response

DATA = Path(__file__).resolve().parents[3] / "shared/data"
TEXT = st.text()
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
    path = DATA / folder / f"{name}.jsonl"
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


def gym_rows(name: str, agent: str) -> list[dict]:
    """NeMo-Gym's example rows of an environment, of which there are some."""
    found = [row | {"agent_ref": {"name": agent}} for row in lines("gym_rows", name)]
    assert found
    return found
