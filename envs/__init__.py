"""What an environment is, and what its author imports. Adding one is adding one module below here.

A module declares `AGENTS`, the `agent_ref.name`s it serves (those of NeMo-Gym's released blends),
and what it does with a row:

    one turn     verify(row, response) -> Reward or a number, plain or async
    many turns   async rollout(row, sampler) -> Episode, in place of verify
    comparison   async score_group(rows, responses) -> list of Rewards, after either or alone

`response` is a `str` with what its markup says (rollout/response.py).

An optional `check(row)` raises ValueError for a row it could not judge. An optional `needs(row)`
returns the Needs of judging the row (envs/services.py), such as `judge.need("general")`, or strings
that envs/needs.py turns into Needs.
`ALLOWS_EMPTY_INPUT = True` says that `rollout` writes the first prompt itself. A module is imported
when the first row names one of its agents (envs/registry.py).

data_prep.py takes what it has to know of an environment from its module, which may have

    place(agent)       the address where an agent is played; OSError or ValueError if there is none
    refusal(row)       why a row that was just made could not be judged; "" if it could
    flaw(row), async   why a row cannot teach, by a trial of its own solution; "" if it can
"""

import reprlib
from dataclasses import dataclass, field
from types import UnionType
from typing import Any

from rollout.response import Response


@dataclass
class Reward:
    """An environment's verdict on one response."""

    value: float  # its range is in the environment's docstring
    info: dict = field(default_factory=dict)  # JSON values; `reason` says why nothing was graded

    @property
    def components(self) -> dict[str, float]:
        """The finite numbers in `info`, by name: what the metrics `info/NAME/ENV` average."""
        of_info = ((name, v) for name, v in self.info.items() if isinstance(v, int | float))
        return {str(name): float(v) for name, v in of_info if -1e300 < v < 1e300}


def get(row: Any, path: str, kind: type | UnionType, expected: str, prefix: str = "") -> Any:
    """The value at the dotted `path` of `row`; raises `require`'s ValueError unless a `kind`."""
    value, at = row, "the row"
    for key in path.split("."):
        is_object = isinstance(value, dict)
        require(is_object or value is None or prefix, at, value, f"an object that holds {key}")
        value, at = value.get(key) if is_object else None, key
    require(isinstance(value, kind), prefix + path, value, expected)
    return value


def require(good: object, path: str, value: object, expected: str) -> None:
    """Raise ValueError naming field, value and expectation unless `good`."""
    if not good:
        try:
            shown = "missing or null" if value is None else reprlib.repr(value)
        except ValueError:  # an int of more than 4,300 digits has no repr
            shown = f"a huge {type(value).__name__}"
        raise ValueError(f"{path} is {shown}, expected {expected}")


def final_text(response: str) -> str:
    """The text to judge: a Response's content, or what follows the last `</think>`; stripped."""
    content = response.content if isinstance(response, Response) else response
    return content.rpartition("</think>")[2].strip()


def unfinished(text: str) -> str | None:
    """Why a `final_text` holds no answer: "empty", "truncated" (still thinking), or None."""
    return "empty" if not text else "truncated" if "<think>" in text else None
