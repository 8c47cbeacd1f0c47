r"""Mathematics judged by the math-verify library: 1.0 if equivalent to the reference, else 0.0.

Row: `expected_answer` (string), with or without one outer `\(..\)` or `$..$`; `question`. Judged,
as in NeMo-Gym's resources_servers/math_with_judge: the text after `</think>`. Its expressions,
boxed or not, are compared with `\boxed{expected_answer}`. If the library finds them unequal and
services.judges has `general`, that judge compares the extracted answer, or else the text, with the
reference, in both orders (envs/maths/same_answer.py). Deliberate deviation: a response that never
closes its `<think>` was cut off and earns 0.

Known leaks of the library: the task repeated as a formula (37*12, an integral), the right side
of a false equation (3=2) and of a relation ("\neq 2", "\leq 2", "\approx 2"), "\neg 2", a letter in
the other case, 2% and 200% for 2, and the last number of a text without a box ("1 or 2"). NeMo-Gym
pins math-verify 0.8, which does not accept 2% for 2.

SymPy hangs on answers such as 9^{9^{9^9}}, and no thread or signal handler can interrupt it. So
checks run in the child processes of envs/sandbox/checkers.py.
"""

from collections.abc import Callable

from envs import Reward, final_text, get, require, services, unfinished
from envs.judge import judge
from envs.maths.same_answer import JUDGE, both_orders
from envs.sandbox.checkers import DEADLINE, MANY, Checkers
from envs.services import Need

AGENTS = ("math_with_judge_simple_agent", "math_with_judge", "math")
# Parsed once before any check: the parser builds its grammar on first use, and checks inherit it.
USUAL = r"""
-\frac{1}{2} 2^{10} \sqrt{2}+3 \frac{3\sqrt{5}}{2} x^2+2x-1 (1,2]\cup[3,\infty) \{1,2\} \pi 0.5
50\% 1{,}234 x\le{4} x=1,2 \sin{x} \text{A} 12\text{cm} 90^\circ \left(\frac{1}{2},-3\right)
\binom{5}{2} \begin{pmatrix}1\\2\end{pmatrix}"""


def check(row: dict) -> None:
    """Raises ValueError unless `expected_answer` is a string that is not blank."""
    answer = get(row, "expected_answer", str, "a string")
    require(answer.strip(), "expected_answer", answer, "an answer")


def needs(row: dict) -> tuple[Need, ...]:
    """The judge `general` if `services.judges` has it, else nothing."""
    return (judge.need(JUDGE),) if JUDGE in services.current().judges else ()


async def verify(row: dict, response: str) -> Reward:
    """Returns 0.0 or 1.0. Raises CheckerError if no check could run, whatever the answer."""
    text = final_text(response)
    if reason := unfinished(text):
        return Reward(0.0, {"reason": reason})
    verdict = await checkers.run(DEADLINE, expected=row["expected_answer"], text=text)
    value = verdict.pop("value")
    if value <= 0.5 and needs(row):
        answer = verdict.get("extracted") or text
        value = await both_orders(row, row["expected_answer"], answer)
        verdict["judged"] = value
    return Reward(value, verdict)


def make_check() -> Callable[..., dict]:
    """Returns the check that a child process runs, with its library imported and warmed up."""
    # SymPy would import these during a check, in which a file that cannot be opened makes answers
    # unequal.
    import sympy.integrals.manualintegrate  # type: ignore[import-untyped]
    import sympy.integrals.prde  # type: ignore[import-untyped]
    import sympy.physics.matrices  # type: ignore[import-untyped]
    import sympy.physics.units  # type: ignore[import-untyped]
    import sympy.sets.handlers.functions  # type: ignore[import-untyped]
    import sympy.sets.handlers.issubset  # type: ignore[import-untyped]
    import sympy.sets.setexpr  # type: ignore[import-untyped]
    import sympy.tensor.tensor  # type: ignore[import-untyped]  # noqa: F401
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    targets = (ExprExtractionConfig(), LatexExtractionConfig())

    def check(expected: str, text: str) -> dict:
        for left, right in (("\\(", "\\)"), ("$", "$")):
            expected = expected.strip()
            if expected.startswith(left) and expected.endswith(right) and len(expected) > 1:
                expected = expected[len(left) : -len(right)].strip()
        gold = parse(f"\\boxed{{{expected}}}", targets[1:], parsing_timeout=None)
        answers = parse(text, targets, parsing_timeout=None)
        if not gold or not answers:
            return {"value": 0.0, "reason": "no answer found" if gold else "unparsable reference"}
        value = float(verify(gold, answers, float_rounding=6, timeout_seconds=None))
        # The string that was parsed: printing what SymPy made of it can itself take for ever.
        return {"value": value, "extracted": str(answers[-1])[:200]}

    for usual in USUAL.split():
        check(usual, f"It is 12, or ${usual}$, so \\boxed{{{usual}}}")
    return check


checkers = Checkers("envs.maths.math:make_check", answers=MANY)
