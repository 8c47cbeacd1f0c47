"""Questions about long texts whose answer is compared as text: 1.0 if the same, else 0.0.

Row: `expected_answer`. Judged: all of the text after the reasoning, as in NeMo-Gym's
resources_servers/equivalence_rule with its released rule, `exact`: both in lower case, with each
run of white space as one space. Nothing is extracted from a box or a sentence.

Deliberate deviations: the similarity rules, which no released configuration sets, are left out;
an empty reference is a bad row, and an answer that is empty or cut off earns 0.
Known leaks: none. As in NeMo-Gym, a right answer earns 0 if it has an extra word or mark, such as
"6." for "6", or if its quotes or dashes differ from the text's.
"""

from envs import Reward, final_text, get, require, unfinished
from envs.questions.letters import plain

AGENTS = ("lc_equivalence_rule_simple_agent", "lc_equivalence_rule")


def check(row: dict) -> None:
    """Raises ValueError unless there is a reference answer."""
    answer = get(row, "expected_answer", str, "an answer")
    require(answer.strip(), "expected_answer", answer, "an answer")


def verify(row: dict, response: str) -> Reward:
    """Returns 0.0 or 1.0."""
    text = final_text(response)
    if reason := unfinished(text):
        return Reward(0.0, {"reason": reason})
    return Reward(float(plain(text) == plain(row["expected_answer"])))
