"""A run that is killed and resumed equals the undisturbed run."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from conftest import spelling_rows, write_rows

from grpo_async import Config
from launch.make_gsm8k import blend, convert
from runtime.checkpoints import archive, lineage
from runtime.startup import preflight
from support.configs import changed
from support.data import HERE, texts
from support.program import Program, end, survivors

pytestmark = pytest.mark.e2e
TIMES = ("second", "wait_", "sync_", "kv_use")


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
        family = {pid: name for pid, name in program.family().items() if b"Agent" not in name}
        program.stop()
        assert not survivors(family), "only the agents of Ray's own node may stay for a while"
        assert not (program.folder / f"step_{k + 2:06d}").exists(), "killed too late"
    program = Program(cfg, "--resume", "auto", script="tests/support/deterministic_engine.py")
    program.succeeds()
    calm.succeeds()

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


@pytest.mark.long
def test_parts_that_a_run_recorded_train_again_bitwise(tiny_config, tmp_path):
    """`--replay` of a run with train_parts: the same weights, also of one killed and resumed."""
    fields = {"steps": 3, "max_lag": 1, "save_period": 1, "keep_last": 99, "sample_period": 1}
    fields |= {"prompts_per_step": 8, "train_parts": 4, "row_tokens": 64, "max_model_len": 64}
    fields |= {"skip_zero_advantage": False, "val_period": 0}
    live = Program(tiny_config(run_dir=str(tmp_path / "live"), **fields)).succeeds()
    files = sorted((live.folder / "samples").glob("step_*.npz"))
    slots = [[slot for slot, *_ in archive.read_groups(str(path))[0]] for path in files]
    assert slots != [sorted(order) for order in slots], "the parts are those of the slots"

    cfg = tiny_config(run_dir=str(tmp_path / "again"), **fields)
    flags = ("--replay", str(live.folder), "--resume", "auto")
    program = Program(cfg, *flags)
    program.wait_until((program.folder / "step_000001" / "complete.json").exists)
    program.stop()
    assert not (program.folder / "step_000003").exists(), "killed too late"
    again = Program(cfg, *flags).succeeds()
    for step in (1, 2, 3):
        name = f"step_{step:06d}"
        ours, theirs = contents(again.folder / name), contents(live.folder / name)
        for key, value in theirs.items():
            assert torch.equal(ours[key], value), (step, key)
    assert any(line["grad_norm"] > 0 for line in live.steps())


def longest_answer(program: Program) -> int:
    lines = program.lines("rollouts.jsonl")
    return max(sum(tokens for _, tokens in line["versions"]) for line in lines)


def replaces(program: Program, engines: int, *victims: int) -> None:
    """Kills processes of a run; it trains two more steps, and then all its engines serve."""
    for pid in victims:
        end(pid)
    wanted = len(program.steps()) + 2

    def is_whole() -> bool:
        steps = program.steps()
        return len(steps) >= wanted and steps[-1]["engines"] == engines

    program.wait_until(is_whole)


@pytest.mark.long
def test_a_run_goes_on_whatever_ended_it(tiny_config, tmp_path):
    """Killed engines and workers, SIGTERM, a damaged checkpoint, a killed trainer rank, Ctrl-C.

    Nothing is lost, and no process stays. An engine is killed while it serves, then the actor
    around one and a rollout worker at once. The driver ends within seconds, whatever it waits for.
    A terminal sends Ctrl-C to all processes. Sequences may become longer from one start to the
    next, as in the recipe: 49,152 to 65,536.
    """
    val = write_rows(tmp_path / "val.jsonl", spelling_rows(4, 1))
    fields = {"save_period": 2, "keep_last": 3, "max_response_tokens": 48, "ranks": 2}
    cfg = tiny_config(steps=1000, data={"val": val}, val_period=2, max_model_len=32, **fields)
    program = Program(changed(cfg, engine={"count": 2, "verify_sync_every": 3}))
    program.wait_until(lambda: len(program.steps()) >= 2)
    replaces(program, 2, program.engine_cores()[0])
    replaces(program, 2, program.pids("Generator")[0], program.pids("RolloutWorker")[0])
    assert not program.lines("dropped.jsonl")
    program.signal(signal.SIGTERM)
    program.succeeds(60)
    assert "(SIGTERM); --resume auto continues" in program.told()
    left_at = program.steps()[-1]["step"]
    newest = program.folder / f"step_{left_at:06d}"
    assert (newest / "complete.json").exists()

    shard = sorted((newest / "policy").glob("*.distcp"))[0]
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    program = Program(cfg, "--resume", "auto")
    program.wait_until(lambda: len(program.steps()) >= left_at + 1)
    assert f"not resumed from {newest}: {shard}: its CRC-32" in program.told()
    end(program.pids("Trainer")[-1])
    assert program.ends(60) != 0
    assert "Trainer" in program.told() and "died" in program.told()

    done = len(program.steps())
    assert 16 < longest_answer(program) < 32
    cfg = changed(cfg, max_model_len=96)
    program = Program(cfg, "--resume", "auto")
    program.wait_until(lambda: len(program.steps()) >= done + 3)
    assert longest_answer(program) == 48
    family = program.family()
    assert len(family) >= 4
    os.killpg(program.process.pid, signal.SIGINT)
    program.succeeds(60)
    assert not survivors(family)
    left_at = len(program.steps())
    assert f"left at step {left_at} (Ctrl-C); --resume auto continues" in program.told()
    assert (program.folder / f"step_{left_at:06d}" / "complete.json").exists()
    told = len(program.told())
    program = Program(cfg, "--resume", "auto")
    program.wait_until(lambda: "starting vLLM" in program.told()[told:])
    for _ in range(2):
        os.killpg(program.process.pid, signal.SIGINT)
        time.sleep(0.5)
    assert program.ends(30) == 1
    assert program.told()[told:].count("\n") < 12, program.told()[told:]
    last = "interrupted; --resume auto continues from the last checkpoint\n"
    assert program.told().endswith(last)
    program.check_slots(cfg, rows=64, steps=len(program.steps()))
    assert all(m["lag_max"] <= cfg.max_lag for m in program.steps())
    validated = [m["step"] for m in program.lines("metrics.jsonl") if "validation_reward" in m]
    assert validated == list(range(0, 2 * len(validated), 2)), "each version once"
    assert len(validated) >= (done + 3) // 2


def gsm8k(folder: Path) -> dict[str, str]:
    """The `data` of a run on GSM8K: 40 questions to train on, and four others."""
    lines = texts("gsm8k/train.jsonl", HERE)
    data = {}
    for name, of, chosen in (("train", "train", lines[:40]), ("val", "test", lines[40:])):
        source = folder / f"{of}.raw"
        source.write_text("\n".join(chosen))
        data[name] = str(folder / f"{of}.jsonl")
        convert(source, Path(data[name]))
    return data


def blended(folder: Path) -> dict[str, str]:
    """The `data` of configs/math_blend.py: questions like GSM8K's, and one like MATH's in six."""
    gsm8k(folder)
    problem = {"problem": "What is $1 + \\frac{1}{2}$?", "answer": "\\frac{3}{2}"}
    (folder / "math.raw").write_text((json.dumps(problem) + "\n") * 8)
    data = {"train": str(folder / "blend.jsonl"), "val": str(folder / "blend_val.jsonl")}
    for name, path in data.items():
        of = folder / f"{'test' if name == 'val' else name}.raw"
        blend([f"gsm8k={of}", f"math={folder / 'math.raw'}"], Path(path))
    return data


def check_data_sets(metrics: dict, start: str) -> None:
    sets = {"math_with_judge_simple_agent/gsm8k", "math_with_judge_simple_agent/math"}
    assert sets <= {k.removeprefix(start) for k in metrics if k.startswith(start)}, start


@pytest.mark.long
def test_saved_samples_of_a_blend_train_again_without_an_engine(tiny_model, tmp_path):
    """configs/math_blend.py: --rollout_only, --replay, --export; configs/gsm8k.py: --eval_only."""
    from transformers import AutoModelForCausalLM

    flags = ["--model", tiny_model, "--run_dir", str(tmp_path / "rollouts")]
    flags += ["--sampling.max_model_len", "2048"]
    base = preflight.load(Config, flags, default="configs/math_blend.py")
    small = {"prompts_per_step": 6, "group_size": 4, "max_response_tokens": 32}
    small |= {"val_samples": 2, "skip_zero_advantage": False}  # a random model earns no reward
    base = changed(base, data=blended(tmp_path), steps=2, val_period=1, **small)
    collected = Program(base, "--rollout_only").succeeds()
    files = sorted(path.name for path in (collected.folder / "samples").iterdir())
    assert files == ["step_000001.npz", "step_000002.npz"]
    lines = collected.lines("rollouts.jsonl")
    assert {line["env"] for line in lines} == {"math_with_judge_simple_agent"}
    first = next(line for line in lines if line["slot"] == 0)
    assert "Natalia sold clips" in first["prompt"]
    # 40 and 8 rows: one of MATH's in the middle of each six.
    assert sorted({line["row"] for line in lines}) == list(range(1, 13))
    assert {line["row"] for line in lines if line["dataset"] == "math"} == {4, 10}

    cfg = changed(base, run_dir=str(tmp_path / "replayed"), steps=9)
    replayed = Program(cfg, "--replay", str(collected.folder)).succeeds()
    assert not replayed.pids("Generator")
    assert [m["step"] for m in replayed.steps()] == [1, 2]
    export = replayed.folder / "step_000002" / "hf"
    assert lineage.chain(lineage.read(export))[1].startswith(tiny_model)
    assert abs(replayed.steps()[0]["token_mult_prob_error"] - 1) < 1e-5
    check_data_sets(replayed.steps()[1], "reward/")
    assert not list((replayed.folder / "logs").glob("Generator*"))

    Program(cfg, "--export", "2").succeeds()
    AutoModelForCausalLM.from_pretrained(replayed.folder / "step_000002" / "hf")
    flags = ["--model", tiny_model, "--run_dir", str(tmp_path / "evaluated")]
    other = preflight.load(Config, flags, default="configs/gsm8k.py")
    other = changed(other, run_dir=cfg.run_dir, data=base.data, max_response_tokens=32)
    evaluation = Program(other, "--resume", "auto", "--eval_only").succeeds()
    (line,) = evaluation.lines("evaluation/metrics.jsonl")
    assert line["step"] == 2 and 0 <= line["validation_reward"] <= 1
    assert 0 <= line["validation_pass@2"] <= 1
    check_data_sets(line, "validation_reward/")
    assert len(replayed.steps()) == 2, "evaluating must not touch the run's own files"
