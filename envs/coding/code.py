r"""Programming problems: 1.0 if a Python program passes all tests, else 0.0.

Row: `verifier_metadata.unit_tests` with `inputs` and `outputs` (lists of strings, of equal length)
and `fn_name`: null for programs that read stdin and write stdout, else the function, or the method
of `Solution`, that is called with an input's lines as JSON values. Judged: after the reasoning, the
text between the last two lines with three backticks, as in NeMo-Gym's resources_servers/code_gen.
Tests run in turn until one fails, each in a process of its own in the sandbox, for at most 10 s.

stdout is right if its lines match, apart from white space around them; numbers may be written in a
different form (4.0, +4, 1e3). A returned value is right if it equals the output as a JSON value,
with tuples as lists and True as 1; a number, or the text of one, is right if it is close (1e-5
relative, 1e-8 absolute).

Deliberate deviations: a process sees one input and no output, so a program can neither read the
expected output nor answer with an object that equals everything. It may use the standard library
and numpy; os, subprocess and open work, in an empty folder, and so does `from __future__`. It has
2 GiB of memory.
A program to which its limits refuse memory, a process or a thread earns 0, with that as the reason.
Known leaks: none, except that a row may have too few tests, and the forms above.
"""

import contextlib
import json
import math
from contextlib import aclosing
from decimal import Decimal, InvalidOperation

from core.waits import in_thread
from envs import Reward, final_text, get, require, unfinished
from envs.sandbox import sandbox
from envs.sandbox.outcome import refused_by_limits
from envs.sandbox.programs import programs
from envs.sandbox.sandbox import Limits
from envs.services import Need

AGENTS = ("code_gen_simple_agent", "code_gen")
LIMITS = Limits(seconds=10.0, output=4 << 20)
FENCE = "```"
Value = float | str | list | dict | None  # a JSON value
# Wraps a program whose function is called: its prints are discarded, and it is not __main__.
CALL = """
import json as _json, os as _os, sys as _sys
_said = _os.dup(1)
_os.dup2(_os.open(_os.devnull, _os.O_WRONLY), 1)
_lines = _sys.stdin.read().split("\\n")
_sys.stdin = open(_os.devnull)
__name__ = "solution"
_sys.modules[__name__] = _sys.modules["__main__"]
exec({source!r})
_owner = Solution() if "class Solution" in {source!r} else None
_function = getattr(_owner, {name!r}) if _owner else globals()[{name!r}]
_result = _json.dumps(_function(*(_json.loads(line) for line in _lines)))
_os.write(_said, _result.encode())
"""


def needs(row: dict) -> tuple[Need, ...]:
    """A sandbox."""
    return (sandbox.NEED,)


def check(row: dict) -> None:
    """Raises ValueError unless there are tests, each with an output that can be printed."""
    at = "verifier_metadata.unit_tests"
    tests = get(row, at, dict, "inputs, outputs and fn_name")
    inputs = get(tests, "inputs", list, "a list of strings", f"{at}.")
    outputs = get(tests, "outputs", list, "a list of strings", f"{at}.")
    name = get(tests, "fn_name", str | None, "the name of a function or null", f"{at}.")
    for field, values in (("inputs", inputs), ("outputs", outputs)):
        for i, value in enumerate(values):
            require(isinstance(value, str), f"{at}.{field}[{i}]", value, "a string")
    expected = f"one for each of the {len(inputs)} inputs, and at least one"
    require(len(inputs) == len(outputs) > 0, f"{at}.outputs", f"a list of {len(outputs)}", expected)
    for i, value in enumerate(outputs):
        size = len(value.strip().encode("utf-8", "surrogatepass"))
        most = f"at most {LIMITS.output} bytes, because a program may print no more"
        require(size <= LIMITS.output, f"{at}.outputs[{i}]", f"a text of {size} bytes", most)
    if name:
        for i in range(len(inputs)):
            check_json(inputs[i].split("\n"), f"{at}.inputs[{i}]")
            check_json([outputs[i]], f"{at}.outputs[{i}]")


def check_json(lines: list[str], path: str) -> None:
    """Raises ValueError unless each line is JSON, as a function's arguments and result must be."""
    try:
        for line in lines:
            json.loads(line)
    except (ValueError, RecursionError) as error:
        require(False, path, lines, f"JSON, because fn_name is given ({error})")


async def verify(row: dict, response: str) -> Reward:
    """Returns 0.0 or 1.0; `passed` is the number of tests passed; `reason` and `error` explain a 0.

    Raises CheckerError if no test could run.
    """
    text = final_text(response)
    if reason := unfinished(text):
        return Reward(0.0, {"reason": reason})
    source = block(text)
    if not source:
        return Reward(0.0, {"reason": "no code block"})
    tests = row["verifier_metadata"]["unit_tests"]
    name = tests.get("fn_name")
    if name:
        source = CALL.format(source=source, name=name.split(".")[-1])
    passed = 0
    reason = error = ""
    agrees = returns if name else prints
    async with aclosing(programs(source, tests["inputs"], LIMITS)) as runs:
        async for ran in runs:
            expected = tests["outputs"][passed]
            if ran.ended or ran.code:
                reason = ran.ended or refused_by_limits(ran.stderr, LIMITS) or "crashed"
                error = ran.stderr[-200:]
            elif not await in_thread(agrees, ran.stdout, expected):
                reason = "wrong answer"
            if reason:
                break
            passed += 1
    info: dict[str, int | str] = {"passed": passed, "tests": len(tests["inputs"])}
    if reason:
        info |= {"reason": reason, "error": error}
    return Reward(float(not reason), info)


def block(text: str) -> str | None:
    """Returns the text between the last two lines with three backticks; None if there are fewer."""
    lines = text.split("\n")
    fences = [i for i, line in enumerate(lines) if FENCE in line]
    if len(fences) < 2:
        return None
    return "\n".join(lines[fences[-2] + 1 : fences[-1]])


def prints(output: str, expected: str) -> bool:
    """Returns whether two outputs agree line by line, as texts or as numbers."""
    lines = stripped_lines(output)
    right = stripped_lines(expected)
    return len(lines) == len(right) and all(map(same_line, lines, right))


def stripped_lines(output: str) -> list[str]:
    """Returns an output's lines, without white space around the output and each line."""
    return [line.strip() for line in output.strip().split("\n")]


def same_line(line: str, expected: str) -> bool:
    """Returns whether two lines are equal as texts, or as numbers word by word."""
    if line == expected:
        return True
    with contextlib.suppress(InvalidOperation, ValueError):
        numbers = [Decimal(word) for word in line.split()]
        right = [Decimal(word) for word in expected.split()]
        return numbers == right
    return False


def returns(output: str, expected: str) -> bool:
    """Returns whether a returned value, as JSON, is the expected one or nearly the same number."""
    try:
        value, right = json.loads(output), json.loads(expected)
    except (ValueError, RecursionError):
        return False
    return json.dumps(value) == json.dumps(right) or value == right or is_close(value, right)


def is_close(value: Value, right: Value) -> bool:
    """Returns numpy's allclose for two numbers, each given as a number or as text."""
    if not isinstance(value, int | float | str) or not isinstance(right, int | float | str):
        return False
    try:
        a, b = float(value), float(right)
    except (ValueError, OverflowError):
        return False
    return math.isfinite(b) and abs(a - b) <= 1e-8 + 1e-5 * abs(b)
