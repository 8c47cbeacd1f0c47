"""Defines the interface of an environment, and the helpers that its author imports.

A new environment is a module in this folder. It declares `AGENTS`, the `agent_ref.name`s that it
serves (named as in NeMo-Gym's released blends), and defines at least one function that scores rows:

    single-turn  verify(row, response) -> Reward or a number, plain or async
    multi-turn   async rollout(row, sampler) -> Episode, in place of verify
    comparison   async score_group(rows, responses) -> list of Rewards, alone or after one of them

`response` is a `str` that also has the reasoning and calls parsed from it (rollout/response.py).

An optional `check(row)` raises ValueError if the row cannot be judged. An optional `needs(row)`
returns the row's Needs (envs/services.py), such as `judge.need("general")`, or strings
that envs/needs.py turns into Needs.
`SECRETS = ("OPENAI_API_KEY",)` names environment variables that rollout workers get: no other
variable whose name ends in TOKEN, KEY, SECRET, PASSWORD or CREDENTIALS reaches them.
`ALLOWS_EMPTY_INPUT = True` means that `rollout` writes the first prompt itself. A module is
imported when the first row names one of its agents (envs/registry.py).

data_prep.py calls further optional functions of an environment's module:

    place(agent)       returns the address of an agent's server; raises OSError or ValueError
    refusal(row)       returns why a newly created row cannot be judged; "" if it can
    flaw(row), async   tries a row's own solution; returns why the row teaches nothing, or ""
"""

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, TypeAlias

from rollout.response import Response

Json: TypeAlias = "None | bool | int | float | str | Sequence[Json] | Mapping[str, Json]"
SHOWN = 200  # characters of a bad value in a message


@dataclass
class Reward:
    """An environment's verdict on one response."""

    value: float  # the environment's docstring states its range
    info: dict = field(default_factory=dict)  # JSON values; `reason`: why nothing was graded

    @property
    def components(self) -> dict[str, float]:
        """The finite numbers in `info`, by name, which the metrics `info/NAME/ENV` average."""
        found: dict[str, float] = {}
        for name, value in self.info.items():
            if isinstance(value, int | float) and -1e300 < value < 1e300:
                found[str(name)] = float(value)
        return found


def get(row: Any, path: str, kind: type | UnionType, expected: str, prefix: str = "") -> Any:
    """Returns the value at the dotted `path` of `row`. Raises ValueError if it is not a `kind`."""
    value = row
    at = "the row"
    for key in path.split("."):
        is_object = isinstance(value, dict)
        require(is_object or value is None or prefix, at, value, f"an object that contains {key}")
        value = value.get(key) if is_object else None
        at = key
    require(isinstance(value, kind), prefix + path, value, expected)
    return value


def require(good: object, path: str, value: object, expected: str) -> None:
    """Raises ValueError naming the field, the value and the expectation, unless `good`."""
    if not good:
        try:
            shown = "missing or null" if value is None else reprlib.repr(value)
            if len(shown) > SHOWN:  # reprlib limits each level of a value, not the whole
                shown = f"{shown[: SHOWN - 30]}...{shown[-30:]}"
        except ValueError:  # an int of more than 4,300 digits has no repr
            shown = f"a huge {type(value).__name__}"
        raise ValueError(f"{path} is {shown}, expected {expected}")


def final_text(response: str) -> str:
    """Returns the text to judge, stripped: a Response's content, or what follows `</think>`."""
    content = response.content if isinstance(response, Response) else response
    return content.rpartition("</think>")[2].strip()


def unfinished(text: str) -> str | None:
    """Returns "empty" or "truncated" (still thinking) if a `final_text` has no answer."""
    if not text:
        return "empty"
    return "truncated" if "<think>" in text else None
