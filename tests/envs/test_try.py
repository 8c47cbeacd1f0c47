"""`python -m envs`, and the code of docs/own_data.md: from questions to judged answers."""

import asyncio
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import write_rows

from core.errors import InputError
from envs import __main__ as envs_main
from envs import registry
from envs.__main__ import Answer
from support.program import ROOT, ran

PAGE = (ROOT / "docs/own_data.md").read_text(encoding="utf-8")
SKIPPED = shutil.ignore_patterns("__pycache__")

pytestmark = pytest.mark.slow


def block(language: str, holds: str) -> str:
    """The page's example in a language that holds a text."""
    found = re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)
    (only,) = [text for text in found if holds in text]
    return only


@pytest.fixture
def project(tmp_path) -> Path:
    """A copy of what the command needs, with the page's environment and its questions as rows."""
    shutil.copytree(ROOT / "envs", tmp_path / "envs", ignore=SKIPPED)
    for room in ("core", "rollout", "settings"):
        shutil.copytree(ROOT / room, tmp_path / room, ignore=SKIPPED)
    (tmp_path / "envs/my_reward.py").write_text(block("python", "AGENTS"))
    question = json.loads(block("json", "question"))
    questions = [question, {"question": "what is 2 plus 2", "answer": "4"}]
    write_rows(tmp_path / "questions.jsonl", questions * 5)
    run(tmp_path, "-c", block("python", "questions.jsonl"))
    return tmp_path


def run(project: Path, *arguments: str) -> subprocess.CompletedProcess:
    return ran(sys.executable, *arguments, root=project)


def try_rows(project: Path, *arguments: str) -> str:
    """What the command prints about train.jsonl; fails where it fails."""
    done = run(project, "-m", "envs", "train.jsonl", *arguments)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout


def problem(project: Path, *arguments: str) -> str:
    """The one line that the command ends with."""
    done = run(project, "-m", "envs", *arguments)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    return done.stderr.removeprefix("error: ").rstrip()


def test_a_reader_that_has_seen_enough_is_no_error(project):
    command = f"{shlex.quote(sys.executable)} -m envs train.jsonl -n 1000 | head -n 1"
    done = ran("bash", "-c", f"set -o pipefail; {command}", root=project)
    assert done.stdout.startswith("my_reward/arithmetic: ") and not done.stderr, done.stderr


def reward(project: Path, verify: str) -> None:
    """Replaces the page's environment by one with this `verify`."""
    text = f'from envs import Reward\nAGENTS = ("my_reward",)\n{verify}\n'
    (project / "envs/my_reward.py").write_text(text)


def test_the_page_shows_what_the_command_prints(project):
    (shown,) = re.findall(r"\n\n```\n(.*?)```", PAGE, re.S)
    number = r"\d+(\.\d+)?(e-\d+)?"
    start, _, end = re.sub(r"[\d.e-]+ ms", "N ms", shown.replace("200", "10")).partition("...\n")
    printed = re.sub(rf"{number} ms", "N ms", try_rows(project))
    assert printed.startswith(start) and printed.endswith(end.lstrip("\n"))
    assert len(re.findall(r"^  reward 1 ", printed, re.M)) == 3


@pytest.mark.parametrize("page", ["docs/own_data.md", "README.md"])
def test_one_command_makes_rows_of_a_table(page, tmp_path):
    """The pages' own; then each reference answer earns 1, and another nothing."""
    (tmp_path / "questions.csv").write_text(block("csv", "question,answer"))
    text = (ROOT / page).read_text().replace("\\\n", " ")
    rows, tried = re.findall(
        r"^\.venv/bin/python ((?:data_prep\.py rows|-m envs) .*)$", text, re.M
    )[:2]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    made = ran(
        sys.executable, ROOT / "data_prep.py", *shlex.split(rows)[1:], root=tmp_path, env=env
    )
    assert made.returncode == 0, made.stderr
    for flags, reward in (((), "1 (1 to 1)"), (("-a", "9"), "0 (0 to 0)")):
        words = shlex.split(tried, comments=True)
        done = ran(sys.executable, *words, *flags, root=tmp_path, env=env)
        assert f": 2 tried, mean reward {reward}" in done.stdout, done.stdout + done.stderr


def test_the_conversion_of_a_hugging_face_data_set(project, monkeypatch):
    """The page's loop, with rows in place of the library that reads them."""
    system, user = {"role": "system", "content": "Add."}, {"role": "user", "content": "2 + 2?"}
    messages = [system, user, {"role": "assistant", "content": "4"}]
    library = f"def load_dataset(*path, **options):\n    return [{{'messages': {messages}}}]\n"
    (project / "datasets.py").write_text(library)
    assert not run(project, "-c", block("python", "load_dataset")).stderr
    (row,) = [json.loads(line) for line in (project / "chats.jsonl").read_text().splitlines()]
    assert row["responses_create_params"]["input"] == [system, user] and row["answer"] == "4"
    out = run(project, "-m", "envs", "chats.jsonl").stdout
    assert "  system:\n    Add.\n  user:\n    2 + 2?\n  answer (answer):\n    4\n  reward 1 " in out


