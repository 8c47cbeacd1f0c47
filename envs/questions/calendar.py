"""Calendars kept over a conversation: 1.0 if all events are where they must be, else 0.0.

Row: `exp_cal_state`, event id -> `duration` (minutes), `min_time`, `max_time`, and `constraint`:
null, "before T", "after T", "between T and T" or "at T". Judged: the first JSON list of objects in
the text after the thought, as in NeMo-Gym's resources_servers/calendar. It must hold each expected
event with its duration, inside its times, and no two events may overlap. Other fields of an event,
such as its name, are not compared. A row that expects no event pays any answer.

Of two events with one id the last is judged; an event that is given twice does not overlap itself.
A text with `<think>` that no parser has read earns 0, as there. Deliberate deviations: texts of an
event may hold brackets, with which NeMo-Gym's regular expression finds no list; 12:-1 is no time.

Known leak: a row that expects no event rewards good and bad answers alike.
"""

import json
import re
from typing import Any

from envs import Reward, final_text, get, require, unfinished
from rollout.response import Response

AGENTS = ("calendar_simple_agent", "calendar")
TIME = re.compile(r"\s*(\d{1,4})(?::(\d{1,4}))?\s*(am|pm)?\s*", re.ASCII)
CONSTRAINT = re.compile(r"(before|after|at) (.+)|(between) (.+) and (.+)")


def check(row: dict) -> None:
    """Raises ValueError unless `exp_cal_state` has duration and times of each event."""
    expected = get(row, "exp_cal_state", dict, "event ids with what is expected of them")
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
    """Reward 0.0 or 1.0; `reason` is the error."""
    if not isinstance(response, Response) and "<think>" in response:
        return Reward(0.0, {"reason": "the thought was not parsed"})
    text = final_text(response)
    reason = unfinished(text) or (row["exp_cal_state"] and problem(row["exp_cal_state"], text))
    return Reward(0.0, {"reason": reason}) if reason else Reward(1.0)


def problem(expected: dict[str, dict], text: str) -> str:
    """The error in the calendar of a text; "" for none."""
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
    if any(end > start for (_, end), (start, _) in zip(spans, spans[1:], strict=False)):
        return "events overlap"
    wrong = (name for name, span in events.items() if not fits(span, expected[name]))
    return "constraint violated" if any(wrong) else ""


def first_list(text: str) -> list[dict[str, Any]]:
    """The first JSON list of objects in a text; [] where there is none."""
    decoder = json.JSONDecoder()
    for start in re.finditer(r"\[\s*\{", text):
        try:
            found, _ = decoder.raw_decode(text, start.start())
        except (ValueError, RecursionError):
            return []
        return found if all(isinstance(event, dict) for event in found) else []
    return []


def fits(span: tuple[float, float], expected: dict) -> bool:
    """Whether an event, from minute to minute of the day, is as long and where it must be."""
    start, end = span
    earliest, latest = (minutes(expected[name]) or 0 for name in ("min_time", "max_time"))
    inside = earliest <= start and end <= latest
    if end - start != expected["duration"] or not inside:
        return False
    rule = bounds(expected["constraint"] or "")
    if rule is None:
        return True
    kind, first, last = rule
    if kind == "at":
        return start == first
    return (kind == "before" or start >= first) and (kind == "after" or end <= last)


def bounds(rule: str) -> tuple[str, int, int] | None:
    """Kind and times of a constraint, in minutes of the day; None for what is none."""
    found = CONSTRAINT.fullmatch(rule)
    if not found:
        return None
    kind = found[1] or found[3]
    first, last = minutes(found[2] or found[4]), minutes(found[5] or found[2])
    return None if first is None or last is None else (kind, first, last)


def minutes(time: object) -> int | None:
    """The minute of the day of "14:30", "2:30pm" or "2pm"; None for what is no time."""
    found = TIME.fullmatch(time) if isinstance(time, str) else None
    if not found or not (found[2] or found[3]):
        return None
    hour = int(found[1])
    if found[3]:
        hour = hour % 12 if hour == 12 else hour
        hour += 12 * (found[3] == "pm")
    return 60 * hour + int(found[2] or 0)
