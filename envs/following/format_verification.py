r"""Citations and layouts that the prompt asks for, found by patterns: 1.0 if as asked, else 0.0.

Row: `verifier`, an object with `type`:
    string_match          each of `expected_markers` is in the text, and every match of the regexes
                          `patterns` is one of these markers
    regex, inline_prose   one of the regexes `verify_regex` matches somewhere in
                          at least `verify_min_matches` lines (1), each of which counts once
Judged: the text after the reasoning, as in NeMo-Gym's resources_servers/format_verification.

Deliberate deviations: an answer that is empty or cut off earns 0, even if nothing is expected in
it. A row that rewards any answer, or none, is refused: one without patterns and markers, with a
`verify_min_matches` below 1, or with an invalid regex. An answer earns 0 if a search of it does not
end in time.

Known leaks: neither the contents nor the positions of citations are judged. So markers alone earn
1.0, and so does "- x" three times. In NeMo-Gym's example rows `patterns` finds only the expected
markers, so a text that cites every source earns 1.0; a pattern such as `\[ref:\d+\]` in the row
would prevent that. Lines in a code fence count, and other text may surround them.
"""

import re
from collections.abc import Callable

from envs import Reward, get, require, unfinished
from envs.sandbox.checkers import DEADLINE, MANY, Checkers
from rollout.response import Response

# fmt: off
AGENTS = (
    "citation_format_simple_agent", "citation_format",
    "freeform_formatting_simple_agent", "freeform_formatting",
)
# fmt: on
BY_LINE = ("regex", "inline_prose")
TYPES = (*BY_LINE, "string_match")


def check(row: dict) -> None:
    """Raises ValueError unless the verifier is known and can tell answers apart."""
    at = "verifier."
    verifier = get(row, "verifier", dict, "an object")
    kind = get(verifier, "type", str, "a type", at)
    require(kind in TYPES, at + "type", kind, "one of: " + ", ".join(TYPES))
    if kind in BY_LINE:
        patterns = texts(verifier, "verify_regex")
        require(patterns, at + "verify_regex", patterns, "at least one regular expression")
        least = get(verifier, "verify_min_matches", int | None, "a whole number or null", at)
        good = least is None or (not isinstance(least, bool) and least >= 1)
        require(good, at + "verify_min_matches", least, "a whole number, 1 or more")
    else:
        patterns = texts(verifier, "patterns")
        markers = texts(verifier, "expected_markers")
        expected = "at least one text, here or in verifier.patterns"
        require(markers or patterns, at + "expected_markers", markers, expected)


def texts(verifier: dict, name: str) -> list[str]:
    """Returns the texts in a field of the verifier.

    Raises ValueError if one is not a text or, except for markers, not a regex.
    """
    found = get(verifier, name, list | None, "a list of texts or null", "verifier.") or []
    for i, text in enumerate(found):
        at = f"verifier.{name}[{i}]"
        require(isinstance(text, str) and text, at, text, "a text")
        try:
            re.compile("" if name == "expected_markers" else text)
        except (re.error, OverflowError, RecursionError) as error:
            require(False, at, text, f"a regular expression ({error})")
    return found


async def verify(row: dict, response: str) -> Reward:
    """Returns 0.0 or 1.0; `lines` counts matching lines, or `missing` and `other` count markers.

    Raises CheckerError if no check could run.
    """
    # Not stripped, because white space may be the layout.
    text = Response.of(response).content.rpartition("</think>")[2]
    if reason := unfinished(text.strip()):
        return Reward(0.0, {"reason": reason})
    verifier = row["verifier"]
    found = await checkers.run(DEADLINE, text=text, verifier=verifier)
    return Reward(found.pop("value"), found)


def make_check() -> Callable[..., dict]:
    """Returns the check, which runs in a child process because a row's regex may take for ever."""

    def check(text: str, verifier: dict) -> dict:
        if verifier["type"] in BY_LINE:
            patterns = [re.compile(pattern) for pattern in verifier["verify_regex"]]
            lines = sum(any(p.search(line) for p in patterns) for line in text.split("\n"))
            least = verifier.get("verify_min_matches") or 1
            return {"value": float(lines >= least), "lines": lines}
        markers = verifier.get("expected_markers") or []
        missing = sum(marker not in text for marker in markers)
        patterns = [re.compile(pattern) for pattern in verifier.get("patterns") or []]
        other = sum(m[0] not in markers for pattern in patterns for m in pattern.finditer(text))
        return {"value": float(not missing and not other), "missing": missing, "other": other}

    return check


checkers = Checkers("envs.following.format_verification:make_check", answers=MANY)
