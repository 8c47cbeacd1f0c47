"""Instructions checked by 54 rules: 1.0 if all are followed, else 0.0; or the share followed.

Row, at the top level or in `verifier_metadata`, which takes precedence: `instruction_id_list`;
`kwargs`, an object or null for each of them; `grading_mode`: "binary" (1 if all are followed, the
default) or "fraction" (the share followed). Judged: the text after the reasoning, by the 54 rules
of envs/following/instructions.py, as in NeMo-Gym's resources_servers/instruction_following. A rule
that cannot be applied is not followed.

Deliberate deviations: an answer without text follows nothing, as in IFEval's strict mode; a row
with missing, negative or empty arguments is refused, while NeMo-Gym draws random ones or accepts
instructions that cannot be followed; white space around an answer is ignored. Sentences are split
by NLTK's Punkt with short lists of words (envs/following/sentences.py), because Punkt's own model
would have to be downloaded.

Known leaks: the rules see only the form. A one-word answer satisfies each rule that only forbids
something, or that concerns each sentence or pair of words. Keywords may simply be listed, or be a
part of another word, and all three fixed answers may be given at once. Commas and dots of other
scripts are none. The word "a" satisfies "palindrome", digits satisfy each language, and
"repeat_phrase" requires a change only in the last copy.
"""

import functools
import inspect
from collections.abc import Callable, Hashable
from types import UnionType
from typing import get_args

from envs import Reward, final_text, get, require, unfinished
from envs.following.instructions import RULES, Place, Relation, Word
from envs.sandbox.checkers import DEADLINE, MANY, Checkers

AGENTS = ("instruction_following_simple_agent", "instruction_following")
MODES = ("binary", "fraction")
# Maps the annotation of a rule's argument to its types, and to their name in an error message.
KINDS: dict[Hashable, tuple[type | UnionType, str]] = {
    str: (str, "text"),
    Place: (int, "a whole number, 1 or more"),
    int: (int, "a whole number, 0 or more"),
    float: (int | float, "a number, 0 or more"),
    list: (list, "a list of texts"),
    Word: (str | list, "a word"),
    Relation: (str, " or ".join(map(repr, get_args(Relation)))),
}


def check(row: dict) -> None:
    """Raises ValueError unless each instruction is known and has its arguments."""
    fields, at = place(row)
    names = get(fields, "instruction_id_list", list, "a list of ids", at)
    many = get(fields, "kwargs", list, "a list of objects", at)
    mode = get(fields, "grading_mode", str | None, "text or null", at)
    require(mode is None or mode in MODES, f"{at}grading_mode", mode, " or ".join(MODES))
    expected = f"one object for each of the {len(names)} ids, and at least one"
    require(len(names) == len(many) > 0, f"{at}kwargs", many, expected)
    for i, (name, given) in enumerate(zip(names, many, strict=True)):
        known = isinstance(name, str) and name in RULES
        require(known, f"{at}instruction_id_list[{i}]", name, "one of: " + ", ".join(sorted(RULES)))
        require(isinstance(given, dict | None), f"{at}kwargs[{i}]", given, "an object or null")
        check_arguments(name, present(given), f"{at}kwargs[{i}]")


def check_arguments(name: str, given: dict, path: str) -> None:
    """Raises ValueError unless a rule can be called with the arguments in `given`."""
    wanted = parameters(name)
    for argument, value in given.items():
        require(argument in wanted, f"{path}.{argument}", value, f"no such argument of {name}")
    for argument, parameter in wanted.items():
        kind, expected = KINDS[parameter.annotation]
        if argument not in given and parameter.default is not inspect.Parameter.empty:
            continue
        value = get(given, argument, kind, expected, f"{path}.")
        if parameter.annotation is Relation:
            require(value in get_args(Relation), f"{path}.{argument}", value, expected)
        if isinstance(value, int | float):
            least = 1 if parameter.annotation is Place else 0
            sensible = not isinstance(value, bool) and value >= least
        else:
            texts = value if isinstance(value, list) else [value]
            sensible = bool(texts) and all(isinstance(item, str) and item.strip() for item in texts)
        require(sensible, f"{path}.{argument}", value, expected)


@functools.cache
def parameters(name: str) -> dict[str, inspect.Parameter]:
    """Returns a rule's parameters other than the text."""
    named = dict(inspect.signature(RULES[name]).parameters)
    named.pop("text")
    return named


def place(row: dict) -> tuple[dict, str]:
    """Returns a row's fields, and the path to them for error messages."""
    nested = row.get("verifier_metadata")
    if not isinstance(nested, dict):
        return row, ""
    return row | nested, "verifier_metadata." if "instruction_id_list" in nested else ""


def present(given: dict | None) -> dict:
    """Returns the arguments that are not null.

    Floats without a fraction become integers again, because some tables store all numbers as
    floats.
    """
    values = {}
    for name, value in (given or {}).items():
        if isinstance(value, float) and value.is_integer():
            values[name] = int(value)
        elif value is not None:
            values[name] = value
    return values


async def verify(row: dict, response: str) -> Reward:
    """Returns the share of instructions followed; in binary mode 1.0 if all are followed, else 0.0.

    `broken` lists the instructions not followed. Raises CheckerError if no check could run.
    """
    text = final_text(response)
    if reason := unfinished(text):
        return Reward(0.0, {"reason": reason})
    fields, _ = place(row)
    names = fields["instruction_id_list"]
    asked = list(zip(names, map(present, fields["kwargs"]), strict=True))
    verdict = await checkers.run(DEADLINE, asked=asked, text=text)
    if "reason" in verdict:
        return Reward(0.0, verdict)
    followed = verdict["followed"]
    share = sum(followed) / len(followed)
    value = share if fields.get("grading_mode") == "fraction" else float(share == 1)
    broken = [name for name, good in zip(names, followed, strict=True) if not good]
    return Reward(value, {"share": share, "broken": broken})


def make_check() -> Callable[..., dict]:
    """Returns the check that a child process runs, with its libraries imported and warmed up."""

    def check(asked: list, text: str) -> dict:
        followed = []
        for name, given in asked:
            try:
                followed.append(bool(RULES[name](text, **given)))
            except Exception:  # such as a keyword that is an invalid regular expression
                followed.append(False)
        return {"followed": followed}

    warm = [["length_constraints:number_sentences", {"num_sentences": 1, "relation": "at least"}]]
    check(warm, "One. Two.")
    check([["language:response_language", {"language": "en"}]], "This is a text in English.")
    return check


checkers = Checkers("envs.following.instruction_following:make_check", answers=MANY)
