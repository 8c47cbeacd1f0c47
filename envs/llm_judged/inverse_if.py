"""Unusual instructions, graded by a rubric: the share of its criteria that are met.

Row: `rubric` ([{"id", "criteria"}]), `prompt`, `reference_response`, and the judge's own words:
`judge_system_prompt` and `judge_prompt_template` with the places {prompt}, {model_response},
{standard_response} and {criteria}. Judged, as in NeMo-Gym's resources_servers/inverse_if: the text
behind the thought, by the judge `general`, one call for each criterion. Its verdict is the "result"
of a JSON object, PASS or FAIL: that of the first fenced block, else any, else the last of the five
last lines that has such a word. Rewards are in [0, 1].

Deliberate deviations: a place that the template lacks or does not know is a bad row; an answer that
is empty or cut off earns 0 unseen; a reply with neither is counted, and the criterion fails. Lines
of the template and verdicts in an answer get a space (envs/judge/prompts.py), and of an answer that
holds a verdict none is read that the reply may quote. There a quoted PASS is paid.
Known leaks: those of the judge.
"""

import functools
import json
import re
import string
from typing import Any

from core.waits import together
from envs import Reward, final_text, get, require, unfinished
from envs.judge import judge
from envs.judge.prompts import apart
from envs.judge.verdicts import own_line
from envs.services import Need

AGENTS = ("inverse_if_simple_agent", "inverse_if")
JUDGE = "general"
SAMPLING: dict[str, Any] = {"temperature": 0.7, "top_p": 0.8, "max_tokens": 8192}
PLACES = {"prompt", "model_response", "standard_response", "criteria"}
FENCED = re.compile(r"```(?:json)?\s*(\{.*?\})\s*```", re.DOTALL)
OBJECT = re.compile(r'\{[^{}]*"result"\s*:\s*"(?:PASS|FAIL)"[^{}]*\}', re.IGNORECASE)
RESULT = re.compile(r"""["']result["']\s*:\s*["'](?=PASS|FAIL)""", re.IGNORECASE)
WORDS = ("PASS", "FAIL")


def needs(row: dict) -> tuple[Need, ...]:
    """The judge `general`."""
    return (judge.need(JUDGE),)


def check(row: dict) -> None:
    """Raises ValueError unless there are criteria, and a template with the known places."""
    rubric = get(row, "rubric", list, "a list of criteria")
    require(rubric, "rubric", rubric, "at least one criterion")
    for i, item in enumerate(rubric):
        criterion = get(item, "criteria", str, "a criterion", f"rubric[{i}].")
        require(criterion.strip(), f"rubric[{i}].criteria", criterion, "a criterion")
    for name in ("prompt", "reference_response", "judge_system_prompt"):
        get(row, name, str | None, "a text or null")
    template = get(row, "judge_prompt_template", str, "the judge's question")
    try:
        parts = [part for part in string.Formatter().parse(template) if part[1] is not None]
    except ValueError as error:
        require(False, "judge_prompt_template", template, f"a template of str.format ({error})")
    names = {name for _, name, _, _ in parts}
    plain = all(not spec and not conversion for _, _, spec, conversion in parts)
    good = plain and {"model_response", "criteria"} <= names <= PLACES
    expected = "the places {model_response} and {criteria}, perhaps {prompt}, {standard_response}"
    require(good, "judge_prompt_template", template, expected)


async def verify(row: dict, response: str) -> Reward:
    """The mean over the rubric; `met` are the numbers of criteria that are. Raises CheckerError."""
    text = final_text(response)
    if reason := unfinished(text):
        return Reward(0.0, {"reason": reason})
    scores = await together(score(row, item["criteria"], text) for item in row["rubric"])
    met = [i for i, value in enumerate(scores) if value]
    return Reward(sum(scores) / len(scores), {"met": met})


async def score(row: dict, criteria: str, text: str) -> float:
    """1.0 where the judge gives PASS for one criterion. Raises CheckerError."""
    filled = row["judge_prompt_template"].format(
        prompt=row.get("prompt") or "",
        model_response=apart(text, [*delimiters(row["judge_prompt_template"]), *spoken(text)]),
        standard_response=row.get("reference_response") or "",
        criteria=criteria,
    )
    system = row.get("judge_system_prompt")
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": filled})
    found = await judge.ask(JUDGE, messages, lambda reply: verdict(reply, text), **SAMPLING)
    return float(found == "PASS")


@functools.cache
def delimiters(template: str) -> list[str]:
    """The lines of a template's own text that have a letter; all of a part that has none."""
    found = []
    for own, *_ in string.Formatter().parse(template):
        lines = [line.strip() for line in own.split("\n") if len(line.strip()) > 1]
        found += [line for line in lines if re.search(r"[^\W\d_]", line)] or lines
    return list(dict.fromkeys(found))


def spoken(answer: str) -> list[str]:
    """The beginnings of the verdicts that an answer holds."""
    return list(dict.fromkeys(found[0] for found in RESULT.finditer(answer)))


def verdict(reply: str, answer: str = "") -> str | None:
    """PASS or FAIL; None where the reply has neither.

    Where the answer holds such an object, PASS only where an object ends the reply, and FAIL is not
    there. Where it holds the word, a word is read only as the last line, and as no line of it.
    """
    if said := of_object(reply):
        sure = reply.rstrip("` \n").endswith("}") and "FAIL" not in reply.upper()
        return said if sure or not spoken(answer) else "FAIL"
    if "PASS" in answer.upper():
        return own_line(reply, answer, WORDS)
    lines = reversed(reply.strip().upper().split("\n")[-5:])
    return next((word for line in lines for word in WORDS if word in line), None)


def of_object(reply: str) -> str | None:
    """PASS or FAIL, the result of a JSON object; None where no object has one."""
    for found in filter(None, (FENCED.search(reply), OBJECT.search(reply))):
        try:
            result = json.loads(found[found.lastindex or 0])["result"].upper().strip()
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            continue
        if result in WORDS and '"result"' in found[0]:
            return result
    return None
