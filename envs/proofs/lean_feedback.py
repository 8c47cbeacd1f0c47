"""Writes the question that follows a failed proof, with Lean's errors. Not an environment.

The layout is as in NeMo-Gym's resources_servers/math_formal_lean.
"""

import re
from typing import NamedTuple

from envs.sandbox.sandbox import Ran

MOST = 8  # errors that are shown
LONGEST = 2000  # characters of an error, or of Lean's output if it names no line
BEFORE = 4  # lines that are shown before the line with an error; one is shown after it
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
    """An error and its position."""

    line: int  # counted from 1
    column: int  # counted from 0, in characters
    message: str


def errors(output: str) -> list[Found]:
    """Returns the errors in Lean's output, each with all lines up to the next message."""
    heads = list(MESSAGE.finditer(output))
    found = []
    for i, head in enumerate(heads):
        end = heads[i + 1].start() if i + 1 < len(heads) else len(output)
        if head[3] == "error":
            found.append(Found(int(head[1]), int(head[2]), output[head.end() : end].strip()))
    return found


def feedback(ran: Ran, source: str) -> str:
    """Returns a failed proof's errors, as shown to the policy."""
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
    """Returns the first errors and the code around them, marked from an error to its line's end."""
    lines = source.split("\n")
    text = ""
    for number, error in enumerate(found[:MOST], 1):
        at = error.line - 1
        if not 0 <= at < len(lines):
            continue
        before = lines[max(0, at - BEFORE) : at]
        wrong = f"{lines[at][: error.column]}<error>{lines[at][error.column :]}</error>"
        after = lines[at + 1 : at + 2]
        code = "\n".join([*before, wrong, *after])
        text += f"\nError {number}:\n\nCorresponding Code:\n```lean4\n{code}\n\n```\n"
        text += f"\nError Message: {error.message[:LONGEST]}\n"
    if len(found) > MOST:
        text += f"\n... [Omitted {len(found) - MOST} more errors] ...\n"
    return text


def question(attempt: str, feedback: str) -> str:
    """Returns the prompt that replaces the conversation after a failed attempt."""
    return QUESTION.format(attempt=attempt, feedback=feedback)
