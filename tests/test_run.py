"""Whole runs with real Ray, vLLM and FSDP, started as a user starts them."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from conftest import make_config, spelling_rows, write_rows

from support import processes
from support.configs import changed
from support.listening_sockets import Doors
from support.program import ROOT, Program

pytestmark = pytest.mark.e2e
of_one_run = pytest.mark.xdist_group("a finished run")


@pytest.fixture(scope="module")
def finished(tiny_model, tmp_path_factory):
    """One asynchronous run on two engines that start as a user's do, and its configuration."""
    folder = tmp_path_factory.mktemp("async")
    cfg = changed(
        make_config(tiny_model, folder),
        data={"val": write_rows(folder / "val.jsonl", spelling_rows(8, seed=1))},
        engine={"count": 2, "args": {"max_num_seqs": 8}},
        val_period=3,
        steps=6,
        max_response_tokens=48,
        skip_zero_advantage=False,
    )
    manifest = folder / "manifest"
    manifest.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT}/tests/support/manifest")
        patch.setenv("MANIFEST_FOLDER", str(manifest))
        program = Program(cfg)
        program.doors = Doors(program.process.pid)
        return program.succeeds(), cfg


@pytest.mark.smoke
@of_one_run
def test_metrics_of_a_run(finished):
    """Every step is logged once, lag keeps its bound, and the first step is exactly on-policy."""
    program, cfg = finished
    steps = program.steps()
    assert [m["step"] for m in steps] == list(range(1, cfg.steps + 1))
    assert all(0 <= m["lag_mean"] <= m["lag_max"] <= cfg.max_lag for m in steps)
    assert steps[0]["lag_max"] == 0 and abs(steps[0]["token_mult_prob_error"] - 1) < 1e-5
    assert any(m["lag_max"] == 1 for m in steps)
    assert all(m["num_valid_samples"] > 0 and m["grad_norm"] >= 0 for m in steps)
    validated = [m["step"] for m in program.lines("metrics.jsonl") if "validation_reward" in m]
    assert validated == [0, 3, 6]


@pytest.mark.smoke
@of_one_run
def test_each_process_loads_what_the_manifest_lists(finished):
    """Prints what was added and removed: docs/processes.md says how to write the page anew."""
    program, cfg = finished
    folder = Path(cfg.run_dir).parent / "manifest"
    found = processes.of_run(folder, Path(cfg.run_dir), program.process.pid)
    if os.environ.get("GRPO_MANIFEST") == "write":
        processes.PAGE.write_text(processes.page(found), encoding="utf-8")
    listed = processes.listed()
    changes = []
    for process in processes.ORDER:
        changes += [f"{process}: + {name}" for name in sorted(found[process] - listed[process])]
        changes += [f"{process}: - {name}" for name in sorted(listed[process] - found[process])]
    assert not changes, "\n".join(changes)


@pytest.mark.smoke
@of_one_run
def test_rollouts_of_a_run(finished):
    """Every slot once, with prompt, response, reward, advantage and its tokens' versions."""
    program, cfg = finished
    lines = [r for r in program.lines("rollouts.jsonl") if r["evaluation"] is None]
    slots = sorted(r["slot"] for r in lines)
    assert slots == sorted(list(range(cfg.steps * cfg.prompts_per_step)) * cfg.group_size)
    for line in lines:
        assert line["step"] == line["slot"] // cfg.prompts_per_step + 1
        assert line["row"] == line["slot"] % 64 + 1, "prompts are used in file order"
        assert line["prompt"].startswith("<user>") and 0 <= line["reward"] <= 1
        versions = [version for version, _ in line["versions"]]
        assert line["step"] - 1 - cfg.max_lag <= versions[0] <= versions[-1] <= line["step"] - 1
    by_slot = {}
    for line in lines:
        by_slot.setdefault(line["slot"], []).append(line)
    for group in by_slot.values():
        assert abs(sum(line["advantage"] for line in group)) < 100
        if len({line["reward"] for line in group}) == 1:
            assert all(line["advantage"] == 0 for line in group)


