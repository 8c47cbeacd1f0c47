"""Calendars kept over a conversation: 1.0 if all events meet their constraints, else 0.0.

Row: `exp_cal_state`, event id -> `duration` (minutes), `min_time`, `max_time`, and `constraint`:
null, "before T", "after T", "between T and T" or "at T". Judged: the first JSON list of objects in
the text after the reasoning, as in NeMo-Gym's resources_servers/calendar. It must contain each
expected event with its duration, within its times, and no two events may overlap. Other fields of
an event, such as its name, are not compared.

If two events have the same id, the last is judged; an event that is listed twice does not overlap
itself. A text with `<think>` that no parser has read earns 0, as in NeMo-Gym. Deliberate
deviations: an event's texts may contain brackets, with which NeMo-Gym's regular expression finds no
list; 12:-1 is not a time.

Known leak: if a row expects no events, good and bad answers earn the same reward.
"""

import itertools
import json
import re
from typing import NamedTuple

from envs import Reward, final_text, get, require, unfinished
from rollout.response import Response

AGENTS = ("calendar_simple_agent", "calendar")
TIME = re.compile(r"\s*(\d{1,4})(?::(\d{1,4}))?\s*(am|pm)?\s*", re.ASCII)
CONSTRAINT = re.compile(r"(before|after|at) (.+)|(between) (.+) and (.+)")
Value = float | str | list | dict | None  # a JSON value


class Bounds(NamedTuple):
    """A constraint, with times in minutes of the day."""

    kind: str  # "before", "after", "at" or "between"
    first: int
    last: int  # end of "between"; else the same as `first`


def check(row: dict) -> None:
    """Raises ValueError unless `exp_cal_state` has the duration and times of each event."""
    expected = get(row, "exp_cal_state", dict, "an object that maps event ids to events")
    for name in expected:
        at = f"exp_cal_state.{name}."
        get(expected, f"{name}.duration", int, "minutes", "exp_cal_state.")
        for end in ("min_time", "max_time"):
            value = get(expected[name], end, str, "a time", at)
            require(minutes(value) is not None, at + end, value, "a time such as 10:00")
        rule = get(expected[name], "constraint", str | None, "a text or null", at)
        expect = 'null, "before T", "after T", "between T and T" or "at T"'
        require(rule is None or bounds(rule), at + "constraint", rule, expect)


def verify(row: dict, response: str) -> Reward:
    """Returns 0.0 or 1.0; `reason` is the error."""
    if not isinstance(response, Response) and "<think>" in response:
        return Reward(0.0, {"reason": "the reasoning was not parsed"})
    text = final_text(response)
    reason = unfinished(text)
    if not reason and row["exp_cal_state"]:
        reason = problem(row["exp_cal_state"], text)
    return Reward(0.0, {"reason": reason}) if reason else Reward(1.0)


def problem(expected: dict[str, dict], text: str) -> str:
    """Returns the error in a text's calendar; "" if there is none."""
    events = {}
    distinct = {}
    for event in first_list(text):
        start = minutes(event.get("start_time"))
        duration = event.get("duration")
        if start is None or not isinstance(duration, int | float) or isinstance(duration, bool):
            return "malformed event"
        span = (start, start + duration)
        events[str(event.get("event_id"))] = span
        distinct[json.dumps(event, sort_keys=True)] = span
    if events.keys() != expected.keys():
        return "other events" if events else "no calendar"
    spans = sorted(distinct.values())
    for (_, end), (start, _) in itertools.pairwise(spans):
        if end > start:
            return "events overlap"
    if all(fits(span, expected[name]) for name, span in events.items()):
        return ""
    return "constraint violated"


def first_list(text: str) -> list[dict[str, Value]]:
    """Returns the first JSON list of objects in a text; [] if there is none."""
    decoder = json.JSONDecoder()
    for start in re.finditer(r"\[\s*\{", text):
        try:
            found, _ = decoder.raw_decode(text, start.start())
        except (ValueError, RecursionError):
            return []
        return found if all(isinstance(event, dict) for event in found) else []
    return []


def fits(span: tuple[float, float], expected: dict) -> bool:
    """Returns whether an event has its duration and times; `span` is in minutes of the day."""
    start, end = span
    earliest = minutes(expected["min_time"]) or 0
    latest = minutes(expected["max_time"]) or 0
    if end - start != expected["duration"] or start < earliest or end > latest:
        return False
    rule = bounds(expected["constraint"] or "")
    if rule is None:
        return True
    if rule.kind == "at":
        return start == rule.first
    if rule.kind == "before":
        return end <= rule.last
    if rule.kind == "after":
        return start >= rule.first
    return rule.first <= start and end <= rule.last


def bounds(rule: str) -> Bounds | None:
    """Returns the bounds that a constraint sets; None if the text is not a constraint."""
    found = CONSTRAINT.fullmatch(rule)
    if not found:
        return None
    first = minutes(found[2] or found[4])
    last = minutes(found[5] or found[2])
    if first is None or last is None:
        return None
    return Bounds(found[1] or found[3], first, last)


def minutes(time: Value) -> int | None:
    """Returns the minute of the day for "14:30", "2:30pm" or "2pm"; None if it is not a time."""
    found = TIME.fullmatch(time) if isinstance(time, str) else None
    if not found or not (found[2] or found[3]):
        return None
    hour = int(found[1])
    if found[3] and hour == 12:
        hour = 0
    if found[3] == "pm":
        hour += 12
    return 60 * hour + int(found[2] or 0)
