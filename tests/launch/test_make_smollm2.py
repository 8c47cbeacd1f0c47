"""The rows of launch/make_smollm2.py, and two steps of the real model that it fetches."""

import json
from pathlib import Path

import pytest
from conftest import write_rows

from envs import check_rows
from envs.following.instructions import RULES
from grpo_async import Config
from launch import make_smollm2
from settings import reader
from support.program import ROOT, Program

# An answer about the moon that follows each rule.
FOLLOWS = {
    "no_comma": "The moon is a cold and silent world of dust.",
    "short": "The moon, our neighbour, is a cold and silent world.",
    "first_word": "The moon, our neighbour, is a cold and silent world. It has no air.",
    "three": "The moon is a cold and silent world of grey dust.",
}


def reward(row: dict, answer: str) -> bool:
    checks = zip(row["instruction_id_list"], row["kwargs"], strict=True)
    return all(RULES[name](answer, **arguments) for name, arguments in checks)


def test_each_rule_can_be_followed_but_not_by_a_word():
    for name, answer in FOLLOWS.items():
        row = make_smollm2.row("the moon", name)
        check_rows.check_row(row)
        assert reward(row, answer), name
        assert not reward(row, "Moon."), name
        assert not reward(row, answer.replace("moon", "sun")), name


def test_validation_asks_about_other_things():
    train, validation = make_smollm2.rows(0)
    assert (len(train), len(validation)) == (320, 80)
    prompts = [
        {row["responses_create_params"]["input"][0]["content"].partition(".")[0] for row in part}
        for part in (train, validation)
    ]
    assert not prompts[0] & prompts[1] and len(prompts[1]) == make_smollm2.VALIDATION_THINGS
    assert {row["dataset"] for row in validation} == set(make_smollm2.RULES)
    assert make_smollm2.rows(0) == (train, validation) != make_smollm2.rows(1)


@pytest.mark.e2e
@pytest.mark.long
def test_a_real_model_is_fetched_and_trains(tmp_path, capsys):
    """Two steps and eight validation rows of configs/smollm2.py; minutes on two cores."""
    make_smollm2.main(root=tmp_path)
    assert capsys.readouterr().out.count("smollm2: ") == 2
    data = tmp_path / "data/form"
    some = [json.loads(line) for line in (data / "validation.jsonl").read_text().splitlines()[:8]]
    flags = ["--config", str(ROOT / "configs/smollm2.py"), "--run_dir", str(tmp_path / "run")]
    flags += ["--model", str(tmp_path / "models/smollm2"), "--steps", "2", "--val_period", "2"]
    flags += ["--data.train", str(data / "train.jsonl")]
    flags += ["--data.val", write_rows(tmp_path / "validation.jsonl", some)]
    program = Program(reader.load(Config, flags, default="configs/tiny.py")).succeeds()
    first, _ = program.steps()
    assert abs(first["token_mult_prob_error"] - 1) < 1e-4, "trainer and engine agree at lag 0"
    assert 10 < first["response_tokens"] <= 48 and first["truncated_samples"] < 0.9
    export = Path(program.folder, "step_000002/hf")
    assert f"--model {export} --dtype float32" in program.told() and (export / "adapter").is_dir()
