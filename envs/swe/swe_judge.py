"""Judges a repository's repair in a box of its own, by the row's tests: 1 or 0.

    prepare     in the agent's box, before the agent: one commit, no answers
    patch_of    after the agent: how the files differ from that start, as text
    judge       a fresh box from the image: the patch, the row's tests, their log and exit code

Row: `instance_id`, `workdir`, `base_commit`, `test_patch`, `log_parser`, `FAIL_TO_PASS`,
`PASS_TO_PASS`, `patch` (which repairs it), and `tests`:
    {"kind": "script", "script": TEXT}      resolved if all tests in both lists passed
    {"kind": "r2e", "expected": {test: status}}     if the image's own tests end as expected
SWE-smith rows, whose image has the repaired files, also have `start_patch`, which breaks them;
their `base_commit` may be HEAD; R2E-Gym's may be HASH^. A script that applies the test patch itself
must have SWE-bench's two marks around its tests.

How rewards are protected: only the patch leaves the agent's box. Its changes to files that steer a
test run (DROPPED), and to links, binary files and the tests' own files are undone, except in files
that the row's own repair changes. The tests come from `base_commit` and `test_patch`. Their log is
read from a random mark on; a test that failed once counts as failed. Two more tests with random
names are added to one of the test files: one must fail, the other must pass, and the exit code must
show a failure.

Known leaks: patched code runs in the process that writes the log. Code that looks for the two tests
can make the rest pass; `tampered` is 1 if a patch looks like that (SIGNS), or was caught. Test
helpers that no row names, such as tests/utils.py, may be changed.

This is not an environment itself: environments use it.
"""

import asyncio
import re
import reprlib
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from envs.boxes import box_budget, sif
from envs.boxes.box import Box, Ran, Size
from envs.services import CheckerError
from envs.swe.canary_tests import (
    ENDS,
    RNG,
    STARTS,
    Canary,
    append,
    applies,
    canary_for,
    whole,
    words_of,
)
from envs.swe.repository import (
    DROPPED,
    FAULTS,
    LONGEST,
    Refused,
    patch_of,
    patched,
    prepare,
    put,
    start_of,
    step,
    tests_of,
    with_tests,
    without_tests,
)
from envs.swe.test_logs import ALL, BAD, COLOURS, GOOD, KEPT, PARSERS, good, outcomes

__all__ = ["Trial", "Verdict", "flaw", "judge", "patch_of", "prepare", "refusal", "tried"]
TESTS = 1200.0  # seconds that tests may take
OUTPUT = 16 << 20  # bytes of the tests' output that are kept
TIMES = 3  # judgements per patch, if the machine may be at fault
DIFF = re.compile(r"^(diff --git |--- .*\n\+\+\+ )", re.M)  # how a file begins in a patch
HASH = r"[0-9a-f]{40}(?:[0-9a-f]{24})?"
KILLED = 126  # the lowest exit code of a command that did not run, or was killed
UNBROKEN = "it is resolved without a repair"
TOO_LONG = "a patch over 1 MiB"
R2E_PATH = "~/.venv/bin:~/.local/bin:~/.cargo/bin"
# Code that interferes with the run of its own tests.
SIGNS = re.compile(
    r"""\b(_pytest|pluggy|pytest_\w+|pytest11|TextTestResult|TestReport|get_objects)\b
    |\b(os\._exit|sys\.argv|unittest\.(case|result|runner))\b
    |/proc/(self|\d+)\b|["'\\]+(PASSED|FAILED)\b""",
    re.X,
)
_sound: set[str] = set()  # instances whose own repair has resolved them here
_looking: dict[str, asyncio.Lock] = {}  # instances whose repair is being judged


class Verdict(NamedTuple):
    """The verdict on a patch."""

    resolved: bool
    reason: str  # "" if resolved
    masked: bool  # True if the episode's limits, not the patch, decided the verdict
    details: dict[str, float]  # fixed, kept (shares), dropped (files), tampered, seconds, peak


class Trial(NamedTuple):
    """One judgement of a patch."""

    verdict: Verdict
    doubt: str = ""  # why the machine or the row may be at fault, or ""
    again: bool = False  # True if another trial may end differently


