"""Extracts answers that are compared as texts, and compares them."""

import re


def extract(text: str) -> str:
    r"""Returns the last `<answer>` tag, else the first `\boxed{}`, else everything; stripped.

    Finds the same text as reasoning_gym.utils.extract_answer and Gym's regular expressions, whose
    time grows with the square of a hostile text's length.
    """
    tagged = None
    end = 0
    while (start := text.find("<answer>", end)) >= 0:
        end = text.find("</answer>", start)
        if end < 0:
            break
        tagged = text[start + len("<answer>") : end]
    if tagged is not None:
        return tagged.strip()
    start = text.find("\\boxed{")
    while start >= 0 and (end := text.find("}", start)) >= 0:
        if boxed := text[start + len("\\boxed{") : end]:
            return boxed.strip()
        start = text.find("\\boxed{", end)
    return text.strip()


def is_same(answer: str, expected: str) -> bool:
    """Returns whether two answers are equal.

    Quotes and white space around an item of a list are ignored.
    """

    def bare(text: str) -> str:
        parts = [part.strip() for part in re.split(r"([\[\],])", text)]
        for i in range(2, len(parts) - 2, 2):
            quoted = re.fullmatch(r"""(['"])([^'"]*)\1""", parts[i])
            if quoted and quoted[2].strip() and parts[i - 1] != "]" and parts[i + 1] != "[":
                parts[i] = quoted[2].strip()
        return "".join(parts)

    if expected.startswith("["):
        if any(answer.count(mark) != expected.count(mark) for mark in "[],"):
            return False  # without splitting the answer, which may be long
        answer, expected = bare(answer), bare(expected)
    return answer.strip() == expected.strip()
