"""Compares a terminal agent's actions with a teacher's, by the rules of the agent's harness.

The rules come from NeMo-Gym's resources_servers/terminal_multi_harness. Each rule returns the
error, or "". For a tool without a rule, the name must be the same, and the call may have only keys
that the teacher's call has.
"""

import json
from collections.abc import Callable
from difflib import SequenceMatcher
from typing import TypedDict

from jsonschema import Draft202012Validator

from envs import Json

Arguments = dict[str, Json]
Rule = Callable[[Arguments, Arguments, float], str]


class Action(TypedDict, total=False):
    """A message, a tool call, or a batch of calls, depending on `type`."""

    type: str  # "message", "function_call" or "function_call_batch"; missing in a batch
    content: str  # text of a message
    name: str  # name of a call's tool
    arguments: str  # JSON text of a call's arguments
    calls: "list[Action]"  # the calls in a batch


def ratio(expected: str, actual: str, threshold: float) -> float:
    """Returns difflib's similarity, or an upper bound on it that is below the threshold."""
    matcher = SequenceMatcher(None, expected, actual)
    for quick in (matcher.real_quick_ratio, matcher.quick_ratio):
        if (bound := quick()) < threshold:
            return bound
    return matcher.ratio()


def difference(
    wanted: Action, found: Action, schemas: dict[str, dict], bound: float, harness: str
) -> str:
    """Returns the error in an action, or ""."""
    if wanted["type"] != found["type"]:
        return f"a {found['type']}, expected a {wanted['type']}"
    if wanted["type"] == "message":
        return "" if found["content"].strip() else "an empty message"
    if wanted["type"] == "function_call":
        return call_difference(wanted, found, schemas, bound, harness)
    if len(wanted["calls"]) != len(found["calls"]):
        return "another number of calls"
    expected = sorted(wanted["calls"], key=order)
    actual = sorted(found["calls"], key=order)
    for a, b in zip(expected, actual, strict=True):
        if error := call_difference(a, b, schemas, bound, harness):
            return error
    return ""


def order(call: Action) -> tuple[str, str]:
    """Returns a call's sorting key in a batch, because a batch has no fixed order."""
    decoded = decode(call)
    return call["name"], call["arguments"] if decoded is None else canonical(decoded)


def canonical(value: Json) -> str:
    return json.dumps(value, sort_keys=True)


def decode(call: Action) -> Arguments | None:
    """Returns a call's arguments; None if they are not a JSON object."""
    try:
        decoded = json.loads(call["arguments"])
    except (ValueError, RecursionError):
        return None
    return decoded if isinstance(decoded, dict) else None


def call_difference(
    wanted: Action, found: Action, schemas: dict[str, dict], bound: float, harness: str
) -> str:
    """Returns the error in a call, or ""."""
    expected = decode(wanted)
    actual = decode(found)
    schema = schemas.get(found["name"])
    if expected is None or actual is None:
        return "arguments are not a JSON object"
    if schema is None:
        return "no such tool"
    parse_texts(actual, schema)
    if not Draft202012Validator(schema).is_valid(actual):
        return "arguments do not fit the tool"
    if wanted["name"] != found["name"]:
        return "another tool"
    if not actual.keys() <= expected.keys():
        return "more arguments"
    rule = RULES.get(harness, {}).get(found["name"])
    return rule(expected, actual, bound) if rule else ""


def parse_texts(actual: Arguments, schema: dict) -> None:
    """Parses lists and objects that were written as text."""
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return
    for name, of in properties.items():
        declared = of.get("type") if isinstance(of, dict) else None
        kind = {"array": list, "object": dict}.get(str(declared))
        text = actual.get(name)
        if kind and isinstance(text, str):
            parsed = decode({"arguments": '{"value": ' + text + "}"})
            if parsed and parsed.keys() == {"value"} and isinstance(parsed["value"], kind):
                actual[name] = parsed["value"]


def equal(*names: str) -> Rule:
    """Returns a rule by which these arguments must be the same."""

    def rule(expected: Arguments, actual: Arguments, bound: float) -> str:
        other = [name for name in names if expected.get(name) != actual.get(name)]
        return f"another {other[0]}" if other else ""

    return rule


def alike(name: str, plain: Callable[[str], str]) -> Rule:
    """Returns a rule by which this argument's normalised texts must reach the similarity bound."""

    def rule(expected: Arguments, actual: Arguments, bound: float) -> str:
        wanted = expected.get(name)
        found = actual.get(name)
        if not isinstance(wanted, str) or not isinstance(found, str):
            return f"no {name}"
        return "" if ratio(plain(wanted), plain(found), bound) >= bound else f"another {name}"

    return rule


def command(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n").strip()


def words(text: str) -> str:
    return text.lower().strip()


def filled(name: str, rule: Rule) -> Rule:
    """Returns a rule that holds if `rule` does and neither action's argument `name` is empty."""

    def both(expected: Arguments, actual: Arguments, bound: float) -> str:
        for arguments in (expected, actual):
            value = arguments.get(name)
            if not isinstance(value, str) or not value.strip():
                return f"no {name}"
        return rule(expected, actual, bound)

    return both


def plan(expected: Arguments, actual: Arguments, bound: float) -> str:
    """Requires a plan, with any content."""
    value = actual.get("plan")
    empty = not value.strip() if isinstance(value, str) else value in (None, [], {})
    return "an empty plan" if empty else ""


def result(expected: Arguments, actual: Arguments, bound: float) -> str:
    """Requires results that are similar as JSON."""
    wanted = canonical(expected.get("result"))
    found = canonical(actual.get("result"))
    return "" if ratio(wanted, found, bound) >= bound else "another result"


def todos(expected: Arguments, actual: Arguments, bound: float) -> str:
    """Requires the same number of entries, each with the same status and priority."""
    wanted = expected.get("todos")
    found = actual.get("todos")
    if not isinstance(wanted, list) or not isinstance(found, list) or len(wanted) != len(found):
        return "other todos"
    for a, b in zip(wanted, found, strict=True):
        if not isinstance(a, dict) or not isinstance(b, dict):
            return "other todos"
        if any(a.get(name) != b.get(name) for name in ("status", "priority")):
            return "other todos"
    return ""


def edit(expected: Arguments, actual: Arguments, bound: float) -> str:
    """Requires the same file, and any change."""
    if actual.get("oldString") == actual.get("newString"):
        return "no change"
    return equal("filePath", "replaceAll")(expected, actual, bound)


def url(expected: Arguments, actual: Arguments, bound: float) -> str:
    """Requires the same address, regardless of case."""
    same = words(str(expected["url"])) == words(str(actual["url"]))
    return "" if same else "another url"


def finish(expected: Arguments, actual: Arguments, bound: float) -> str:
    """Requires the same paths in any order, and a similar reason."""
    paths = []
    for arguments in (expected, actual):
        given = arguments.get("paths")
        if not isinstance(given, list) or not given or not all(isinstance(p, str) for p in given):
            return "no paths"
        paths.append(sorted(path.strip() for path in given))
    if paths[0] != paths[1]:
        return "other paths"
    return alike("reason", words)(expected, actual, bound)


RULES: dict[str, dict[str, Rule]] = {
    "codex": {"exec_command": alike("cmd", command), "update_plan": plan},
    "agent006": {"execute_python": filled("code", alike("code", str)), "return_result": result},
    "opencode": {
        "bash": alike("command", command),
        "todowrite": todos,
        "read": equal("filePath"),
        "write": equal("filePath"),
        "edit": edit,
        "glob": equal("pattern", "path"),
        "grep": equal("pattern", "path", "include"),
        "webfetch": equal("url", "format"),
        "skill": equal("name"),
        "task": equal("subagent_type"),
    },
    "stirrup": {
        "code_exec": alike("cmd", command),
        "web_search": filled("query", alike("query", words)),
        "fetch_web_page": filled("url", url),
        "finish": filled("reason", finish),
    },
}
