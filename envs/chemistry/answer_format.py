"""Finds the answer in a text, by the format that the prompt names or by the row's regex.

A format finds the same text as the regexes of NeMo-Gym's resources_servers/rdkit_chemistry and
litmus_agent. Their run time grows with the square of a hostile text's length; here it is linear.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")


class Format(NamedTuple):
    """The marks around an answer."""

    opening: str  # a regex
    closing: str = "\n"  # a text
    least: int = 1  # minimum number of characters in between


# Names and marks come from NeMo-Gym's server.
FORMATS = {
    "fmt_00": Format(r"\(\(", "))", 0),
    "fmt_01": Format(r"\(Answer:\s*", ")"),
    "fmt_02": Format(r"Final answer:\s*\(", ")"),
    "fmt_03": Format(r"Answer is\s*\[", "]"),
    "fmt_04": Format(r"\[Answer:\s*", "]"),
    "fmt_05": Format(r"\[\[", "]]"),
    "fmt_06": Format(r"Correct Answer:\s*\[", "]"),
    "fmt_07": Format(r"\\boxed\{", "}"),
    "fmt_08": Format(r"\\boxed\{", "}"),
    "fmt_09": Format(r"\{\{", "}}"),
    "fmt_10": Format(r"Answer Value:\s*\{", "}"),
    "fmt_11": Format("<<", ">>"),
    "fmt_12": Format("<<", ">>"),
    "fmt_13": Format("<", ">"),
    "fmt_14": Format(r"<Answer:\s*", ">"),
    "fmt_15": Format(r"<final_answer>\s*", "</final_answer>"),
    "fmt_16": Format(r"Final Answer:\s*\|\|", "||"),
    "fmt_17": Format(r"The answer is:\s*\|", "|"),
    "fmt_18": Format(r"\*\*Answer:\s*", "**"),
    "fmt_19": Format(r"\*\*Final answer is:\s*", "**"),
    "fmt_20": Format(r"Answer:\s*\*", "*"),
    "fmt_21": Format(r"## Answer:\s*", "##"),
    "fmt_22": Format(r"ANSWER IS\s*"),
    "fmt_23": Format(r"Response:\s*"),
    "fmt_24": Format(r"Final Answer\s*->\s*"),
    "fmt_25": Format(r"Final value is:\s*"),
    "fmt_26": Format(r"Correct Answer >>\s*"),
    "fmt_27": Format(r"Answer Value:\s*"),
    "fmt_28": Format(r"Final Answer\s*=\s*"),
    "fmt_29": Format(r"Correct answer is\s*"),
    "fmt_30": Format(r"Final Answer:\s*"),
}


def marked(text: str, form: Format) -> str:
    """Returns the last answer in the format; "" if there is none.

    It is the last match of re.findall for: opening, as few characters as possible, closing.
    """
    found, at = "", 0
    opening = re.compile(form.opening)
    if form.closing == "\n":
        text += "\n"
    while begun := opening.search(text, at):
        end = text.find(form.closing, begun.end() + form.least)
        if end < 0:
            # The regex would backtrack and match the white space as the answer.
            empty = begun[0][-1].isspace() and text.startswith(form.closing, begun.end())
            return "" if empty else found
        found, at = text[begun.end() : end], end + len(form.closing)
    return found


def number_in(answer: str) -> float | None:
    """Returns an answer as a number, else the last number in it; None if it has no number."""
    try:
        return float(answer.strip())
    except ValueError:
        numbers = NUMBER.findall(answer)
        return float(numbers[-1]) if numbers else None


def make_check() -> Callable[..., dict]:
    """Returns the check, which runs in a child process because a row's regex may take for ever."""

    def check(pattern: str, text: str) -> dict:
        found = ""
        for match in re.finditer(pattern, text, re.DOTALL):
            found = match[1] or ""
        return {"found": found}

    return check
