"""Lean: what is compiled, and what is made of the compiler's words.

There is no Lean here. tests/support/lean_stand_in.py stands in for it: it tells right proofs from
wrong ones by a few words only, so that what these tests show is all but Lean's own verdict.
"""

import asyncio
import itertools
import os
import random
import re
import shutil
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs import services
from envs.proofs import lean, lean_runs, lean_source
from envs.proofs.lean_source import code_block, code_of, proof_of
from envs.sandbox import sandbox
from settings.environment_services import Services
from support.data import in_both
from support.examples import tries
from support.skills import Handler, as_sandbox
from support.tables import refused
from support.verifiers import HOSTILE, gym_rows, known_answers, lines

AGENT = "math_formal_lean_simple_agent"
ROW = {"header": "import Mathlib\n\n", "formal_statement": "theorem t : True := by\n"}
STAND_IN = Path(__file__).parents[2] / "support/lean_stand_in.py"


@pytest.fixture(scope="module")
def stand_in():
    """The stand-in as services.lean, in the sandbox where there is one."""
    if problem := sandbox.problem():
        pytest.skip(f"no sandbox here: {problem}")
    before = services.current()
    with tempfile.TemporaryDirectory() as folder:  # nobody can read it, and nobody runs it
        os.chmod(folder, 0o755)
        program = shutil.copy(STAND_IN, folder)
        services.configure(Services(lean=f"{sandbox.python()[0]} {program}"))
        yield program
    services.configure(before)


def verdict(answer: str, row: dict = ROW):
    lean.check(row)
    return asyncio.run(lean.verify(row, answer))


def block(proof: str) -> str:
    return f"```lean4\n{proof}\n```"


@in_both
@pytest.mark.parametrize("name", ["lean_minif2f", "math_formal_lean"])
def test_known_answers(name, place, stand_in, monkeypatch):
    monkeypatch.setattr(lean_runs, "LIMITS", lean_runs.LIMITS._replace(seconds=2))
    for row, response, expected, case in known_answers(name, AGENT, 3, place):
        predicted = case["metadata"].get("predicted_proof")
        if predicted:
            row["header"], theorem, rest = predicted.partition("theorem")
            row["formal_statement"] = theorem + rest.partition(":= by\n")[0] + ":= by\n"
            source = row["header"] + row["formal_statement"] + proof_of(code_of(str(response)))
            assert source == predicted
        if case["source"].endswith("::test_verify_timeout"):  # Gym's compiler is made up there
            row["formal_statement"] = "theorem sleep_for_ever : True := by\n"
        assert verdict(str(response), row).value == expected, case


def test_known_functions():
    functions = {
        "extract_code_block": lambda text, languages, **_: code_block(text, tuple(languages)),
        "clean_formal_generation": lambda generation, **_: code_of(generation),
        "extract_proof_only": lambda lean_code: proof_of(lean_code),
        "build_lean4_proof": lambda generation, data_point, **_: (
            data_point["header"] + data_point["formal_statement"] + proof_of(code_of(generation))
        ),
        "determine_proof_status": lambda compiler_output: status(**compiler_output),
    }
    # Lean's errors as the next question tells them: test_lean_refinement.py.
    later = {"parse_error", "format_error_feedback", "get_error_str", "build_correction_prompt"}
    agreed = 0
    for case in lines("known_answers", "math_formal_lean_fns"):
        args = case["args"]
        other = args.get("extract_code_mode") == "first" or args.get("final_answer_key")
        config = args.get("config", {"restate_formal_statement": True})
        # No released configuration takes the first block, a key, or no statement of the row.
        if case["fn"] in later or other or not config["restate_formal_statement"]:
            continue
        assert functions[case["fn"]](**args) == case["expected"], case
        agreed += 1
    assert agreed >= 28


def status(process_status: str, stdout: str, stderr: str) -> str:
    """Our reading of what Gym's client was told, in Gym's words."""
    ended = "time" if process_status == "timeout" else ""
    reason = lean_runs.failure(
        sandbox.Ran(stdout, stderr, int(process_status != "completed"), ended, 0)
    )
    # A compiler that Gym could not ask is an error here, see test_a_lean_that_is_away.
    return {"failed": process_status, "sorry": "has_sorry", "": "completed"}.get(reason, reason)


