r"""A number, a yes or no, or a text that the row expects: 1.0 for the right one, else 0.0.

Row: `expected_answer` and its `answer_type`: "float", "bool" or "string". `output_regex`, with
exactly one group, finds the answer in the text; without it, `answer_format` or `use_box_format`
does, as in molecules.py. `match` is {"rule": NAME, "rel_tol": X, "abs_tol": Y}:
    exact        both numbers, rounded, are equal
    isclose      within rel_tol (of the larger) or abs_tol, each 1e-6 by default; for "float"
    abs_window   within abs_tol
    rel_window   within rel_tol of the expected number
    bool_eq      both are yes, or both no; for "bool"
    string_eq    the same text, whatever its case and white space; for "string"
Without a `match`, the answer's type decides. Without an `answer_type`, the row has a
`property_type` and is judged as in molecules.py, by its `match` if there is one.

As in NeMo-Gym's resources_servers/litmus_agent (07d6b0d), the last match among everything that the
policy has said is judged. The tool, and the episode of at most 10 answers, are those of
molecules.py. The reason `no answer` means that nothing was found, or nothing that has the type.

Deliberate deviations. An infinite number is a wrong answer, as is a text where a rule needs a
number, and a row whose expected answer does not suit its rule is refused: in NeMo-Gym, these make
the request fail, or earn 0 whatever the answer is. So is a parameter of `match` with another name,
which NeMo-Gym ignores. A regex that searches for 10 s earns 0.0. Reasoning that does not end does
not count as text.
Known leaks: those of molecules.py. For "bool", each number but 0 is a yes ("((2))", "((not 1))"),
and half of all guesses earn 1.0.
"""

import math
import re
from typing import TYPE_CHECKING, TypeAlias

from envs import Reward, final_text, get, require, unfinished
from envs.chemistry import molecules
from envs.chemistry.answer_format import marked, number_in
from envs.chemistry.molecules import as_number
from envs.sandbox.checkers import DEADLINE, MANY, Checkers
from rollout.episode import Episode

if TYPE_CHECKING:
    from rollout.sampler import Sampler

AGENTS = ("litmus_agent_agent", "litmus_agent")
USUAL_RULES = {"float": "isclose", "bool": "bool_eq", "string": "string_eq"}  # by the answer's type
NUMERIC = ("exact", "isclose", "abs_window", "rel_window")
RULES = (*NUMERIC, "bool_eq", "string_eq")
TOLERANCES = {"rel_tol": 1e-6, "abs_tol": 1e-6}
YES = {"1", "1.0", "true", "yes", "present", "t", "y"}
NO = {"0", "0.0", "false", "no", "absent", "f", "n"}
Answer: TypeAlias = str | float
needs = molecules.needs


def check(row: dict) -> None:
    """Raises ValueError unless the row can be judged and offers either this tool or none."""
    types = "one of: " + ", ".join(USUAL_RULES)
    kind = get(row, "answer_type", str | None, types)
    require(kind is None or kind in USUAL_RULES, "answer_type", kind, types)
    if kind is None:
        molecules.check_kind(row)
    check_match(row)
    check_expected(row)
    pattern = get(row, "output_regex", str | None, "a regex or null")
    if pattern is None:
        molecules.check_format(row)
    else:
        check_regex(pattern)
    molecules.check_tools(row)


def check_match(row: dict) -> None:
    """Raises ValueError unless the row's `match` names a rule, with numbers as its parameters."""
    match = get(row, "match", dict | None, "an object with a rule, or null")
    if match is None:
        return
    require(match.get("rule") in RULES, "match.rule", match.get("rule"), ", ".join(RULES))
    for name, value in match.items():
        if name != "rule":
            require(name in TOLERANCES, "match", name, "a rule, rel_tol and abs_tol")
            is_number = type(value) in (int, float) and 0 <= value < math.inf
            require(is_number, f"match.{name}", value, "a number, 0 or more")


