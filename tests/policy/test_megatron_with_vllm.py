"""policy/megatron beside a real vLLM engine: whole runs, routing replay in bf16, exports."""

import json
import os
import subprocess
import sys

import pytest
from transformers import AutoModelForCausalLM

from support.program import ROOT, Program

pytestmark = pytest.mark.e2e
REPLAYED = {"tensor_parallel": 2, "replay_routing": True}


@pytest.mark.parametrize(("family", "layout", "limit"), [
    pytest.param("qwen3_moe", {"ranks": 2, "tp": 2} | REPLAYED, 1e-5, marks=pytest.mark.long),
    ("nemotron_moe", REPLAYED, 1e-3),
    pytest.param("qwen3", {"ranks": 2, "pp": 2, "train_parts": 2}, 1e-5, marks=pytest.mark.long),
])  # fmt: skip
def test_it_trains_what_vllm_samples(family, layout, limit, models, tiny_config, monkeypatch):
    """Five steps of the whole program, each sampled by the policy that trains on it.

    With a lag a token's context may be older than the token, and no recomputation agrees.
    """
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}/tests/cpu")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # two processes on few processors
    fields = {"kind": "megatron", "skip_zero_advantage": False, "verify_sync_every": 1}
    cfg = tiny_config(model=models[family], steps=5, lr=1e-4, max_lag=0, **fields | layout)
    program = Program(cfg).succeeds()
    assert len(program.steps()) == 5
    tables = [line["rows"] for line in program.lines("mismatch.jsonl")]
    means = [row["mean"] for rows in tables for row in rows if row["by"] == "all"]
    assert len(means) == 5 and max(means) < limit
    if "replay_routing" in layout:
        assert all(line["routing_replay_hit_rate"] == 1 for line in program.steps())
    AutoModelForCausalLM.from_pretrained(program.folder / "step_000005" / "hf")


LOADED = ["qwen3_moe", "nemotron_moe", "qwen3", "nemotron_dense"]
LOADED_BY = {"routing_replay": LOADED[:1], "vllm_loads_export": LOADED}
LOADED_BY |= {"routes_of_turns": LOADED[1:2]}


@pytest.fixture(scope="module")
def scripts(models):
    """What programs print that hold an engine each, by name; each starts when it is asked for."""
    path = {"PYTHONPATH": f"{ROOT}/tests/cpu:{ROOT}:{ROOT}/tests", "OMP_NUM_THREADS": "1"}
    given = {"cwd": ROOT, "env": os.environ | path, "text": True}
    given |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}

    def printed(name: str) -> dict:
        command = [sys.executable, "-W", "ignore", f"tests/support/{name}.py"]
        command += [models[family] for family in LOADED_BY[name]]
        done = subprocess.run(command, timeout=300, **given)
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))

    return printed


@pytest.mark.xdist_group("two engines")
@pytest.mark.long
def test_replayed_experts_bring_trainer_and_engine_together_in_bf16(scripts):
    """Both compute in bf16: where they choose other experts, their logprobs part."""
    found = scripts("routing_replay")
    print(found)
    assert found["hit rate"] == 1 and found["other experts"] > 0
    assert found["replayed"]["max"] < found["free"]["max"] / 3
    assert found["replayed"]["mean"] < found["free"]["mean"]


@pytest.mark.xdist_group("two engines")
@pytest.mark.long
def test_routes_that_are_sent_once_are_those_of_a_full_answer(scripts):
    """Of three turns, between which the weights change: a token keeps the experts of its turn."""
    found = scripts("routes_of_turns")
    print(found)
    assert found["same tokens"] and found["same routes"] and found["tokens"] > 300
    assert found["moved"] > 0.1, "both turns would have the same routes"
    assert found["sent"] < 0.6


@pytest.mark.xdist_group("two engines")
@pytest.mark.long
def test_vllm_loads_the_export_and_scores_the_same(scripts):
    """Families whose tiny heads its CPU attention knows; with experts first, for their group."""
    gaps = scripts("vllm_loads_export")
    assert set(gaps) == set(LOADED) and max(gaps.values()) < 1e-5, gaps
