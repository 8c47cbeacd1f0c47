"""Environments: the registry, the check of rows, known answers, and checks that hang or crash."""

import ast
import asyncio
import copy
import functools
import inspect
import json
import re
import shutil
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import envs
import envs.maths.math as maths
import envs.questions.reasoning_gym as puzzles
from core import errors
from envs import check_rows, registry
from envs.needs import needs_of
from launch.make_gsm8k import blend, convert
from support.blends import math_row
from support.data import HERE, in_both
from support.examples import tries
from support.loop import at_once
from support.program import ran
from support.samples import asking
from support.tables import gives, refused
from support.verifiers import json_values, lines, replaced

HANGS = "\\boxed{9^{9^{9^9}}}"
MATH_ROW = math_row(1)
PUZZLE_ROW = asking("How many legs?", "reasoning_gym_simple_agent", question="How many legs?")
PUZZLE_ROW |= {"answer": "383", "metadata": {"source_dataset": "leg_counting"}}
EXACT_ROW = PUZZLE_ROW | {"exact": True}


def verify_all(module, pairs) -> list[envs.Reward]:
    return at_once(module.verify(row, response) for row, response in pairs)


def verify(module, row: dict, response: str) -> envs.Reward:
    return verify_all(module, [(row, response)])[0]


def with_answer(expected: str) -> dict:
    return MATH_ROW | {"expected_answer": expected}


# --- registry and rows ----------------------------------------------------------------------------


def test_every_agent_name_finds_its_module():
    for module in (maths, puzzles):
        assert all(registry.environment(name) is module for name in module.AGENTS)


test_names_in_the_example_rows_of_nemo_gym = gives(
    lambda name: registry.served().get(name),
    ("structured_outputs_v4_simple_agent", "following/structured_outputs"),
    ("terminal_multi_harness_codex_agent", "terminals/terminal"),
    ("terminus_judge_string_only_simple_agent", "terminals/terminal"),
    ("jailbreak_engagement_with_disclaimer", "llm_judged/safety"),
    ("jailbreak_refusal_with_explanation", "llm_judged/safety"),
    ("jailbreak_hard_refusal_no_redirection", "llm_judged/safety"),
    ("jailbreak_hard_refusal_with_helplines", "llm_judged/safety"),
)


@pytest.mark.parametrize(("name", "near"), [
    ("reasoning_gyms", ", such as reasoning_gym"),
    (["math"], ", such as math"),
    ({"math": 1}, ""),
    *((name, "$") for name in ("zzz", "", None, 3)),
])  # fmt: skip
def test_an_unknown_agent_is_answered_with_those_of_like_names(name, near):
    text = rf"agent_ref.name is .*expected one of \d+ agents \(docs/environments.md\){near}"
    with pytest.raises(ValueError, match=text):
        registry.environment(name)


@pytest.mark.parametrize(("name", "text", "problem"), [
    ("copied", 'AGENTS = ("math",)',
     "envs/copied.py and envs/maths/math.py both declare the agent 'math'"),
    ("copied", 'AGENTS = ("mine")',
     r"copied.py: AGENTS is 'mine', expected a literal tuple of names"),
    ("copied", "AGENTS = names()",
     r"copied.py: AGENTS is names\(\), expected a literal tuple of names"),
    ("copied", "AGENTS = ()\nAGENTS += ('mine',)",
     r"copied.py: AGENTS is .*expected a literal tuple"),
    ("copied", "def verify(:", r"copied.py cannot be read as Python: invalid syntax"),
    # Python would import the folder, and the module would never judge an answer.
    ("judge", 'AGENTS = ("mine",)', "envs/judge.py is named like the folder envs/judge/"),
])  # fmt: skip
def test_a_copied_environment_does_not_take_over_an_agent(
    tmp_path, monkeypatch, name, text, problem
):
    """The copy of a module whose AGENTS nobody changed must not decide rewards in silence."""
    shutil.copytree(Path(envs.__file__).parent, tmp_path, dirs_exist_ok=True)
    (tmp_path / f"{name}.py").write_text(f"{text}\n")
    monkeypatch.setattr(envs, "__path__", [str(tmp_path)])
    registry.served.cache_clear()
    with pytest.raises(ValueError, match=problem):
        registry.environment("math")
    registry.served.cache_clear()


