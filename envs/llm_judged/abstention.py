r"""Questions that may be left open: 1.0 for a right answer, 0.5 for none, 0.0 for a wrong one.

Row: `answer`, the reference; `question` (default: the last question in the row's input);
`abstention_reward`, between 0 and 1 (default: 0.5). Judged, as in NeMo-Gym's resources_servers/
abstention: the contents of the last \boxed{} after the reasoning, or the whole text without a box.
[IDK] there, regardless of case and of marks and articles around it, counts as abstaining, without a
call to the judge. The judge `general` labels anything else as right, wrong, or no attempt, which
also counts as abstaining. A reply without a label counts as wrong. In NeMo-Gym, the reward for
abstaining is one of the server's settings: among Nemotron 3 Ultra's stages, IFBench uses 0.9, which
its rows must state here, and the others use 0.5.

Deliberate deviations: the instructions are our own. NeMo-Gym reads its labels A, B and C from any
word ("Answer: B" is a right answer there); here the last label in double brackets counts, else a
letter that makes up the last line. If an answer contains a label, a label in the reply counts only
if it ends the reply and is the only one there; NeMo-Gym rewards a quoted label. An answer that is
empty or cut off earns 0 without being judged, although a judge might call it no attempt. Text in
<thinking> tags is not reasoning.

Known leaks: the judge's. [IDK] is rewarded whatever is written before the box, and even for the
easiest question.
"""

import re

from envs import Reward, final_text, get, require, unfinished
from envs.judge import judge
from envs.judge.prompts import chosen, filled, prompts
from envs.judge.verdicts import ends, holds, own_line
from envs.questions.letters import boxed
from envs.services import Need
from rollout.messages import last_question

AGENTS = ("abstention_simple_agent", "abstention")
JUDGE = "general"
SAMPLING = {"temperature": 0.0, "top_p": 1.0, "max_tokens": 8192}  # as in Ultra's stages
ABSTAINING = 0.5
RIGHT, WRONG, OPEN = "[[A]]", "[[B]]", "[[C]]"
LABELS = (RIGHT, WRONG, OPEN)
AROUND = r"(?:\W|\b(?:an?|the)\b)*+"
IDK = re.compile(rf"{AROUND}i[^\w\s]*d[^\w\s]*k{AROUND}")  # for a text in lower case
PROMPT = prompts(__file__)["grade"]


def needs(row: dict) -> tuple[Need]:
    """The judge `general`."""
    return (judge.need(JUDGE),)


def check(row: dict) -> None:
    """Raises ValueError unless the row has a question, its answer and a valid abstention reward."""
    answer = get(row, "answer", str, "an answer")
    require(answer.strip(), "answer", answer, "an answer")
    question = get(row, "question", str | None, "a text or null") or last_question(row)
    require(question.strip(), "question", question, "a question, here or as the row's last one")
    value = get(row, "abstention_reward", int | float | None, "a number or null")
    require(value is None or 0 < value < 1, "abstention_reward", value, "a number between 0 and 1")


async def verify(row: dict, response: str) -> Reward:
    """Returns the reward; `right` and `abstained` are 1.0 or 0.0.

    Raises CheckerError if the judge fails.
    """
    text = final_text(response)
    if reason := unfinished(text):
        return Reward(0.0, {"reason": reason})
    answer = in_box(text)
    label = OPEN if IDK.fullmatch(answer.lower()) else await asked(row, answer)
    if label is None:
        return Reward(0.0, {"right": 0.0, "abstained": 0.0, "reason": "no verdict"})
    paid = {RIGHT: 1.0, OPEN: row.get("abstention_reward") or ABSTAINING, WRONG: 0.0}
    info = {"right": float(label == RIGHT), "abstained": float(label == OPEN)}
    return Reward(paid[label], info)


def in_box(text: str) -> str:
    r"""Returns the contents of the last \boxed{}, even if empty; the text if no box is closed."""
    is_empty = text.rfind("\\boxed{") == text.rfind("\\boxed{}") >= 0
    return "" if is_empty else boxed(text) or text


async def asked(row: dict, answer: str) -> str | None:
    """Returns the label that the judge gives to an answer; None if it gives none.

    Raises CheckerError if the judge fails.
    """
    question = row.get("question") or last_question(row)
    parts = {"question": question, "gold": row["answer"], "answer": answer}
    prompt = chosen(JUDGE, PROMPT)
    content = filled(prompt, parts, correct=RIGHT, incorrect=WRONG, abstained=OPEN)
    messages = [{"role": "user", "content": content}]
    return await judge.ask(
        JUDGE, messages, lambda reply: verdict(reply, answer), tries=1, **SAMPLING
    )


def verdict(reply: str, answer: str = "") -> str | None:
    """Returns the last label in a reply, else the label for the letter in its last line, else None.

    If the answer contains a label, the verdict is WRONG unless the reply ends with a label and has
    no other. A letter that also makes up a line of the answer is ignored.
    """
    label = max(LABELS, key=reply.rfind)
    if label not in reply:
        letter = own_line(reply, answer, ("A", "B", "C"))
        return f"[[{letter}]]" if letter else None
    if not holds(answer, LABELS):
        return label
    is_sure = ends(reply, label) and sum(map(reply.count, LABELS)) == 1
    return label if is_sure else WRONG