def refusal(row: dict) -> str:
    """Returns why a row cannot be judged; "" if it can."""
    kind = row["tests"].get("kind")
    parser = row["log_parser"]
    script = row["tests"].get("script", "")
    if kind not in ("script", "r2e"):
        return f"tests.kind is {kind!r}, expected 'script' or 'r2e'"
    if parser not in PARSERS:
        return f"log_parser is {parser!r}, expected one of {', '.join(sorted(PARSERS))}"
    expected = row["tests"].get("expected")
    if kind == "r2e" and not expected:
        return "tests.expected is empty, expected the status of each test"
    for test, status in (expected or {}).items():
        if status not in ALL:
            return f"tests.expected[{test!r}] is {status!r}, expected one of {', '.join(ALL)}"
    if kind == "script" and not (script.strip() and row.get("FAIL_TO_PASS")):
        return "tests.script or FAIL_TO_PASS is empty"
    if applies(script) and not (STARTS in script and ENDS in script):
        return f"tests.script applies a patch, without the marks {STARTS!r} and {ENDS!r}"
    commit = HASH
    if kind == "r2e":
        commit = rf"{commit}\^?"
    if row.get("start_patch"):
        commit = f"HEAD|{commit}"
    if not re.fullmatch(commit, row["base_commit"]):
        return f"base_commit is {row['base_commit']!r}, expected the hash of a commit"
    for name in ("patch", "test_patch", "start_patch"):
        text = row.get(name) or ""
        if text.strip() and not DIFF.search(text):
            return f"{name} is {reprlib.repr(text)}, expected a diff, such as git writes it"
    return "" if row["patch"].strip() else "patch is empty, expected one that repairs it"


async def judge(image: Path, row: dict, patch: str, size: Size | None = None) -> Verdict:
    """Judges a patch in a fresh box from an image.

    A patch is judged again if the machine may be at fault. If that does not help, or if the row may
    be at fault, the row's own repair is judged. Raises CheckerError if that does not resolve the
    instance either.
    """
    if not patch.strip():
        return Verdict(False, "no patch", False, {})
    if len(patch.encode("utf-8", "replace")) > LONGEST:
        return Verdict(False, TOO_LONG, False, {})
    for left in reversed(range(TIMES)):
        try:
            trial = await tried(image, row, patch, size)
        except CheckerError as error:
            if not left or isinstance(error, box_budget.Full):
                raise
            continue
        if not trial.again:
            break
    if trial.doubt:
        await _must_be_sound(image, row, size, trial.doubt)
    return trial.verdict


async def _must_be_sound(image: Path, row: dict, size: Size | None, doubt: str) -> None:
    """Raises CheckerError if the row's own repair does not resolve the instance here either."""
    name = row["instance_id"]
    try:
        async with _looking.setdefault(name, asyncio.Lock()):
            if name in _sound:
                return
            trial = await tried(image, row, row["patch"], size)
            if not trial.verdict.resolved:
                why = trial.doubt or trial.verdict.reason
                raise CheckerError(
                    f"{name}: {doubt}; its own reference patch does not resolve it: {why}"
                )
            _sound.add(name)
    finally:
        _looking.pop(name, None)


async def flaw(row: dict) -> str:
    """Returns why a row is useless: no repair is needed, or its own repair fails; else "".

    Raises CheckerError if the node is at fault.
    """
    image = sif.find(row["image"])
    if (await _settled(image, row, "")).resolved:
        return UNBROKEN
    repaired = await _settled(image, row, row["patch"])
    if repaired.resolved:
        return ""
    return f"its own reference patch does not resolve it: {repaired.reason}"


async def _settled(image: Path, row: dict, patch: str) -> Verdict:
    """Returns the first verdict on a patch for which the machine is not at fault.

    Raises CheckerError after TIMES trials without such a verdict.
    """
    for _ in range(TIMES):
        trial = await tried(image, row, patch)
        if not trial.again:
            return trial.verdict
    raise CheckerError(trial.doubt)


async def tried(image: Path, row: dict, patch: str, size: Size | None = None) -> Trial:
    """Judges a patch, which may be empty, once. Raises CheckerError if the node is at fault."""
    async with Box(image, row["workdir"], size) as box:
        start = (await start_of(box, row)).commit
        try:
            dropped = await patched(box, row, patch, start)
            canary, script = await _prepared(box, row, start)
        except Refused as refused:
            return _failed(box, str(refused))
        mark = f"{RNG.getrandbits(128):032x}"
        path = f"/tmp/{RNG.getrandbits(64):x}.sh"
        await put(box, path, whole(script, canary, mark).encode("utf-8", "surrogatepass"))
        ran = await box.run(f"bash {path}", TESTS, OUTPUT)
        trial = _graded(row, ran, mark, canary)
        steers = any(DROPPED.search(name) for name in dropped)
        suspect = steers or bool(signs(patch) - signs(row["patch"]))
        details = trial.verdict.details | {
            "dropped": float(len(dropped)),
            "tampered": trial.verdict.details.get("tampered", 0.0) or float(suspect),
            "seconds": ran.seconds,
            "peak": float(box.peak),
        }
        return trial._replace(verdict=trial.verdict._replace(details=details))


