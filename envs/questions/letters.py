"""Finds the multiple-choice letter that a text names; `options` maps letters to plain texts.

Patterns and rules come from NeMo-Gym's resources_servers/mcqa, written so that each takes time
linear in the length of the text.
"""

import re
import unicodedata
from collections.abc import Iterator
from itertools import pairwise

LETTER = re.compile(r"(?<![A-Za-z])[A-Za-z](?![A-Za-z])")
ALONE = re.compile(r"[^A-Za-z]*([A-Z])[^A-Za-z]*|\s*([A-Z])\s*[:).\-].*", re.DOTALL)
LEADING = re.compile(r"[A-Za-z](?![A-Za-z0-9])")
CAPITAL = re.compile(r"\b[A-Z]\b")
LISTED = re.compile(r"\s*[/|&,;]\s*|\s+(?:or|and)\s+|\s+", re.IGNORECASE)
ANSWER = re.compile(r"[*_]{0,2}Answer[*_]{0,2}\s*:[*_\s]{0,2}(.+)", re.IGNORECASE)
# The letters that stand for A to D in Arabic and Bengali.
OTHER_SCRIPTS = str.maketrans({
    "\u0623": " A", "\u0628": " B", "\u062c": " C", "\u062f": " D",
    "\u0985": " A", "\u09ac": " B", "\u09a1": " C", "\u09a2": " D",
})  # fmt: skip


def plain(text: str) -> str:
    """Returns the text in lower case, with one space between words."""
    return " ".join(text.lower().split())


def latin(text: str) -> str:
    """Returns the text with full-width, Arabic and Bengali letters as Latin letters."""
    return unicodedata.normalize("NFKC", text).translate(OTHER_SCRIPTS).strip()


def named(text: str, options: dict[str, str]) -> str | None:
    """Returns the letter of the first option that has this text; None if there is none."""
    written = plain(text)
    return next((letter for letter, option in options.items() if option == written), None)


def boxed(text: str) -> str:
    r"""Returns the text in the last \boxed{} with matching braces; "" if there is none."""
    _, found, rest = text.rpartition("\\boxed{")
    depth = 1
    for brace in re.finditer(r"[{}]", rest if found else ""):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return rest[: brace.start()]
    return ""


def unwrapped(text: str) -> str:
    r"""Returns the text without any \text{} around it."""
    start, end = 0, len(text)
    while text.startswith("\\text{", start) and end > start + 6 and text[end - 1] == "}":
        start, end = start + 6, end - 1
        while start < end and text[start].isspace():
            start += 1
        while start < end and text[end - 1].isspace():
            end -= 1
    return text[start:end]


def in_box(text: str, options: dict[str, str]) -> str | None:
    r"""Returns the option's letter in the last \boxed{}: alone, or before one of :).-"""
    found = ALONE.fullmatch(unwrapped(boxed(text).strip()))
    letter = found and (found[1] or found[2])
    return letter if letter in options else None


def payloads(text: str, prefix: str) -> Iterator[str]:
    """Yields the rest of each line after "Answer:" or the row's prefix, last one first."""
    text = unicodedata.normalize("NFKC", text)
    patterns = [ANSWER]
    if prefix:
        own = re.escape(unicodedata.normalize("NFKC", prefix)) + r"\s*(.*)"
        patterns.insert(0, re.compile(own, re.IGNORECASE))
    found = [match for pattern in patterns for match in pattern.finditer(text)]
    for match in sorted(found, key=lambda match: match.start(), reverse=True):
        yield match[1]


def single(text: str, options: dict[str, str]) -> str | None:
    """Returns the one letter that a payload begins or ends with; None if it lists several."""
    written = latin(text).strip("*_` \t\n\r.,;:")
    shown = [match for match in LETTER.finditer(written) if match[0].upper() in options]
    for left, right in pairwise(shown):
        between = written[left.end() : right.start()]
        if left[0].upper() != right[0].upper() and LISTED.fullmatch(between):
            return None
    letter = ""
    if leading := LEADING.match(written):
        letter = leading[0]
    elif len(written) == 1:
        letter = written
    elif capitals := CAPITAL.findall(written):
        letter = capitals[-1]
    return letter.upper() if letter.upper() in options else None