@pytest.mark.smoke
@of_one_run
def test_what_a_run_prints(finished):
    """Its folder first, what it waits for, a line a step, and at the end what came out of it."""
    program, cfg = finished
    folder, lines = program.folder, program.told().splitlines()
    share = r"\d/8 \[\d\.\d\d, \d\.\d\d\]"
    expected = [
        f"run folder: {folder}",
        r" +\d+ s  starting Ray",
        r" +\d+ s  loading .* \(trainer ranks: 1\)",
        r" +\d+ s  starting vLLM \(engines: 2\)",
        r" +\d+ s  sending the policy to the engines",
        r"evaluating version 0 \(prompts: 8\)",
        rf"version 0: validation reward 0\.\d{{3}}, exact {share}",
        r"step 1/6  reward 0\.\d{3}  lag 0\.00  trainer waited \d+\.\d\d s  [\d,]+ tokens/s",
        *(rf"step {step}/6  .* tokens/s  \d\d:\d\d left" for step in (2, 3)),
        r"evaluating version 3 .*",
        "version 3: .*",
        *(rf"step {step}/6  .*" for step in (4, 5, 6)),
        r"evaluating version 6 .*",
        "version 6: .*",
        r"done in \d\d:\d\d",
        r"validation_reward: \d.\d+ -> \d.\d+ \(\d.\d+ at best\)",
        rf"validation_exact: {share} -> {share} \({share} at best\)",
        "prompt: <user>.*",
        "answer: .*",
        r"reward of this answer: [\d.]+",
        f"model: {folder}/step_000006/hf, in float32 as it was trained; .*",
        f"serve: .* --model {folder}/step_000006/hf --dtype float32",
        f"next: .* --run_dir {folder} --resume auto --steps 12",
        f"report: {folder}/report.html",
    ]
    assert len(lines) == len(expected), "\n".join(lines)
    for line, pattern in zip(lines, expected, strict=True):
        assert re.fullmatch(pattern, line), (line, pattern)
    logs = "".join(path.read_text() for path in (folder / "logs").glob("Generator*"))
    assert "Failed to load weights" not in logs and "not loaded" not in logs
    written = json.loads((folder / "config.json").read_text())
    assert {"commit", "diff", "versions", "command_line"} <= written.keys()
    assert written["steps"] == cfg.steps


@of_one_run
def test_a_run_listens_where_the_page_says_and_nowhere_else(finished):
    """docs/cluster.md has each process that listens, and where. Ray is not seen from outside."""
    page = (ROOT / "docs/cluster.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| (loopback|one address) \| ", page, re.M)
    listed = {(name, where) for names, where in rows for name in re.findall(r"\w+", names)}
    seen = finished[0].doors.seen
    assert {("raylet", "loopback"), ("gcs_server", "loopback"), ("Trainer", "loopback")} <= seen
    listed |= {(name, "loopback") for name, _ in listed}  # where the host's name may lead
    assert seen <= listed, sorted(seen - listed)


@of_one_run
def test_a_finished_run_is_exported_and_evaluated_again(finished, tmp_path):
    """`--export` and `--eval_only`, on a copy: they leave the run's own metrics as they are."""
    program, cfg = finished
    cfg = changed(cfg, run_dir=str(shutil.copytree(program.folder, tmp_path / "copy")))
    weights = Path(cfg.run_dir) / "step_000006/hf/model.safetensors"
    exported = weights.read_bytes()
    weights.unlink()
    Program(cfg, "--export", "6").succeeds()
    assert weights.read_bytes() == exported
    again = Program(cfg, "--resume", "auto", "--eval_only").succeeds()
    (line,) = again.lines("evaluation/metrics.jsonl")
    assert line["step"] == 6 and 0 <= line["validation_reward"] <= 1
    assert again.lines("metrics.jsonl") == program.lines("metrics.jsonl")
