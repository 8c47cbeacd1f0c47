r"""Answers that a judge compares with the reference: 1.0 for the same, else 0.0.

Row: `expected_answer`; `template_metadata.output_regex`, which finds the part of an answer that is
compared (the first group that is not empty in the last match). Judged, as in NeMo-Gym's
resources_servers/equivalence_llm_judge: the judge `general` judges the text after the reasoning;
the first label in its reply counts, and a reply without a label means "not the same". Three agents
differ in Rules:

    equivalence_llm_judge   questions from all fields; a row's regex finds the compared part
    nl2bash                 commands, in a block after "Answer:"; judged in both orders
    lc_judge                questions about long texts; only the question after the text is shown

As in the released configurations, no Rules give half the reward for a match in the whole answer.

Deliberate deviations: the instructions are our own, with the published labels, which an answer
cannot imitate; an answer that is empty or cut off earns 0 without being judged. If an answer
contains a label, "the same" counts only if it ends the reply and nothing contradicts it; NeMo-Gym
rewards a quoted one. Known leaks: the judge's.
"""

import re
from collections.abc import Callable

from envs import Reward, final_text, get, require, unfinished
from envs.judge import judge
from envs.maths.same_answer import JUDGE, PROMPTS, Rules, same
from envs.sandbox.checkers import DEADLINE, MANY, Checkers
from envs.services import Need
from rollout.messages import last_question

# fmt: off
AGENTS = (
    "equivalence_llm_judge_simple_agent", "equivalence_llm_judge",
    "lc_judge_simple_agent", "lc_judge", "nl2bash_simple_agent", "nl2bash",
)
# fmt: on
NL2BASH = Rules(
    PROMPTS["bash"],
    response_extract_regex=r"Answer:\s*```(?:\w+)?\s*([\s\S]*?)\s*```(?=[\s\S]*$)",
    check_twice_swap=True,
    use_per_record_regex=False,
)
LONG = Rules(
    judge_equal_label="CORRECT",
    judge_not_equal_label="INCORRECT",
    question_extract_regex=r"^QUESTION:\s*(.*)$|</text>\n\n(.*)$",
)
OF_AGENT = {"nl2bash": NL2BASH, "lc_judge": LONG}


def needs(row: dict) -> tuple[Need]:
    """The judge `general`."""
    return (judge.need(JUDGE),)


def check(row: dict) -> None:
    """Raises ValueError unless there is a reference answer, and the regex, if any, is valid."""
    answer = get(row, "expected_answer", str, "an answer")
    require(answer.strip(), "expected_answer", answer, "an answer")
    get(row, "template_metadata", dict | None, "an object or null")
    at = "template_metadata.output_regex"
    pattern = get(row, at, str | None, "a regex or null")
    try:
        re.compile(pattern or "")
    except re.error as error:
        require(False, at, pattern, f"a regular expression ({error})")


async def verify(row: dict, response: str) -> Reward:
    """Returns the reward under the rules of the row's agent. Raises CheckerError."""
    name = row["agent_ref"]["name"].removesuffix("_simple_agent")
    return await judged(row, response, OF_AGENT.get(name, Rules()))


async def judged(row: dict, response: str, rules: Rules) -> Reward:
    """Returns the reward under the given rules; `label` is the judge's last label.

    Raises CheckerError if the judge fails.
    """
    text = final_text(response)
    if reason := unfinished(text):
        return Reward(0.0, {"reason": reason})
    gold = row["expected_answer"]
    question = last_question(row).strip()
    own = ""
    if rules.use_per_record_regex:
        own = (row.get("template_metadata") or {}).get("output_regex") or ""
    threshold = rules.extraction_length_threshold
    is_long = bool(own) and threshold is not None and len(gold) > threshold
    of_answer = None if is_long else own or rules.response_extract_regex
    patterns = [rules.question_extract_regex, of_answer]
    found = await checkers.run(DEADLINE, patterns=patterns, question=question, text=text)
    if "reason" in found:
        return Reward(found.pop("value"), found)
    question, answer = found["found"]
    if not await same(question, gold, answer, rules):
        if not own or is_long or not rules.check_full_generation_on_fail:
            return Reward(0.0)
        whole = await same(question, gold, text, rules)
        return Reward(whole * rules.reward_if_full_generation_succeeds)
    if not rules.check_twice_swap or is_long or await same(question, answer, gold, rules):
        return Reward(1.0)
    return Reward(rules.reward_if_swap_fails, {"reason": "swap"})


def make_check() -> Callable[..., dict]:
    """Returns the check, which runs in a child process because a regex may take for ever."""

    def check(patterns: list[str | None], question: str, text: str) -> dict:
        question_pattern, text_pattern = patterns
        return {"found": [extracted(question_pattern, question), extracted(text_pattern, text)]}

    return check


def extracted(pattern: str | None, text: str) -> str:
    """Returns the part of a text that a regex finds, stripped; the whole text if there is no match.

    The part is the first group that is not blank in the last match, else the whole match.
    """
    matches = list(re.finditer(pattern, text, re.MULTILINE | re.DOTALL)) if pattern else []
    if not matches:
        return text.strip()
    last = matches[-1]
    for group in last.groups():
        if group and group.strip():
            return group.strip()
    return last[0].strip()


checkers = Checkers("envs.maths.equivalence:make_check", answers=MANY)
