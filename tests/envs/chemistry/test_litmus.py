"""Answers of a type, found by a format or a regex: NeMo-Gym's rewards, rules, and refused rows."""

import asyncio
import math
import time

from envs import check_rows
from envs.chemistry import litmus, molecules
from envs.maths.python_tool import TOOL
from support.scripts import Script
from support.tables import gives, refused
from support.verifiers import HOSTILE, known_answers, own_rows

(ROW,) = [row for row in own_rows() if row["agent_ref"]["name"] == "litmus_agent_agent"]
FLOAT = ROW | {"answer_type": "float", "expected_answer": 100, "answer_format": None}
NAME = ROW | {"answer_type": "string", "expected_answer": "Carboxylic acid"}
COUNT = FLOAT | {"answer_type": None, "property_type": "count"}
TOOLS = [{"type": "function", "name": TOOL}]


def reward(row: dict, said: str, **fields: object) -> float:
    return asyncio.run(litmus.verify(row | fields, said)).value


def test_known_answers():
    """Each answer that NeMo-Gym's own tests and example rollouts have, with the reward there."""
    for known in known_answers("litmus_agent", "litmus_agent", least=38):
        check_rows.check_row(known.row)
        assert reward(known.row, known.response) == known.reward, known.case["source"]


def rule(name: str, **tolerances: float) -> dict:
    return {"match": {"rule": name} | tolerances}


test_rules = gives(
    lambda row, fields, said: reward(row, said, **fields),
    (FLOAT, {}, "((100.00001))", 1.0),
    (FLOAT, {}, "((100.01))", 0.0),
    (FLOAT, rule("exact"), "((99.6))", 1.0),
    (FLOAT, rule("exact"), "((98.6))", 0.0),
    (FLOAT, rule("isclose", rel_tol=0.01), "((101))", 1.0),
    (FLOAT, rule("isclose", rel_tol=0.0, abs_tol=0.0), "((100.00001))", 0.0),
    (FLOAT, rule("abs_window", abs_tol=2), "((98))", 1.0),
    (FLOAT, rule("abs_window", abs_tol=2), "((97.9))", 0.0),
    (FLOAT, rule("abs_window", rel_tol=2), "((98))", 0.0),
    (FLOAT, rule("rel_window", rel_tol=0.02), "((-98))", 0.0),
    (FLOAT, rule("rel_window", rel_tol=0.02) | {"expected_answer": -100}, "((-98))", 1.0),
    (FLOAT, rule("rel_window", abs_tol=2), "((98))", 0.0),
    (FLOAT, rule("string_eq") | {"expected_answer": "100.0"}, "((100))", 1.0),
    *((FLOAT, rule(name), "((inf))", 0.0) for name in litmus.NUMERIC),
    *((FLOAT, rule(name), "((nan))", 0.0) for name in litmus.RULES if name != "bool_eq"),
    (ROW, {}, "<final_answer>Present</final_answer>", 1.0),
    (ROW, {}, "<final_answer>2</final_answer>", 1.0),
    (ROW, {}, "<final_answer>absent</final_answer>", 0.0),
    (ROW, {}, "<final_answer>perhaps</final_answer>", 0.0),
    (ROW, {"expected_answer": 0}, "<final_answer>N</final_answer>", 1.0),
    (ROW, {"expected_answer": True}, "<final_answer>1.0</final_answer>", 1.0),
    (NAME, {}, "<final_answer> carboxylic\n  ACID </final_answer>", 1.0),
    (NAME, {}, "<final_answer>acid</final_answer>", 0.0),
    (NAME, rule("exact") | {"expected_answer": 4}, "<final_answer>4.2</final_answer>", 1.0),
    (NAME, rule("exact") | {"expected_answer": 4}, "<final_answer>four</final_answer>", 0.0),
    (COUNT, {}, "((99.6))", 1.0),
    (COUNT, {"property_type": "bool", "expected_answer": 1}, "((2))", 0.0),
    (COUNT, {"property_type": "float"}, "((99.6))", 0.0),
    (COUNT, rule("isclose"), "((99.6))", 0.0),
)
test_where_a_regex_finds_the_answer = gives(
    lambda pattern, said: reward(FLOAT, said, output_regex=pattern),
    (r"Answer: (\d+)", "((100)) Answer: 7", 0.0),
    (r"Answer: (\d+)", "((7)) Answer: 7 Answer: 100", 1.0),
    (r"Answer: (\d+)?", "Answer: 100 Answer: none", 0.0),
    (r"Answer: (.+)", "Answer: 7\n100", 1.0),  # a dot is also a line break
    (r"(100)", "<think>100</think>7", 0.0),
)


