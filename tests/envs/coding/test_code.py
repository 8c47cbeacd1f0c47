"""Programs: known answers, real rows, what counts as right output, and what nobody should pay."""

import asyncio
import json
import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs import Reward
from envs.coding import code
from envs.sandbox import sandbox
from support.data import HERE, SHARED, in_both
from support.examples import tries
from support.loop import at_once
from support.tables import gives, refused
from support.verifiers import HOSTILE, gym_rows, known_answers

pytestmark = pytest.mark.skipif(bool(sandbox.problem()), reason=sandbox.problem())
SQUARE = {"inputs": ["2\n", "5\n"], "outputs": ["4\n", "25\n"]}


def row(**tests) -> dict:
    return {"verifier_metadata": {"unit_tests": SQUARE | tests}}


def judged(program: str, of: dict) -> Reward:
    return asyncio.run(code.verify(of, f"```python\n{program}\n```"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "names", "count"),
    [(HERE, ("code_edge", "code_function", "code_gen_gym"), 67), (SHARED, ("code_function",), 77)],
    ids=["here", "shared"],
)
def test_known_answers(place, names, count):
    """Three of NeMo-Gym's example rollouts come without their row's tests, and are left out."""
    known = []
    for name in names:
        for answer in known_answers(name, "code_gen", 1, place):
            tests = answer.row.get("unit_tests")
            of = answer.row if tests is None else {"verifier_metadata": {"unit_tests": tests}}
            known += [(of, answer)] if "unit_tests" in of.get("verifier_metadata", {}) else []
    assert len(known) == count
    rewards = at_once(code.verify(of, str(answer.response)) for of, answer in known)
    for (of, answer), reward in zip(known, rewards, strict=True):
        code.check(of)
        assert reward.value == answer.reward, (answer.case, reward)


@in_both
def test_real_rows(place):
    for of in gym_rows("code_gen", place=place):
        code.check(of)
        assert asyncio.run(code.verify(of, "")).value == 0
        assert judged("print(input())", of).info["reason"] in ("wrong answer", "crashed")


@pytest.mark.parametrize("name", ["prints", "returns"])
def test_the_event_loop_compares_nothing(monkeypatch, name):
    """4 MB of output take half a second."""
    compares = getattr(code, name)
    threads = []

    def compare(said: str, expected: str) -> bool:
        threads.append(threading.current_thread())
        return compares(said, expected)

    monkeypatch.setattr(code, name, compare)
    called = {"inputs": ["1"], "outputs": ["1"], "fn_name": "f" if name == "returns" else None}
    assert judged("def f(x): return x\nprint(1)", row(**called)).value == 1
    assert threads and threading.main_thread() not in threads


def test_tests_run_until_one_fails():
    program = "n = int(input())\nprint(n * n if n < 5 else 0)"
    info = {"passed": 1, "tests": 2, "reason": "wrong answer", "error": ""}
    assert judged(program, row()) == Reward(0.0, info)
    assert judged("print(int(input())**2)", row()) == Reward(1.0, {"passed": 2, "tests": 2})
    crashed = judged("print(4); 1 / 0", row())
    assert crashed.info["reason"] == "crashed" and "ZeroDivisionError" in crashed.info["error"]


START = "threading.Thread(target=time.sleep, args=(9,), daemon=True).start()"


@pytest.mark.parametrize(("program", "reason"), [
    ("kept = [bytearray(1 << 28) for _ in range(9)]", "memory"),
    ("import numpy\nnumpy.zeros(1 << 40)", "memory"),
    (f"import threading, time\nfor _ in range(80): {START}", "processes"),
    ("import threading, time\nthreading.stack_size(64 << 20)\n"
     f"for _ in range(40): {START}", "memory"),
    ("import os, time\nfor _ in range(80): os.fork() or time.sleep(9)", "processes"),
])  # fmt: skip
def test_what_its_limits_refuse_a_program_is_the_reason(program, reason):
    found = judged(program, row())
    assert (found.value, found.info["reason"]) == (0, reason), found


def test_recursion_through_c_has_a_deep_stack():
    """The stack of 8 MB that a process begins with holds 15,000 calls of a cached function."""
    program = """sys.setrecursionlimit(10**6)
@cache
def down(n):
    return n and down(n - 1)
down(50_000)
print(int(input()) ** 2)"""
    assert judged(program, row()).value == 1


def test_numbers_may_have_many_digits():
    """Where Python itself writes and reads 4,300."""
    of = row(inputs=["5000"], outputs=["1" + "0" * 5000])
    assert judged("print(int(str(10 ** int(input()))))", of).value == 1


