"""The text of the question after a failed proof, with Lean's errors. No environment by itself.

The layout is that of NeMo-Gym's resources_servers/math_formal_lean.
"""

import re
from typing import NamedTuple

from envs.sandbox.sandbox import Ran

MOST = 8  # errors that are shown
LONGEST = 2000  # characters of an error, or of Lean's output where it names no line
BEFORE = 4  # lines that are shown before the one with an error; one is shown after it
# FILE.lean:LINE:COLUMN: KIND, or KIND(NAME) since Lean 4.21, and a colon
MESSAGE = re.compile(r"^\S*?\.lean:(\d{1,9}):(\d{1,9}): (\w+)(?:\([\w.]*\))?:", re.MULTILINE)
TIMEOUT = "The compilation timed out. Please simplify your proof or use more efficient tactics."
SILENT = "The proof failed but no specific error message was captured."
QUESTION = """The following is an attempt to prove a theorem in Lean 4:

{attempt}

Lean does not accept it. This is what went wrong:

{feedback}

Correct the proof. First study what went wrong, and then write the Lean 4 code. Your answer must \
be one block of code with the whole theorem and its proof, which begins with ```lean4 and ends \
with ```. Write nothing else before or after it."""


class Found(NamedTuple):
    """An error, and where Lean found it."""

    line: int  # from 1
    column: int  # from 0, in characters
    message: str


def errors(output: str) -> list[Found]:
    """The errors in Lean's output, each with all lines up to the next message."""
    heads = list(MESSAGE.finditer(output))
    ends = [*(head.start() for head in heads[1:]), len(output)]
    return [
        Found(int(head[1]), int(head[2]), output[head.end() : end].strip())
        for head, end in zip(heads, ends, strict=False)
        if head[3] == "error"
    ]


def feedback(ran: Ran, source: str) -> str:
    """The errors of a failed proof, as its author should see them."""
    if ran.ended == "time":
        return TIMEOUT
    output = f"{ran.stdout}\n{ran.stderr}"
    if found := errors(output):
        return marked(source, found)
    if not output.strip():
        return SILENT
    cut = "\n... [Truncated]" if len(output) > LONGEST else ""
    return f"Compilation output:\n{output[:LONGEST]}{cut}"


def marked(source: str, found: list[Found]) -> str:
    """The first errors with the code around them, marked from the column to the line's end."""
    lines = source.split("\n")
    text = ""
    for number, error in enumerate(found[:MOST], 1):
        at = error.line - 1
        if not 0 <= at < len(lines):
            continue
        wrong = f"{lines[at][: error.column]}<error>{lines[at][error.column :]}</error>"
        shown = [*lines[max(0, at - BEFORE) : at], wrong, *lines[at + 1 : at + 2]]
        code = "\n".join(shown)
        text += f"\nError {number}:\n\nCorresponding Code:\n```lean4\n{code}\n\n```\n"
        text += f"\nError Message: {error.message[:LONGEST]}\n"
    more = len(found) - MOST
    return text + (f"\n... [Omitted {more} more errors] ...\n" if more > 0 else "")


def question(attempt: str, feedback: str) -> str:
    """The prompt that takes the place of the conversation after a failed attempt."""
    return QUESTION.format(attempt=attempt, feedback=feedback)
