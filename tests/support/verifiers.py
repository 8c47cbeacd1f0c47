"""Known answers and real rows of environments, and answers that nobody should pay."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from envs.rollout.response import Response

DATA = Path(__file__).resolve().parents[3] / "shared/data"
HOSTILE = [
    "",
    " ",
    "\x00",
    "\ud800",
    "a" * 10**6,
    "[" * 10**5,
    "{" * 10**5,
    '[{"a":' * 10**5,
    "<a>" * 10**5,
    "\\boxed{" * 10**5,
    "(a+)+" * 10**4,
    "word, " * 10**5,
    "\n" * 10**6,
    "9" * 10**6,
    "<think>" * 10**5,
    "```" * 10**5,
]


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


def known_answers(name: str, agent: str) -> list[Known]:
    """The known answers of an environment, calls included."""
    found = []
    for case in lines("known_answers", name):
        row = {"agent_ref": {"name": agent}, "responses_create_params": {"input": "?"}}
        calls = [item for item in case.get("output", []) if item["type"] == "function_call"]
        response = Response(case["response"], tool_calls=calls)
        reward = float(case["expected_reward"])
        found.append(Known(row | case.get("metadata", {}), response, reward, case))
    return found


def gym_rows(name: str, agent: str) -> list[dict]:
    """NeMo-Gym's example rows of an environment."""
    return [row | {"agent_ref": {"name": agent}} for row in lines("gym_rows", name)]
