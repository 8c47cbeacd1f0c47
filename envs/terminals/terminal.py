"""A terminal agent's next action, compared with a teacher's: 1.0 if alike, else 0.0.

Terminus (terminal_pivot, terminus_judge): the text after the reasoning is a JSON object of the form
that `metadata.harness`, terminus_1 or terminus_2, asks for. Row: `expected_answer`, such an object
as text, and `threshold` (0.9). All keystrokes together must reach that similarity to the expected
ones, by difflib's ratio, and if the task is complete, the answer must say so. Source: NeMo-Gym's
resources_servers/terminus_judge, without its judge.

Calls (terminal_multi_harness): Row: `expected_action`, a message, a function_call or a
function_call_batch with `calls`; `declared_tools`, or the prompt's tools; `harness` and
`threshold` (0.9). The rules are in envs/terminals/harnesses.py.

Deliberate deviation: an answer that is empty or cut off earns 0.
Known leaks: analysis, plan and messages are not read; a tenth of the keystrokes may be anything;
terminus may call a task complete too early; edits and new files may contain any text.
"""

from collections.abc import Callable

from envs import Reward, final_text, get, require, unfinished
from envs.following.schemas import problem
from envs.sandbox.checkers import DEADLINE, MANY, Checkers
from envs.services import TOOL_PARSER, Need
from envs.terminals import terminus
from envs.terminals.harnesses import Action, difference
from envs.terminals.terminus import parsed
from rollout.response import Response

AGENTS = (
    "terminal_pivot_simple_agent", "terminus_judge_simple_agent",
    "terminus_judge_string_only_simple_agent", "terminal_multi_harness_simple_agent",
    "terminal_multi_harness_agent006_agent", "terminal_multi_harness_codex_agent",
    "terminal_multi_harness_opencode_agent", "terminal_multi_harness_stirrup_agent",
    "terminal_pivot", "terminus_judge", "terminal_multi_harness",
)  # fmt: skip
THRESHOLD = 0.9


def needs(row: dict) -> tuple[Need, ...]:
    """A tool-call parser, for rows that expect a call."""
    return (TOOL_PARSER,) if "expected_action" in row else ()


def check(row: dict) -> None:
    """Raises ValueError unless the row expects an action of a known form."""
    threshold = get(row, "threshold", int | float | None, "a number from 0 to 1, or null")
    require(threshold is None or 0 <= threshold <= 1, "threshold", threshold, "from 0 to 1")
    if "expected_action" not in row:
        harness = get(row, "metadata.harness", str, "the name of a harness")
        forms = terminus.FORMS
        require(harness in forms, "metadata.harness", harness, "one of: " + ", ".join(forms))
        text = get(row, "expected_answer", str, "a JSON object as text")
        fits = terminus.has_form(parsed(text), harness)
        require(fits, "expected_answer", text, f"an answer of {harness}")
        return
    get(row, "harness", str | None, "the name of a harness or null")
    get(row, "declared_tools", list | None, "a list of tools or null")
    at = "declared_tools" if row.get("declared_tools") else "responses_create_params.tools"
    for i, tool in enumerate(tools(row)):
        get(tool, "name", str, "the name of a tool", f"{at}[{i}].")
        schema = get(tool, "parameters", dict | None, "a JSON schema or null", f"{at}[{i}].")
        why = problem(schema or {})
        require(not why, f"{at}[{i}].parameters", schema, f"a JSON schema (draft 2020-12): {why}")
    kind = get(row, "expected_action.type", str, "the kind of an action")
    kinds = ("message", "function_call", "function_call_batch")
    require(kind in kinds, "expected_action.type", kind, "one of: " + ", ".join(kinds))
    at = "expected_action."
    calls = {"message": [], "function_call": [row["expected_action"]]}.get(kind)
    for i, call in enumerate(get(row, at + "calls", list, "calls") if calls is None else calls):
        inner = at if calls else f"{at}calls[{i}]."
        get(call, "name", str, "the name of a tool", inner)
        arguments = get(call, "arguments", str, "a JSON object as text", inner)
        require(isinstance(parsed(arguments), dict), f"{inner}arguments", arguments, "JSON")


def tools(row: dict) -> list:
    """Returns the tools that a row declares, or else the tools of its prompt."""
    found = row.get("declared_tools") or row.get("responses_create_params", {}).get("tools") or []
    return [tool.get("function", tool) if isinstance(tool, dict) else tool for tool in found]


async def verify(row: dict, response: str) -> Reward:
    """Returns the reward 0.0 or 1.0; `reason` is the error. Raises CheckerError."""
    text = final_text(response)
    calls = [
        {"name": str(call.get("name")), "arguments": str(call.get("arguments"))}
        for call in Response.of(response).tool_calls
    ]
    if not calls and (reason := unfinished(text)):
        return Reward(0.0, {"reason": reason})
    wanted = {key: row.get(key) for key in ("expected_action", "expected_answer", "harness")}
    wanted["form"] = (row.get("metadata") or {}).get("harness")
    wanted["threshold"] = THRESHOLD if row.get("threshold") is None else row["threshold"]
    wanted["tools"] = tools(row)
    verdict = await checkers.run(DEADLINE, wanted=wanted, calls=calls, text=text)
    info = {k: v for k, v in verdict.items() if v and k != "value"}
    return Reward(float(not verdict["reason"]), info)


def make_check() -> Callable[..., dict]:
    """Returns the check, which runs in a child process because difflib may be slow."""

    def check(wanted: dict, calls: list[Action], text: str) -> dict:
        bound = wanted["threshold"]
        if not wanted["expected_action"]:
            return {"reason": terminus.difference(wanted, text)}
        found: Action = {"type": "message", "content": text}
        if len(calls) > 1:
            found = {"type": "function_call_batch", "calls": calls}
        elif calls:
            found = {**calls[0], "type": "function_call"}
        schemas = {tool["name"]: tool.get("parameters") or {} for tool in wanted["tools"]}
        harness = wanted["harness"] or ""
        try:
            return {"reason": difference(wanted["expected_action"], found, schemas, bound, harness)}
        except RecursionError:
            return {"reason": "nested too deep"}

    return check


checkers = Checkers("envs.terminals.terminal:make_check", answers=MANY)