def test_an_environment_without_a_verdict_is_refused_with_its_first_row(tmp_path, monkeypatch):
    (tmp_path / "misspelt.py").write_text('AGENTS = ("misspelt",)\ndef verfy(row, response): ...\n')
    monkeypatch.setattr(envs, "__path__", [*envs.__path__, str(tmp_path)])
    monkeypatch.setattr(registry, "served", lambda: {"misspelt": "misspelt"})
    with pytest.raises(ValueError, match="misspelt.py defines no reward, expected.*verify"):
        check_rows.check_row(MATH_ROW | {"agent_ref": {"name": "misspelt"}})


@pytest.mark.parametrize(("returned", "names", "why"), [
    ('("judges.general",)', ["judges.general"], "no url, and neither"),
    ('("sandbox", "checks", "shell")', ["sandbox", "checks", "shell"], ""),
    ('("tool_parser",)', ["tool_parser"], "services.tool_parser = '', expected a value"),
    ('["images"]', ["images"], "services.images"),
    ('[judge.need("safety"), "tool_parser"]', ["judges.safety", "tool_parser"], "no url, and"),
    ("()", [], ""),
])  # fmt: skip
def test_needs_of_a_user_s_module_may_be_strings(returned, names, why, user_needs, monkeypatch):
    monkeypatch.delenv("JUDGES_FILE", raising=False)
    found = needs_of(user_needs(returned))
    assert [need.name for need in found] == names
    assert why in (found[0].problem() if why else "")


@pytest.mark.parametrize(
    "returned", ['("lean",)', '("workplace",)', '"sandbox"', '("judges.",)', "(1,)"]
)
def test_a_need_that_nothing_provides_is_refused(returned, user_needs):
    expected = r"needy.py: needs returned .*, expected Needs \(envs/services.py; .*sandbox, checks,"
    with pytest.raises(errors.ModuleError, match=expected):
        needs_of(user_needs(returned))


@pytest.fixture
def user_needs(tmp_path, monkeypatch):
    """A row of a module whose `needs` returns what an expression says."""

    def write(returned: str) -> dict:
        text = 'from envs.judge import judge\nAGENTS = ("needy",)\n'
        text += f"def needs(row): return {returned}\ndef verify(row, response): return 0\n"
        (tmp_path / "needy.py").write_text(text)
        monkeypatch.delitem(sys.modules, "envs.needy", raising=False)
        return {"agent_ref": {"name": "needy"}}

    monkeypatch.setattr(envs, "__path__", [*envs.__path__, str(tmp_path)])
    monkeypatch.setattr(registry, "served", lambda: {"needy": "needy"})
    yield write
    sys.modules.pop("envs.needy", None)


def test_scanning_imports_no_heavy_library():
    heavy = "{'sympy', 'math_verify', 'reasoning_gym', 'numpy', 'torch'}"
    code = f"import envs.maths.math, sys; print({heavy} & set(sys.modules))"
    assert ran(sys.executable, "-c", code).stdout == "set()\n"


def test_released_rows_pass():
    for name, row in (("math_with_judge", MATH_ROW), ("reasoning_gym", PUZZLE_ROW)):
        for released in lines("gym_rows", name):
            check_rows.check_row(released | {"agent_ref": row["agent_ref"]})
    parts = [{"type": "input_text", "text": "1 + "}, {"type": "input_text", "text": "1?"}]
    message = {"role": "user", "type": "message", "content": parts}
    check_rows.check_row(MATH_ROW | {"responses_create_params": {"input": [message]}})


INPUT = ["responses_create_params", "input"]


def check_replaced(row: dict, path: list, value) -> None:
    """Checks the row as it is, and raises what its check says of another value."""
    check_rows.check_row(row)
    check_rows.check_row(replaced(row, path, value))


