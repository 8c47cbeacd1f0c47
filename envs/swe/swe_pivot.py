"""A coding agent's next tool call, compared with the expected one: 0.0 or 1.0, or in between.

Row: `expected_action` {"type": "function_call", "name", "arguments": JSON text}, or the same as
JSON text in `expected_answer`, or in `metadata.expected_action`; `reward_mode` (optional): "binary"
or "continuous", which NeMo-Gym keeps in its server's configuration, resources_servers/swe_pivot.
As in NeMo-Gym, only the first call in the answer is judged. Its tool must be the same, or have the
same purpose (TOOLS in envs/swe/coding_calls.py). An edit needs the same command and file (the last
two parts of its path), a view 80 % of the lines; a shell command the same program, a path in common
(its last three parts) and a similarity of 0.3; a search or a read the same path. The reward then
depends on the similarity of the edited text (of the old or the new text, whichever is lower) or of
the command. "binary" gives 1.0 from 0.8 up. "continuous" gives 0.5 at 0.4, rising to 1.0 at 0.8,
minus up to a tenth for the size of an edit. Similarity is difflib's ratio for the first 2,000
characters.

Deliberate deviations: arguments that are not a JSON object earn 0, as do a call without the path or
shell command of the expected call, and an edit that changes nothing. NeMo-Gym rewards them.

Known leaks: calls after the first are not judged. Searches, reads, plans, thoughts and finishing
calls are judged by tool and path alone, edits regardless of where they insert. A view may leave out
its lines or its command. Text after 2,000 characters is not compared, and a fifth of an edit or of
a shell command may be anything ("; rm -rf /").
"""

from envs import Reward, get, require
from envs.services import TOOL_PARSER, Need
from envs.swe.coding_calls import kind_of, same_target, same_tool, similarity, size_penalty
from envs.tools.calls import arguments, check_call
from rollout.response import Response

AGENTS = ("swe_pivot_tool_simulation_agent", "swe_pivot")


def check(row: dict) -> None:
    """Raises ValueError unless the row expects a call, and its reward mode is known."""
    call = expected_call(row)
    require(call, "expected_action", row.get("expected_action"), "a function_call")
    check_call(call, "expected_action.")
    mode = get(row, "reward_mode", str | None, "a mode or null")
    require(mode in (None, "binary", "continuous"), "reward_mode", mode, "binary or continuous")


def needs(row: dict) -> tuple[Need, ...]:
    """A tool-call parser."""
    return (TOOL_PARSER,)


def verify(row: dict, response: str) -> Reward:
    """Returns a reward in [0, 1]; `reason` explains a 0; `similarity` compares the calls."""
    calls = Response.of(response).tool_calls
    if not calls:
        return Reward(0.0, {"reason": "no tool call"})
    try:
        return judge(expected_call(row), calls[0], row.get("reward_mode") == "continuous")
    except RecursionError:
        return Reward(0.0, {"reason": "nested too deep"})


def expected_call(row: dict) -> dict[str, str]:
    """Returns the call that a row expects, or {}."""
    places = [row.get("expected_action"), arguments({"arguments": row.get("expected_answer")})]
    if isinstance(row.get("metadata"), dict):
        places.append(row["metadata"].get("expected_action"))
    calls = [p for p in places if isinstance(p, dict) and p.get("type") == "function_call"]
    return calls[0] if calls else {}


def judge(wanted: dict[str, str], found: dict[str, str], continuous: bool) -> Reward:
    """Returns the reward for a call."""
    tool = str(found.get("name"))
    ours = arguments(found)
    theirs = arguments(wanted)
    kind = kind_of(tool)
    if not same_tool(tool, wanted["name"]):
        return Reward(0.0, {"reason": "another tool"})
    if not isinstance(ours, dict):
        return Reward(0.0, {"reason": "arguments are not a JSON object"})
    if not same_target(kind, ours, theirs):
        return Reward(0.0, {"reason": "another target"})
    alike = similarity(kind, ours, theirs)
    if alike < (0.4 if continuous else 0.8):
        return Reward(0.0, {"reason": "not similar", "similarity": alike})
    value = min(1.0, 0.5 + 0.5 * (alike - 0.4) / 0.4) if continuous else 1.0
    if continuous:
        value *= 1 - size_penalty(kind, ours, 0.1)
    return Reward(value, {"similarity": alike})
