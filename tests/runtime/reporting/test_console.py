"""What a run shows where nobody watches, and at its end."""

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import write_rows
from safetensors.torch import save_file

from core.errors import shown
from runtime.reporting import console
from runtime.reporting.console import Bars, Lines, close_bars, phase
from runtime.reporting.summary import model_lines, summary

ROOT = Path(__file__).parents[3]
SERVER = f"{sys.executable} -m vllm.entrypoints.openai.api_server --host 127.0.0.1 --model"
METRICS = {"reward": 0.5, "lag_mean": 0.25, "wait_for_rollouts": 1.0, "wait_for_training": 0.0}


def config(run_dir, steps: int = 40, modes: tuple = (), wandb: bool = False) -> SimpleNamespace:
    command = SimpleNamespace(modes=modes)
    folders = {"run_dir": str(run_dir), "writes_to": str(run_dir)}
    rest = {"steps": steps, "prompts_per_step": 4, "command": command, "wandb": wandb}
    return SimpleNamespace(**folders, **rest)


def checkpoint(folder, step: int, whole: bool = True) -> None:
    (folder / f"step_{step:06d}" / "hf").mkdir(parents=True)
    if whole:
        (folder / f"step_{step:06d}" / "complete.json").write_text("{}")


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
    left = {"11/": "", "12/": "  00:56 left", "13/": "  01:21 left"}
    assert shown == [start.replace("11/", step) + text for step, text in left.items()]


def test_the_log_of_a_thousand_steps_is_short(capsys):
    lines = Lines(config("runs/a", 1000))
    for step in range(1, 1001):
        lines.step(step, METRICS)
    lines.show_ready(3, 4)
    lines.close()
    assert len(capsys.readouterr().out) < 100_000


@pytest.mark.parametrize("close", [Bars.close, lambda bars: close_bars()])
def test_bars_start_with_the_first_step(close, capsys):
    """They end with a run, or with what it prints when it fails."""
    bars = Bars(config("runs/a"))
    bars.show_ready(3, 4)
    assert capsys.readouterr().err == ""
    bars.step(12, METRICS)
    bars.show_ready(3, 4)
    bar, ready = bars.bars
    assert (bar.initial, bar.n, bar.total, ready.n, ready.total) == (11, 12, 40, 3, 4)
    close(bars)
    assert bar.disable and ready.disable
    assert "reward 0.500  lag 0.25" in capsys.readouterr().err


def test_a_phase_has_the_seconds_since_the_program_began(capsys, monkeypatch):
    monkeypatch.setattr(console, "BEGAN", time.monotonic() - 12.2)
    phase("starting Ray")
    assert capsys.readouterr().out == "  12 s  starting Ray\n"


def test_the_summary_of_a_run_that_is_done(tmp_path, monkeypatch):
    run = tmp_path / "run"
    for step in (20, 40):
        checkpoint(run, step)
    checkpoint(run, 60, whole=False)  # of a future that a resumed run has left
    (run / "step_best" / "hf").mkdir(parents=True)
    lines = [
        {"step": 0, "validation_reward": 0.25, "validation_exact": 0.125},
        *({"step": step, "reward": step / 40} for step in (4, 40)),
        {"step": 40, "validation_reward": 0.75, "validation_exact": 0.5, "validation_answers": 80},
    ]
    write_rows(run / "metrics.jsonl", lines)
    answers = [rollout("old", 0), rollout("c a t\n <answer>tac</answer>", 40), rollout("new", None)]
    write_rows(run / "rollouts.jsonl", answers)
    monkeypatch.chdir(tmp_path)
    given = ["--config", "my config.py", "--run-dir", "a b", "--steps=40"]
    monkeypatch.setattr(sys, "argv", ["grpo_async.py", *given])
    done, *found, going_on = summary(config(run))
    assert done.startswith("done in ")
    assert found == [
        "validation_reward: 0.250 -> 0.750 (0.750 at best)",
        "validation_exact: 0.125 -> 40/80 [0.39, 0.61] (40/80 [0.39, 0.61] at best)",
        "prompt: <user>flip cat",
        "answer: c a t <answer>tac</answer>",
        "reward of this answer: 1",
        "model: run/step_000040/hf",
        f"serve: {SERVER} run/step_000040/hf",
    ]
    words = shlex.split(going_on.removeprefix("next: "))
    assert words[1:4] == ["grpo_async.py", "--config", "my config.py"]
    assert words[4:] == ["--run_dir", "run", "--resume", "auto", "--steps", "80"]


@pytest.mark.parametrize("odd", ["x", None, [1], {"step": None}, {"step": 1}, 10**400])
def test_an_odd_line_does_not_end_the_summary(odd, tmp_path):
    """Nor does an odd value."""
    names = ("validation_reward", "validation_exact")
    values = [odd, {"step": 1, "validation_exact": odd}, dict.fromkeys(("step", *names), 1)]
    write_rows(tmp_path / "metrics.jsonl", values)
    odd_values = [rollout("odd", 1) | {k: odd} for k in ("response", "reward")]
    write_rows(tmp_path / "rollouts.jsonl", [rollout("good", 1), odd, *odd_values])
    lines = summary(config(tmp_path))
    assert "validation_reward: 1.000 -> 1.000 (1.000 at best)" in lines and "answer: good" in lines


