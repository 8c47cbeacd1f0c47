"""Prepares the repository in a box, reads an agent's patch from it, and applies patch and tests.

The commands are in repository.sh. This is not an environment itself: envs/swe/swe_judge.py uses it.
"""

import contextlib
import re
import shlex
import tomllib
import weakref
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from envs import Json
from envs.boxes.box import Box, Ran
from envs.services import CheckerError

SCRIPT = Path(__file__).with_name("repository.sh").read_text(encoding="utf-8")
LONGEST = 1 << 20  # bytes of a patch
STEP = 300.0  # seconds for a step before or after the tests
PATCH_SECONDS = 30.0  # seconds for reading a patch, in addition to SLOWER times Start.seconds
SLOWER = 10
LISTS = 16 << 20  # bytes in a list of files, or in one file
APPLIES_NOT = 9  # exit code of repository.sh if a patch does not apply
PATCH = "/tmp/.judge/patch"
LINKS = ("120000", "160000")  # modes of symbolic links and of other repositories
R2E_FILES = "expected_test_output.json execution_result.json parsed_commit.json"
R2E_FILES += " modified_files.json modified_entities.json syn_issue.json"
R2E_TESTS = ("r2e_tests", "run_tests.sh")
# Files with which a patch could steer a test run.
DROPPED = re.compile(
    r"""(^|/)(conftest\.py|\.?pytest\.(ini|toml)|tox\.ini|setup\.cfg|\.coveragerc|\.gitattributes
    |(site|user)customize(\.py|/.*)|[^/]*\.pth|[^/]*\.(egg|dist)-info/.*)\Z
    |^(pytest|_pytest|pluggy|unittest|iniconfig)(\.py|/.*)\Z""",
    re.X,
)
# Signs in a log without results that the machine is at fault, from swebench's infra_failure.py.
FAULTS = re.compile(
    r"""Failed\ to\ (launch|connect\ to\ the\ bus)|cannot\ open\ display|Missing\ X\ server
    |unable\ to\ open\ X\ display|Cannot\ allocate\ memory|OutOfMemoryError|^Killed$
    |Could\ not\ resolve\ host|Temporary\ failure\ in\ name\ resolution
    |No\ space\ left\ on\ device""",
    re.X | re.M,
)


class Start(NamedTuple):
    """The first commit of a repository in a box."""

    commit: str
    folder: str  # with links resolved
    seconds: float  # seconds that reading all of its files took


_starts: weakref.WeakKeyDictionary[Box, Start] = weakref.WeakKeyDictionary()


class Refused(Exception):
    """Raised, before any test runs, with the reason why a patch earns nothing."""


async def prepare(box: Box, row: dict) -> None:
    """Reduces a box's repository to its start, so that nothing shows how it was repaired.

    Raises CheckerError if that is not possible.
    """
    _starts[box] = await start_of(box, row, R2E_TESTS)


async def patch_of(box: Box, row: dict) -> str | None:
    """Returns how a prepared box's files differ from their start; None if they do not.

    A patch that is too long is returned with more than LONGEST bytes. No program that the policy
    may have replaced is run. The result is None if reading takes too long, for example because git
    would read a pipe: the row's own files took only `Start.seconds`. Raises CheckerError as Box
    does.
    """
    start = _starts[box]
    within = min(STEP, PATCH_SECONDS + SLOWER * start.seconds)
    script = command("difference", start.commit, str(LONGEST + 1))
    found = await box.aside(script, within, LONGEST + 1, start.folder)
    if found and len(found) > LONGEST:
        return found.decode("utf-8", "replace")
    parts = []
    for part in re.split(rb"^(?=diff --git )", found or b"", flags=re.M):
        binary = b"\nBinary files " in part.partition(b"\n@@ ")[0]
        if not binary:
            with contextlib.suppress(UnicodeDecodeError):
                parts.append(part.decode())
    return "".join(parts) or None


async def start_of(box: Box, row: dict, hidden: tuple[str, ...] = ()) -> Start:
    """Cuts the repository's history, and returns its only commit. Raises CheckerError."""
    if row["tests"]["kind"] == "r2e":
        await step(box, "hide", " ".join([R2E_FILES, *hidden]))
        await step(box, "aside")
    else:
        await step(box, "hide", "")
    if broken := row.get("start_patch"):
        await put(box, PATCH, broken.encode())
        await step(box, "plainly", PATCH)
    ran = await step(box, "cut", row["base_commit"], "0" if broken else "1")
    _, commit, folder = ran.output.rstrip("\n").rpartition("\n")[2].split(" ", 2)
    return Start(commit, folder, ran.seconds)