def test_functions_and_methods_are_called():
    of = row(inputs=["[1, 2]\n3"], outputs=["[4, 5]"], fn_name="add")
    plain = "def add(xs, y):\n    print('noise')\n    return tuple(x + y for x in xs)"
    method = "class Solution:\n    def add(self, xs, y):\n        return [x + y for x in xs]"
    for main in ("print(add([1], 2))", "input()", "import unittest; unittest.main()"):
        guarded = f"{plain}\nif __name__ == '__main__':\n    {main}"
        assert judged(guarded, of).value == 1, main
    future = f"from __future__ import annotations\n{plain}\ndef other() -> unknown: ..."
    assert judged(plain, of).value == judged(method, of).value == judged(future, of).value == 1
    for wrong in (
        "add = 5",
        "def other(): pass",
        "def add(xs, y): return xs",
        "input()",
        "exit()",
        "",
    ):
        assert judged(wrong, of).value == 0, wrong
    assert judged("def add(xs, y): return {1, 2}", of).info["reason"] == "crashed"


test_printed_output = gives(
    code.prints,
    ("4", "4", True),
    ("\n 4 \n\n", "4\n", True),
    ("4.0", "4", True),
    ("1e3  2", "1000 2.00", True),
    ("a  b", "a b", False),
    ("YES", "yes", False),
    ("0.30000000000000004", "0.3", False),
    ("1\n2", "1 2", False),
    ("1\n\n2", "1\n2", False),
    ("", "", True),
    ("NaN", "NaN", True),
    ("sNaN", "1", False),
    ("9" * 5000, "9" * 5000, True),
)

test_returned_values = gives(
    code.returns,
    ("[1, 2]", "[1,2]", True),
    ("0.30000000000000004", "0.3", True),
    ("[0.30000000000000004]", "[0.3]", False),
    ('"5"', "5", True),
    ("true", "1", True),
    ("NaN", "NaN", True),
    ("Infinity", "1e999", True),
    ("null", "0", False),
    ("[[[", "1", False),
    ("", "null", False),
    ("9" * 400, "1.0", False),
)


def test_wrong_outputs_earn_nothing():
    """A thousand changes of right ones."""
    rng = random.Random(0)
    for _ in range(1000):
        numbers = [rng.randrange(100) for _ in range(6)]
        wrong = list(numbers)
        match rng.randrange(4):
            case 0:
                wrong.pop(rng.randrange(6))
            case 1:
                wrong[rng.randrange(6)] += rng.choice((-1, 1, 1000))
            case 2:
                wrong.append(0)
            case 3:
                wrong += wrong
        for sep in (" ", "\n"):
            said, right = (sep.join(map(str, n)) for n in (wrong, numbers))
            assert not code.prints(said, right) and not code.prints(f"Answer: {right}", right)
        assert not code.returns(json.dumps(wrong), json.dumps(numbers))


def test_hostile_answers():
    texts = HOSTILE + [f"```\n{text}\n```" for text in HOSTILE]
    rewards = at_once(code.verify(row(), text) for text in texts)
    assert {reward.value for reward in rewards} == {0.0}


@given(st.text(st.sampled_from("`ab \n")))
@settings(max_examples=500)
def test_a_block_is_what_stands_between_the_last_two_fences(text):
    assert code.block(f"{text}\n```x\nprint(1)\n```") == "print(1)"


@given(st.text(st.sampled_from("01.e-+naif \n")), st.text(st.sampled_from("01.e-+ \n")))
@settings(max_examples=tries(5000))  # two cases each
def test_any_two_outputs_are_compared(said, expected):
    assert code.prints(said, said)
    assert code.prints(said, expected) == code.prints(expected, said)
    code.returns(said, expected)


test_bad_rows = refused(
    lambda tests: code.check(row(**tests) if tests else {}),
    ({}, "verifier_metadata.unit_tests is missing"),
    ({"inputs": None}, "verifier_metadata.unit_tests.inputs is missing"),
    ({"outputs": ["4"]}, "unit_tests.outputs is 'a list of 1', expected one for each of the 2"),
    ({"inputs": [], "outputs": []}, "expected one for each of the 0 inputs, and at least one"),
    ({"inputs": [2, 5]}, r"unit_tests.inputs\[0\] is 2, expected a string"),
    ({"fn_name": 5}, "unit_tests.fn_name is 5, expected the name of a function"),
    ({"fn_name": "f", "inputs": ["x", "y"]}, r"unit_tests.inputs\[0\] is \['x'\], expected JSON"),
    ({"fn_name": "f", "inputs": ["1", "9" * 5000]}, r"inputs\[1\] is \['9.*\(4300 digits"),
    ({"outputs": ["4", " " + "5" * (2**22 + 1)]}, r"outputs\[1\] is .*4194305.*at most 4194304"),
)
