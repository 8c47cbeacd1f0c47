"""A conversation's last answer, graded by a rubric: the share of its questions that are met.

Row: `rubric` ([{"question", "pass_criteria" (YES or NO, by default YES)}]), and `context`, the
conversation as text; without it, the row's input. Judged, as in NeMo-Gym's resources_servers/
multichallenge: the text after the reasoning, by the judge `general`, one call per question. The
last label counts, else YES or NO in the judge's last line. Rewards are in [0, 1].

Deliberate deviations: the instructions are our own, with the published labels; a reply with neither
label does not meet its question, even if NO is wanted; an empty rubric is a bad row; an answer that
is empty or cut off earns 0 without being judged. If an answer contains a label, or the word yes or
no, a verdict that the reply may only be quoting is ignored; NeMo-Gym rewards a quoted one.
Known leaks: the judge's.
"""

import re
from typing import NotRequired, TypedDict

from core.waits import together
from envs import Reward, final_text, get, require, unfinished
from envs.judge import judge
from envs.judge.prompts import chosen, filled, prompts
from envs.judge.verdicts import ends, holds, own_line
from envs.services import Need
from rollout.messages import chat

AGENTS = ("multichallenge_simple_agent", "multichallenge")
JUDGE = "general"
SAMPLING = {"temperature": 0.7, "top_p": 0.8, "max_tokens": 8192}
YES, NO = "[[YES]]", "[[NO]]"
WORD = re.compile(r"\b(?:yes|no)\b", re.IGNORECASE)
PROMPT = prompts(__file__)["rubric"]


class Item(TypedDict):
    """A question in a rubric."""

    question: str
    pass_criteria: NotRequired[str | None]  # "YES" or "NO"


def needs(row: dict) -> tuple[Need, ...]:
    """The judge `general`."""
    return (judge.need(JUDGE),)


def check(row: dict) -> None:
    """Raises ValueError unless the rubric has questions with known criteria."""
    rubric = get(row, "rubric", list, "a list of questions")
    require(rubric, "rubric", rubric, "at least one question")
    get(row, "context", str | None, "a text or null")
    for i, item in enumerate(rubric):
        at = f"rubric[{i}]."
        question = get(item, "question", str, "a question", at)
        require(question.strip(), at + "question", question, "a question")
        wanted = get(item, "pass_criteria", str | None, "YES, NO or null", at)
        require(wanted in (None, "YES", "NO"), at + "pass_criteria", wanted, "YES, NO or null")


async def verify(row: dict, response: str) -> Reward:
    """Returns the mean over the rubric; `met` lists the indices of the questions that are met.

    Raises CheckerError if the judge fails.
    """
    text = final_text(response)
    if reason := unfinished(text):
        return Reward(0.0, {"reason": reason})
    context = row.get("context") or said_before(row)
    scores = await together(score(item, context, text) for item in row["rubric"])
    met = [i for i, value in enumerate(scores) if value]
    return Reward(sum(scores) / len(scores), {"met": met})


def said_before(row: dict) -> str:
    """Returns the row's conversation as text."""
    messages = chat(row["responses_create_params"]["input"])
    return "\n\n".join(f"[{m['role'].upper()}]: {m['content']}" for m in messages)


async def score(item: Item, context: str, answer: str) -> float:
    """Returns 1.0 if the judge's verdict is the one that the rubric wants, else 0.0.

    Raises CheckerError if the judge fails.
    """
    parts = {"conversation": context, "answer": answer, "question": item["question"]}
    content = filled(chosen(JUDGE, PROMPT), parts, yes=YES, no=NO)
    messages = [{"role": "user", "content": content}]
    label = await judge.ask(
        JUDGE, messages, lambda reply: verdict(reply, answer), tries=1, **SAMPLING
    )
    return float(label == (item.get("pass_criteria") or "YES"))


def verdict(reply: str, answer: str = "") -> str | None:
    """Returns YES or NO: the last label, else the word in the last line; None without either.

    If the answer contains a label, a label in the reply counts only if it ends the reply and is the
    only one there. If the answer contains YES or NO as a word, a word in the reply counts only if
    it makes up the whole last line and is not a line of the answer.
    """
    yes, no = reply.rfind(YES), reply.rfind(NO)
    if yes >= 0 or no >= 0:
        label, other = (YES, NO) if yes > no else (NO, YES)
        is_sure = ends(reply, label) and other not in reply
        if holds(answer, (YES, NO)) and not is_sure:
            return None
        return label.strip("[]")
    if WORD.search(answer):
        return own_line(reply, answer, ("YES", "NO"))
    last = reply.strip().rpartition("\n")[2].upper()
    return next((word for word in ("YES", "NO") if word in last), None)
