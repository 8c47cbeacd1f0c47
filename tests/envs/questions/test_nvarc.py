"""Grids of ARC-AGI, written or made by a program: known answers, and what earns nothing."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs import Reward, check_rows
from envs.questions import nvarc, nvarc_programs
from envs.sandbox import sandbox
from envs.services import configure
from settings.environment_services import Services
from support.examples import tries
from support.loop import at_once
from support.samples import asking
from support.tables import gives, refused
from support.verifiers import HOSTILE

GRID = [[0, 1], [2, 3]]
MORE = [[1, 2], [3, 4]]
WRITTEN = asking("?", "nvarc_transductive_simple_agent", expected_output=MORE)
MADE = asking("?", "nvarc_inductive_simple_agent", expected_output=MORE, test_input=GRID)
ADDS = "def transform(grid):\n    return [[cell + 1 for cell in row] for row in grid]"
runs = pytest.mark.skipif(bool(sandbox.problem()), reason=sandbox.problem())


def text_of(grid: list[list[int]]) -> str:
    return "\n".join(" ".join(map(str, row)) for row in grid)


def block(source: str) -> str:
    return f"```python\n{source}\n```"


def judged(row: dict, *responses: str) -> list[Reward]:
    return at_once(nvarc.verify(row, response) for response in responses)


def values(row: dict, *responses: str) -> list[float]:
    return [reward.value for reward in judged(row, *responses)]


# --- written grids --------------------------------------------------------------------------------


test_written_grids = gives(
    nvarc.written,
    ("1 2\n3 4", MORE),
    ("\\boxed{1 2\n3 4}", MORE),
    ("It is 7:\n\\boxed{\n1 2\n\n3 4\n}\nas 5 says.", MORE),
    ("\\boxed{[[1, 2],\n[3, 4]]}", MORE),
    ("| 1 | 2 |\n| 3 | 4 |", MORE),
    ("so 1 2\nand 3 4.", MORE),
    ("1\t2\r\n3\xa04", MORE),
    ("1 2\u20283 4", [[1, 2, 3, 4]]),
    ("12\n34", []),
    ("1,2\n3,4", []),
    ("-1 2.\n3 0.4 4", MORE),
    ("0 12 1", [[0, 1]]),
    ("\u0661 \u00b2 1", [[1]]),  # ARABIC-INDIC DIGIT ONE, SUPERSCRIPT TWO
    ("1 2\n3", []),
    ("\\boxed{1 2\n4", [[2], [4]]),  # "boxed1" is a word
    ("\\boxed{1} and \\boxed{2}", [[1]]),  # from the first to the last brace
    ("\\boxed{{1 2}\n{3 4}}", MORE),
    ("\\boxed{}", []),
    ("} 1 \\boxed{", [[1]]),
    ("none", []),
    ("", []),
)


def test_a_grid_is_right_in_each_cell():
    right = (
        text_of(MORE),
        f"<think>5</think>\\boxed{{{text_of(MORE)}}}",
        f"No.</think>{text_of(MORE)}",
    )
    assert values(WRITTEN, *right) == [1, 1, 1]
    wrong = {"1 2\n3 5": "wrong grid", "1 2": "wrong grid", "1 2\n3": "no grid", "?": "no grid"}
    wrong |= {"": "empty", f"<think>{text_of(MORE)}": "truncated", ADDS: "wrong grid"}
    wrong |= {text_of(list(zip(*MORE, strict=True))): "wrong grid"}
    assert [reward.info["reason"] for reward in judged(WRITTEN, *wrong)] == list(wrong.values())
    assert {reward.value for reward in judged(WRITTEN, *wrong)} == {0.0}


def test_wrong_grids_earn_nothing():
    """A thousand changes of right ones."""
    rng = random.Random(0)
    for _ in range(1000):
        grid = [[rng.randrange(10) for _ in range(3)] for _ in range(4)]
        other = [list(row) for row in grid]
        match rng.randrange(5):
            case 0:
                other[rng.randrange(4)][rng.randrange(3)] += 1 + rng.randrange(9)
                other = [[cell % 10 for cell in row] for row in other]
            case 1:
                other.pop(rng.randrange(4))
            case 2:
                other.append(other[0])
            case 3:
                other = [row[1:] for row in other]
            case 4:
                other = [[*row, 0] for row in other]
        assert nvarc.written(text_of(grid)) == grid != nvarc.written(f"\\boxed{{{text_of(other)}}}")


@given(st.text(st.sampled_from("01 9,-[]{}\\boxed\n\t\u0663")) | st.text())
@settings(max_examples=tries(500))
def test_any_text_has_one_grid(text):
    grid = nvarc.written(text)
    assert all(row and len(row) == len(grid[0]) for row in grid)
    assert nvarc.written(text_of(grid)) == grid


# --- programs -------------------------------------------------------------------------------------


test_programs_in_a_text = gives(
    nvarc_programs.program,
    (block(ADDS), ADDS),
    (f"{block('x')}\nBetter:\n{block(ADDS)}\nDone.", ADDS),
    (f"```python  \n\n    {ADDS}\n```", ADDS),
    (f"```\n{ADDS}\n```", ADDS),
    (f"```python\n{ADDS}\n```\n```\nx\n```", ADDS),  # the language comes first
    (ADDS, ADDS),
    (f"```python\n{ADDS}", f"```python\n{ADDS}"),
    (f"```py\n{ADDS}\n```", f"```py\n{ADDS}\n```"),
    ("```python x\n```", None),
    ("```python\n```", ""),
    ("a transform", None),
)


@runs
def test_what_a_program_returns():
    """A grid is compared as JSON."""
    right = {
        "lists": ADDS,
        "tuples": "def transform(g): return tuple(tuple(c + 1 for c in r) for r in g)",
        "an array": "import numpy as np\ndef transform(g): return np.array(g) + 1",
        "arrays": "import numpy as np\ndef transform(g): return [r for r in np.array(g) + 1.0]",
        "texts": "def transform(g): return [[str(c + 1) for c in r] for r in g]",
        "a main part": f"{ADDS}\nif __name__ == '__main__':\n    print(transform([[1]]))",
        "a class": "class A:\n    def f(self, g): return [[c + 1 for c in r] for r in g]\n"
        "transform = A().f",
        "prints": "def transform(g):\n    print(g)\n    return [[1, 2], [3, 4]]",
        "braces": ADDS + "\nx = {1: '{0}'}",
    }
    found = values(MADE, *map(block, right.values()))
    assert dict(zip(right, found, strict=True)) == dict.fromkeys(right, 1.0)


@runs
@pytest.mark.slow
def test_programs_may_use_torch():
    """Its import takes two seconds, in each program that asks for it."""
    tensor = "import torch\ndef transform(g): return torch.tensor(g, dtype=torch.float32) + 1"
    assert values(MADE, block(tensor)) == [1]


WRONG = {
    "the input": ("def transform(g): return g", "wrong grid"),
    "its own text": ("def transform(g): return '1 2\\n3 4'", "no grid"),
    "an object": ("def transform(g): return {'output': [[1, 2], [3, 4]]}", "no grid"),
    "a map": ("def transform(g): return [map(int, r) for r in g]", "crashed"),
    "fractions": ("def transform(g): return [[c + 1.5 for c in r] for r in g]", "no grid"),
    "nothing": ("def transform(g): pass", "no grid"),
    "no function": ("x = 1", "crashed"),
    "no syntax": ("def transform(g: return", "crashed"),
    "an error": ("def transform(g): return g[9]", "crashed"),
    "a forgotten import": ("def transform(g): return list(deque([[1, 2], [3, 4]]))", "crashed"),
    "an early end": ("import sys\nsys.exit()", "no grid"),
    "an early end in it": ("def transform(g): raise SystemExit", "no grid"),
    "a printed grid": ("print([[1, 2], [3, 4]])", "crashed"),
    "a printed frame": ("def transform(g): print('[[1, 2], [3, 4]]')", "no grid"),
    "a forbidden module": (f"import os\n{ADDS}", "crashed"),
    "a part of one": (f"import concurrent.futures\n{ADDS}", "crashed"),
    "a forbidden name": (f"{ADDS}\nglobals()", "crashed"),
    "a file": ("def transform(g): return open('/etc/passwd')", "crashed"),
    "too much": ("def transform(g): return [[1] * 10**6]", "output"),
    "a signal": ("import sys\no = sys.modules['os']\no.kill(o.getpid(), 9)", "crashed"),
    "one that equals all": (
        "class All(list):\n    def __eq__(self, other): return True\n"
        "def transform(g): return All([[0]])",
        "wrong grid",
    ),
    "a stub of what compares": (
        "import json\njson.dumps = lambda *a, **k: 'true'\ndef transform(g): return g",
        "no grid",
    ),
    "two frames": (
        "import sys\no = sys.modules['os']\nfor fd in range(3, 20):\n"
        "    try:\n        o.write(fd, b'[[1, 2], [3, 4]]')\n    except OSError:\n        pass\n"
        "def transform(g): return [[1, 2], [3, 4]]",
        "no grid",
    ),
}


@runs
def test_programs_that_earn_nothing():
    rewards = judged(MADE, *(block(source) for source, _ in WRONG.values()))
    for (name, (_, reason)), reward in zip(WRONG.items(), rewards, strict=True):
        assert (reward.value, reward.info["reason"]) == (0.0, reason), (name, reward)
    silent = judged(MADE, "I cannot.", f"<think>{block(ADDS)}", "")
    assert [reward.info["reason"] for reward in silent] == ["no code block", "truncated", "empty"]


@runs
def test_a_program_sees_neither_the_row_nor_another_program():
    """It returns the right grid where it finds its text anywhere, and leaves it for the next."""
    look = """import sys
