"""Whole runs of mopd.py with real Ray, vLLM, FSDP and Megatron-Core."""

import dataclasses
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from conftest import make_config, save_tokenizer, spelling_rows, write_rows
from test_docs import first_cells
from test_resume import contents, timeless

from mopd import Config
from support import forks
from support.configs import changed
from support.program import ROOT, Program, end

pytestmark = pytest.mark.e2e
AGENT = "reasoning_gym_simple_agent"


def other_model(model: str, folder: Path) -> str:
    """A model of the same kind and size with other weights, the same ones in each folder."""
    from transformers import AutoModelForCausalLM

    shutil.copytree(model, folder)
    save_tokenizer(folder)
    made = AutoModelForCausalLM.from_pretrained(folder)
    random = torch.Generator().manual_seed(0)
    for weight in made.parameters():
        weight.data += 0.02 * torch.randn(weight.shape, generator=random)
    made.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def taught(tiny_model, tmp_path_factory):
    """A function that makes a small configuration with two teachers, one for each data set."""
    models = tmp_path_factory.mktemp("teachers")
    teachers = {name: other_model(tiny_model, models / name) for name in "ab"}
    rows = [row | {"dataset": "xy"[i % 2]} for i, row in enumerate(spelling_rows(64))]

    def made(folder: Path, **fields) -> Config:
        folder.mkdir(exist_ok=True)
        small = make_config(tiny_model, folder)
        names = {field.name for field in dataclasses.fields(Config)} & vars(small).keys()
        same = {name: getattr(small, name) for name in names - {"loss", "command", "advantage"}}
        routes = {f"{AGENT}/x": "a", AGENT: "b"}
        cfg = Config(**same | {"teachers": teachers, "routes": routes})
        train = {"train": write_rows(folder / "rows.jsonl", rows)}
        usual = {"data": train, "group_size": 1, "prompts_per_step": 8, "steps": 4}
        return changed(changed(cfg, val_period=0, **usual), **fields)

    return made


def run(cfg: Config, *flags: str) -> Program:
    return Program(cfg, *flags, script="mopd.py")


@pytest.fixture(scope="module")
def finished(taught, tmp_path_factory):
    """A run of some steps, and its configuration."""
    fields = {"steps": 6, "save_period": 6, "sample_period": 1, "prompts_per_step": 16}
    fields["policy"] = {"lr": 3e-4, "warmup_lr": 3e-4}
    cfg = taught(tmp_path_factory.mktemp("mopd"), **fields)
    return run(cfg).succeeds(), cfg


@pytest.mark.smoke
@pytest.mark.xdist_group("a finished distillation")
def test_a_student_comes_closer_to_both_teachers(finished):
    program, cfg = finished
    steps = program.steps()
    program.check_slots(cfg, rows=64)
    assert "is lost" not in program.told()
    assert [m["lag_max"] <= cfg.max_lag for m in steps] == [True] * 6
    for name in ("reverse_kl", "reverse_kl/a", "reverse_kl/b"):
        assert steps[-1][name] < 0.9 * steps[0][name], name
    # Those that are scored while another step is trained are counted in that one.
    assert all(
        steps[0][f"teacher_{what}/{name}"] > 0 for what in ("wait", "seconds") for name in "ab"
    )
    # At lag 0 the engine's logprobs are the trainer's.
    both = [steps[0][f"reverse_kl/{name}"] for name in "ab"]
    assert min(both) - 1e-3 <= steps[0]["reverse_kl"] <= max(both) + 1e-3


@pytest.mark.smoke
@pytest.mark.xdist_group("a finished distillation")
def test_its_metrics_are_those_of_the_page(finished):
    program, _ = finished
    text = (ROOT / "docs/mopd.md").read_text()
    own = set(first_cells(text.partition("## Metrics")[2].partition("\n## ")[0]))
    expected = {name.replace("TEACHER", "a").replace("ENV", AGENT) for name in own}
    assert expected and expected <= program.steps()[-1].keys()
    gone = {"probs_ratio", "probs_ratio_min", "clip_fraction", "kl_penalty"}
    assert not gone & program.steps()[-1].keys()


@pytest.mark.xdist_group("a finished distillation")
def test_its_samples_train_again_without_engine_and_teachers(finished, taught, tmp_path):
    """Samples hold the teachers' logprobs: the first step is that of the run that wrote them."""
    program, cfg = finished
    again = taught(
        tmp_path / "again", prompts_per_step=cfg.prompts_per_step, policy=vars(cfg.policy)
    )
    replayed = run(again, "--replay", str(program.folder)).succeeds()
    ours, theirs = replayed.steps()[0], program.steps()[0]
    for name in ("reverse_kl", "reverse_kl/a", "reverse_kl/b", "grad_norm"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-4), name
    assert not list((replayed.folder / "logs").glob("Teacher-*"))


