"""A run that is killed and resumed equals the undisturbed run."""

import os
import signal

import pytest
import torch

from support.program import Program, survivors

pytestmark = pytest.mark.e2e
TIMES = ("seconds", "wait_for", "sync_")


def contents(folder) -> dict:
    """Weights, moments and progress of a checkpoint, flat, as tensors."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    whole = folder / "whole.pt"
    dcp_to_torch_save(folder / "policy", whole)
    state = torch.load(whole, weights_only=False)
    flat = {}
    whole.unlink()

    def flatten(prefix: str, value) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                flatten(f"{prefix}/{key}", inner)
        else:
            flat[prefix] = value

    flatten("", state)
    return flat


def timeless(line: dict) -> dict:
    """Metrics without what a clock says."""
    return {k: v for k, v in line.items() if not any(t in k for t in TIMES)}


def test_a_run_killed_after_every_step_equals_the_undisturbed_run(tiny_config, tmp_path):
    """SIGKILL after each checkpoint: weights, moments, metrics and rollouts are the same.

    GRPO_KILLS=8 takes four minutes.
    """
    steps = 1 + int(os.environ.get("GRPO_KILLS", 1))
    fields = {"steps": steps, "max_lag": 0, "save_period": 1, "keep_last": 99}
    fields |= {"max_response_tokens": 8, "skip_zero_advantage": False}
    whole = tiny_config(run_dir=str(tmp_path / "whole"), **fields)
    calm = Program(whole, script="tests/support/deterministic_engine.py")

    cfg = tiny_config(run_dir=str(tmp_path / "killed"), **fields)
    for k in range(1, steps):
        program = Program(cfg, "--resume", "auto", script="tests/support/deterministic_engine.py")
        marker = program.folder / f"step_{k:06d}" / "complete.json"
        program.wait_until(marker.exists)
        program.stop()
        assert not (program.folder / f"step_{k + 2:06d}").exists(), "killed too late"
    program = Program(cfg, "--resume", "auto", script="tests/support/deterministic_engine.py")
    assert program.ends() == 0, program.told()[-4000:]
    assert calm.ends() == 0, calm.told()[-4000:]

    for step in range(1, steps + 1):
        name = f"step_{step:06d}"
        ours = contents(program.folder / name)
        theirs = contents(calm.folder / name)
        assert list(ours) == list(theirs) and int(ours["/updates"]) == step
        for key, value in theirs.items():
            assert torch.equal(ours[key], value), (step, key)
    assert list(map(timeless, program.steps())) == list(map(timeless, calm.steps()))
    rollouts = [
        sorted((r["slot"], r["response"][0], r["reward"], r["advantage"]) for r in p)
        for p in (program.lines("rollouts.jsonl"), calm.lines("rollouts.jsonl"))
    ]
    assert rollouts[0] == rollouts[1]
    assert any(m["grad_norm"] > 0 for m in calm.steps()), "nothing was learnt: nothing compared"
    program.check_slots(cfg, rows=64)


def test_sigterm_saves_and_leaves_and_a_damaged_checkpoint_is_passed_over(tiny_config, tmp_path):
    """With vLLM: leave on SIGTERM, damage the newest checkpoint, kill, go on: nothing is lost."""
    from conftest import spelling_rows, write_rows

    val = write_rows(tmp_path / "val.jsonl", spelling_rows(4, 1))
    fields = {"save_period": 2, "keep_last": 3, "max_response_tokens": 48}
    cfg = tiny_config(steps=10, data={"val": val}, val_period=2, **fields)
    program = Program(cfg)
    program.wait_until(lambda: len(program.steps()) >= 3)
    program.signal(signal.SIGTERM)
    assert program.ends(60) == 0, program.told()[-4000:]
    assert "(SIGTERM); --resume auto goes on" in program.told()
    left_at = program.steps()[-1]["step"]
    newest = program.folder / f"step_{left_at:06d}"
    assert (newest / "complete.json").exists() and left_at < cfg.steps

    (shard,) = (newest / "policy").glob("*.distcp")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    program = Program(cfg, "--resume", "auto")
    program.wait_until(lambda: len(program.steps()) >= left_at + 1)
    assert f"not resumed from {newest}: {shard}: its CRC-32" in program.told()
    family = {pid: name for pid, name in program.family().items() if b"Agent" not in name}
    assert len(family) >= 4
    program.signal(signal.SIGKILL)
    program.stop()
    assert not survivors(family), "only the agents of Ray's own node may stay for a while"

    program = Program(cfg, "--resume", "auto")
    assert program.ends() == 0, program.told()[-4000:]
    program.check_slots(cfg, rows=64)
    assert all(m["lag_max"] <= cfg.max_lag for m in program.steps())
    validated = [m["step"] for m in program.lines("metrics.jsonl") if "validation_reward" in m]
    assert validated == [0, 2, 4, 6, 8, 10], "each version once, whatever ended the run meanwhile"
    again = Program(cfg)
    assert again.ends(60) != 0 and "holds a run already" in again.told()


def test_saved_samples_train_again_without_an_engine(tiny_config, tmp_path):
    """--rollout_only, then --replay, then --export and --eval_only of what came out."""
    from conftest import spelling_rows, write_rows
    from transformers import AutoModelForCausalLM

    val = write_rows(tmp_path / "val.jsonl", spelling_rows(4, seed=1))
    first = tiny_config(run_dir=str(tmp_path / "rollouts"), steps=2, skip_zero_advantage=False)
    collected = Program(first, "--rollout_only")
    assert collected.ends() == 0, collected.told()[-4000:]
    files = sorted(path.name for path in (collected.folder / "samples").iterdir())
    assert files == ["step_000001.npz", "step_000002.npz"]

    fields = {"run_dir": str(tmp_path / "replayed"), "skip_zero_advantage": False}
    data = {"val": val, "val_samples": 2}
    cfg = tiny_config(steps=9, data=data, val_period=1, **fields)
    replayed = Program(cfg, "--replay", str(collected.folder))
    assert replayed.ends() == 0, replayed.told()[-4000:]
    assert not replayed.pids("Generator") and len(replayed.steps()) == 2
    assert abs(replayed.steps()[0]["token_mult_prob_error"] - 1) < 1e-5
    assert not list((replayed.folder / "logs").glob("Generator*"))

    export = Program(cfg, "--export", "2")
    assert export.ends() == 0, export.told()[-4000:]
    AutoModelForCausalLM.from_pretrained(replayed.folder / "step_000002" / "hf")
    evaluation = Program(cfg, "--resume", "auto", "--eval_only")
    assert evaluation.ends() == 0, evaluation.told()[-4000:]
    (line,) = evaluation.lines("evaluation/metrics.jsonl")
    assert line["step"] == 2 and 0 <= line["validation_reward"] <= 1
    assert 0 <= line["validation_pass@2"] <= 1
    assert len(replayed.steps()) == 2, "evaluating must not touch the run's own files"