o, io = sys.modules["os"], sys.modules["io"]
right = [[8 + 0, 9]]
def transform(g):
    texts = [o.pread(0, 1 << 20, 0).decode()]
    for folder in ("/work", "/tmp", "/dev/shm"):
        for path, _, files in o.walk(folder):
            texts += [io.open(o.path.join(path, file)).read() for file in files]
    for entry in o.listdir("/proc"):
        for name in ("environ", "cmdline"):
            try:
                texts.append(io.open(f"/proc/{entry}/{name}").read())
            except OSError:
                pass
    io.open("/tmp/left", "w").write(str(right))
    return right if any(str(right) in text for text in texts) else [[len(texts)]]"""
    row = MADE | {"expected_output": [[8, 9]]}
    for _ in range(2):
        assert judged(row, block(look))[0] == Reward(0.0, {"reason": "wrong grid", "error": ""})


@runs
@pytest.mark.slow
def test_a_program_has_a_deadline(monkeypatch):
    monkeypatch.setattr(nvarc_programs, "LIMITS", nvarc_programs.LIMITS._replace(seconds=1.0))
    endless = "def transform(g):\n    while True: pass"
    sleeps = "import time\ndef transform(g):\n    time.sleep(99)"
    rewards = judged(MADE, block(endless), block(sleeps))
    assert [reward.info["reason"] for reward in rewards] == ["time", "time"]


@runs
def test_known_leaks():
    """What the docstring lists."""
    assert values(WRITTEN, "-1 2.\n12 3 4") == [1]
    fixed = f"def transform(g): return {MORE}"
    once = "def transform(g): return [[g[0][1], 2], [3, 4]]"
    assert values(MADE, block(fixed), block(once)) == [1, 1]


@runs
def test_hostile_answers():
    texts = HOSTILE + [block(text) for text in HOSTILE]
    texts += ["\\boxed{" + text for text in HOSTILE] + ["```python" + "\n" * 10**6]
    assert set(values(WRITTEN, *texts)) == {0.0}
    assert set(values(MADE, *texts)) == {0.0}


# --- rows -----------------------------------------------------------------------------------------


def test_the_row_names_the_mode_or_else_the_agent():
    """As in NeMo-Gym, whose servers have `agent_mode` in their configuration."""
    assert [need.name for need in nvarc.needs(MADE)] == ["sandbox", "scipy"]
    for row in (WRITTEN, MADE | {"agent_mode": "transductive"}, asking("?", "nvarc")):
        assert nvarc.needs(row) == ()
    assert [need.name for need in nvarc.needs(WRITTEN | {"agent_mode": "inductive"})] == [
        "sandbox",
        "scipy",
    ]
    assert [need.name for need in nvarc.needs(MADE | {"agent_mode": None})] == ["sandbox", "scipy"]
    assert values(MADE | {"agent_mode": "transductive"}, text_of(MORE)) == [1]


def test_programs_need_what_their_prompts_offer(monkeypatch):
    for lacks, why in (
        ({"importlib.util.find_spec": lambda name: None}, "expected requirements.txt"),
        ({"envs.sandbox.sandbox.own_packages": lambda: ""}, "cannot import this Python's numpy"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr("importlib.util.find_spec", lambda name: name)
            patch.setattr("envs.sandbox.sandbox.own_packages", lambda: "/packages")
            assert nvarc_programs.problem() == ""
            for path, function in lacks.items():
                patch.setattr(path, function)
            assert why in nvarc_programs.problem()
            configure(Services(sandbox="http", sandbox_url="http://somewhere:1"))
            assert nvarc_programs.problem() == ""
            configure(Services())


def test_good_rows():
    for row in (WRITTEN, MADE, WRITTEN | {"agent_mode": None}, MADE | {"train": None}):
        check_rows.check_row(row)
        check_rows.check_row(json.loads(json.dumps(row)))


EXPECTED = "expected_output"
test_bad_rows = refused(
    lambda row, **fields: nvarc.check(row | fields) if fields else nvarc.check(row),
    (WRITTEN | {EXPECTED: None}, "expected_output is missing or null, expected a grid"),
    (WRITTEN | {EXPECTED: []}, r"expected_output is \[\], expected at least one row"),
    (WRITTEN | {EXPECTED: [[]]}, r"expected_output\[0\] is \[\], expected a list of integers"),
    (WRITTEN | {EXPECTED: [[1], 2]}, r"expected_output\[1\] is 2, expected a list of integers"),
    (WRITTEN | {EXPECTED: [[1], [2, 3]]}, r"output\[1\] is 'a list of 2', expected 1 cells"),
    (WRITTEN | {EXPECTED: [[10]]}, r"expected_output\[0\] is \[10\], expected a list of int"),
    (WRITTEN | {EXPECTED: [[True]]}, r"expected_output\[0\] is \[True\], expected"),
    (WRITTEN | {EXPECTED: [["1"]]}, r"expected_output\[0\] is \['1'\], expected"),
    (WRITTEN | {EXPECTED: [[1] * 400_000]}, "'a grid of 1200002 bytes', expected at most 1048576"),
    (WRITTEN | {"agent_mode": 1}, "agent_mode is 1, expected text or null"),
    (WRITTEN | {"agent_mode": "both"}, "agent_mode is 'both', expected one of: transductive, ind"),
    (MADE | {"test_input": None}, "test_input is missing or null, expected a grid"),
    (MADE | {"test_input": [[1, 2], [3]]}, r"test_input\[1\] is 'a list of 1', expected 2 cells"),
    (WRITTEN | {"agent_mode": "inductive"}, "test_input is missing or null, expected a grid"),
)
