"""Answers of the agent Terminus: JSON objects with commands for a terminal."""

import json
import re
from typing import Any

NUMBER = (int, float)
# Fields of an answer and of each of its commands; ? for one that may be missing.
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
    """The error in an answer of Terminus; "" for none."""
    from envs.terminals.harnesses import ratio

    bound = wanted["threshold"]
    expected, actual = parsed(wanted["expected_answer"]), parsed(text)
    if not has_form(actual, wanted["form"]) or not isinstance(expected, dict):
        return "not of the form"
    done = [
        any(a.get(k) for k in ("task_complete", "is_task_complete")) for a in (expected, actual)
    ]
    if done[0] and not done[1]:
        return "the task is complete"
    keys = ["".join(c["keystrokes"] for c in answer["commands"]) for answer in (expected, actual)]
    empty = [not answer["commands"] for answer in (expected, actual)]
    alike = float(empty[0] == empty[1]) if any(empty) else ratio(keys[0], keys[1], bound)
    return "" if alike >= bound else "other commands"


def has_form(answer: Any, harness: str) -> bool:
    """Whether an answer has the fields of a harness, and no other."""
    fields, of_command = FORMS.get(harness, ({"": str}, {}))
    return fits(answer, fields) and all(fits(c, of_command) for c in answer["commands"])


def fits(value: Any, fields: dict) -> bool:
    """Whether a value is an object with these fields; true and false are no numbers."""
    if not isinstance(value, dict):
        return False
    for name, kind in fields.items():
        given = value.get(name.rstrip("?"))
        wrong = not isinstance(given, kind) or (kind is NUMBER and isinstance(given, bool))
        if wrong and (name.rstrip("?") in value or not name.endswith("?")):
            return False
    return value.keys() <= {name.rstrip("?") for name in fields}


def keys(command: dict) -> str:
    """The keys of a command; "C-c" and the like, alone, are keys, as tmux names them."""
    key = re.fullmatch(r"C-([a-z])", command["keystrokes"])
    return chr(ord(key[1]) & 31) if key else str(command["keystrokes"])


def parsed(text: str) -> Any:
    """The value of a JSON text; None for another text."""
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return None