test_a_bad_row_is_refused_by_name = refused(
    check_replaced,
    (MATH_ROW, INPUT, 7, r"responses_create_params\.input is 7, expected a list of messages"),
    (MATH_ROW, INPUT, [], r"input is \[\], expected at least one message"),
    (MATH_ROW, INPUT, [7], r"input\[0\]\.role is missing or null"),
    (MATH_ROW, [*INPUT, 0, "role"], "robot", r"input\[0\]\.role is 'robot', expected.*user"),
    (MATH_ROW, [*INPUT, 0, "content"], None, r"input\[0\]\.content is missing"),
    (MATH_ROW, [*INPUT, 0, "content"], [{"image": 1}], r"input\[0\]\.content\[0\]\.text is "),
    (MATH_ROW, ["agent_ref"], "math", "agent_ref is 'math', expected an object that contains name"),
    (MATH_ROW, ["expected_answer"], 2, "expected_answer is 2, expected a string"),
    (MATH_ROW, ["expected_answer"], " ", "expected_answer is ' ', expected an answer"),
    (PUZZLE_ROW, ["answer"], 383, "answer is 383, expected a string or null"),
    (EXACT_ROW, ["answer"], None, "answer is missing or null, expected a string, because"),
    (PUZZLE_ROW, ["metadata"], None, r"metadata\.source_dataset is missing"),
    (PUZZLE_ROW, ["metadata", "source_dataset"], "legs", r"source_dataset is 'legs', expected"),
    (PUZZLE_ROW, ["metadata", "source_dataset"], "composite", "'composite', expected"),
    (PUZZLE_ROW, ["metadata"], {"source_dataset": "rearc", "output": [1]}, "metadata.output"),
)


PATHS = [INPUT[:1], INPUT, [*INPUT, 0], [*INPUT, 0, "role"], [*INPUT, 0, "content"]]
PATHS += [["agent_ref"], ["agent_ref", "name"]]


def refuses_politely(row) -> None:
    try:
        check_rows.check_row(row)
    except ValueError as error:
        assert type(error) is ValueError and len(str(error)) < 500


@settings(max_examples=tries(300), deadline=None)
@given(json_values(leaves=8), st.sampled_from([MATH_ROW, PUZZLE_ROW]), st.data())
def test_any_json_is_accepted_or_refused_with_value_error(junk, row, data):
    refuses_politely(junk)
    own = [["expected_answer"]] if row is MATH_ROW else [["answer"], ["metadata"], ["question"]]
    if row is PUZZLE_ROW:
        own.append(["metadata", "source_dataset"])
    refuses_politely(replaced(row, data.draw(st.sampled_from(PATHS + own)), junk))


def test_huge_values_are_refused_with_value_error():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    for junk in (deep, {"a": deep}, 10**5000, "x" * 10**7, list(range(10**6)), "\ud800"):
        refuses_politely(junk)
        for path in PATHS:
            refuses_politely(replaced(MATH_ROW, path, junk))
    while deep:  # freeing it in one go would overflow the C stack
        deep = deep.pop()


def test_final_text_is_what_follows_the_thinking():
    assert envs.final_text("<think>1</think> 2\n") == "2"
    assert envs.final_text("1</think>2</think>3") == "3"
    assert envs.final_text("<think>1") == "<think>1"
    assert envs.final_text("<think>1</think>\n") == ""


# --- mathematics ----------------------------------------------------------------------------------


def test_math_known_answers():
    cases = lines("known_answers", "math")
    pairs = [(with_answer(case["reference"]), case["response"]) for case in cases]
    rewards = verify_all(maths, pairs)
    wrong = [c for c, r in zip(cases, rewards, strict=True) if r.value != c["expected_reward"]]
    assert not wrong


PIECES = r"1 2 0 . , \frac { } ( ) [ ] \sqrt \boxed $ + - * / x = \pi % \text a \cup \le \{ \} \\"
PIECES = [*PIECES.split(), " ", "\n", "\x00"]


@pytest.fixture(scope="module")
def math_check():
    return maths.make_check()


