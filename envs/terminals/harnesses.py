"""Actions of terminal agents, compared with those that a teacher took, by the rules of its harness.

The rules are those of NeMo-Gym's resources_servers/terminal_multi_harness. Each returns the error,
"" for none. A tool without a rule needs its name and no keys that the teacher has not.
"""

import json
from collections.abc import Callable
from difflib import SequenceMatcher
from typing import Any

from jsonschema import Draft202012Validator

Arguments = dict[str, Any]
Rule = Callable[[Arguments, Arguments, float], str]


def ratio(expected: str, actual: str, threshold: float) -> float:
    """difflib's likeness, or an upper bound of it that is below the threshold."""
    matcher = SequenceMatcher(None, expected, actual)
    for quick in (matcher.real_quick_ratio, matcher.quick_ratio):
        if (bound := quick()) < threshold:
            return bound
    return matcher.ratio()


def difference(
    wanted: Any, found: Any, schemas: dict[str, dict], bound: float, harness: str
) -> str:
    """The error in an action; both have `type`, and `content`, a call's fields or `calls`."""
    if wanted["type"] != found["type"]:
        return f"a {found['type']}, expected a {wanted['type']}"
    if wanted["type"] == "message":
        return "" if found["content"].strip() else "an empty message"
    if wanted["type"] == "function_call":
        return call_difference(wanted, found, schemas, bound, harness)
    if len(wanted["calls"]) != len(found["calls"]):
        return "another number of calls"
    pairs = zip(*(sorted(batch["calls"], key=order) for batch in (wanted, found)), strict=True)
    wrong = (call_difference(a, b, schemas, bound, harness) for a, b in pairs)
    return next(filter(None, wrong), "")


def order(call: dict) -> tuple[str, str]:
    """The sorting key of a call in a batch, as the order of a batch is free."""
    decoded = decode(call)
    return call["name"], call["arguments"] if decoded is None else canonical(decoded)


def canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def decode(call: dict) -> Arguments | None:
    """A call's arguments; None for what is no JSON object."""
    try:
        decoded = json.loads(call["arguments"])
    except (ValueError, RecursionError):
        return None
    return decoded if isinstance(decoded, dict) else None


def call_difference(
    wanted: dict, found: dict, schemas: dict[str, dict], bound: float, harness: str
) -> str:
    """The error in a call, "" for none."""
    expected, actual = decode(wanted), decode(found)
    schema = schemas.get(found["name"])
    if expected is None or actual is None:
        return "arguments are no JSON object"
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
    for name, of in properties.items() if isinstance(properties, dict) else ():
        kind = {"array": list, "object": dict}.get(str(isinstance(of, dict) and of.get("type")))
        if kind and isinstance(actual.get(name), str):
            parsed = decode({"arguments": '{"value": ' + actual[name] + "}"})
            if parsed and parsed.keys() == {"value"} and isinstance(parsed["value"], kind):
                actual[name] = parsed["value"]


def equal(*names: str) -> Rule:
    """These arguments are the same."""

    def rule(expected: Arguments, actual: Arguments, bound: float) -> str:
        other = [name for name in names if expected.get(name) != actual.get(name)]
        return f"another {other[0]}" if other else ""

    return rule


def alike(name: str, plain: Callable[[str], str]) -> Rule:
    """The normalised texts of this argument reach the bound of likeness."""

    def rule(expected: Arguments, actual: Arguments, bound: float) -> str:
        texts = expected.get(name), actual.get(name)
        if not all(isinstance(text, str) for text in texts):
            return f"no {name}"
        wanted, found = (plain(str(text)) for text in texts)
        return "" if ratio(wanted, found, bound) >= bound else f"another {name}"

    return rule


def command(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n").strip()


def words(text: str) -> str:
    return text.lower().strip()


def filled(name: str, rule: Rule) -> Rule:
    """Neither text of this argument is empty, and the rule holds."""

    def both(expected: Arguments, actual: Arguments, bound: float) -> str:
        for arguments in (expected, actual):
            value = arguments.get(name)
            if not isinstance(value, str) or not value.strip():
                return f"no {name}"
        return rule(expected, actual, bound)

    return both


def plan(expected: Arguments, actual: Arguments, bound: float) -> str:
    """There is a plan, of any content."""
    value = actual.get("plan")
    empty = not value.strip() if isinstance(value, str) else value in (None, [], {})
    return "an empty plan" if empty else ""


def result(expected: Arguments, actual: Arguments, bound: float) -> str:
    """The results are alike as JSON."""
    wanted, found = (canonical(arguments.get("result")) for arguments in (expected, actual))
    return "" if ratio(wanted, found, bound) >= bound else "another result"


def todos(expected: Arguments, actual: Arguments, bound: float) -> str:
    """As many entries, each with the same status and priority."""
    wanted, found = expected.get("todos"), actual.get("todos")
    if not isinstance(wanted, list) or not isinstance(found, list) or len(wanted) != len(found):
        return "other todos"
    for a, b in zip(wanted, found, strict=True):
        if not isinstance(a, dict) or not isinstance(b, dict):
            return "other todos"
        if any(a.get(name) != b.get(name) for name in ("status", "priority")):
            return "other todos"
    return ""


def edit(expected: Arguments, actual: Arguments, bound: float) -> str:
    """The same file, and a change, whatever it is."""
    if actual.get("oldString") == actual.get("newString"):
        return "no change"
    return equal("filePath", "replaceAll")(expected, actual, bound)


def url(expected: Arguments, actual: Arguments, bound: float) -> str:
    """The same address, in any case of letters."""
    same = words(str(expected["url"])) == words(str(actual["url"]))
    return "" if same else "another url"


def finish(expected: Arguments, actual: Arguments, bound: float) -> str:
    """The same paths in any order, and an alike reason."""
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
