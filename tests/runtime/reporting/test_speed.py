"""Tokens a second, MFU and shares of a step, from numbers that are worked out by hand."""

import pytest
from vllm.v1.metrics.stats import IterationStats, SchedulerStats
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from grpo_async import Config
from policy.gpus import H100
from policy.model_shape import read_model
from runtime.engines.stat_logger import Meter
from runtime.reporting.speed import COUNTS, Speed
from support.configs import changed

STEP = {"step_seconds": 10.0, "train_seconds": 4.0, "wait_for_rollouts": 5.0, "reward": 0.5}
STEP |= {"sync_pause": 0.1, "sync_transfer": 0.8, "sync_resume": 0.1, "engine_tokens": 700}
STEP |= {"batch_tokens": 1000, "train_tokens": 400, "train_keys": 100 * 50 + 300 * 150}


@pytest.fixture
def cfg(tiny_model) -> Config:
    return changed(Config(model=tiny_model), ranks=3, count=2, tensor_parallel=2)


def test_a_run_on_cpus_has_tokens_a_second_and_no_share_of_a_peak(cfg):
    found = Speed(cfg, set()).of(STEP)
    assert found.items() >= {k: v for k, v in STEP.items() if k not in COUNTS}.items()
    speeds = {name: found[name] for name in found.keys() - STEP.keys()}
    assert speeds == pytest.approx({
        "tokens_per_second": 100.0,
        "train_tokens_per_second": 100.0,
        "engine_tokens_per_second": 70.0,
        "wait_share": 0.5,
        "sync_share": 0.1,
    })  # fmt: skip


def test_gpus_have_a_share_each_and_the_trainers_one_of_their_peak(cfg):
    """Seven GPUs, three of which train. A token meets half of its sequence on average."""
    model = read_model(cfg.model)
    found = Speed(cfg, {"H100"}).of(STEP)
    assert found["tokens_per_second_per_gpu"] == pytest.approx(100 / 7)
    weights = 2 * (model.params - model.embedding) * 400
    attention = 4 * model.heads * model.head_dim * model.layers * (100 * 50 + 300 * 150)
    assert found["mfu"] == pytest.approx(3 * (weights + attention) / 4 / (3 * H100.flops))
    adapted = Speed(changed(cfg, lora_rank=8), {"H100"}).of(STEP)
    assert adapted["mfu"] == pytest.approx((2 * weights + 3 * attention) / 12 / H100.flops)


@pytest.mark.parametrize("kinds", [{"A100"}, {"H100", "B200"}, {"of no known kind"}])
def test_of_a_gpu_whose_data_sheet_is_not_here_there_is_no_mfu(cfg, kinds):
    found = Speed(cfg, kinds).of(STEP)
    assert "mfu" not in found and found["tokens_per_second_per_gpu"] == pytest.approx(100 / 7)


def test_a_step_that_computes_nothing_or_trains_nothing_has_no_false_speed(cfg):
    found = Speed(cfg, {"H100"}).of(STEP | {"train_seconds": 0.0})
    assert not {"mfu", "train_tokens_per_second"} & found.keys()
    assert Speed(cfg, set()).of({"wait_for_rollouts": 1.0, "batch_tokens": 9}) == {
        "wait_for_rollouts": 1.0
    }


def test_a_meter_adds_up_steps_and_begins_anew():
    meter = Meter()
    for use, tokens in ((0.25, 3), (0.75, 4), (0.5, 0)):
        steps = IterationStats()
        steps.num_generation_tokens = tokens
        steps.num_preempted_reqs = 1
        meter.record(SchedulerStats(kv_cache_usage=use), steps)
    meter.record(None, None)
    assert meter.take() == {"engine_tokens": 7, "kv_use": 0.75, "preemptions": 3}
    drafts = SpecDecodingStats.new(2)
    for accepted in (2, 1, 0):
        drafts.observe_draft(2, accepted)
    meter.record(SchedulerStats(spec_decoding_stats=drafts), None)
    found = meter.take()
    assert found.items() >= {"drafts": 3, "draft_tokens": 6, "accepted_draft_tokens": 3}.items()
    assert meter.take() == {"engine_tokens": 0, "kv_use": 0.0, "preemptions": 0}


def test_drafts_have_a_share_that_is_accepted_and_a_length(cfg):
    counts = {"drafts": 10, "draft_tokens": 30, "accepted_draft_tokens": 15}
    found = Speed(cfg, set()).of(STEP | counts)
    assert (found["draft_acceptance"], found["accepted_length"]) == (0.5, 2.5)
    assert not {*COUNTS} & found.keys()
