"""The next step of an agent, the calls that the row expects or a message: 0.0 to 1.0.

Row: `expected_action`: {"type": "function_call", "name", "arguments": JSON text}, {"type":
"function_call_batch", "calls": [such calls]} or {"type": "message", "content"};
`tool_call_comparator_config` (optional): some of SETTINGS, which NeMo-Gym keeps in its server's
configuration, resources_servers/single_step_tool_use_with_argument_comparison. Without it the
agent's name chooses them (BY_AGENT). Where calls are expected, each must be among those of the
answer, in any order; text beside them is not judged. Names must be equal, and arguments have the
same types, keys, lengths, numbers (fractions within 1e-6) and texts. Of texts of two words or more,
the shared words must be `word_count_similarity_threshold` of the words of both; this share is 0.5
for equal texts. Reward 0.0 or 1.0. With `parallel_tool_call_rewarding` the number of calls counts
too, and the modes `fractional` and `f1` pay for some of the calls. Where a message is expected, any
text without a call is paid.

Deliberate deviations: true is not 1, and a message with a broken tool call earns 0. The package
nemo-gym 0.4.0 is older: it looks at the first call alone, and knows no batches.

Known leaks: any message is paid. So are more calls than expected, unless their number counts. At
the threshold 0.1 "the cat" is "the dog", and at 0.0, SWE 1's, any two words are: its reward is the
tool, the names of the arguments, and those values that are no texts.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from envs import Reward, final_text, get, require, unfinished
from envs.services import TOOL_PARSER, Need
from envs.tools.calls import arguments, check_call, matching, same
from rollout.response import Response

AGENTS = (
    "single_step_tool_use_with_argument_comparison_agent",
    "single_step_tool_use_with_argument_comparison",
    "toolcall_schema_single_step_tool_use_with_argument_comparison_agent",
    "toolcall_schema",
    "search_pivot_single_step_tool_use_with_argument_comparison_agent",
    "search_pivot",
    "swe_pivot_single_step_tool_use_with_argument_comparison_agent",
    "droid_pivot_single_step_tool_use_with_argument_comparison_agent",
    "parallel_tool_calls_single_step_tool_use_with_argument_comparison_agent",
)
SETTINGS: dict[str, Any] = {"word_count_similarity_threshold": 0.1}
SETTINGS |= {"floating_point_comparison_threshold": 1e-6, "parallel_tool_call_rewarding": False}
SETTINGS |= {"allow_subset": False, "allow_superset": False}
SETTINGS |= {"parallel_tool_call_reward_mode": "binary_strict"}
COUNTED = dict.fromkeys(("parallel_tool_call_rewarding", "allow_subset", "allow_superset"), True)
BY_AGENT: dict[str, dict[str, Any]] = {  # how its name begins -> its settings
    "search_pivot": {"word_count_similarity_threshold": 0.3},
    "swe_pivot": {"word_count_similarity_threshold": 0.0},
    "droid_pivot": {"word_count_similarity_threshold": 0.0},
    "parallel_tool_calls": COUNTED | {"parallel_tool_call_reward_mode": "f1"},
}
MODES = ("binary_strict", "fractional", "f1")


def check(row: dict) -> None:
    """Raises ValueError unless `expected_action` is a known one, and the settings are valid."""
    kind = get(row, "expected_action.type", str, "function_call, function_call_batch or message")
    action = row["expected_action"]
    if kind == "message":
        get(row, "expected_action.content", str, "a text")
    elif kind == "function_call_batch":
        calls = get(row, "expected_action.calls", list, "a list of calls")
        require(calls, "expected_action.calls", calls, "at least one call")
        for i, call in enumerate(calls):
            check_call(call, f"expected_action.calls.{i}.")
    else:
        expected = "function_call, function_call_batch or message"
        require(kind == "function_call", "expected_action.type", kind, expected)
        check_call(action, "expected_action.")
    field = "tool_call_comparator_config"
    for name, value in (get(row, field, dict | None, "settings or null") or {}).items():
        require(name in SETTINGS, f"{field}.{name}", value, "one of: " + ", ".join(SETTINGS))
        usual = SETTINGS[name]
        if isinstance(usual, float):
            fits = type(value) in (int, float) and 0 <= value <= 0.5
            require(fits, f"{field}.{name}", value, "a number from 0 to 0.5")
        elif isinstance(usual, bool):
            require(isinstance(value, bool), f"{field}.{name}", value, "true or false")
        else:
            require(value in MODES, f"{field}.{name}", value, "one of: " + ", ".join(MODES))


def needs(row: dict) -> tuple[Need, ...]:
    """A parser of tool calls."""
    return (TOOL_PARSER,)


def verify(row: dict, response: str) -> Reward:
    """Reward in [0, 1]; `reason` is why it is less than 1."""
    response = Response.of(response)
    action = row["expected_action"]
    calls = response.tool_calls
    missing = unfinished(final_text(response))
    if action["type"] == "message":
        called = "a tool call" if calls or response.malformed == "tool_call" else None
        reason = called or missing
        return Reward(0.0, {"reason": reason}) if reason else Reward(1.0)
    if not calls:
        return Reward(0.0, {"reason": missing or "no tool call"})
    known = (own for name, own in BY_AGENT.items() if row["agent_ref"]["name"].startswith(name))
    settings = SETTINGS | next(known, {}) | (row.get("tool_call_comparator_config") or {})
    expected = action["calls"] if action["type"] == "function_call_batch" else [action]
    value = score(expected, calls, settings)
    return Reward(value, {"reason": "other tool calls"} if value < 1 else {})


def score(expected: list[dict], actual: list[dict], settings: dict[str, Any]) -> float:
    """The reward of calls, at least one, in any order."""
    likeness = settings["word_count_similarity_threshold"]
    tolerance = settings["floating_point_comparison_threshold"]
    named = [(call.get("name"), arguments(call)) for call in actual]

    def fitting(call: dict) -> Iterator[int]:
        wanted = arguments(call)
        for i, (name, found) in enumerate(named):
            if name == call["name"] and same(wanted, found, likeness, tolerance):
                yield i

    # More candidates than there are expected calls cannot help.
    matched = matching([list(islice(fitting(call), len(expected))) for call in expected])
    if not settings["parallel_tool_call_rewarding"]:
        return float(matched == len(expected))
    surplus = len(actual) - len(expected)
    allowed = settings["allow_superset"] if surplus > 0 else settings["allow_subset"]
    if surplus and not allowed:
        return 0.0
    if settings["parallel_tool_call_reward_mode"] == "f1":
        return 2 * matched / (len(expected) + len(actual))
    needed = min(len(expected), len(actual)) if settings["allow_subset"] else len(expected)
    if settings["parallel_tool_call_reward_mode"] == "fractional":
        return matched / needed
    return float(matched == needed)
