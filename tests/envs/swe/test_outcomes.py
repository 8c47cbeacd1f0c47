"""Known answers of the parsers of tests' logs; test_log_oracle.py has those of swebench beside."""

import time

from envs.swe.test_logs import GOOD, KEPT, PARSERS, good, outcomes
from support.tables import gives
from support.verifiers import HOSTILE

PYTEST, DJANGO, R2E = "parse_log_pytest", "parse_log_django", "r2e"
V2, OPTIONS = f"{PYTEST}_v2", f"{PYTEST}_options"
TITLE = "=== short test summary info ===\n"

test_outcomes = gives(
    outcomes,
    (PYTEST, "PASSED t.py::a\nXFAIL t.py::b - why\nFAILED t.py::c - assert 1 == 2\nPASSED",
     {"t.py::a": "PASSED", "t.py::b": "XFAIL", "t.py::c": "FAILED"}),
    (PYTEST, "t.py::a PASSED\n PASSED t.py::b\nSKIPPED [2] t.py:3: no\nPASSED [100%]",
     {"[100%]": "PASSED"}),
    (PYTEST, "\x1b[32mPASSED\x1b[0m t.py::\x1b[1ma\x1b[0m\r\n", {"t.py::a": "PASSED"}),
    # A test that failed once has failed: what is printed later, or before, changes nothing.
    (PYTEST, "FAILED t.py::a - no\nPASSED t.py::a", {"t.py::a": "FAILED"}),
    (PYTEST, "PASSED t.py::a\nERROR t.py::a - at its end", {"t.py::a": "ERROR"}),
    (PYTEST, "SKIPPED t.py::a\nPASSED t.py::a", {"t.py::a": "PASSED"}),
    (OPTIONS, "PASSED t.py::a[/x/y.txt]\nPASSED t.py::b[//x/y]\nPASSED t.py::c[/x/*]z",
     {"t.py::a[/y.txt]": "PASSED", "t.py::b[//x/y]": "PASSED", "t.py::c[/x/*]": "PASSED"}),
    (V2, "PASSED t.py::a[x y]\nFAILED t.py::b[x y] - no - more\nt.py::c[x y] PASSED\nFAILED",
     {"t.py::a[x y]": "PASSED", "t.py::b[x y]": "FAILED", "t.py::c[x y]": "PASSED"}),
    (f"{PYTEST}_pydantic", "FAILED [ 50%] t.py::a\nt.py::b PASSED",
     {"t.py::a": "FAILED", "t.py::b": "PASSED"}),
    ("parse_log_sphinx", "PASSED t.py::a[x y]", {"t.py::a[x y]": "PASSED"}),
    ("parse_log_matplotlib", "PASSED t.py::a[MouseButton.LEFT]", {"t.py::a[1]": "PASSED"}),
    ("parse_log_seaborn", "t.py::a PASSED [ 9%]\nFAILED t.py::b - no",
     {"t.py::a": "PASSED", "t.py::b": "FAILED"}),
    (DJANGO, "t (a.B) ... ok\nu (a.B) ... FAIL\nv (a.B) ... skipped 'no'\nw (a.B) ... noise\nok",
     {"t (a.B)": "PASSED", "u (a.B)": "FAILED", "v (a.B)": "SKIPPED", "w (a.B)": "PASSED"}),
    (DJANGO, "t ... Testing against Django installed in /x\nmore silenced).\nok",
     {"t": "PASSED"}),
    (DJANGO, "t (a.B) ... ok\nERROR: t (a.B)\nFAIL:", {"t (a.B)": "PASSED", "t": "ERROR"}),
    ("parse_log_sympy", "____ a/test_b.py:test_c ____\ntest_a ok\ntest_b E\ntest_d F\nx ok",
     {"a/test_b.py:test_c": "FAILED", "test_a": "PASSED", "test_b": "ERROR", "test_d": "FAILED"}),
    ("swesmith", "t.py::a PASSED [ 50%]\nt.py::b[x] FAILED\n PASSED t.py::c",
     {"t.py::a": "PASSED", "t.py::b[x]": "FAILED"}),
    (R2E, f"PASSED t.py::z\n{TITLE}PASSED t.py::C::a\nFAILED t.py::b - no\nERROR t.py\n1 passed",
     {"C.a": "PASSED", "b": "FAILED"}),
    # What a test prints as the summary does not take the place of the summary.
    (R2E, f"{TITLE}PASSED t.py::a\n{TITLE}FAILED t.py::a - no", {"a": "FAILED"}),
)  # fmt: skip

FOUND = {"a[x y]": "PASSED", "a[x z]": "XFAIL", "b[x y]": "PASSED", "b[x z]": "FAILED"}
FOUND |= {"c[x": "PASSED", "c[x y]": "FAILED", "d": "SKIPPED", "e[x y]": "SKIPPED"}
test_good = gives(
    good,
    ("a[x y]", FOUND, GOOD, True),
    ("a[x z]", FOUND, GOOD, True),
    ("a[x", FOUND, GOOD, True),
    ("b[x", FOUND, GOOD, False),  # one of them failed
    ("c[x", FOUND, GOOD, True),  # it is there by itself
    ("a", FOUND, GOOD, False),
    ("f[x", FOUND, KEPT, False),
    ("d", FOUND, GOOD, False),
    ("d", FOUND, KEPT, True),
    ("e[x", FOUND, KEPT, True),
    ("b[x z]", FOUND, KEPT, False),
)


def test_time_grows_with_the_length_of_a_log():
    """A log of the longest that is kept takes seconds, whatever the judged code wrote."""
    parts = [
        " ",
        "_",
        "[",
        "a ... Testing against Django installed in ",
        ".py:",
        "x ... ",
        "FAILED [",
    ]
    lines = [(part * 10_000)[:9_999] for part in parts]
    lines += ["FAILED " + line for line in lines] + [line + " PASSED" for line in lines]
    for parser in ("parse_log_sympy", DJANGO, OPTIONS, V2, f"{PYTEST}_pydantic", R2E, "swesmith"):
        for line in [*lines, "a ... Testing against Django installed in ", *HOSTILE]:
            log = (line + "\n") * (300_000 // (len(line) + 1))
            began = time.process_time()
            outcomes(parser, log)
            # Linear time takes 0.3 s at most on an idle machine.
            assert time.process_time() - began < 10, (parser, line[:50])


def test_parsers_have_the_names_that_rows_give_them():
    assert len(PARSERS) == 23 and {"parse_log_astropy", "parse_log_flask"} <= PARSERS.keys()
