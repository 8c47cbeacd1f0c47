"""Pass rates from the rollouts of an evaluation, which a script stands in for."""

import json
from pathlib import Path

import pytest
from conftest import write_rows

import data_prep
from core.errors import InputError
from grpo_async import Config
from prep import profile
from settings import reader
from support.blends import math_row

PROGRAM = """
import json, pathlib, sys
flags = dict(zip(sys.argv[2::2], sys.argv[3::2]))
folder = pathlib.Path(flags["--run_dir"], "evaluation")
folder.mkdir(parents=True)
(folder / "argv.json").write_text(json.dumps(sys.argv[1:]))
(folder / "rollouts.jsonl").write_text(pathlib.Path("rollouts.jsonl").read_text())
sys.exit(int(flags["--seed"]))
"""


@pytest.fixture
def profiled(tmp_path, monkeypatch):
    """The rows that come out where the rollouts had these lines and rewards."""
    (tmp_path / "grpo_async.py").write_text(PROGRAM)
    monkeypatch.setattr(profile, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)

    def run(rows: list[dict], rollouts: list, *words: str, code: int = 0) -> list[dict]:
        write_rows(tmp_path / "in.jsonl", rows)
        lines = [{"row": n, "reward": r, "evaluation": 0} for n, r in rollouts]
        write_rows(tmp_path / "rollouts.jsonl", lines)
        flags = ("--model", "m", "--run_dir", "run", *words, "--", "--seed", str(code))
        data_prep.main(["profile", "in.jsonl", "out.jsonl", *flags])
        return [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]

    return run


def test_each_row_gets_its_pass_rate_and_the_order_stays(profiled, tmp_path, capsys):
    rows = [math_row(0), math_row(1, pass_rate=0.9, pass_rate_total=4), math_row(2)]
    rollouts = [(3, 1.0), (1, 1.0), (1, 0.0), (3, 1), (1, 0.99), (1, 0.5)]
    out = profiled(rows, rollouts)
    rates = [{"pass_rate": 0.25, "pass_rate_total": 4, "pass_rate_passed": 1}, {}]
    rates += [{"pass_rate": 1.0, "pass_rate_total": 2, "pass_rate_passed": 2}]
    assert out == [math_row(i) | rate for i, rate in enumerate(rates)]
    assert "their rollouts failed: 1\n" in capsys.readouterr().out
    before = (tmp_path / "out.jsonl").read_bytes()
    (tmp_path / "run").rename(tmp_path / "run1")
    profiled(rows, rollouts)
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_the_reward_that_passes_is_chosen(profiled):
    (row,) = profiled([math_row(0)], [(1, 0.5), (1, 0.4)], "--threshold", "0.5")
    assert row["pass_rate"] == 0.5


def test_the_run_is_an_evaluation_of_every_row_that_the_program_understands(profiled, tmp_path):
    profiled([math_row(0)], [(1, 1.0)], "--samples", "4")
    argv = json.loads((tmp_path / "run/evaluation/argv.json").read_text())
    cfg = reader.overridden(Config(), argv)
    assert cfg.command.eval_only and cfg.model == "m"
    assert (cfg.data.val, cfg.data.train, cfg.data.val_samples) == ("in.jsonl", "in.jsonl", 4)


@pytest.mark.parametrize(("rollouts", "code", "message"), [
    ([], 3, "grpo_async.py exited with code 3; run folder run"),
    ([(None, 1)], 0, "rollouts.jsonl:1: expected a rollout: TypeError"),
])  # fmt: skip
def test_what_fails_is_named_and_leaves_nothing(profiled, tmp_path, rollouts, code, message):
    with pytest.raises(InputError, match=message):
        profiled([math_row(0)], rollouts, code=code)
    assert not list(tmp_path.glob("out.*"))


def test_settings_of_a_run_belong_to_profile_alone():
    with pytest.raises(InputError, match="only profile accepts --"):
        data_prep.main(["check", "a.jsonl", "--", "--seed", "1"])
