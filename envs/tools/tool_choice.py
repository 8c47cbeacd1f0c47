"""An agent's next step, which is the expected calls or a message: 0.0 to 1.0.

Row: `expected_action`: {"type": "function_call", "name", "arguments": JSON text}, {"type":
"function_call_batch", "calls": [such calls]} or {"type": "message", "content"};
`tool_call_comparator_config` (optional): some fields of Settings, which NeMo-Gym keeps in its
server's configuration, resources_servers/single_step_tool_use_with_argument_comparison. The agent's
name determines the others (BY_AGENT). If calls are expected, each must be among the answer's calls,
in any order; text next to them is not judged. Names must be equal, and arguments must have the same
types, keys, lengths, numbers (fractions within 1e-6) and texts. For texts of two words or more, the
shared words must make up at least `word_count_similarity_threshold` of the words of both; equal
texts reach 0.5. The reward is 0.0 or 1.0. With `parallel_tool_call_rewarding` the number of calls
counts too, and the modes `fractional` and `f1` give a partial reward if only some of the calls
match. If a message is expected, any text without a call earns 1.0.

Deliberate deviations: true is not 1, and a message with a broken tool call earns 0. The package
nemo-gym 0.4.0 is older: it looks only at the first call, and has no batches.

Known leaks: any message is rewarded. So are more calls than expected, unless their number counts.
At the threshold 0.1 "the cat" equals "the dog", and at 0.0, as in SWE 1, any two texts of several
words are equal: then the reward depends only on the tool, the names of the arguments, and the
values that are not texts.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

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


@dataclass(frozen=True)
class Settings:
    """The comparator's settings, with NeMo-Gym's names and defaults."""

    word_count_similarity_threshold: float = 0.1
    floating_point_comparison_threshold: float = 1e-6
    parallel_tool_call_rewarding: bool = False
    allow_subset: bool = False
    allow_superset: bool = False
    parallel_tool_call_reward_mode: str = "binary_strict"  # one of MODES


USUAL = Settings()
FIELDS = tuple(field.name for field in dataclasses.fields(Settings))
BY_AGENT = {  # the beginning of an agent's name -> its settings
    "search_pivot": Settings(word_count_similarity_threshold=0.3),
    "swe_pivot": Settings(word_count_similarity_threshold=0.0),
    "droid_pivot": Settings(word_count_similarity_threshold=0.0),
    "parallel_tool_calls": Settings(
        parallel_tool_call_rewarding=True,
        allow_subset=True,
        allow_superset=True,
        parallel_tool_call_reward_mode="f1",
    ),
}
MODES = ("binary_strict", "fractional", "f1")


def check(row: dict) -> None:
    """Raises ValueError unless `expected_action` has a known type and the settings are valid."""
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
        at = f"{field}.{name}"
        require(name in FIELDS, at, value, "one of: " + ", ".join(FIELDS))
        usual = getattr(USUAL, name)
        if isinstance(usual, float):
            fits = type(value) in (int, float) and 0 <= value <= 0.5
            require(fits, at, value, "a number from 0 to 0.5")
        elif isinstance(usual, bool):
            require(isinstance(value, bool), at, value, "true or false")
        else:
            require(value in MODES, at, value, "one of: " + ", ".join(MODES))


def needs(row: dict) -> tuple[Need, ...]:
    """A tool-call parser."""
    return (TOOL_PARSER,)


def verify(row: dict, response: str) -> Reward:
    """Returns a reward in [0, 1]; `reason` explains why it is less than 1."""
    response = Response.of(response)
    action = row["expected_action"]
    calls = response.tool_calls
    missing = unfinished(final_text(response))
    if action["type"] == "message":
        if calls or response.malformed == "tool_call":
            return Reward(0.0, {"reason": "a tool call"})
        return Reward(0.0, {"reason": missing}) if missing else Reward(1.0)
    if not calls:
        return Reward(0.0, {"reason": missing or "no tool call"})
    expected = action["calls"] if action["type"] == "function_call_batch" else [action]
    value = score(expected, calls, settings_of(row))
    return Reward(value, {"reason": "other tool calls"} if value < 1 else {})


def settings_of(row: dict) -> Settings:
    """Returns a row's settings; those that it lacks are its agent's."""
    agent = row["agent_ref"]["name"]
    of_agent = (settings for name, settings in BY_AGENT.items() if agent.startswith(name))
    own = row.get("tool_call_comparator_config") or {}
    return dataclasses.replace(next(of_agent, USUAL), **own)


def score(
    expected: Sequence[Mapping[str, str]], actual: Sequence[Mapping[str, str]], settings: Settings
) -> float:
    """Returns the reward for the answer's calls, at least one, in any order."""
    likeness = settings.word_count_similarity_threshold
    tolerance = settings.floating_point_comparison_threshold
    named = [(call.get("name"), arguments(call)) for call in actual]

    def fitting(call: Mapping[str, str]) -> Iterator[int]:
        wanted = arguments(call)
        for i, (name, found) in enumerate(named):
            if name == call["name"] and same(wanted, found, likeness, tolerance):
                yield i

    # More candidates than there are expected calls cannot help.
    matched = matching([list(islice(fitting(call), len(expected))) for call in expected])
    if not settings.parallel_tool_call_rewarding:
        return float(matched == len(expected))
    surplus = len(actual) - len(expected)
    is_allowed = settings.allow_superset if surplus > 0 else settings.allow_subset
    if surplus and not is_allowed:
        return 0.0
    if settings.parallel_tool_call_reward_mode == "f1":
        return 2 * matched / (len(expected) + len(actual))
    needed = min(len(expected), len(actual)) if settings.allow_subset else len(expected)
    if settings.parallel_tool_call_reward_mode == "fractional":
        return matched / needed
    return float(matched == needed)
