"""Reads the status of each test in a log, as SWE-bench does for pytest, Django and SymPy.

`statuses` and `passed` follow NeMo-Gym's swerl_gen and keep a test's last status. `outcomes` uses
swebench 5.0.2's Python parsers, under their names, and parsers for other row sources. It reads logs
that the judged code may have written to: a test that failed once counts as failed, and the time is
linear in the length of the log.

This is not an environment itself: envs/swe/swe_patch.py and envs/swe/swe_judge.py use it.
"""

import re
from collections.abc import Callable, Iterable, Iterator

STATUSES = ("FAILED", "PASSED", "SKIPPED", "ERROR")
ENDINGS = {" ok": "PASSED", " F": "FAILED", " E": "ERROR"}  # status by the end of SymPy's lines
LONGEST = 10_000  # characters of a line; a longer one is not a test's
BAD = ("FAILED", "ERROR")
GOOD = ("PASSED", "XFAIL")  # an expected failure counts as passed
KEPT = (*GOOD, "SKIPPED")  # a test that passed before and is skipped now is not a regression
ALL = (*STATUSES, "XFAIL")
COUNT = re.compile(r"\[\d+\]\Z")  # in place of a name, in pytest's summary of skipped tests
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
CONTROL = dict.fromkeys(range(1, 32))
DJANGO = (  # beginning and end of Django's output between "..." and the "ok" on a later line
    (" ... Testing against Django installed in ", " silenced)."),
    (" ... Internal Server Error: /", "/"),
    (" ... System check identified no issues (0 silenced)", ""),
)
DJANGO_7188 = "Applying sites.0002_alter_domain_unique...test_no_migrations"
SUMMARY = "short test summary info"
Found = Iterator[tuple[str, str]]  # a test and its status, in the order of the log


def statuses(repo: str, log: str) -> dict[str, str]:
    """Returns the last status of each test that a log names. `repo` is OWNER/NAME."""
    log = re.sub(r"\x1b\[[0-9;]*m", "", log.replace("…", "..."))
    read = {"django": _django, "sympy": _sympy}.get(repo.rpartition("/")[2], _pytest)
    lines = [line for line in log.split("\n") if len(line) <= LONGEST]
    return {name_of(test): status for test, status in read(lines).items() if status in STATUSES}


def passed(repo: str, log: str) -> set[str]:
    """Returns the names of the tests whose last status in a log is PASSED."""
    return {test for test, status in statuses(repo, log).items() if status == "PASSED"}


def name_of(test: str) -> str:
    """Returns a test's name, with a path in brackets cut to its last part: folders differ."""
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


def outcomes(parser: str, log: str) -> dict[str, str]:
    """Returns the status of each test in a log; FAILED or ERROR if it failed anywhere in it.

    `parser` is a name in PARSERS.
    """
    found: dict[str, str] = {}
    for test, status in PARSERS[parser](_lines(log)):
        if found.get(test) not in BAD:
            found[test] = status
    return found


def good(test: str, found: dict[str, str], states: tuple[str, ...] = GOOD) -> bool:
    """Returns whether a test has one of these states.

    A name that was cut within its brackets, as 676 names in SWE-bench Verified were, stands for all
    tests whose names begin with it.
    """
    if test not in found and test.count("[") > test.count("]"):
        cut = [status for name, status in found.items() if name.startswith(test)]
        return bool(cut) and (set(cut) <= set(GOOD) or set(cut) <= set(states) - set(GOOD))
    return found.get(test) in states


def _lines(log: str) -> list[str]:
    plain = COLOURS.sub("", log).replace("\r\n", "\n")
    return [line for line in plain.split("\n") if len(line) <= LONGEST]


def _by_pytest(lines: Iterable[str]) -> Found:
    for line in lines:
        if line.startswith(ALL):
            line = line.replace(" - ", " ") if line.startswith("FAILED") else line
            words = line.split()
            if len(words) > 1 and not _counts(*words[:2]):
                yield words[1], words[0]


def _counts(status: str, name: str) -> bool:
    return status == "SKIPPED" and bool(COUNT.match(name))


def _by_pytest_options(lines: Iterable[str]) -> Found:
    for test, status in _by_pytest(lines):
        start, end = test.find("["), test.rfind("]")
        if 0 <= start < end:
            option = test[start + 1 : end]
            if option.startswith("/") and not option.startswith("//") and "*" not in option:
                option = "/" + option.rpartition("/")[2]
            test = f"{test[:start]}[{option}]"
        yield test, status


def _by_pytest_v2(lines: Iterable[str]) -> Found:
    for line in lines:
        line = re.sub(r"\[(\d+)m", "", line).translate(CONTROL)
        if line.startswith(ALL):
            line = line.split(" - ", 1)[0] if line.startswith("FAILED") else line
            words = line.split()
            if len(words) > 1 and not _counts(*words[:2]):
                yield " ".join(words[1:]), words[0]
        elif line.endswith(ALL):
            words = line.split()
            if len(words) > 1:
                yield " ".join(words[:-1]), words[-1]


