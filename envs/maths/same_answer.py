"""Asks a judge whether two answers to a question are the same, for equivalence.py and math.py."""

from dataclasses import dataclass

from envs.judge.prompts import chosen, filled, prompts
from envs.judge.verdicts import choose
from rollout.messages import last_question

JUDGE = "general"
TOKENS = 8192  # maximum tokens in the judge's answer, as in Super's configuration
PROMPTS = prompts(__file__)


@dataclass(frozen=True)
class Rules:
    """An agent's rules for judging, with the fields of NeMo-Gym's server."""

    prompt: str = PROMPTS["compare"]
    judge_equal_label: str = "[[A=B]]"
    judge_not_equal_label: str = "[[A!=B]]"
    question_extract_regex: str | None = None
    response_extract_regex: str | None = None
    check_twice_swap: bool = False
    reward_if_swap_fails: float = 0.0
    use_per_record_regex: bool = True
    extraction_length_threshold: int | None = None
    check_full_generation_on_fail: bool = False
    reward_if_full_generation_succeeds: float = 0.5


async def both_orders(row: dict, gold: str, answer: str) -> float:
    """Returns 1.0 if the judge finds two answers to a row the same in both orders, else 0.0."""
    question = row.get("question") or last_question(row)
    rules = Rules()
    if not await same(question, gold, answer, rules):
        return 0.0
    return float(await same(question, answer, gold, rules))


async def same(question: str, gold: str, candidate: str, rules: Rules) -> bool:
    """Returns whether the judge's label is the one for equal answers. Raises CheckerError."""
    equal = rules.judge_equal_label
    other = rules.judge_not_equal_label
    parts = {"question": question, "gold": gold, "candidate": candidate}
    asked = filled(chosen(JUDGE, rules.prompt), parts, same=equal, other=other)
    answers = f"{gold}\n{candidate}"
    return await choose(JUDGE, asked, (equal, other), answers, max_tokens=TOKENS) == equal
