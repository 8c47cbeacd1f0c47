"""Our parsers of logs beside those of swebench 5.0.2: `bash tests/run.sh swe` sets GRPO_SWE.

GRPO_SWE is a virtual environment with swebench 5.0.2, installed without what it requires.
"""

import json
import os
import random
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from envs.swe.test_logs import ALL, BAD, GOOD, KEPT, PARSERS, _lines, good, outcomes

VENV = os.environ.get("GRPO_SWE", "")
THEIRS = Path(__file__).resolve().parents[2] / "support/oracle/swebench_logs.py"
OURS_ALONE = {"swesmith", "r2e", "parse_log_pytest_pydantic"}
LOGS = 2000  # random ones a parser
TESTS = ("t.py::a", "t.py::b[x y]", "t.py::c[/tmp/z/f.txt]", "t.py::d[x - y]", "t.py::e[//z]",
         "test_f", "test_g (a.B)", "test_h (a.B.test_h)", "t.py::i[MouseButton.LEFT]",
         "t.py::j[a][/b/c]", "t.py::k[*/x]", "t.py::l[/x*]", "t.py::m[/", "n")  # fmt: skip
ENDS = ("ok", "OK", " OK", "FAIL", "ERROR", "skipped 'no'", "noise", "ok ", "F", "E")
NOISE = ("", "ok", "okay", "=== short test summary info ===", "SKIPPED [3] t.py:1: no", "PASSED",
         "PASSED [100%]", "+ pytest t.py", "FAILED", "noise ... silenced", "[32mPASSED",
         "--version is equivalent to version", "in /x silenced).", "____ a/test_b.py:test_c ____",
         "___ x.py:y", "_ _.py: _", "a b.py:c d.py:e f", " .py: ", "Internal Server Error: /x/",
         "t ... Testing against Django installed in /x with up to 2 processes silenced).",
         "u ... Testing against Django installed in /x", "v ... Internal Server Error: /a/b/",
         "w ... System check identified no issues (0 silenced)", "1 failed, 2 passed in 0.1s",
         "Applying sites.0002_alter_domain_unique...test_no_migrations (m.T) ... ok")  # fmt: skip


def line(rng: random.Random) -> str:
    test, status, end = rng.choice(TESTS), rng.choice(ALL), rng.choice(ENDS)
    return rng.choice([
        f"{status} {test}", f"{status} {test} - assert 1 - 2", f"{test} {status}",
        f"{test} {status} [ 50%]", f"{test} ... {end}", f"{test} {end}", f"FAIL: {test}",
        f"ERROR: {test}", f"  {status} {test}", f"\x1b{status} {test}", f"{status}\t{test}\r",
        rng.choice(NOISE),
    ])  # fmt: skip


def random_log(rng: random.Random) -> str:
    return "\n".join(line(rng) for _ in range(rng.randrange(12)))


@pytest.fixture(scope="module")
def ask():
    """What swebench says of the same input."""
    if not VENV:
        pytest.skip("bash tests/run.sh swe installs swebench")

    def asked(given: list) -> list:
        text = "".join(json.dumps(one) + "\n" for one in given)
        command = [f"{VENV}/bin/python", THEIRS]
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-2000:]
        return list(map(json.loads, done.stdout.splitlines()))

    return asked


def test_parsers_agree(ask):
    """Each status that swebench reads, we read; but a test that failed once has failed."""
    rng = random.Random(0)
    names = sorted(PARSERS.keys() - OURS_ALONE)
    given = [(name, random_log(rng)) for name in names for _ in range(LOGS)]
    known, *theirs = ask(given)
    assert set(names) <= set(known) and len(known) == 57
    rows = Counter()
    for (name, log), their in zip(given, theirs, strict=True):
        found = list(PARSERS[name](_lines(log)))
        assert dict(found) == their, (name, log)
        own = outcomes(name, log)
        failed = {test for test, status in found if status in BAD}
        assert {test: status for test, status in own.items() if test not in failed} == {
            test: status for test, status in their.items() if test not in failed
        }
        assert all(own[test] in BAD for test in failed)
        rows[name, "tests"] += len(their)
        rows[name, "failed"] += sum(their[test] not in BAD for test in failed)
    head = ("parser of swebench 5.0.2", "logs", "tests", "equal", "failed once")
    print("\n{:30} {:>5} {:>6} {:>6} {:>11}".format(*head))
    for name in known:
        if name in names:
            tests, failed = rows[name, "tests"], rows[name, "failed"]
            print(f"{name:30} {LOGS:>5} {tests:>6} {tests - failed:>6} {failed:>11}")
        else:
            print(f"{name:30} refused: no parser of Python's tests")


def test_grading_agrees(ask):
    """Tests that count, by their states; names that were cut within brackets among them."""
    rng = random.Random(1)
    tests = ["a", "t[x", "t[x y]", "t[x z]", "t[y", "t[", "u[x]"]
    given = []
    for _ in range(4000):
        found = {test: rng.choice(ALL) for test in rng.sample(tests, rng.randrange(len(tests)))}
        given.append((None, rng.choice(tests), found))
    _, *theirs = ask(given)
    stricter = 0
    for (_, test, found), their in zip(given, theirs, strict=True):
        own = [good(test, found, GOOD), good(test, found, KEPT)]
        assert own[0] == their[0]
        # Where a cut name stands for skipped and failed tests, swebench looks at the first alone.
        assert own[1] <= their[1]
        stricter += own[1] != their[1]
    assert stricter < len(given) / 20