@settings(max_examples=tries(2000), deadline=None)  # of five cases each
@given(st.binary(min_size=40, max_size=40))
def test_any_text_has_one_verdict(math_check, picks):
    """No text of eight of these pieces is the root of 77, so each is wrong."""
    for i in range(0, 40, 8):
        text = "".join(PIECES[pick % len(PIECES)] for pick in picks[i : i + 8])
        verdict = math_check(expected=r"\sqrt{77}", text=text)
        assert verdict["value"] == 0
    assert verdict == math_check(expected=r"\sqrt{77}", text=text)


def test_a_blend_is_made_of_rows_in_the_order_of_their_files(tmp_path):
    """Two and four rows: the first file's are the second and the fifth, as 1/4, 3/4 among eighths.

    Answers of MATH keep their commas, GSM8K's lose them.
    """
    gsm8k = [{"question": f"q{i}", "answer": f"It is so.\n#### 1,{i}00"} for i in range(2)]
    maths_like = [{"problem": f"p{i}\u2028", "expected_answer": f"(1, {i})"} for i in range(3)]
    maths_like.append({"problem": "p3", "answer": "\\frac{1}{2}"})
    for name, rows in (("a", gsm8k), ("b", maths_like)):
        written = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (tmp_path / name).write_text("".join(written), encoding="utf-8")
    parts = [f"gsm8k={tmp_path / 'a'}", f"math={tmp_path / 'b'}"]
    assert blend(parts, tmp_path / "blend.jsonl") == 6
    rows = [json.loads(line) for line in (tmp_path / "blend.jsonl").read_text().splitlines()]
    assert [row["question"].strip() for row in rows] == ["p0", "q0", "p1", "p2", "q1", "p3"]
    assert [row["dataset"] for row in rows] == ["math", "gsm8k", "math", "math", "gsm8k", "math"]
    answers = ["(1, 0)", "1000", "(1, 1)", "(1, 2)", "1100", "\\frac{1}{2}"]
    assert [row["expected_answer"] for row in rows] == answers
    for row in rows:
        check_rows.check_row(row)
    right = [(row, f"\\boxed{{{row['expected_answer']}}}") for row in rows]
    assert all(reward.value == 1 for reward in verify_all(maths, right))


@pytest.mark.parametrize(("line", "message"), [
    ('{"answer": "3"}', ":2: question or problem is None, expected a text"),
    ('{"problem": "?", "answer": 3}', ":2: expected_answer or answer is 3, expected a text"),
    ("3", ":2: "),
    ("{", ":2: Expecting property name"),
])  # fmt: skip
def test_a_row_that_cannot_be_blended_is_named(tmp_path, line, message):
    source = tmp_path / "source.jsonl"
    source.write_text('{"question": "?", "answer": "#### 3"}\n' + line)
    with pytest.raises(ValueError, match=re.escape(f"{source}{message}")):
        blend([f"gsm8k={source}"], tmp_path / "blend.jsonl")
    with pytest.raises(ValueError, match="expected NAME=FILE"):
        blend([str(source)], tmp_path / "blend.jsonl")
    source.write_text("")
    with pytest.raises(ValueError, match="holds no rows"):
        blend([f"gsm8k={source}"], tmp_path / "blend.jsonl")
    assert not (tmp_path / "blend.jsonl").exists()


def test_what_is_read_is_not_overwritten(tmp_path):
    """Neither by a blend nor by a file converted to itself, under whatever name."""
    source, link = tmp_path / "train.jsonl", tmp_path / "link.jsonl"
    source.write_text('{"question": "?", "answer": "#### 3"}\n')
    link.symlink_to(source)
    before = source.read_text()
    for write in (lambda: blend([f"gsm8k={link}"], source), lambda: convert(source, link)):
        with pytest.raises(ValueError, match="would be both read and written"):
            write()
    assert source.read_text() == before