def test_nothing_heavy_is_imported(project):
    code = "import runpy, sys; sys.argv[1:] = ['train.jsonl']; runpy.run_module('envs', None, "
    code += "'__main__'); print({'ray', 'torch', 'vllm', 'numpy', 'transformers', 'reasoning_gym', "
    code += "'math_verify', 'sympy', 'envs.maths.math', 'envs.questions.reasoning_gym'} & "
    code += "set(sys.modules))"
    done = run(project, "-c", code)
    assert done.stdout.splitlines()[-1] == "set()", done.stderr


def test_given_answers_are_tried_on_each_row(project):
    out = try_rows(project, "-n", "2", "-a", "43 or 42", "-a", "", "-a", "5")
    assert re.findall(r"train.jsonl:(\d+) ", out) == list("111222")
    assert re.findall(r"  reward (\S+) ", out) == ["1", "0", "0.1", "0.1", "0", "0.1"]
    assert "my_reward/arithmetic: 6 tried, mean reward 0.2167 (0 to 1); verify took " in out
    assert re.search(r" ms \(median\), \S+ ms at most, and for the first answer \S+ ms\n", out)


def test_rows_of_each_environment_and_data_set_are_tried(project):
    row = json.loads((project / "train.jsonl").read_text().splitlines()[0])
    maths = row | {"agent_ref": {"name": "math"}, "dataset": None, "expected_answer": "43"}
    write_rows(project / "train.jsonl", [row, row, row | {"dataset": "b"}, maths])
    out = try_rows(project, "-n", "1")
    expected = [("1", "my_reward/arithmetic"), ("3", "my_reward/b"), ("4", "math")]
    assert re.findall(r"train.jsonl:(\d+) (\S+)", out) == expected
    assert "my_reward/arithmetic: 2 good rows" in out and "math: 1 good rows" in out
    assert "answer (expected_answer):\n    43\n  reward 1 " in out, "the reference, not the answer"
    assert out.count(": 1 tried, mean reward 1 ") == 3
    assert "math: 1 tried, mean reward 0 " in try_rows(project, "-n", "1", "-f", "answer")


def test_an_answer_of_a_nested_field_may_be_no_text(project):
    row = json.loads((project / "train.jsonl").read_text().splitlines()[0])
    write_rows(project / "train.jsonl", [row | {"metadata": {"solution": [42]}}])
    out = try_rows(project, "-f", "metadata.solution")
    assert "  answer (metadata.solution):\n    [42]\n  reward 1 " in out
    told = "train.jsonl:1: metadata.answer is missing or null, expected an answer"
    assert problem(project, "train.jsonl", "-f", "metadata.answer") == told


def test_rows_without_a_reference_are_named_and_an_answer_may_be_given(project):
    row = json.loads((project / "train.jsonl").read_text().splitlines()[0])
    row["target"] = row.pop("answer")
    write_rows(project / "train.jsonl", [row])
    refused = "train.jsonl:1: answer is missing or null, expected the right number as text"
    assert refused in problem(project, "train.jsonl")
    module = project / "envs/my_reward.py"
    module.write_text(re.sub(r"def check.*?\n\n\n", "", module.read_text(), flags=re.S))
    done = run(project, "-m", "envs", "train.jsonl")
    lacks = "train.jsonl:1 my_reward/arithmetic: not tried, it has no reference answer; -f FIELD or"
    assert done.returncode == 0 and lacks in done.stdout
    raised = r"train.jsonl:1: verify raised .*/envs/my_reward.py:\d+: KeyError: 'answer'$"
    assert re.search(raised, problem(project, "train.jsonl", "-a", "42"))


def test_bad_rows_are_told_before_anything_is_tried(project):
    with open(project / "train.jsonl", "a") as file:
        file.write('{"question": "2 + 2?"}\n{\n')
    told = problem(project, "train.jsonl")
    assert told.startswith("train.jsonl:11: responses_create_params.input is missing or null")
    assert told.endswith("(2 bad rows: lines 11, 12)")
    (project / "train.jsonl").unlink()
    assert problem(project, "train.jsonl").startswith(f"{project}/train.jsonl: expected a JSONL")


@pytest.mark.parametrize(("verify", "message"), [
    ("async def verify(row, response):\n    return row['level']", "{file}:4: KeyError: 'level'"),
    ("def verify(row, response):\n    return len(response, 2)", "{file}:4: TypeError: len() "),
    ("def verify(row, response): ...", "TypeError: environment 'my_reward' returned None, exp"),
    ("def verify(row, response): return float('nan')", "returned nan, expected a finite number"),
])  # fmt: skip
def test_a_wrong_verify_is_told_in_one_line(project, verify, message):
    reward(project, verify)
    told = problem(project, "train.jsonl")
    assert told.startswith("train.jsonl:1: verify ")
    assert message.format(file=project / "envs/my_reward.py") in told


