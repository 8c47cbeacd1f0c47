r"""Multiple choice: 1.0 if the chosen letter is the right one, else 0.0.

Row: `options` ([{"A": text}, ...]; null texts are not options), `expected_answer` (a letter),
`grading_mode`, `template_metadata` with `output_regex` (one or a list) and `answer_prefix`. Judged:
the text after the reasoning, as in NeMo-Gym's resources_servers/mcqa. First come the row's regexes,
in turn: the last match names a letter, in the options or not, or an option's text. Then comes
grading_mode:
    strict_single_letter_boxed   the last \boxed{}: a capital alone ("[C]"), or before one of :).-
    lenient_boxed                the same; else the only option with its text in the box
    lenient_answer_colon         the first "answer:": a letter or an option's text, nothing else
    lenient_answer_colon_md      the last "Answer:" or `answer_prefix` that names one letter, also
                                 in Markdown; "A or B" names none; with a prefix, else the box

Deliberate deviations: a row with an invalid regex is bad; the first of several groups counts. The
package nemo-gym 0.4.0 is older: it reads the first box, with one capital alone.
Known leaks: a box earns 1.0 for its first letter whatever follows the mark ("B. A. C. D.", "B-D"),
lenient_boxed rewards a box that denies the right option ("not B's text"), and
lenient_answer_colon_md gives 1.0 whatever follows the letter ("B is wrong", "B or maybe A").
"""

import re
from collections.abc import Callable

from core.waits import in_thread
from envs import Reward, final_text, get, require, unfinished
from envs.questions import letters
from envs.sandbox.checkers import DEADLINE, MANY, Checkers

AGENTS = ("mcqa_simple_agent", "mcqa")
MODES = (
    "strict_single_letter_boxed",
    "lenient_boxed",
    "lenient_answer_colon",
    "lenient_answer_colon_md",
)
COLON = re.compile(r"answer\s*:\s*(.+)", re.IGNORECASE)


def check(row: dict) -> None:
    """Raises ValueError unless options, answer, mode and regexes are valid."""
    options = get(row, "options", list | None, "a list of objects, letter to text") or []
    for i, option in enumerate(options):
        good = isinstance(option, dict) and all(isinstance(v, str | None) for v in option.values())
        require(good, f"options[{i}]", option, "an object, letter to text")
    answer = get(row, "expected_answer", str, "a letter")
    require(is_letter(answer.strip()), "expected_answer", answer, "a letter")
    mode = get(row, "grading_mode", str | None, "text or null")
    require(mode is None or mode in MODES, "grading_mode", mode, "one of: " + ", ".join(MODES))
    at = "template_metadata"
    get(row, at, dict | None, "an object or null")
    get(row, f"{at}.answer_prefix", str | None, "text or null")
    given = get(row, f"{at}.output_regex", str | list | None, "a regex or a list of them")
    shown = [k for option in options for k, v in option.items() if is_letter(k) and v is not None]
    named = answer.strip().upper() in map(str.upper, shown)
    require(named or given, "expected_answer", answer, f"one of the options {', '.join(shown)}")
    patterns = [given] if isinstance(given, str) else given or []
    for pattern in patterns:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            require(False, f"{at}.output_regex", pattern, f"a regular expression ({error})")


async def verify(row: dict, response: str) -> Reward:
    """Returns 0.0 or 1.0; `letter` is the chosen one. Raises CheckerError if no check could run."""
    text = final_text(response)
    if reason := unfinished(text):
        return Reward(0.0, {"reason": reason})
    given = {k.upper(): v for option in row.get("options") or [] for k, v in option.items()}
    options = {k: letters.plain(v) for k, v in given.items() if is_letter(k) and v is not None}
    template = row.get("template_metadata") or {}
    letter = None
    if patterns := template.get("output_regex"):
        patterns = [patterns] if isinstance(patterns, str) else patterns
        verdict = await checkers.run(DEADLINE, patterns=patterns, text=text)
        if "reason" in verdict:
            return Reward(0.0, verdict)
        captured = (letters.latin(found).strip().upper() for found in verdict["found"])
        chosen = (c if is_letter(c) else letters.named(c, options) for c in captured)
        letter = next(filter(None, chosen), None)
    if letter is None:
        mode = row.get("grading_mode") or MODES[0]
        prefix = template.get("answer_prefix") or ""
        letter = await in_thread(choice, text, options, mode, prefix)  # 1 MB takes seconds
    is_right = letter == row["expected_answer"].strip().upper()
    return Reward(float(is_right), {"letter": letter})


def make_check() -> Callable[..., dict]:
    """Returns the check, which runs in a child process because a row's regex may take for ever."""

    def check(patterns: list[str], text: str) -> dict:
        found = []
        for pattern in patterns:
            matches = list(re.finditer(pattern, text, re.IGNORECASE))
            if matches:
                last = matches[-1]
                first = last[1] if last.groups() else last[0]
                found.append((first or "")[:10_000])
        return {"found": found}

    return check


def choice(text: str, options: dict[str, str], mode: str, prefix: str) -> str | None:
    """Returns the letter that a text chooses under a grading mode; None if it chooses none."""
    if mode == "lenient_answer_colon":
        found = COLON.search(text)
        written = letters.unwrapped(found[1]).strip() if found else ""
        return written.upper() if written.upper() in options else letters.named(written, options)
    if mode == "lenient_answer_colon_md":
        chosen = (letters.single(written, options) for written in letters.payloads(text, prefix))
        letter = next(filter(None, chosen), None)
        return letter or (letters.in_box(text, options) if prefix else None)
    letter = letters.in_box(text, options)
    if letter or mode != "lenient_boxed":
        return letter
    inner = letters.plain(letters.boxed(text))
    named_there = [k for k, option in options.items() if option and option in inner]
    return named_there[0] if len(named_there) == 1 else None


def is_letter(text: str) -> bool:
    """Returns whether a text is one letter, of any script."""
    return len(text) == 1 and text.isalpha()


checkers = Checkers("envs.questions.mcqa:make_check", answers=MANY)