async def patched(box: Box, row: dict, patch: str, start: str) -> list[str]:
    """Applies a patch, undoes changes to files that it may not change, and returns their paths.

    Raises Refused if the patch does not apply.
    """
    if not patch.strip():
        return []
    await put(box, PATCH, patch.encode("utf-8", "replace"))
    ran = await box.run(command("apply", PATCH, start), STEP)
    if ran.code == APPLIES_NOT and not FAULTS.search(ran.output):
        raise Refused("does not apply")
    _must_end(ran, "apply")
    raw = await _list(box, f"{PATCH}.raw")
    counts = await _list(box, f"{PATCH}.counts")
    modes: dict[str, str] = {}  # git mode of each path
    for fields, path in zip(raw[::2], raw[1::2], strict=True):
        modes[path] = fields.split(" ")[1]
    binary = {line.split("\t", 2)[2] for line in counts if line.startswith("-\t-\t")}
    own = set(paths_of(row["patch"]))
    tests = set(tests_of(row))
    dropped = []
    for path, mode in modes.items():
        steers = bool(DROPPED.search(path)) or mode in LINKS or path in binary
        if not steers and PurePosixPath(path).name == "pyproject.toml":
            before = await _pytest_of(box, start, path)
            steers = before != await _pytest_of(box, "", path)
        if path in tests or (steers and path not in own):
            dropped.append(path)
    await _back(box, start, dropped)
    return dropped


async def with_tests(box: Box, row: dict, start: str) -> None:
    """Puts a row's tests in place. Raises Refused."""
    await _back(box, _base(row, start), paths_of(row.get("test_patch") or ""))
    if (text := row.get("test_patch") or "").strip():
        await put(box, PATCH, text.encode())
        ran = await box.run(command("plainly", PATCH), STEP)
        if ran.code != 0:
            raise Refused("the tests' patch does not apply")


async def without_tests(box: Box, row: dict, start: str) -> None:
    """Undoes the changes made by the test patch. Raises Refused."""
    await _back(box, _base(row, start), paths_of(row.get("test_patch") or ""))


def _base(row: dict, start: str) -> str:
    return start if row.get("start_patch") else row["base_commit"]


def tests_of(row: dict) -> list[str]:
    """Returns the paths of a row's tests: from their patch, and from the tests' names."""
    paths = paths_of(row.get("test_patch") or "")
    for test in [*row.get("FAIL_TO_PASS", ()), *row.get("PASS_TO_PASS", ())]:
        path, colons, _ = test.partition("::")
        if colons:
            paths.append(path)
    return list(dict.fromkeys(paths))


def paths_of(patch: str) -> list[str]:
    """Returns the paths in the headers of a patch in the row."""
    found = re.findall(r"^(?:---|\+\+\+) [ab]/([^\t\n]+)", patch, re.M)
    found += re.findall(r"^rename (?:from|to) (.+)", patch, re.M)
    return list(dict.fromkeys(found))


async def _pytest_of(box: Box, commit: str, path: str) -> dict[str, Json] | bytes | None:
    """Returns the pytest settings in a pyproject.toml, in a commit or, if that is "", in the files.

    Returns the file itself if it is not valid TOML.
    """
    if commit:
        await box.run(f"git show {commit}:{shlex.quote(path)} >{PATCH}.toml", STEP)
    found = await box.get(f"{PATCH}.toml" if commit else f"{box.workdir}/{path}", LISTS)
    try:
        table = tomllib.loads((found or b"").decode("utf-8", "replace"))
        project = table.get("project", {})
        tool = table.get("tool", {})
        plugins = project.get("entry-points", {}).get("pytest11")
        poetry = tool.get("poetry", {}).get("plugins", {}).get("pytest11")
        return {"pytest": tool.get("pytest"), "plugins": plugins, "poetry": poetry}
    except (ValueError, AttributeError, RecursionError):
        return found


async def _back(box: Box, commit: str, paths: list[str]) -> None:
    """Restores paths to their state in a commit. Raises Refused."""
    if not paths:
        return
    text = "".join(f"{path}\0" for path in paths)
    await put(box, f"{PATCH}.back", text.encode("utf-8", "surrogateescape"))
    ran = await box.run(command("back", commit, f"{PATCH}.back"), STEP)
    if ran.code != 0:
        raise Refused("its changes cannot be undone")


async def _list(box: Box, path: str) -> list[str]:
    """Reads a list whose entries end with zero bytes."""
    found = await box.get(path, LISTS)
    return (found or b"").decode("utf-8", "surrogateescape").split("\0")[:-1]


def command(*args: str) -> str:
    return f"set -- {shlex.join(args)}\n{SCRIPT}"


async def step(box: Box, *args: str) -> Ran:
    """Runs a step before any part of a patch runs. Raises CheckerError if it fails."""
    ran = await box.run(command(*args), STEP)
    _must_end(ran, args[0])
    return ran


def _must_end(ran: Ran, step: str) -> None:
    if ran.code != 0:
        why = ran.ended or f"code {ran.code}: {' '.join(ran.output[-500:].split())}"
        raise CheckerError(f"a repository cannot be prepared ({step}): {why}")


async def put(box: Box, path: str, content: bytes) -> None:
    """Writes a file in a box. Raises CheckerError if that is not possible."""
    try:
        await box.put(path, content)
    except ValueError as error:
        raise CheckerError(f"a repository cannot be prepared: {error}") from None