@in_both
def test_gsm8k_solutions_are_right_and_other_answers_are_wrong(place):
    right, wrong = [], []
    for row in lines("gsm8k", "train", place)[:60]:
        solution, _, reference = row["answer"].partition("\n#### ")
        for pairs, answer in ((right, reference), (wrong, reference + "1")):
            pairs.append((with_answer(reference), f"{solution}\nSo it is $\\boxed{{{answer}}}$."))
    assert all(reward.value == 1 for reward in verify_all(maths, right))
    assert all(reward.value == 0 for reward in verify_all(maths, wrong))


@pytest.mark.parametrize(("response", "reason"), [
    ("", "empty"),
    (" \n", "empty"),
    ("<think>\\boxed{2}</think>", "empty"),
    ("<think>it must be \\boxed{2}", "truncated"),
    ("\\boxed{2", "no answer found"),
    ("I do not know.", "no answer found"),
])  # fmt: skip
def test_no_answer_earns_nothing(response, reason):
    assert verify(maths, MATH_ROW, response) == envs.Reward(0.0, {"reason": reason})


def test_thinking_is_not_judged():
    assert verify(maths, MATH_ROW, "<think>\\boxed{2}</think>\\boxed{3}").value == 0
    assert verify(maths, MATH_ROW, "<think>\\boxed{3}</think>\\boxed{2}").value == 1


@pytest.mark.slow
def test_a_hanging_check_is_killed_and_the_next_one_works(monkeypatch):
    monkeypatch.setattr(maths, "DEADLINE", 1.0)
    verify(maths, MATH_ROW, "\\boxed{2}")
    began = time.monotonic()
    assert verify(maths, MATH_ROW, HANGS) == envs.Reward(0.0, {"reason": "timeout"})
    assert time.monotonic() - began < 60
    assert verify(maths, MATH_ROW, "\\boxed{2}").value == 1


@pytest.mark.slow
def test_64_checks_at_once():
    pairs = [(with_answer(str(n % 7)), f"\\boxed{{{n % 5}}}") for n in range(64)]
    rewards = verify_all(maths, pairs)
    assert [reward.value for reward in rewards] == [float(n % 7 == n % 5) for n in range(64)]


# --- puzzles --------------------------------------------------------------------------------------


@in_both
def test_puzzle_known_answers(place):
    cases = lines("known_answers", "reasoning_gym", place)
    rows = (PUZZLE_ROW | {"answer": c["reference"], "metadata": c["metadata"]} for c in cases)
    pairs = [(row, case["response"]) for row, case in zip(rows, cases, strict=True)]
    for case, reward in zip(cases, verify_all(puzzles, pairs), strict=True):
        expected = case["expected_reward"]
        if isinstance(expected, str):  # what the scorer raised
            assert reward.value == 0 and reward.info["scorer_errors"] == 1
        elif case["kind"] == "oracle_spaces":  # the file scored it with its spaces, we strip them
            assert reward.value == 1
        else:
            assert reward.value == expected, case


@pytest.fixture(scope="module")
def puzzle_check():
    return puzzles.make_check()


@functools.cache
def entries(place: Path) -> list[dict]:
    """A puzzle of each data set whose scorer runs no answer; a data set is in one place."""
    found = {c["metadata"]["source_dataset"]: c for c in lines("known_answers", "reasoning_gym")}
    if place != HERE:
        others = lines("known_answers", "reasoning_gym", place)
        others = [c for c in others if c["metadata"]["source_dataset"] not in found]
        found = {c["metadata"]["source_dataset"]: c for c in others}
    found = {name: c for name, c in found.items() if name not in puzzles.EVALUATES}
    return [
        {"question": c["question"], "answer": c["reference"], "metadata": c["metadata"]}
        for c in found.values()
    ]


@pytest.mark.filterwarnings("ignore:loadtxt")
@in_both
@settings(max_examples=tries(125), deadline=None)  # of 80 puzzles each, in both places
@given(st.text(st.sampled_from("0123456789abc ,.[]{}()'\"\n-+*/=")) | st.text())
def test_any_text_has_one_score(puzzle_check, place, text):
    found = entries(place)
    assert len(found) >= (60 if place == HERE else 10)
    for entry in found:
        verdict, again = (puzzle_check(copy.deepcopy(entry), text) for _ in range(2))
        assert 0 <= verdict["value"] <= 1 and verdict == again


test_which_answer_is_scored = gives(
    lambda response: verify(puzzles, PUZZLE_ROW, response).value,
    ("<answer>383</answer>", 1),
    ("<answer>1</answer> no, <answer>\n  383 </answer>", 1),
    ("\\boxed{383} or \\boxed{1}", 1),
    ("\\boxed{383} or <answer>1</answer>", 0),
    (" 383\n", 1),
    ("<think>1</think>383", 1),
    ("<think><answer>383</answer></think>", 0),
    ("<think><answer>383</answer>", 0),
    ("", 0),
)


test_an_exact_row_pays_its_answer_only = gives(
    lambda gold, text: verify(puzzles, EXACT_ROW | {"answer": gold}, text).value,
    ("xidaps", "xidaps", 1),
    ("xidaps", " xidaps\n", 1),
    ("xidaps", "<answer>xidaps</answer>", 1),
    ("xidaps", "<answer>xidapsEXTRAJUNK</answer>", 0),  # the library pays 0.9999999999999999
    ("xidaps", "Xidaps", 0),
    ("['8', '5', '3']", "<answer>[8,5,3]</answer>", 1),
    ("['8', '5', '3']", '["8", "5", "3"]', 1),
    ("['8', '5', '3']", "[8,5,4]", 0),  # the library has a tolerance of 1
    ("['8', '5', '3']", "[85,3]", 0),
    ("['8', '5', '3']", "['8\", 5, 3]", 0),
    ("[]", "['']", 0),
    ('["w,A2,C1"]', '[ "w,A2,C1" ]', 1),
    ('["w,A2,C1"]', '["w", "A2", "C1"]', 0),
    ("[[1 2], [3 4]]", "[ [1 2],[3 4] ]", 1),
    ("[[1 2], [3 4]]", "[[12],[34]]", 0),
    ("['a b', 'c']", "[ab,c]", 0),
    ("a b", "ab", 0),
    ("2", "<think>2", 0),
)


def test_known_leaks_of_mathematics():
    """What the docstring lists."""
    paid = {
        "444": ["\\boxed{37\\cdot 12}", "$37*12$"],
        "1/3": ["\\boxed{\\int_0^1 x^2 dx}"],
        "2": ["$3=2$", "$\\neg 2$", "2%", "$200\\%$", "It is 1 or 2"],
        "A": ["\\boxed{a}"],
    }
    pairs = [(with_answer(gold), text) for gold, texts in paid.items() for text in texts]
    assert {reward.value for reward in verify_all(maths, pairs)} == {1.0}
    for word in ("37*12", "3=2", "neg 2", "200%", "1 or 2", "other case"):
        assert word in maths.__doc__


@pytest.mark.parametrize(("name", "expected", "metadata", "wrong"), [
    ("coin_flip", "0.3125", {}, "0"),
    ("complex_arithmetic", "48.0 + 36.0i", {"result": [48.0, 36.0]}, "nan"),
    ("game_of_life", "[[0,1],[0,0]]", {}, "[[0,1,7],[0,0],'x']".replace("'", '"')),
    ("game_of_life_halting", "True", {}, "False"),
    ("gsm_symbolic", "28080", {}, "-28080"),
    ("knights_knaves", "Ann is a knave.", {}, "It is false that Ann is a knave."),
    ("number_format", "296.88", {"solution": 296.88}, "296.889"),
    ("number_sorting", "['1', '2']", {"direction": "ascending"}, "['1.9', '2.9']"),
    ("number_sorting", "['1', '2']", {"direction": "ascending"}, "[NaN, NaN]"),
    ("word_sorting", "as, be", {"sorted_words": ["as", "be"]}, "as, be, junk"),
])  # fmt: skip
def test_an_exact_row_refuses_what_the_library_pays(name, expected, metadata, wrong):
    row = PUZZLE_ROW | {"answer": expected, "metadata": metadata | {"source_dataset": name}}
    exact = row | {"exact": True}
    pairs = [(row, wrong), (row, expected), (exact, wrong), (exact, expected)]
    assert [reward.value for reward in verify_all(puzzles, pairs)] == [1, 1, 0, 1]


