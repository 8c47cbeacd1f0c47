"""`pivot`: makes single-step rows from agents' trajectories, and keeps rows whose answers vary."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import tyro

from core.errors import InputError
from envs import check_rows, get, require
from prep import files
from rollout.messages import chat, check_items, functions


@dataclass(frozen=True)
class Pivot:
    """Turns trajectories into rows for envs/swe/swe_pivot.py, each of which expects the next call.

    A line with messages becomes a row for each assistant turn that calls a tool. A line that
    is such a row already, with a pass rate from `profile`, is kept if its answers vary: some but
    not all of them earned a reward, so the row's group teaches something.
    """

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="FILE")]
    """JSONL file: `messages` and `tools` of each trajectory, or rows written by this command."""
    out: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="OUT")]
    """JSONL file to write."""
    reward_mode: str = "binary"
    """How a call is rewarded: binary or continuous."""
    resolved: str = ""
    """Trajectory field that must be true, or at least 1; empty: every trajectory is used."""
    dataset: str = ""
    """Name of these rows in the metrics."""

    def run(self) -> int:
        """Checks and writes the rows, and prints what was left out."""
        if self.reward_mode not in ("binary", "continuous"):
            raise InputError(f"--reward_mode {self.reward_mode!r}: expected binary or continuous")
        left: Counter[str] = Counter()
        with files.rewriting(self.source, self.out) as output:
            for line in files.lines(self.source):
                record = line.row()
                try:
                    rows = list(self.rows(record, line.number, left))
                except (ValueError, LookupError, TypeError, AttributeError) as error:
                    raise InputError(f"{line.place}: expected a trajectory: {error}") from None
                for row in rows:
                    output.write(row)
            for why, count in left.items():
                print(f"  left out, {why}: {count:,}")
        return 0

    def rows(self, record: dict, number: int, left: Counter[str]) -> Iterator[dict]:
        """Yields the rows of a line.

        Raises ValueError, LookupError, TypeError or AttributeError if it is malformed.
        """
        if "expected_action" in record:
            rate = record.get("pass_rate")
            if rate is not None:
                expected = "a number from 0 to 1"
                rate = get(record, "pass_rate", int | float, expected)
                require(0 <= rate <= 1, "pass_rate", rate, expected)
            if rate is None:
                left["without a pass rate"] += 1
            elif rate == 0:
                left["never rewarded"] += 1
            elif rate == 1:
                left["always rewarded"] += 1
            else:
                yield record
            return
        if self.resolved and not float(record.get(self.resolved) or 0) >= 1:
            left[f"trajectories that are not {self.resolved}"] += 1
            return
        messages, tools = conversation(record)
        name = record.get("trajectory_id") or record.get("traj_id") or record.get("instance_id")
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            calls = message.get("tool_calls") or []
            if not calls:
                left["turns without a call"] += 1
                continue
            called = calls[0]["function"]
            row = {
                "responses_create_params": {"input": messages[:turn], "tools": tools},
                "agent_ref": {"type": "responses_api_agents", "name": "swe_pivot"},
                "expected_action": {
                    "type": "function_call",
                    "name": called["name"],
                    "arguments": json.dumps(called["arguments"]),
                },
                "reward_mode": self.reward_mode,
                "trajectory_id": str(name or number),
                "turn": turn,
            }
            if self.dataset:
                row["dataset"] = self.dataset
            check_rows.check_row(row)
            yield row


def conversation(record: dict) -> tuple[list[dict], list[dict]]:
    """Returns a trajectory's messages and tools, each given as a list or as a JSON string."""
    params = record.get("responses_create_params") or {}
    messages = list_of(record.get("messages") or params.get("input") or [], "messages")
    tools = list_of(record.get("tools") or params.get("tools") or [], "tools")
    require(messages, "messages", None, "a list of messages")
    check_items(messages, "messages")
    return chat(messages), functions(tools) or []


def list_of(value: list | str, name: str) -> list[dict]:
    """Returns a list as is, or parses it from a JSON string. Raises ValueError if it is neither."""
    found = json.loads(value) if isinstance(value, str) else value
    require(isinstance(found, list), name, found, "a list, or its JSON")
    return found