@pytest.mark.long
def test_a_run_goes_on_whatever_dies_and_its_resume_is_exact(taught, tmp_path, monkeypatch):
    """Teachers killed and stopped, an engine beside, then the driver; bitwise the calm run's."""
    fields = {"max_lag": 0, "save_period": 1, "keep_last": 99, "steps": 5}
    fields |= {"max_response_tokens": 8, "timeouts": {"train": 15.0}}
    # Which groups a teacher scores together depends on time, so each sample has a row of its own.
    fields |= {"teacher_policy": {"row_tokens": 1}}
    script = "tests/support/deterministic_engine.py"
    monkeypatch.setenv("GRPO_ALGORITHM", "mopd")
    calm = Program(taught(tmp_path / "calm", **fields), script=script).succeeds()
    cfg = taught(tmp_path / "killed", **fields)
    program = Program(cfg, "--resume", "auto", script=script)
    program.wait_until(lambda: len(program.steps()) >= 1)
    first, second = program.pids("Teacher")
    end(first)
    program.wait_until(lambda: len(program.steps()) >= 2)
    os.kill(second, signal.SIGSTOP)
    program.wait_until(lambda: len(program.steps()) >= 3)
    assert program.told().count("is lost: ") >= 2
    program.stop()
    program = Program(cfg, "--resume", "auto", script=script).succeeds()
    program.check_slots(cfg, rows=64)
    for step in range(1, 6):
        name = f"step_{step:06d}"
        ours, theirs = contents(program.folder / name), contents(calm.folder / name)
        for key, value in theirs.items():
            assert torch.equal(ours[key], value), (step, key)
    without = ("teacher_",)
    lines = [
        [{k: v for k, v in timeless(m).items() if not k.startswith(without)} for m in of.steps()]
        for of in (program, calm)
    ]
    assert lines[0] == lines[1]
    assert not program.lines("dropped.jsonl")


@pytest.mark.long
def test_the_fork_over_the_likeliest_tokens_trains(taught, tmp_path, monkeypatch):
    """By the page's commands, with more tokens than the vocabulary has; its KL falls.

    Half of the prompts have episodes of two sequences, with rewards below zero.
    """
    root = forks.copied(tmp_path / "repo")
    forks.run_in(root, *forks.commands("mopd"))
    pairs = zip(spelling_rows(24), forks.forgetful_rows(24), strict=True)
    data = {"train": write_rows(tmp_path / "mixed.jsonl", [row for pair in pairs for row in pair])}
    data |= {"val": write_rows(tmp_path / "val.jsonl", forks.forgetful_rows(2)), "val_samples": 2}
    fields = {"prompts_per_step": 16, "policy": {"lr": 1e-3, "warmup_lr": 1e-3}, "steps": 3}
    cfg = taught(tmp_path / "run", data=data, default_teacher="a", val_period=3, **fields)
    monkeypatch.setenv("GRPO_PROGRAM", "topk_kl.py")
    program = Program(cfg, "--loss.top_k", "128", script="launch/local.sh", root=root).succeeds()
    assert not program.lines("dropped.jsonl")
    kl = [m["topk_kl"] for m in program.steps()]
    assert len(kl) == 3 and kl[-1] < 0.9 * kl[0] and kl[0] > 0.1
    lines = program.lines("rollouts.jsonl")
    assert sum(line["evaluation"] is not None for line in lines) == 2 * 2 * 2
    assert min(line["reward"] for line in lines) < 0


@pytest.mark.long
def test_two_teachers_of_other_layouts_teach_a_megatron_student(taught, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}/tests/cpu")
    tp = {"kind": "megatron", "ranks": 2, "tp": 2}
    layouts = {"a": tp, "b": {"kind": "fsdp", "ranks": 2}}
    cfg = taught(tmp_path / "run", policy={"kind": "megatron"}, teacher_layouts=layouts, steps=2)
    program = run(cfg).succeeds()
    assert "is lost" not in program.told()
    plain = run(taught(tmp_path / "plain", steps=2)).succeeds()
    first, same = program.steps()[0], plain.steps()[0]
    for name in ("reverse_kl/a", "reverse_kl/b", "reverse_kl"):
        assert first[name] == pytest.approx(same[name], rel=1e-4), name