def signs(patch: str) -> set[str]:
    """Returns the SIGNS of interference with the tests in the lines that a patch adds."""
    found: set[str] = set()
    for line in patch.split("\n"):
        if line.startswith("+"):
            found |= {sign[0] for sign in SIGNS.finditer(line[: 1 << 16])}
    return found


def _failed(box: Box, reason: str) -> Trial:
    details = {"fixed": 0.0, "kept": 0.0, "peak": float(box.peak)}
    return Trial(Verdict(False, reason, False, details), reason)


async def _prepared(box: Box, row: dict, start: str) -> tuple[Canary, str]:
    """Puts a row's tests and two more in place; returns the two, and the script that runs all."""
    if row["tests"]["kind"] == "r2e":
        ran = await step(box, "link")
        runs, *files = ran.output.split("\n")
        script = f"export PATH={R2E_PATH}:$PATH\nbash {shlex.quote(runs)}"
        canary = await canary_for(box, row, files, list(row["tests"]["expected"]))
    else:
        await with_tests(box, row, start)
        script = row["tests"]["script"]
        canary = await canary_for(box, row, tests_of(row), row["FAIL_TO_PASS"])
    if applies(script):
        await without_tests(box, row, start)
    else:
        await append(box, canary)
    return canary, script


def _graded(row: dict, ran: Ran, mark: str, canary: Canary) -> Trial:
    """Judges the log and the exit code of a run."""
    if ran.ended:
        reason = "tests time" if ran.ended == "time" else ran.ended
        return Trial(Verdict(False, reason, ran.ended in ("time", "memory"), {}))
    _, begun, log = ran.output.partition(f"\n{mark}\n")
    found = outcomes(row["log_parser"], log)
    passes = [state for test, state in found.items() if canary.passes in words_of(test)]
    fails = [state for test, state in found.items() if canary.fails in words_of(test)]
    ours = {canary.passes, canary.fails}
    found = {test: state for test, state in found.items() if not words_of(test) & ours}
    fixed, kept = _shares(row, found)
    details = {"fixed": fixed, "kept": kept}
    if not begun or not found and FAULTS.search(log):
        reason = "no results" if begun else "tests did not begin"
        doubt = f"{reason}, code {ran.code}: {' '.join(ran.output[-500:].split())}"
        return Trial(Verdict(False, reason, False, details), doubt, True)
    if fixed < 1 or kept < 1:
        some_passed = fixed or (kept and row.get("PASS_TO_PASS"))
        doubt = "" if some_passed else "no test that counts has passed"
        return Trial(Verdict(False, "tests failed", False, details), doubt)
    if set(passes) != {"PASSED"} or not fails or not set(fails) <= set(BAD):
        doubt = f"our two tests ended as {[passes, fails]}, expected one PASSED and one FAILED"
        return Trial(Verdict(False, "canary", False, details | {"tampered": 1.0}), doubt)
    if not 0 < (ran.code or 0) < KILLED:
        doubt = f"tests ended with code {ran.code} although one must fail"
        return Trial(Verdict(False, "exit code", False, details | {"tampered": 1.0}), doubt)
    return Trial(Verdict(True, "", False, details))


def _shares(row: dict, found: dict[str, str]) -> tuple[float, float]:
    """Returns the shares of tests to repair and of tests to keep that ended as they must."""
    if row["tests"]["kind"] == "r2e":
        expected = {_plain(test): state for test, state in row["tests"]["expected"].items()}
        expected.pop("", None)
        same = sum(found.get(test) == state for test, state in expected.items())
        share = same / max(len(expected), len(found), 1)
        return share, share
    fixed = _share(row["FAIL_TO_PASS"], found, GOOD)
    kept = _share(row.get("PASS_TO_PASS", ()), found, KEPT)
    return fixed, kept


def _share(tests: Sequence[str], found: dict[str, str], states: tuple[str, ...]) -> float:
    """Returns the share of the tests that have one of these states; 1 if there are none."""
    if not tests:
        return 1.0
    return sum(good(test, found, states) for test in tests) / len(tests)


def _plain(test: str) -> str:
    """Returns a test's name as R2E-Gym prints it, without colours or the text that follows."""
    return COLOURS.sub("", test).split(" - ")[0]