@in_both
def test_real_rows(stand_in, place):
    for row in gym_rows("math_formal_lean", AGENT, place):
        assert verdict("", row).value == verdict("<think>trivial", row).value == 0
        statement = row["formal_statement"]
        assert verdict(block(statement + "  nlinarith"), row).value == 1  # the stand-in says so
        assert verdict(block(statement + "  sorry"), row).info["reason"] == "sorry"


def test_what_lean_says_is_what_counts(stand_in, monkeypatch):
    monkeypatch.setattr(lean_runs, "LIMITS", lean_runs.LIMITS._replace(seconds=2))
    assert verdict(f"<think>sorry</think>Here: {block('  trivial -- sorry')} sorry").value == 1
    failed = verdict(block("  wrong_tactic"))
    assert (failed.value, failed.info["reason"]) == (0, "failed")
    assert "unsolved goals" in failed.info["lean"]
    assert verdict(block("  sleep_for_ever")).info["reason"] == "timeout"
    assert verdict(block("  much_output")).info["reason"] == "output"
    assert verdict("\ud800 \x00").value == 1  # replaced, and then the stand-in is content


def test_the_statement_is_the_rows(stand_in):
    """An answer's own theorem is dropped with all before it, so that another proves nothing."""
    assert proof_of("axiom a : False\n\ntheorem u : False := by\n  exact a") == "  exact a"
    other = block("theorem t : 1 = 1 := by\n  wrong_tactic")
    assert verdict(f"{block('  trivial')} {other}").value == 0
    assert verdict(f"{other} {block('  trivial')}").value == 1


@pytest.mark.parametrize("proof", [
    "  exact sorryAx _ true",
    "  native_decide",
    "  decide +native",
    "  decide (config := { native := true })",
    "  run_tac (IO.Process.exit 0 : IO Unit)",
    "  run_tac Lean.Elab.admitGoal (← Lean.Elab.Tactic.getMainGoal)",
    "  exact (by_elab return .const ``True [])",
    "  trivial\n#eval (IO.Process.exit 0 : IO Unit)",
    "  exact exit_at_once\nrun_cmd IO.Process.exit 0",
    "  exact exit_at_once\nopen IO in #eval Process.exit 0",
    '  exact exit_at_once\nelab "x" : command => return',
    '  exact exit_at_once\nmacro "x" : tactic => `(tactic| skip)',
    "  exact exit_at_once\ninitialize pure ()",
    "  set_option debug.skipKernelTC true in exact exit_at_once",
    "  set_option warn.sorry false in exact exit_at_once",
    "  let rec @[implemented_by f] g := 1\n  trivial",
    "  trivial /- run_tac -/",
])  # fmt: skip
def test_what_runs_code_inside_lean_is_refused(proof, stand_in):
    got = verdict(block(proof))
    assert got.value == 0
    assert got.info["reason"].startswith("forbidden: ")


def test_ordinary_words_are_not_refused():
    proof = "  -- alternative: eliminate, then runs; an IOU, external, exit\n  simp_all [Nat.elab']"
    assert lean.refused("  nlinarith [sq_nonneg (a + b)] -- macroscopic, nativity") == ""
    assert lean.refused(proof.replace("elab'", "succ")) == ""


def test_a_lean_without_mathlib_is_an_error(stand_in, monkeypatch):
    monkeypatch.setattr(lean_runs, "LIMITS", lean_runs.LIMITS._replace(seconds=1))
    for header in ("import Missing\n", "import Slow\n"):
        with pytest.raises(services.CheckerError, match="Lean cannot compile the header 'import"):
            verdict(block("  trivial"), ROW | {"header": header})


@pytest.mark.parametrize("command", ["false", "sh -c 'kill -9 $$'"])
def test_a_lean_that_says_nothing_is_an_error(command, stand_in, monkeypatch):
    """If it can compile the header, it is the answer that ends it."""
    row = ROW | {"header": f"import {len(command)}\n"}
    before = services.current()
    monkeypatch.setattr(services, "_current", [Services(lean=command)])
    with pytest.raises(services.CheckerError, match="Lean cannot compile the header 'import"):
        verdict(block("  trivial"), row)
    monkeypatch.setattr(services, "_current", [before])
    assert verdict(block("  exit_silently"), row).info == {"reason": "failed", "lean": ""}


def test_a_lean_that_does_not_start_is_an_error(stand_in, monkeypatch):
    monkeypatch.setattr(services, "_current", [Services(lean="/usr/bin/no_such_lean")])
    with pytest.raises(services.CheckerError, match="no_such_lean"):
        verdict(block("  trivial"))


