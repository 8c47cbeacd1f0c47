"""The check of mathematics: what it needs is there before it judges."""

import subprocess
import sys

import pytest

from support.data import HERE
from support.program import ROOT, ran

OPENS = """
import json, sys
from envs.maths.math import make_check
check, opened = make_check(), []
sys.addaudithook(lambda event, args: event == "open" and opened.append(args[0]))
with open(sys.argv[1]) as lines:
    known = [json.loads(line) for line in lines]
for one in known:
    check(one["reference"], one["response"])
print(len(known), opened[1:])
"""


@pytest.mark.slow
def test_a_check_opens_no_file():
    """One that cannot be opened for a moment would make a right answer unequal."""
    known = HERE / "known_answers/math.jsonl"
    command = [sys.executable, "-c", OPENS, str(known)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout == "108 []\n", done.stdout + done.stderr


LATE = """
import sys
import reasoning_gym
from envs.maths import math
from envs.questions import reasoning_gym as puzzles
judge, score = math.make_check(), puzzles.make_check()
before = set(sys.modules)
assert judge("0.5", r"\\boxed{\\int_0^1 x dx}")["value"] == 1
for name in ("intermediate_integration", "simple_integration", "polynomial_multiplication"):
    entry = reasoning_gym.create_dataset(name, size=1, seed=3)[0]
    assert score(entry, f"<answer>{entry['answer']}</answer>")["value"] == 1, name
print(sorted(name for name in sys.modules.keys() - before if name.startswith("sympy")))
"""


def test_nothing_of_sympy_is_imported_while_it_judges():
    """A file that cannot be opened then would mean that a right answer is wrong."""
    done = ran(sys.executable, "-c", LATE)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr
