"""Proofs that are corrected: what the next question tells, and which attempt counts.

tests/support/lean_stand_in.py stands in for Lean, as in test_lean.py.
"""

import asyncio
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_lean import ROW, block, stand_in  # noqa: F401 (a fixture)

from envs.check_rows import check_row
from envs.proofs import lean, lean_feedback, lean_refinement, lean_runs
from envs.proofs.lean_feedback import MOST, errors, feedback, marked
from envs.registry import environment
from envs.sandbox import sandbox
from envs.sandbox.sandbox import Ran
from envs.services import CheckerError
from rollout.chat import NoRoom
from rollout.response import Response
from support.data import in_both
from support.examples import tries
from support.scripts import Full, Script
from support.verifiers import HOSTILE, gym_rows, lines

AGENT = "math_formal_lean_refinement_agent"
PROMPT = [{"role": "user", "content": "Prove t."}]
ASKED = ROW | {"agent_ref": {"name": AGENT}, "responses_create_params": {"input": PROMPT}}
WRONG, RIGHT = block("  wrong_tactic"), block("  trivial")


def episode(*answers: str, row: dict = ASKED):
    """The episode of these answers, and what was asked before each."""
    policy = Script(answers)
    return asyncio.run(lean_refinement.rollout(row, policy)), policy.seen


def ran(process_status: str, stdout: str, stderr: str) -> Ran:
    return Ran(stdout, stderr, 1, "time" if process_status == "timeout" else "", 0.0)


def test_known_functions():
    """`build_correction_prompt` is not among them: our question has words of its own."""

    def parsed(log_string: str) -> list[dict]:
        made = []
        for line, column, data in errors(log_string):
            made.append({"pos": {"line": line, "column": column}, "endPos": None, "data": data})
        return made

    functions = {
        "parse_error": parsed,
        "format_error_feedback": lambda compiler_output, predicted_proof: feedback(
            ran(**compiler_output), predicted_proof
        ),
        "get_error_str": lambda code, errors, **_: marked(
            code, [lean_feedback.Found(*e["pos"].values(), e["data"]) for e in errors]
        ),
    }
    agreed = 0
    for case in lines("known_answers", "math_formal_lean_fns"):
        if case["fn"] in functions:
            assert functions[case["fn"]](**case["args"]) == case["expected"], case
            agreed += 1
    assert agreed >= 7


def test_an_error_is_shown_with_the_code_around_it():
    source = "\n".join(f"line {i}" for i in range(1, 9))
    said = "a.lean:6:5: error: unsolved goals\n⊢ 1 = 2\na.lean:1:0: warning: unused"
    assert feedback(Ran(said, "", 1, "", 0.0), source) == (
        "\nError 1:\n\nCorresponding Code:\n```lean4\nline 2\nline 3\nline 4\nline 5\n"
        "line <error>6</error>\nline 7\n\n```\n\nError Message: unsolved goals\n⊢ 1 = 2\n"
    )
    first = marked("only", [lean_feedback.Found(1, 9, "m"), lean_feedback.Found(2, 0, "beyond")])
    assert "```lean4\nonly<error></error>\n\n```" in first and "beyond" not in first


def test_what_lean_says_is_cut():
    said = "".join(f"a.lean:1:0: error(lean.x): {'e' * 5000}\n" for _ in range(MOST + 3))
    told = feedback(Ran(said, "", 1, "", 0.0), "x")
    assert told.count("Corresponding Code") == MOST and told.count("e" * 2000) == MOST
    assert len(told) < MOST * 2200 and told.endswith("\n... [Omitted 3 more errors] ...\n")
    raw = feedback(Ran("y" * 5000, "", 1, "", 0.0), "x")
    assert raw == "Compilation output:\n" + "y" * 2000 + "\n... [Truncated]"
    assert feedback(Ran("", "\n", 1, "", 0.0), "x") == lean_feedback.SILENT


@in_both
def test_real_rows(place):
    for row in gym_rows("math_formal_lean", lean_refinement.AGENTS[0], place):
        check_row(row)
        assert environment(row["agent_ref"]["name"]) is lean_refinement and lean_refinement.needs(
            row
        )


