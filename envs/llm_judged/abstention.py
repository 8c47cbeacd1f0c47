r"""Questions that may be left open: 1.0 for a right answer, 0.5 for none, 0.0 for a wrong one.

Row: `answer`, the reference; `question`, else the last one of the row's input; `abstention_reward`,
what abstaining earns, between 0 and 1 (0.5). Judged, as in NeMo-Gym's resources_servers/abstention:
what the last \boxed{} behind the thought holds, or the whole text without one. [IDK] there, in any
case, marks and articles around it, abstains unseen. Of anything else the judge `general` says
whether it is right, wrong, or no attempt, which abstains too. No label counts as wrong. NeMo-Gym
has the reward of abstaining in its server's settings: of Nemotron 3 Ultra's stages IFBench has 0.9
there, which its rows must say here, and the others 0.5.

Deliberate deviations: the instructions are our own. Of NeMo-Gym's labels A, B and C, which it reads
from any word ("Answer: B" is a right answer there), the last one in double brackets counts, else
the letter that is all of the last line. Of an answer that holds a label, one counts only where it
ends the reply and is its only one, and there a quoted one is paid. An answer that is empty or cut
off earns 0 unseen, which a judge may call no attempt. Text in <thinking> tags is no thought.

Known leaks: those of the judge. [IDK] is paid whatever is written in front of the box, and for the
easiest question.
"""

import re
from typing import Any

from envs import Reward, final_text, get, require, unfinished
from envs.judge import judge
from envs.judge.prompts import chosen, filled, prompts
from envs.judge.verdicts import ends, holds, own_line
from envs.questions.letters import boxed
from envs.services import Need
from rollout.messages import last_question

AGENTS = ("abstention_simple_agent", "abstention")
JUDGE = "general"
SAMPLING: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0, "max_tokens": 8192}  # as for Ultra
ABSTAINING = 0.5
RIGHT, WRONG, OPEN = "[[A]]", "[[B]]", "[[C]]"
LABELS = (RIGHT, WRONG, OPEN)
AROUND = r"(?:\W|\b(?:an?|the)\b)*+"
IDK = re.compile(rf"{AROUND}i[^\w\s]*d[^\w\s]*k{AROUND}")  # of a text in small letters
PROMPT = prompts(__file__)["grade"]


def needs(row: dict) -> tuple[Need]:
    """The judge `general`."""
    return (judge.need(JUDGE),)


def check(row: dict) -> None:
    """Raises ValueError unless there are a question and its answer, and abstaining pays less."""
    answer = get(row, "answer", str, "an answer")
    require(answer.strip(), "answer", answer, "an answer")
    question = get(row, "question", str | None, "a text or null") or last_question(row)
    require(question.strip(), "question", question, "a question, here or as the row's last one")
    value = get(row, "abstention_reward", int | float | None, "a number or null")
    require(value is None or 0 < value < 1, "abstention_reward", value, "a number between 0 and 1")


async def verify(row: dict, response: str) -> Reward:
    """The reward; `right` and `abstained` are 1.0 where it was so. Raises CheckerError."""
    text = final_text(response)
    if reason := unfinished(text):
        return Reward(0.0, {"reason": reason})
    answer = in_box(text)
    label = OPEN if IDK.fullmatch(answer.lower()) else await asked(row, answer)
    value = {RIGHT: 1.0, OPEN: row.get("abstention_reward") or ABSTAINING}.get(label or WRONG, 0.0)
    found = {"right": float(label == RIGHT), "abstained": float(label == OPEN)}
    return Reward(value, found if label else found | {"reason": "no verdict"})


def in_box(text: str) -> str:
    r"""What the last \boxed{} holds, be it nothing; the text where there is none that is closed."""
    is_empty = text.rfind("\\boxed{") == text.rfind("\\boxed{}") >= 0
    return "" if is_empty else boxed(text) or text


async def asked(row: dict, answer: str) -> str | None:
    """The label that the judge gives an answer; None for none. Raises CheckerError."""
    question = row.get("question") or last_question(row)
    parts = {"question": question, "gold": row["answer"], "answer": answer}
    labels = dict(zip(("correct", "incorrect", "abstained"), LABELS, strict=True))
    messages = [{"role": "user", "content": filled(chosen(JUDGE, PROMPT), parts, **labels)}]
    return await judge.ask(JUDGE, messages, lambda reply: verdict(reply, answer), **SAMPLING)


def verdict(reply: str, answer: str = "") -> str | None:
    """The last label of a reply, else that of the letter in its last line; None for none.

    Of an answer that holds a label, WRONG unless one ends the reply and is its only one. Of one
    that has such a line, no letter is read.
    """
    label = max(LABELS, key=reply.rfind)
    if label not in reply:
        letter = own_line(reply, answer, ("A", "B", "C"))
        return letter and f"[[{letter}]]"
    sure = ends(reply, label) and sum(map(reply.count, LABELS)) == 1
    return label if sure or not holds(answer, LABELS) else WRONG