def test_a_regex_that_does_not_end_finds_nothing(monkeypatch):
    monkeypatch.setattr(litmus, "DEADLINE", 0.1)
    told = asyncio.run(litmus.verify(FLOAT | {"output_regex": "(?:a|aa)+(100)"}, "a" * 10_000))
    assert (told.value, told.info["reason"]) == (0.0, "timeout")


def test_what_holds_no_answer_says_why():
    reasons = {"": "empty", "<think>": "truncated", "100": "no answer", "((a))": "no answer"}
    for said, reason in reasons.items():
        told = asyncio.run(litmus.verify(FLOAT, said))
        assert (told.value, told.info) == (0.0, {"reason": reason})


test_bad_rows_are_refused = refused(
    lambda row, fields: check_rows.check_row(row | fields),
    (ROW, {"answer_type": "int"}, "answer_type is 'int', expected one of: float, bool, string"),
    (ROW, {"answer_type": None}, "property_type is missing or null, expected one of: count"),
    (ROW, {"match": {}}, "match.rule is missing or null, expected exact, isclose"),
    (ROW, {"match": {"rule": "near"}}, "match.rule is 'near', expected exact, isclose"),
    (ROW, rule("exact", tol=1), "match is 'tol', expected a rule, rel_tol and abs_tol"),
    (FLOAT, rule("exact", abs_tol="2"), "match.abs_tol is '2', expected a number, 0 or more"),
    (FLOAT, rule("exact", abs_tol=-1), "match.abs_tol is -1, expected a number, 0 or more"),
    (FLOAT, rule("exact", rel_tol=math.nan), "match.rel_tol is nan, expected a number"),
    (FLOAT, {"expected_answer": "many"}, "expected_answer is 'many', expected a finite number"),
    (ROW, rule("isclose"), "expected_answer is 'true', expected a finite number"),
    (ROW, {"expected_answer": "maybe"}, "expected_answer is 'maybe', expected yes, no, or"),
    (NAME, {"expected_answer": " "}, "expected_answer is ' ', expected a text"),
    (NAME, {"expected_answer": True}, "expected_answer is True, expected a text or a number"),
    (ROW, {"output_regex": "(a"}, r"output_regex is '\(a', expected a regular expression"),
    (ROW, {"output_regex": "a"}, "output_regex is 'a', expected one group, and not 0"),
    (ROW, {"answer_format": "fmt_31"}, "answer_format is 'fmt_31', expected one of fmt_00"),
    (
        ROW,
        {"responses_create_params": {"input": "?", "tools": TOOLS * 2}},
        "tools is .*, expected the tool",
    ),
    taken=(ROW, {}),
)


def test_hostile_answers_take_little_time():
    began = time.process_time()
    for row in (FLOAT, ROW, NAME):
        for said in HOSTILE:
            assert reward(row, said) == 0
    assert time.process_time() - began < 20


def test_an_episode_is_that_of_molecules():
    script = Script(["((100))"])
    done = asyncio.run(litmus.rollout(FLOAT, script))
    assert (done.reward.value, len(done.turns)) == (1.0, 1)
    assert litmus.needs is molecules.needs
