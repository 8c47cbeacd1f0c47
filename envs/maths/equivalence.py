r"""Answers that a judge compares with the reference: 1.0 for the same, else 0.0.

Row: `expected_answer`; `template_metadata.output_regex`, what of an answer is compared (the last
match, its first group that is not empty). Judged, as in NeMo-Gym's resources_servers/
equivalence_llm_judge: the text behind the thought, by the judge `general`; its first label
counts. An answer without a label is "not the same". Three agents differ in Rules:

    equivalence_llm_judge   questions of all fields; a row's regex finds the compared part
    nl2bash                 commands, in a block behind "Answer:"; asked again in the other order
    lc_judge                questions about long texts; only the question behind the text is shown

As in the released configurations, no Rules look again at a whole answer for half the reward.

Deliberate deviations: the instructions are our own, with the published labels, which an answer
cannot imitate; an answer that is empty or cut off earns 0 unseen. Of an answer that holds a label,
"the same" counts only where it ends the reply, and nothing contradicts it; there a quoted one is
paid. Known leaks: those of the judge.
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
    """Raises ValueError unless there is a reference answer, and a regex that can be used."""
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
    """The reward by the rules of the row's agent. Raises CheckerError."""
    name = row["agent_ref"]["name"].removesuffix("_simple_agent")
    return await judged(row, response, OF_AGENT.get(name, Rules()))


async def judged(row: dict, response: str, rules: Rules) -> Reward:
    """The reward by some rules; `label` is the judge's last label. Raises CheckerError."""
    text = final_text(response)
    if reason := unfinished(text):
        return Reward(0.0, {"reason": reason})
    gold, question = row["expected_answer"], last_question(row).strip()
    own = (row.get("template_metadata") or {}).get("output_regex") or ""
    own = own if rules.use_per_record_regex else ""
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
    """The check that a child runs, as a regex may take for ever."""

    def check(patterns: list[str | None], question: str, text: str) -> dict:
        found = []
        for pattern, given in zip(patterns, (question, text), strict=True):
            flags = re.MULTILINE | re.DOTALL
            matches = list(re.finditer(pattern, given, flags)) if pattern else []
            last = matches[-1] if matches else None
            groups = (group for group in last.groups() if group and group.strip()) if last else ()
            found.append(next(iter(groups), last[0] if last else given).strip())
        return {"found": found}

    return check


checkers = Checkers("envs.maths.equivalence:make_check", answers=MANY)