@pytest.mark.parametrize("files", [(), ("metrics.jsonl", "rollouts.jsonl")])
def test_the_summary_of_a_run_that_left_nothing(files, tmp_path):
    for name in files:
        (tmp_path / name).write_text('{"half a li')
    (line,) = summary(config(tmp_path))
    assert line.startswith("done in ")


def test_a_run_that_left_early_goes_on_to_the_same_step(tmp_path, monkeypatch):
    checkpoint(tmp_path, 20)
    assert "--steps" not in summary(config(tmp_path))[-1]
    monkeypatch.setattr(sys, "argv", ["grpo_async.py", "--steps", "40", "--seed=3"])
    ends = f"grpo_async.py --steps 40 --seed=3 --run_dir {shown(tmp_path)} --resume auto"
    assert summary(config(tmp_path))[-1].endswith(ends)


def test_dropped_prompts_are_counted_at_the_end(tmp_path):
    write_rows(tmp_path / "metrics.jsonl", [{"step": 1, "dropped_prompts": n} for n in (0, 15)])
    told = f"dropped prompts: 15, with reasons in {shown(tmp_path)}/dropped.jsonl"
    assert summary(config(tmp_path))[-1] == told
    write_rows(tmp_path / "metrics.jsonl", [{"step": 1, "dropped_prompts": 0}])
    assert len(summary(config(tmp_path))) == 1


def test_what_was_said_to_wandb_is_said_again_except_a_key(tmp_path, monkeypatch):
    checkpoint(tmp_path, 20)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_NAME", "a b")
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    told = summary(config(tmp_path, wandb=True))[-1]
    assert told.startswith("next: WANDB_MODE=offline WANDB_NAME='a b' ") and "secret" not in told
    assert "WANDB" not in summary(config(tmp_path))[-1]


def test_an_evaluation_is_not_compared_with_an_earlier_one_of_another_policy(tmp_path):
    lines = [{"step": step, "validation_reward": step / 100} for step in (80, 40)]
    write_rows(tmp_path / "metrics.jsonl", lines)
    assert summary(config(tmp_path, modes=("eval_only",)))[1:] == ["validation_reward: 0.400"]


def test_what_cannot_be_gone_on_with_has_no_next_command(tmp_path):
    checkpoint(tmp_path, 40)
    assert summary(config(tmp_path, modes=("replay",)))[-1].startswith("serve: ")


OF_FLOAT32 = "in float32 as it was trained; read as bfloat16, it loses 73% of the update"
OF_BFLOAT16 = "in bfloat16 as engines read it; rounding has lost 73% of the update"


@pytest.mark.parametrize(
    ("stored", "known", "text"),
    [
        ("float32", 0.734, OF_FLOAT32),
        ("bfloat16", 0.734, OF_BFLOAT16),
        ("float32", None, "in float32"),
    ],
)
def test_an_export_is_described_by_its_type_and_served_in_it(
    stored, known, text, tmp_path, monkeypatch
):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # no path is shortened
    tensors = {"w": torch.zeros(2, dtype=getattr(torch, stored))}
    save_file(tensors, tmp_path / "model.safetensors")
    lines = [{"step": 3, "bf16_lost_update": 0.9}, {"step": 4, "bf16_lost_update": known}]
    model, serve = model_lines(tmp_path, lines if known else [{"step": 4, "reward": 1.0}])
    assert model == f"model: {tmp_path}, {text}"
    memory = "VLLM_CPU_KVCACHE_SPACE=1 " if stored == "float32" else ""
    assert serve == f"serve: {memory}{SERVER} {tmp_path} --dtype {stored}"


def test_the_answer_at_the_end_is_typical_of_the_good_ones_of_the_last_evaluation(tmp_path):
    """Not of an earlier policy, not wrong, and neither the shortest nor the longest."""
    lines = [rollout("an answer of the earlier policy", 20)]
    lines += [rollout(text, 40) for text in ("of medium length", "short", "the longest one of all")]
    lines += [rollout("wrong", 40) | {"reward": 0.0}, rollout("from training", None) | {"step": 41}]
    write_rows(tmp_path / "rollouts.jsonl", lines)
    assert "answer: of medium length" in summary(config(tmp_path))
    write_rows(tmp_path / "rollouts.jsonl", lines[-1:])
    assert "answer: from training" in summary(config(tmp_path))


def test_the_last_answer_cannot_command_a_terminal(tmp_path):
    lines = [rollout("old", 3), rollout("\x1b]0;new\x07 answer", 4), {"of": "a fork"}]
    write_rows(tmp_path / "rollouts.jsonl", lines)
    assert "answer: ]0;new answer" in summary(config(tmp_path))


WAITING = """
import os, sys
from grpo_async import Config
from runtime.reporting import console
from runtime.startup import preflight
preflight.check = lambda cfg: None
preflight.load(Config, ["--run_dir", sys.argv[1]], "configs/tiny.py")
console.phase("starting Ray")
os._exit(0)
"""


def test_a_pipe_shows_at_once_what_a_run_waits_for(tmp_path):
    """Nothing is flushed when the process ends."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", WAITING, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert [line[-12:] for line in done.stdout.splitlines()[1:]] == ["starting Ray"], done.stderr
