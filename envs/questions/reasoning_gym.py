r"""Puzzles from the reasoning-gym library, judged by its own scorers: 0.0 to 1.0.

Row: `question`, `answer` (null if the puzzle has many), `metadata` with `source_dataset`, as
written by NeMo-Gym's resources_servers/reasoning_gym. Judged, as there: the last `<answer>` tag
after `</think>`, else the first `\boxed{}`, else the whole text, stripped. Deliberate deviations: a
response that never closes its `<think>` earns 0, and boards are compared as boards (see BOARDS).

The library rewards many wrong answers: docs/environments.md lists the known ones. Answers to
puzzles in EVALUATES run as Python, in the sandbox.

With `"exact": true`, a row gives 1 for its `answer`, character by character, and 0 for any other.
This closes all these leaks if there is one right answer and the question states its form. It is not
for puzzles with many answers, nor for: advanced_geometry, codeio, coin_flip, complex_arithmetic,
decimal_arithmetic, decimal_chain_sum, figlet_font, fraction_simplification, futoshiki,
group_anagrams, knights_knaves, number_format, palindrome_partitioning, polynomial_equations,
polynomial_multiplication, pool_matrix, power_function and the integration puzzles.
"""

import math
from collections.abc import Callable

from envs import Reward, final_text, get, require, unfinished
from envs.questions.exact import extract, is_same
from envs.sandbox import sandbox
from envs.sandbox.checkers import DEADLINE, MANY, Checkers
from envs.services import Need

AGENTS = ("reasoning_gym_simple_agent", "reasoning_gym")
# Their scorers compare with tuples, which JSON turns into lists: the right answer would earn 0.05.
BOARDS = ("arc_agi", "rearc")
# Its scorer accepts any text that is not empty.
BROKEN = ("game_of_life_halting",)
# Their scorers call eval, or SymPy's parse_expr, which calls eval.
EVALUATES = (
    "binary_matrix",
    "countdown",
    "intermediate_integration",
    "n_queens",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
    "spiral_matrix",
    "string_insertion",
)


def check(row: dict) -> None:
    """Raises ValueError unless the library has a usable scorer for the row."""
    from reasoning_gym.factory import DATASETS

    get(row, "question", str, "a string")
    get(row, "answer", str | None, "a string or null")
    name = get(row, "metadata.source_dataset", str, "the name of a reasoning-gym dataset")
    # "composite" names a mixture; its entries carry the name of the dataset they came from.
    known = name in DATASETS and name != "composite"
    require(known, "metadata.source_dataset", name, "one of reasoning-gym's datasets")
    if get(row, "exact", bool | None, "true or false"):
        get(row, "answer", str, "a string, because exact is true")
    else:
        why = "a dataset whose scorer can tell answers apart, or exact true"
        require(name not in BROKEN, "metadata.source_dataset", name, why)
    if name in BOARDS:
        board = get(row, "metadata.output", list, "a list of lists")
        require(all(isinstance(line, list) for line in board), "metadata.output", board, "lists")


def needs(row: dict) -> tuple[Need, ...]:
    """A sandbox around the checks, for the puzzles that run an answer as Python."""
    return (sandbox.FOR_CHECKS,) if evaluates(row) and not row.get("exact") else ()


def evaluates(row: dict) -> bool:
    """Returns whether the row's scorer runs an answer as Python."""
    return row["metadata"]["source_dataset"] in EVALUATES


async def verify(row: dict, response: str) -> Reward:
    """Returns the library's score or, if `exact` is true, 1.0 for the row's answer, else 0.0.

    `info` contains the extracted `answer`, and `scorer_errors`, which is 1 if the scorer raised. An
    answer that makes the scorer raise, run for 10 s or die counts as wrong. Raises CheckerError if
    no check could run, and ValueError if the scorer raises for the row's own answer.
    """
    text = final_text(response)
    if reason := unfinished(text):
        return Reward(0.0, {"reason": reason})
    if row.get("exact"):  # texts are compared, and no part of the answer runs
        answer = extract(text)
        return Reward(float(is_same(answer, row["answer"])), {"answer": answer[:200]})
    entry = {key: row.get(key) for key in ("question", "answer", "metadata")}
    pool = evaluators if evaluates(row) else checkers
    verdict = await pool.run(DEADLINE, entry=entry, text=text)
    if "row_error" in verdict:
        raise ValueError(verdict["row_error"])
    return Reward(verdict.pop("value"), verdict)


def make_check() -> Callable[..., dict]:
    """Returns the check that a child process runs, with its library imported."""
    # As in envs/maths/math.py: scorers of integrals and polynomials make SymPy import these.
    import sympy.integrals.manualintegrate  # type: ignore[import-untyped]
    import sympy.integrals.prde  # type: ignore[import-untyped]  # noqa: F401
    from reasoning_gym.factory import DATASETS, get_score_answer_fn

    # Made now, because some take a third of a second.
    scorers = {name: get_score_answer_fn(name) for name in DATASETS if name != "composite"}

    def check(entry: dict, text: str) -> dict:
        metadata = entry["metadata"]
        scorer = scorers[metadata["source_dataset"]]
        if metadata["source_dataset"] in BOARDS:
            metadata["output"] = tuple(map(tuple, metadata["output"]))
        answer = extract(text)
        value, error = score(scorer, answer, entry)
        if error and entry["answer"] is not None and score(scorer, entry["answer"], entry)[1]:
            return {"row_error": f"metadata cannot be used by its scorer, which raised {error}"}
        verdict = {"value": value, "answer": answer[:200], "scorer_errors": 0}
        if error:
            verdict |= {"reason": error, "scorer_errors": 1}
        return verdict

    return check


def score(scorer: Callable, answer: str, entry: dict) -> tuple[float, str | None]:
    """Returns the scorer's value and None, or 0.0 and the error."""
    try:
        value = float(scorer(answer, entry))
    except BaseException as error:  # an evaluated answer may be "exit()"
        return 0.0, f"{type(error).__name__}: {error}"[:200]
    if not math.isfinite(value):
        return 0.0, f"a score of {value}"
    return value, None


checkers = Checkers("envs.questions.reasoning_gym:make_check", answers=MANY)
evaluators = Checkers("envs.questions.reasoning_gym:make_check")
