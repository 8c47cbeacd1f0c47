"""The tests that passed by a log, as SWE-bench reads the output of pytest, Django and SymPy.

No environment by itself: envs/swe/swe_patch.py uses it.
"""

import re

STATUSES = ("FAILED", "PASSED", "SKIPPED", "ERROR")
ENDINGS = {" ok": "PASSED", " F": "FAILED", " E": "ERROR"}  # of SymPy's lines
LONGEST = 10_000  # characters of a line that can be a test's


def statuses(repo: str, log: str) -> dict[str, str]:
    """The last status of each test that a log names. `repo` is OWNER/NAME."""
    log = re.sub(r"\x1b\[[0-9;]*m", "", log.replace("…", "..."))
    read = {"django": _django, "sympy": _sympy}.get(repo.rpartition("/")[2], _pytest)
    lines = [line for line in log.split("\n") if len(line) <= LONGEST]
    return {name_of(test): status for test, status in read(lines).items() if status in STATUSES}


def passed(repo: str, log: str) -> set[str]:
    """The names of the tests that have the last status PASSED in a log."""
    return {test for test, status in statuses(repo, log).items() if status == "PASSED"}


def name_of(test: str) -> str:
    """A test's name; of a path in its brackets only the last part, since folders differ."""
    found = re.match(r"(.*?)\[(.*)\]", test)
    if found and found[2].startswith("/") and not re.search(r"^//|\*|-/", found[2]):
        return f"{found[1]}[/{found[2].rpartition('/')[2]}]"
    return test


def _pytest(lines: list[str]) -> dict[str, str]:
    found = {}
    for line in lines:
        if not any(status in line for status in STATUSES):
            continue
        line = re.sub(r"\[\d+m|[\x01-\x1f]", "", line)
        line = re.sub(r"\[ *\d+ *% *\]\Z", "", line).rstrip()
        line = line.replace("MouseButton.LEFT", "1").replace("MouseButton.RIGHT", "3")
        words = line.replace(" - ", " ").split()
        if len(words) > 1 and line.startswith(STATUSES):
            found[words[1]] = words[0]
        elif len(words) > 1 and line.endswith(STATUSES):
            found[words[0]] = words[1]
    return found


def _django(lines: list[str]) -> dict[str, str]:
    found = {}
    running = ""
    for line in map(str.strip, lines):
        test, dots, status = line.rpartition("... ")
        if " ... " in line:
            running = line.partition(" ... ")[0]
        if dots and status.strip() in ("ok", "OK"):
            found[test.strip()] = "PASSED"
        elif " ... skipped" in line:
            found[running] = "SKIPPED"
        elif dots and status in ("FAIL", "ERROR"):
            found[test.strip()] = status
        elif line.startswith(("FAIL: ", "ERROR: ")):
            found[line.split()[1]] = "FAILED"
        elif line.startswith("ok") and running:
            found[running] = "PASSED"
    return found


def _sympy(lines: list[str]) -> dict[str, str]:
    found = {}
    for line in lines:
        line = line.replace("[OK]", "").replace("[FAIL]", "").strip()
        words = line.split()
        ending = next((ending for ending in ENDINGS if line.endswith(ending)), "")
        if line.startswith("test_") and ending:
            found[words[0]] = ENDINGS[ending]
        elif not line.startswith("test_") and "PASSED" in line and len(words) > 1:
            found[words[words[0] == "PASSED"]] = "PASSED"
    return found