@pytest.mark.usefixtures("stand_in")
def test_a_proof_at_once_is_the_only_attempt():
    made, asked = episode(RIGHT)
    assert (made.reward.value, made.reward.info) == (1.0, {"attempts": 1})
    assert asked == [[{"role": "user", "content": "Prove t."}]] and len(made.turns) == 1


@pytest.mark.usefixtures("stand_in")
def test_a_failed_attempt_is_replaced_by_a_question_about_it():
    made, asked = episode(f"<think>hard</think>Here: {WRONG}", RIGHT)
    assert (made.reward.value, made.reward.info) == (1.0, {"attempts": 2})
    ((question,),) = asked[1:]
    assert question["role"] == "user" and "hard" not in question["content"]
    assert f"Here: {WRONG}" in question["content"], "the attempt, without its thought"
    assert "\nwr<error>ong_tactic</error>\n" in question["content"]
    assert "Error Message: unsolved goals" in question["content"]
    assert "Prove t." not in question["content"]
    (turn,) = made.turns
    assert turn.text == RIGHT, "what failed is not paid for what came after it"


@pytest.mark.usefixtures("stand_in")
def test_the_last_of_three_attempts_counts():
    made, asked = episode(WRONG, block("  sorry"), WRONG, RIGHT)
    assert (made.reward.value, made.reward.info["attempts"]) == (0.0, 3)
    assert made.reward.info["reason"] == "failed" and len(asked) == 3
    told = "Compilation output:\nproof.lean:1:8: warning: declaration uses 'sorry'"
    assert told in asked[2][0]["content"]


@pytest.mark.parametrize(("answer", "told"), [
    ("", "(empty)"),
    ("<think>no end", "the thought before it had no end"),
    (block("  native_decide"), "It is not compiled: forbidden: native_decide."),
    (block("x" * 60_000), "It is not compiled: too long."),
    (block("  sleep_for_ever"), lean_feedback.TIMEOUT),
    (block("  exit_silently"), lean_feedback.SILENT),
])  # fmt: skip
@pytest.mark.usefixtures("stand_in")
def test_what_was_not_compiled_is_told_so(answer, told, monkeypatch):
    monkeypatch.setattr(lean_runs, "LIMITS", lean_runs.LIMITS._replace(seconds=1))
    made, asked = episode(answer, RIGHT)
    assert told in asked[1][0]["content"] and made.reward.value == 1


@pytest.mark.usefixtures("stand_in")
def test_no_room_for_a_question_ends_the_episode():
    made = asyncio.run(lean_refinement.rollout(ASKED, Full([WRONG])))
    assert (made.reward.value, made.reward.info["attempts"]) == (0, 1)
    with pytest.raises(NoRoom):
        full = Full([])
        full.seen.append([])
        asyncio.run(lean_refinement.rollout(ASKED, full))


@pytest.mark.usefixtures("stand_in")
def test_a_lean_that_is_away_is_an_error_in_any_attempt(monkeypatch):
    real = sandbox.run

    async def away(command, *, files, **options):
        if "second" in files["proof.lean"]:
            raise CheckerError("no processor")
        return await real(command, files=files, **options)

    monkeypatch.setattr(sandbox, "run", away)
    with pytest.raises(CheckerError, match="no processor"):
        episode(WRONG, block("  second"))


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_words_are_read_in_time(text):
    began = time.process_time()
    said = [text, f"a.lean:1:0: error: {text}", "a.lean:1:0: error:\n" * 10**4, ".lean:1:" * 10**5]
    source = text[: lean.LONGEST]
    for out in said:
        assert len(feedback(Ran(out, text, 1, "", 0.0), source)) < MOST * (lean.LONGEST + 3000)
    Response(lean_feedback.question(text, text))
    assert time.process_time() - began < 10


@given(st.text(), st.text(st.sampled_from("a.lean:019 error\n")), st.text(max_size=9))
@settings(max_examples=tries(1000), deadline=None)
def test_any_words_can_be_told(out, err, source):
    told = feedback(Ran(f"{out}\nx.lean:1:2: error: {err}", err, 1, "", 0.0), source)
    assert told and "```lean4" in told
