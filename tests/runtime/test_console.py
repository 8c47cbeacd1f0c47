"""What a run shows where nobody watches, and at its end."""

import json
import shlex
import sys
import time
from types import SimpleNamespace

import pytest

from runtime import console
from runtime.console import Bars, Lines, phase, summary

METRICS = {"reward": 0.5, "lag_mean": 0.25, "wait_for_rollouts": 1.0, "wait_for_training": 0.0}


def config(run_dir, steps: int = 40) -> SimpleNamespace:
    return SimpleNamespace(run_dir=str(run_dir), steps=steps, prompts_per_step=4)


def write(path, lines: list[dict]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def rollout(text: str, evaluation: int | None) -> dict:
    of_prompt = {"prompt": "<user>flip cat", "reward": 1.0, "evaluation": evaluation}
    return of_prompt | {"response": [text]}


def test_a_step_is_one_line_and_start_up_is_not_in_the_time_that_is_left(capsys, monkeypatch):
    """Steps 11 to 13 end at 100, 102 and 106 s: 27 more take 3 s each."""
    lines = Lines(config("runs/a"))
    for step, now in ((11, 100.0), (12, 102.0), (13, 106.0)):
        monkeypatch.setattr(time, "monotonic", lambda now=now: now)
        lines.step(step, METRICS)
    shown = capsys.readouterr().out.splitlines()
    start = "step 11/40  reward 0.500  lag 0.25  trainer waited 1.00 s"
    assert shown == [
        start,
        start.replace("11/", "12/") + "  00:56 left",
        start.replace("11/", "13/") + "  01:21 left",
    ]


def test_the_log_of_a_thousand_steps_is_short(capsys):
    lines = Lines(config("runs/a", 1000))
    for step in range(1, 1001):
        lines.step(step, METRICS)
    lines.show_ready(3)
    lines.close()
    assert len(capsys.readouterr().out) < 100_000


def test_bars_start_with_the_first_step(capsys):
    bars = Bars(config("runs/a"))
    bars.show_ready(3)
    assert capsys.readouterr().err == ""
    bars.step(12, METRICS)
    bars.show_ready(3)
    bar, ready = bars.bars
    assert (bar.initial, bar.n, bar.total, ready.n, ready.total) == (11, 12, 40, 3, 4)
    bars.close()
    assert "reward=0.500" in capsys.readouterr().err


def test_a_phase_has_the_seconds_since_the_program_began(capsys, monkeypatch):
    monkeypatch.setattr(console, "BEGAN", time.monotonic() - 12.2)
    phase("starting Ray")
    assert capsys.readouterr().out == "  12 s  starting Ray\n"


def test_the_summary_of_a_run_that_is_done(tmp_path, monkeypatch):
    run = tmp_path / "run"
    for step in (20, 40):
        (run / f"step_{step:06d}" / "hf").mkdir(parents=True)
    lines = [
        {"step": 0, "validation_reward": 0.25, "validation_exact": 0.125},
        *({"step": step, "reward": step / 40} for step in (4, 40)),
        {"step": 40, "validation_reward": 0.75, "validation_exact": 0.5},
    ]
    write(run / "metrics.jsonl", lines)
    answers = [rollout("old", 0), rollout("c a t\n <answer>tac</answer>", 40), rollout("new", None)]
    write(run / "rollouts.jsonl", answers)
    monkeypatch.chdir(tmp_path)
    given = ["--config", "my config.py", "--run-dir", "a b", "--steps=40"]
    monkeypatch.setattr(sys, "argv", ["grpo_async.py", *given])
    done, *found, going_on = summary(config(run))
    assert done.startswith("done in ")
    assert found == [
        "reward: 0.100 -> 1.000",
        "validation_reward: 0.250 -> 0.750",
        "validation_exact: 0.125 -> 0.500",
        "prompt: <user>flip cat",
        "answer: c a t <answer>tac</answer>",
        "reward of this answer: 1",
        "model: run/step_000040/hf, which transformers and vLLM load",
    ]
    words = shlex.split(going_on.removeprefix("next: "))
    assert words[1:4] == ["grpo_async.py", "--config", "my config.py"]
    assert words[4:] == ["--run_dir", "run", "--resume", "auto", "--steps", "80"]


@pytest.mark.parametrize("files", [(), ("metrics.jsonl", "rollouts.jsonl")])
def test_the_summary_of_a_run_that_left_nothing(files, tmp_path):
    for name in files:
        (tmp_path / name).write_text('{"half a li')
    (line,) = summary(config(tmp_path))
    assert line.startswith("done in ")


def test_a_run_that_left_early_goes_on_to_the_same_step(tmp_path):
    (tmp_path / "step_000020" / "hf").mkdir(parents=True)
    assert "--steps" not in summary(config(tmp_path))[-1]