def check_expected(row: dict) -> None:
    """Raises ValueError unless the row's rule can find its expected answer right."""
    expected = get(row, "expected_answer", str | int | float, "a number or a text")
    rule = rule_of(row)
    if rule in NUMERIC:
        require(math.isfinite(as_number(expected)), "expected_answer", expected, "a finite number")
    elif rule == "bool_eq":
        is_clear = yes_or_no(str(expected)) is not None
        require(is_clear, "expected_answer", expected, "yes, no, or a number")
    else:
        is_text = plain(expected) and not isinstance(expected, bool)
        require(is_text, "expected_answer", expected, "a text or a number")


def check_regex(pattern: str) -> None:
    """Raises ValueError unless the pattern is a regex with one group."""
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        require(False, "output_regex", pattern, f"a regular expression ({error})")
    require(groups == 1, "output_regex", pattern, f"one group, and not {groups}")


async def rollout(row: dict, sampler: "Sampler") -> Episode:
    """Plays one episode of at most 10 answers."""
    said = await molecules.converse(row, sampler)
    return Episode(said.turns, await verify(row, said.text))


async def verify(row: dict, response: str) -> Reward:
    """Returns 0.0 or 1.0. Raises CheckerError if the row's regex could not be run."""
    text = final_text(response)
    if reason := unfinished(text):
        return Reward(0.0, {"reason": reason})
    if pattern := row.get("output_regex"):
        verdict = await checkers.run(DEADLINE, pattern=pattern, text=text)
        if "reason" in verdict:
            return Reward(0.0, verdict)
        said = verdict["found"]
    else:
        said = marked(text, molecules.format_of(row))
    answer = read(said, row)
    if answer is None:
        return Reward(0.0, {"reason": "no answer"})
    tolerances = TOLERANCES | (row.get("match") or {})
    return Reward(float(is_right(answer, row["expected_answer"], rule_of(row), tolerances)))


def rule_of(row: dict) -> str:
    """Returns the rule by which the row's answers are compared."""
    if match := row.get("match"):
        return match["rule"]
    if kind := row.get("answer_type"):
        return USUAL_RULES[kind]
    return "isclose" if row["property_type"] == "float" else "exact"


def read(said: str, row: dict) -> Answer | None:
    """Returns an answer as the row's type has it; None if there is none."""
    kind = row.get("answer_type") or "float"
    if kind == "string":
        return said.strip() or None
    number = yes_or_no(said) if kind == "bool" else number_in(said)
    return None if number is None or math.isnan(number) else number


def yes_or_no(text: str) -> float | None:
    """Returns 1.0 for a yes or a number other than 0, 0.0 for a no or 0; None for other texts."""
    word = text.strip().lower()
    if word in YES:
        return 1.0
    if word in NO:
        return 0.0
    number = number_in(word)
    return None if number is None else float(number != 0)


def is_right(answer: Answer, expected: Answer, rule: str, tolerances: dict) -> bool:
    """Returns whether an answer is the expected one by a rule."""
    if rule == "string_eq":
        return plain(answer) == plain(expected)
    found = as_number(answer)
    if rule == "bool_eq":
        return found == yes_or_no(str(expected))
    wanted = as_number(expected)
    if not math.isfinite(found):
        return False
    if rule == "exact":
        return round(found) == round(wanted)
    relative, absolute = tolerances["rel_tol"], tolerances["abs_tol"]
    if rule == "isclose":
        return math.isclose(found, wanted, rel_tol=relative, abs_tol=absolute)
    window = absolute if rule == "abs_window" else abs(relative * wanted)
    return abs(found - wanted) <= window


def plain(text: Answer) -> str:
    """Returns a text in lower case, with one blank for each stretch of white space."""
    return " ".join(str(text).lower().split())


checkers = Checkers("envs.chemistry.answer_format:make_check", answers=MANY)