@pytest.mark.parametrize(("given", "message"), [
    ({}, "services.lean = '', expected a folder that `bash launch/lean.sh FOLDER` creates"),
    ({"lean": "no_such_lean x"}, "lean = 'no_such_lean x': no such folder or command; expected"),
    ({"lean": "a 'b"}, ": No closing quotation; expected a folder"),
    ({"lean": "/usr"}, "lean = '/usr': the folder has no program bin/lean; expected"),
    ({"lean": "env lean", "sandbox": "http"}, "'env lean' is a command, but services.sandbox ="),
    ({"lean": "env A=B lean"}, ""),
])  # fmt: skip
def test_what_is_missing_is_named_at_the_start(given, message, monkeypatch):
    monkeypatch.setattr(services, "_current", [Services(**given)])
    assert [need.name for need in lean.needs(ROW)] == ["lean", "sandbox"]
    problem = lean_source.NEED.problem()
    assert re.search(message, problem) if message else not problem


SAID = {  # by the service, of a proof
    "failed": ("failed", "t.lean:3:2: error: unsolved goals", ""),
    "slow": ("timeout", "", "timed out"),
    "away": ("error", "", "no lake"),
    "full": ("failed", "", "error: cannot allocate memory"),
    "killed": ("failed", "t.lean:1:0: warning: unused variable", ""),
    "deep": ("failed", "", "Stack overflow detected. Aborting."),
    "sorry": ("completed", "uses 'sorry'", ""),
    "long": ("completed", "x" * 99 + "<output cut>", ""),
}


@pytest.mark.parametrize("fault", ["slow", "gone"])
def test_a_service_that_worked_before_is_doubted(fault, monkeypatch):
    """It is slow once; or Mathlib is gone, whose lines are not the answer's."""
    gone = ("failed", "t.lean:1:0: error: object file 'Mathlib.olean' does not exist", "")
    good = ("completed", "", "")
    said = [good] if fault == "gone" else [SAID["slow"], good]

    def answer(asked: Handler, request: dict) -> dict:
        told = said.pop(0) if said else gone
        return dict(zip(("process_status", "stdout", "stderr"), told, strict=True))

    monkeypatch.setattr(lean_runs, "COMPILES", {ROW["header"]})
    with as_sandbox(answer):
        assert verdict(block("  trivial")).value == 1 and not said
        if fault == "gone":
            with pytest.raises(services.CheckerError, match="Lean cannot compile the header"):
                verdict(block("  trivial"))


@pytest.mark.parametrize(("said", "expected"), [
    (("timeout", "", "timed out"), "Lean cannot compile the header .*: timeout"),
    (("failed", "x.lean:3:1: error: IO error: No space left on device", ""), "service at .*failed"),
    (("failed", "", "x.lean:3:1: error: failed to create thread"), "service at .*: failed"),
    (("completed", "<html>log in</html>", ""), "does not refuse a false proof, code 0: <html>log"),
    (("completed", "", "lake: command not found"), "does not refuse a false proof, code 0: lake"),
])  # fmt: skip
def test_a_service_that_fails_after_it_worked_is_an_error(said, expected, monkeypatch):
    monkeypatch.setattr(lean_runs, "COMPILES", {ROW["header"]})
    monkeypatch.setattr(lean_runs, "REFUSES", set())
    told = dict(zip(("process_status", "stdout", "stderr"), said, strict=True))
    with as_sandbox(lambda *_: told), pytest.raises(services.CheckerError, match=expected):
        verdict(block("  trivial"))


@pytest.mark.parametrize("command", ["false", "sh -c 'kill -9 $$'", "sh -c 'kill $$'"])
def test_a_lean_that_is_killed_after_it_worked_is_an_error(command, stand_in, monkeypatch):
    assert verdict(block("  trivial")).value == 1
    monkeypatch.setattr(lean_runs, "COMPILES", {ROW["header"]})
    monkeypatch.setattr(services, "_current", [Services(lean=command)])
    with pytest.raises(services.CheckerError, match="Lean cannot compile the header"):
        verdict(block("  trivial"))


def test_a_folder_of_launch_lean_sh_compiles(stand_in, tmp_path, monkeypatch):

    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "bin/lean")
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec {services.current().lean} "$@"\n')
        for path in (folder, program.parent, program):
            os.chmod(path, 0o755)
        shutil.copy(stand_in, folder)
        program.write_text(program.read_text().replace(str(Path(stand_in).parent), folder))
        monkeypatch.setattr(services, "_current", [Services(lean=folder)])
        assert not lean_source.NEED.problem()
        assert verdict(block("  trivial")).value == 1
        assert verdict(block("  wrong_tactic")).info["reason"] == "failed"


