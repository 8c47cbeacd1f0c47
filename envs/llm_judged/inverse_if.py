"""Unusual instructions, graded by a rubric: the share of its criteria that are met.

Row: `rubric` ([{"id", "criteria"}]), `prompt`, `reference_response`, and the judge's prompts:
`judge_system_prompt` and `judge_prompt_template` with the placeholders {prompt}, {model_response},
{standard_response} and {criteria}. Judged, as in NeMo-Gym's resources_servers/inverse_if: the text
after the reasoning, by the judge `general`, one call per criterion. Its verdict, PASS or FAIL, is
the "result" of the JSON object in the first fenced block, else of any JSON object, else the last of
these words in the final five lines of its reply. Rewards are in [0, 1].

Deliberate deviations: a row is bad if its template lacks a required placeholder or has an unknown
one; an answer that is empty or cut off earns 0 without being judged; a reply without a verdict is
counted, and the criterion fails. A space is inserted into lines of the template and verdicts in an
answer (envs/judge/prompts.py). If the answer contains a verdict, a verdict that the reply may only
be quoting is ignored; NeMo-Gym rewards a quoted PASS. Known leaks: the judge's.
"""

import functools
import json
import re
import string

from core.waits import together
from envs import Reward, final_text, get, require, unfinished
from envs.judge import judge
from envs.judge.prompts import apart
from envs.judge.verdicts import own_line
from envs.services import Need

AGENTS = ("inverse_if_simple_agent", "inverse_if")
JUDGE = "general"
SAMPLING = {"temperature": 0.7, "top_p": 0.8, "max_tokens": 8192}
PLACES = {"prompt", "model_response", "standard_response", "criteria"}
FENCED = re.compile(r"```(?:json)?\s*(\{.*?\})\s*```", re.DOTALL)
OBJECT = re.compile(r'\{[^{}]*"result"\s*:\s*"(?:PASS|FAIL)"[^{}]*\}', re.IGNORECASE)
RESULT = re.compile(r"""["']result["']\s*:\s*["'](?=PASS|FAIL)""", re.IGNORECASE)
WORDS = ("PASS", "FAIL")


def needs(row: dict) -> tuple[Need, ...]:
    """The judge `general`."""
    return (judge.need(JUDGE),)


def check(row: dict) -> None:
    """Raises ValueError unless there are criteria, and a template with the known placeholders."""
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
        require(False, "judge_prompt_template", template, f"a str.format template ({error})")
    names = {name for _, name, _, _ in parts}
    plain = all(not spec and not conversion for _, _, spec, conversion in parts)
    good = plain and {"model_response", "criteria"} <= names <= PLACES
    expected = "{model_response} and {criteria}, and perhaps {prompt} and {standard_response}"
    require(good, "judge_prompt_template", template, expected)


async def verify(row: dict, response: str) -> Reward:
    """Returns the mean over the rubric; `met` lists the indices of the criteria that are met.

    Raises CheckerError if the judge fails.
    """
    text = final_text(response)
    if reason := unfinished(text):
        return Reward(0.0, {"reason": reason})
    scores = await together(score(row, item["criteria"], text) for item in row["rubric"])
    met = [i for i, value in enumerate(scores) if value]
    return Reward(sum(scores) / len(scores), {"met": met})


async def score(row: dict, criteria: str, text: str) -> float:
    """Returns 1.0 if the judge gives PASS for one criterion, else 0.0.

    Raises CheckerError if the judge fails.
    """
    template = row["judge_prompt_template"]
    filled = template.format(
        prompt=row.get("prompt") or "",
        model_response=apart(text, [*delimiters(template), *spoken(text)]),
        standard_response=row.get("reference_response") or "",
        criteria=criteria,
    )
    messages = [{"role": "user", "content": filled}]
    if system := row.get("judge_system_prompt"):
        messages.insert(0, {"role": "system", "content": system})
    found = await judge.ask(
        JUDGE, messages, lambda reply: verdict(reply, text), tries=1, **SAMPLING
    )
    return float(found == "PASS")


@functools.cache
def delimiters(template: str) -> list[str]:
    """Returns each template part's lines that contain a letter; all its lines if none does."""
    found = []
    for own, *_ in string.Formatter().parse(template):
        lines = [line.strip() for line in own.split("\n") if len(line.strip()) > 1]
        found += [line for line in lines if re.search(r"[^\W\d_]", line)] or lines
    return list(dict.fromkeys(found))


def spoken(answer: str) -> list[str]:
    """Returns the beginnings of the verdicts that an answer contains."""
    return list(dict.fromkeys(found[0] for found in RESULT.finditer(answer)))


def verdict(reply: str, answer: str = "") -> str | None:
    """Returns PASS or FAIL; None if the reply has neither.

    If the answer contains a verdict in JSON, PASS counts only if a JSON object ends the reply and
    the reply does not contain FAIL. If the answer contains the word PASS, a word counts only if it
    makes up the last line of the reply and is not a line of the answer.
    """
    if said := of_object(reply):
        if not spoken(answer):
            return said
        is_sure = reply.rstrip("` \n").endswith("}") and "FAIL" not in reply.upper()
        return said if is_sure else "FAIL"
    if "PASS" in answer.upper():
        return own_line(reply, answer, WORDS)
    lines = reversed(reply.strip().upper().split("\n")[-5:])
    return next((word for line in lines for word in WORDS if word in line), None)


def of_object(reply: str) -> str | None:
    """Returns PASS or FAIL, the result of a JSON object; None if no object has one."""
    for found in (FENCED.search(reply), OBJECT.search(reply)):
        if found is None:
            continue
        try:
            result = json.loads(found[found.lastindex or 0])["result"].upper().strip()
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            continue
        if result in WORDS and '"result"' in found[0]:
            return result
    return None
