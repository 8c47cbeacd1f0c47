"""Reads and compares the Terminus agent's answers: JSON objects with commands for a terminal."""

import json
import re
from typing import Any

from envs import Json

NUMBER = (int, float)
# Fields of an answer and of each of its commands; ? marks a field that may be missing.
FORMS: dict[str, tuple[dict, dict]] = {
    "terminus_1": (
        {"state_analysis": str, "explanation": str, "commands": list, "is_task_complete": bool},
        {"keystrokes": str, "is_blocking": bool, "timeout_sec": NUMBER},
    ),
    "terminus_2": (
        {"analysis": str, "plan": str, "commands": list, "task_complete?": bool},
        {"keystrokes": str, "duration?": NUMBER},
    ),
}


def difference(wanted: dict, text: str) -> str:
    """Returns the error in a Terminus answer, or ""."""
    from envs.terminals.harnesses import ratio

    bound = wanted["threshold"]
    expected = parsed(wanted["expected_answer"])
    actual = parsed(text)
    if not has_form(actual, wanted["form"]) or not isinstance(expected, dict):
        return "not of the form"
    if is_complete(expected) and not is_complete(actual):
        return "the task is complete"
    expected_keys = "".join(command["keystrokes"] for command in expected["commands"])
    actual_keys = "".join(command["keystrokes"] for command in actual["commands"])
    if expected["commands"] and actual["commands"]:
        alike = ratio(expected_keys, actual_keys, bound)
    else:
        alike = float(not expected["commands"] and not actual["commands"])
    return "" if alike >= bound else "other commands"


def is_complete(answer: dict) -> bool:
    """Returns whether an answer calls the task complete."""
    return bool(answer.get("task_complete") or answer.get("is_task_complete"))


def has_form(answer: Any, harness: str) -> bool:
    """Returns whether an answer has exactly the fields of a harness."""
    fields, of_command = FORMS.get(harness, ({"": str}, {}))
    return fits(answer, fields) and all(fits(c, of_command) for c in answer["commands"])


def fits(value: Json, fields: dict) -> bool:
    """Returns whether a value is an object with these fields; booleans are not numbers."""
    if not isinstance(value, dict):
        return False
    for name, kind in fields.items():
        given = value.get(name.rstrip("?"))
        wrong = not isinstance(given, kind) or (kind is NUMBER and isinstance(given, bool))
        if wrong and (name.rstrip("?") in value or not name.endswith("?")):
            return False
    return value.keys() <= {name.rstrip("?") for name in fields}


def keys(command: dict) -> str:
    """Returns a command's keys; "C-c" and the like, if alone, name one key, as in tmux."""
    key = re.fullmatch(r"C-([a-z])", command["keystrokes"])
    return chr(ord(key[1]) & 31) if key else str(command["keystrokes"])


def parsed(text: str) -> Any:
    """Returns a JSON text's value; None if it is not JSON."""
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return None
