"""Where our rewards differ from those of nemo-gym 0.4.0, and why. Data only.

An entry has the beginning of an environment's name, "" for all; a test of a case, NeMo-Gym's reward
for it and ours; and the reason. The first entry that holds gives it. Where the package is older
than NeMo-Gym's repository, our modules follow the repository.
"""

import re
from collections.abc import Callable

from envs import final_text, unfinished
from envs.questions.reasoning_gym import BOARDS
from envs.swe.swe_pivot import expected_call
from envs.tools.calls import arguments
from support.oracle.cases import Case

Test = Callable[[Case, float, float], bool]
VERDICT = re.compile(
    r"\[\[[A-Z!=_]+\]\]|CORRECT|\bPASS\b|\byes\b|Response harm:|\"(?:result|score_1)\""
)
LABEL = re.compile(r"\\boxed\{\s*([A-Z]\s*[:).\-]|\\text|\{)")


def less(test: Callable[[Case], object]) -> Test:
    """We pay less for an answer such as this."""
    return lambda case, their, own: own < their and bool(test(case))


def more(test: Callable[[Case], object]) -> Test:
    """We pay more for an answer such as this."""
    return lambda case, their, own: own > their and bool(test(case))


def either(test: Callable[[Case], object]) -> Test:
    return lambda case, their, own: bool(test(case))


def has(*parts: str) -> Callable[[Case], bool]:
    return lambda case: any(part in case.text for part in parts)


def unanswered(case: Case) -> bool:
    """Whether a text holds no answer, where no calls are judged in its place."""
    by_calls = case.calls and ("expected_action" in case.row or "ground_truth" in case.row)
    return not by_calls and bool(unfinished(final_text(case.text)))


def hollow(case: Case) -> bool:
    """Whether the first call is no object, lacks its command or path, or changes nothing."""
    given, wanted = arguments(case.calls[0]), arguments(expected_call(case.row))
    if not isinstance(given, dict):
        return True
    lacks = [key for key in ("command", "path") if not str(given.get(key, "")).strip()]
    changes = "new_str" not in given or given.get("old_str") != given["new_str"]
    return not changes or any(key in wanted for key in lacks)


def quotes(case: Case) -> bool:
    """Whether a judge may quote a verdict that an answer, or another of its group, holds."""
    return any(VERDICT.search(text) for text in (case.text, *case.group))


EXPLAINED: list[tuple[str, Test, str]] = [
    ("", less(unanswered),
     "an answer that is empty, or was cut off within its thought, earns 0"),
    ("", more(has("</think>")), "the text behind </think> is judged, also without a <think>"),
    ("math", more(has("%")), "math-verify 0.9 pays 2% for 2; NeMo-Gym pins 0.8"),
    ("math", more(lambda case: case.text.count("\\boxed") > 1),
     "math-verify 0.9 takes a box that is given twice for one; NeMo-Gym pins 0.8"),
    ("math", more(has("4033")), "the library's own 5 s were not enough there; here a check has 10"),
    ("mcqa", either(lambda case: case.text.count("\\boxed") > 1 or LABEL.search(case.text)),
     "the repository reads the last box, and in it \\text{B} and B: too; the package the first"),
    ("calendar", more(lambda case: case.text.count("[") > 1),
     "NeMo-Gym's regular expression finds no list where a name holds a bracket"),
    ("calendar", less(has(":-")), "a time has no negative minutes"),
    ("structured_outputs", more(lambda case: case.text != case.text.strip()),
     "blanks around a text do not count"),
    ("structured_outputs", less(lambda case: case.row["schema_type"] in ("xml", "csv")),
     "a CSV has a row, rows are as long as the header, and 1_0 is no number"),
    ("tool_choice", more(lambda case: len(case.calls) > 1),
     "the repository looks at all calls of an answer; the package at the first"),
    ("swe_pivot", less(hollow), "a call without arguments, or one that changes nothing, earns 0"),
    ("code", less(has("__eq__", "gt_out")), "no program sees the output that it has to equal"),
    ("code", more(has("from __future__")), "NeMo-Gym puts its own lines before it: a SyntaxError"),
    ("reasoning_gym", more(lambda case: case.row["metadata"]["source_dataset"] in BOARDS),
     "the scorer compares with tuples, which JSON turned into lists"),
    ("multichallenge", less(lambda case: "NO" in str(case.row["rubric"])),
     "a reply with neither label meets no question, also where NO is wanted"),
    ("genrm", either(lambda case: '"score_1": 10' in "".join(case.replies)),
     "numbers that no judge is asked for are no verdict"),
    ("genrm", either(quotes), "a verdict that an answer holds, and the judge quotes, is not read"),
    *((name, less(quotes), "a verdict that the answer holds, and the judge quotes, is not paid")
      for name in ("equivalence", "lc_judge", "nl2bash", "multichallenge", "inverse_if", "safety")),
]  # fmt: skip