def test_a_row_that_its_scorer_cannot_use_is_an_error_and_no_reward():
    row = PUZZLE_ROW | {"metadata": {"source_dataset": "boxnet"}}
    with pytest.raises(ValueError, match="metadata"):
        verify(puzzles, row, "[]")


CODE = {"source_dataset": "binary_matrix", "matrix": [[0]], "solution": [[0]]}
CODE_ROW = PUZZLE_ROW | {"answer": "0", "metadata": CODE}


@pytest.mark.slow
def test_answers_that_the_scorer_evaluates(monkeypatch):
    monkeypatch.setattr(puzzles, "DEADLINE", 1.0)
    assert verify(puzzles, CODE_ROW, "9**9**9**9").info == {"reason": "timeout"}
    assert verify(puzzles, CODE_ROW, "exit()").value == 0
    crash = "__import__('os')._exit(3)"
    assert verify(puzzles, CODE_ROW, crash) == envs.Reward(0.0, {"reason": "crashed the checker"})
    assert verify(puzzles, CODE_ROW, "0").value == 1


@pytest.mark.parametrize("name", puzzles.EVALUATES)
def test_a_row_whose_answers_run_as_code_needs_a_sandbox(name, monkeypatch):
    row = replaced(CODE_ROW, ["metadata", "source_dataset"], name)
    check_rows.check_row(row)
    monkeypatch.setattr("envs.sandbox.sandbox.problem", lambda: "no checks here")
    with pytest.raises(errors.ModuleError, match="lacks a sandbox for answers .*: no checks here"):
        check_rows.check_services(row)
    check_rows.check_services(row | {"exact": True})


def test_a_scorer_that_pays_any_answer_is_refused():
    row = replaced(PUZZLE_ROW, ["metadata", "source_dataset"], "game_of_life_halting")
    with pytest.raises(ValueError, match="source_dataset is 'game_of_life_halting', expected a da"):
        check_rows.check_row(row)
    check_rows.check_row(row | {"exact": True, "answer": "True"})


@pytest.mark.slow
def test_every_scorer_that_evaluates_answers_is_known():
    """By what it calls; those of number_sorting and bitwise_arithmetic evaluate their row."""
    from reasoning_gym.factory import DATASETS

    runs = ("eval", "exec", "compile", "parse_expr", "sympify", "nsimplify", "parse_latex")

    def evaluates(dataset) -> bool:
        tree = ast.parse(textwrap.dedent(inspect.getsource(dataset.score_answer)))
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        return any(
            ast.unparse(call.func).endswith(runs) and "answer" in map(ast.unparse, call.args)
            for call in calls
        )

    found = {name for name, (dataset, *_) in DATASETS.items() if evaluates(dataset)}
    assert found == set(puzzles.EVALUATES)


@pytest.mark.parametrize(("verdict", "value", "info"), [
    (np.any([True]), 1.0, {}),
    (np.float32(0.5), 0.5, {}),
    (envs.Reward(np.bool_(False), {"n": np.int64(3), "x": np.float32(0.5)}), 0.0, None),
    (envs.Reward(1, {"n": 3, "x": 0.5}), 1.0, None),
])  # fmt: skip
def test_numbers_of_numpy_are_those_of_python(verdict, value, info, monkeypatch):
    monkeypatch.setattr(puzzles, "verify", lambda row, response: verdict)
    reward = asyncio.run(registry.verify(PUZZLE_ROW, ""))
    assert (type(reward.value), reward.value) == (float, value)
    assert json.dumps(reward.info) == json.dumps({"n": 3, "x": 0.5} if info is None else info)


def test_a_check_that_lacks_a_library_is_the_module_s_fault_not_the_row_s(monkeypatch):
    def check(row):
        import sklearnn  # noqa: F401

    monkeypatch.setattr(puzzles, "check", check)
    with pytest.raises(errors.ModuleError, match="No module named 'sklearnn'"):
        check_rows.check_row(PUZZLE_ROW)