def test_rows_whose_judge_is_missing_are_named_and_the_others_tried(project):
    needs = "needs = lambda row: ('judges.general',) if row['answer'] == '42' else ()"
    reward(project, f"{needs}\ndef verify(row, response): return 1")
    count = len((project / "train.jsonl").read_text().splitlines())
    out = try_rows(project, "-n", "1000")
    lacking = "environment 'my_reward' lacks judges.general: no url, and neither JUDGES_FILE nor"
    assert out.count(f"my_reward/arithmetic: not tried, {lacking}") == 1
    tried = int(re.search(r": (\d+) tried, mean reward 1 ", out)[1])
    assert 0 < tried < count
    reward(project, "needs = lambda row: ('judges.general',)\ndef verify(row, response): return 1")
    assert problem(project, "train.jsonl").startswith(f"train.jsonl:1: {lacking}")


def test_a_wrong_needs_is_named_in_one_line(project):
    reward(project, "def needs(row): return row['nope']\ndef verify(row, response): return 1")
    raised = f"needs raised {project / 'envs/my_reward.py'}:3: KeyError: 'nope'"
    assert problem(project, "train.jsonl").startswith(f"train.jsonl:1: {raised}")


def test_an_asynchronous_verify_is_awaited_and_timed(project):
    body = "    await asyncio.sleep(0.02)\n    return 2"
    reward(project, f"import asyncio\nasync def verify(row, response):\n{body}")
    out = try_rows(project)
    assert "3 tried, mean reward 2 (2 to 2)" in out
    assert 20 <= float(re.search(r"took (\S+) ms \(median\)", out)[1]) < 2000


def test_an_environment_of_several_turns_is_said_not_to_be_tried(project):
    reward(project, "async def rollout(row, sampler): ...")
    out = try_rows(project)
    told = "my_reward: not tried, its multi-turn `rollout` needs a model"
    assert out.splitlines()[1:] == [told]
    reward(project, "async def score_group(rows, answers): ...")
    out = try_rows(project)
    assert out.splitlines()[1:] == ["my_reward: not tried, it compares the answers in a group"]
    both = "def verify(row, response): return 1\nasync def score_group(rows, answers): ..."
    reward(project, both)
    out = try_rows(project)
    assert "my_reward: only `verify` is tried; training does not use it alone" in out
    assert "3 tried, mean reward 1 " in out


def rollout(row: int, prompt: str, response: str, reward: float, **fields) -> dict:
    """A line of rollouts.jsonl, of which only some fields are read."""
    turns = ["a first try", response]
    return {"row": row, "prompt": prompt, "response": turns, "reward": reward} | fields


def test_answers_of_a_run_are_judged_again(project):
    question = json.loads((project / "train.jsonl").read_text().splitlines()[0])["question"]
    lines = [
        rollout(1, f"<user>{question}\n<bot>", "42", 0.25),
        rollout(1, f"<user>\n{question.replace(' ', '  ')}<bot><think>\n", "42</think> 41", 0.5),
        rollout(1, f"<user>{question}<bot><think>\n", "42", 0.75),
        rollout(1, "<user>a validation row<bot>", "42", 1),
        rollout(99, f"<user>{question}<bot>", "42", 1),
    ]
    write_rows(project / "rollouts.jsonl", lines)
    out = try_rows(project, "-r", "rollouts.jsonl", "-n", "9")
    assert re.findall(r"answer \(rollouts.jsonl:(\d)\):", out) == ["1", "2", "3"]
    assert re.findall(r"  reward (\S+) ", out) == ["1", "0.1", "0"], "a thought is no answer"
    assert "3 tried, mean reward 0.3667, in the run 0.5 (0 to 1);" in out
    write_rows(project / "rollouts.jsonl", lines[3:])
    told = problem(project, "train.jsonl", "-r", "rollouts.jsonl")
    assert told == "rollouts.jsonl: contains no rollouts of these rows, expected at least one"
    told = problem(project, "train.jsonl", "-r", "train.jsonl")
    assert told == "train.jsonl:1: expected a rollout: KeyError('row')"
    told = problem(project, "train.jsonl", "-r", "rollouts.jsonl", "-a", "42")
    assert told == "-a, -f and -r are mutually exclusive, expected only one of them"


def test_a_verify_that_never_returns_is_an_error_that_names_it(monkeypatch):
    async def verify(row, response):
        await asyncio.sleep(60)

    monkeypatch.setattr(registry.environment("math"), "verify", verify)
    monkeypatch.setattr(envs_main, "SECONDS", 0.1)
    row = {"_line": 7, "agent_ref": {"name": "math"}, "responses_create_params": {"input": "1"}}
    answer = Answer(row, "1", "given")
    with pytest.raises(InputError, match="train.jsonl:7: verify .*waited 0 s for verify of 'math'"):
        asyncio.run(envs_main.judge(answer, envs_main.Args("train.jsonl")))


def test_an_answer_is_parsed_as_the_run_would_parse_it(project, tiny_model):
    verify = "def verify(row, response):\n    return Reward(1, {'content': response.content})"
    reward(project, verify)
    named = ["--services.reasoning_parser", "nemotron_v3", "--model", tiny_model]
    assert '{"content": "42"}' in try_rows(project, "-a", "so</think>42", *named)
    done = run(project, "-m", "envs", "train.jsonl", "--services.tool_parser", "hermse")
    assert "expected the folder of the tokenizer" in done.stderr