def test_a_service_compiles_beside_a_sandbox_for_all_else(monkeypatch):
    """What excludes an HTTP sandbox, such as images and shells, may be used with it."""
    asked = []

    def answer(handler: Handler, request: dict) -> dict:
        asked.append(request["language"])
        return {"process_status": "completed", "stdout": "", "stderr": ""}

    with as_sandbox(answer):
        url = services.current().sandbox_url
        monkeypatch.setattr(services, "_current", [Services(lean=url)])
        assert lean.needs(ROW) == (lean_source.NEED,) and not lean_source.NEED.problem()
        assert verdict(block("  trivial")).value == 1 and asked == ["lean4"]
        assert services.current().sandbox == "bubblewrap"


def test_the_service_compiles():
    def answer(asked: Handler, request: dict) -> dict:
        assert (asked.path, request["language"], request["timeout"]) == ("/execute", "lean4", 30)
        proof = request["generated_code"].rpartition(":= by\n")[2].strip()
        told = SAID.get(proof, ("completed", "", ""))
        return dict(zip(("process_status", "stdout", "stderr"), told, strict=True))

    with as_sandbox(answer):
        assert lean.needs(ROW) == (lean_source.NEED,) and not lean_source.NEED.problem()
        assert verdict(block("  trivial")).value == 1
        reasons = {"failed": "failed", "deep": "failed", "slow": "timeout", "sorry": "sorry"}
        for proof, reason in (reasons | {"long": "output"}).items():
            got = verdict(block(proof))
            assert (got.value, got.info["reason"]) == (0, reason)
        with pytest.raises(services.CheckerError, match="error: no lake"):
            verdict(block("away"))
        for proof in ("killed", "full"):
            with pytest.raises(services.CheckerError, match="failed: "):
                verdict(block(proof))


def test_wrong_proofs_earn_nothing(stand_in):
    """A thousand changes of a wrong proof, whose error must reach Lean; a hundred are compiled."""
    rng = random.Random(0)
    wrong = ["  wrong_tactic", "  exact absurd rfl (by decide)", "I could not prove it."]
    for i in range(1000):
        proof = rng.choice(wrong)
        junk = rng.choice(["", "Done.", "```", "\n", "theorem", ":= by", "by ", "sorry", "🙂"])
        text = rng.choice([block(proof), f"```lean\n{proof}\n```", proof, f"```\n{proof}\n```"])
        text = rng.choice([f"{text}\n{junk}", f"{junk}\n{text}", f"{text}{text}", text])
        if "```" not in junk:
            source = ROW["formal_statement"] + proof_of(code_of(text))
            assert proof.split()[0] in source or junk in (":= by", "theorem"), text
        if i % 20 == 0:
            assert verdict(text).value == 0, text


@pytest.mark.parametrize("text", [t for t in HOSTILE if t.strip()], ids=itertools.count())
def test_hostile_answers_are_read_in_time(text):
    began = time.process_time()
    assert isinstance(lean.refused(proof_of(code_of(text))), str)
    assert time.process_time() - began < 10


@pytest.mark.parametrize("text", ["", " ", "\n" * 10**6, "<think>" * 10**5, "a" * 10**6])
def test_hostile_answers_earn_nothing(text):
    assert verdict(text).value == 0


@given(st.text() | st.text("`lean4 \n:=by theorem").map(lambda text: f"```lean4{text}"))
@settings(max_examples=tries(10_000), deadline=None)
def test_any_text_has_a_proof(text):
    assert len(proof_of(code_of(text))) <= len(text)
    assert "```" not in code_block(text)


test_bad_rows = refused(
    lambda change: lean.check(ROW | change),
    ({"header": None}, "header is missing or null, expected imports and options"),
    ({"formal_statement": 5}, "formal_statement is 5, expected a theorem up to its"),
    ({"formal_statement": "theorem t : True := by sorry"}, "formal_statement is 'theorem"),
    ({"formal_statement": ""}, "formal_statement is '', expected"),
    ({"name": 3}, "name is 3, expected a text or null"),
    ({"informal_prefix": []}, r"informal_prefix is \[\], expected"),
)