def _by_pytest_pydantic(lines: Iterable[str]) -> Found:
    """Reads SWE-Gym's pydantic logs, which have a percentage of tests between status and name."""
    for line in lines:
        line = re.sub(r"\[(\d+)m", "", line).translate(CONTROL)
        words = re.sub(r"FAILED\s*\[[^\]]*\]", "FAILED", line).replace(" - ", " ").split()
        if len(words) > 1 and line.startswith(ALL):
            yield words[1], words[0]
        elif len(words) > 1 and line.endswith(ALL):
            yield words[0], words[1]


def _by_matplotlib(lines: Iterable[str]) -> Found:
    buttons = (("MouseButton.LEFT", "1"), ("MouseButton.RIGHT", "3"))
    return _by_pytest(line.replace(*buttons[0]).replace(*buttons[1]) for line in lines)


def _by_seaborn(lines: Iterable[str]) -> Found:
    for line in lines:
        words = line.split()
        if len(words) < 2:
            continue
        if line.startswith("FAILED"):
            yield words[1], "FAILED"
        elif " PASSED " in line:
            if words[1] == "PASSED":
                yield words[0], "PASSED"
        elif line.startswith("PASSED"):
            yield words[1], "PASSED"


def _by_django(lines: Iterable[str]) -> Found:
    lines = list(lines)
    running = ""
    for line in map(str.strip, lines):
        if "--version is equivalent to version" in line:
            yield "--version is equivalent to version", "PASSED"
        running = line.partition(" ... ")[0] if " ... " in line else running
        passed = next((end for end in (" ... ok", " ... OK", " ...  OK") if line.endswith(end)), "")
        if passed:
            test = line.split("...", 1)[1].strip() if line.startswith(DJANGO_7188) else line
            yield test.rsplit(passed, 1)[0], "PASSED"
        if " ... skipped" in line:
            yield line.partition(" ... skipped")[0], "SKIPPED"
        for mark, status in (("FAIL", "FAILED"), ("ERROR", "ERROR")):
            if line.endswith(f" ... {mark}"):
                yield line.partition(f" ... {mark}")[0], status
            words = line.split()
            if line.startswith(f"{mark}:") and len(words) > 1:
                yield words[1], status
        if line.startswith("ok") and running:
            yield running, "PASSED"
    for begins, ends in DJANGO:
        yield from _over_lines(lines, begins, ends)


def _over_lines(lines: list[str], begins: str, ends: str) -> Found:
    """Yields Django tests that passed, with other output between "..." and "ok"."""
    test = ""
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        name, begun, rest = line.partition(begins)
        if begun and not test:
            test, line = name, rest
        if test and line.endswith(ends) and (ends or not line) and after == "ok":
            yield test, "PASSED"
            test = ""
        elif begins != DJANGO[0][0]:
            test = ""  # only the first kind of output spans more than one line


def _by_sympy(lines: Iterable[str]) -> Found:
    lines = list(lines)
    for line in lines:  # the title of a traceback: "____ sympy/x/tests/test_y.py:test_z ____"
        first, last = line.find(" "), line.rfind(" ")
        middle = line.rfind(".py:", 0, last)
        if 0 <= first < middle:
            yield line[first + 1 : last], "FAILED"
    for line in map(str.strip, lines):
        ending = next((ending for ending in ENDINGS if line.endswith(ending)), "")
        if line.startswith("test_") and ending:
            yield line.split()[0], ENDINGS[ending]


def _by_swesmith(lines: Iterable[str]) -> Found:
    """Reads SWE-smith's logs: the name of a test comes first, as `pytest -v` prints it."""
    for line in lines:
        words = line.split(None, 2)
        if len(words) > 1 and not line[0].isspace():
            for status in ALL:
                if words[1].startswith(status):
                    yield words[0], status


def _by_r2e(lines: Iterable[str]) -> Found:
    """Reads R2E-Gym's logs: the lines after pytest's summary title, without the test's file."""
    begun = False
    for line in lines:
        status = next((status for status in ("PASSED", "FAILED", "ERROR") if status in line), "")
        if begun and status:
            name = ".".join(line.split("::")[1:]).split(" - ")[0]
            if name.strip():
                yield name, status
        begun = begun or SUMMARY in line


SAME = {  # names of swebench's parsers that share one function
    "": ("astroid", "flask", "marshmallow", "pvlib", "pyvista", "sqlfluff", "xarray"),
    "_options": ("pydicom", "requests", "pylint"),
    "_v2": ("astropy", "scikit", "sphinx"),
}
PARSERS: dict[str, Callable[[Iterable[str]], Found]] = {
    "parse_log_pytest": _by_pytest,
    "parse_log_pytest_options": _by_pytest_options,
    "parse_log_pytest_v2": _by_pytest_v2,
    "parse_log_pytest_pydantic": _by_pytest_pydantic,
    "parse_log_django": _by_django,
    "parse_log_matplotlib": _by_matplotlib,
    "parse_log_seaborn": _by_seaborn,
    "parse_log_sympy": _by_sympy,
    "swesmith": _by_swesmith,
    "r2e": _by_r2e,
}
for _kind, _repositories in SAME.items():
    for _repository in _repositories:
        PARSERS[f"parse_log_{_repository}"] = PARSERS[f"parse_log_pytest{_kind}"]
