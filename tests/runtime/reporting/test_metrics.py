"""What is measured beside the loss: known answers, and plain loops that find the same."""

import dataclasses

import numpy as np
import pytest
import torch

from grpo_async import Config, pack, policy_loss
from policy.packing import Update
from rollout.episode import Sample, SampleInfo, Turn, stitch
from runtime.reporting import rollout_metrics
from runtime.reporting.metrics import mean_metrics, reduce_stats, step_metrics
from runtime.reporting.rollout_metrics import mismatch_rows, mismatch_table
from runtime.reporting.validation_metrics import counted, validation_metrics
from support.samples import make_sample
from support.tables import gives


def test_what_was_trained_is_counted_with_its_prompts_and_what_each_token_attends_to():
    """Also tokens that the filter drops: they were computed. An empty row is none."""
    samples = [make_sample(np.random.default_rng(0), n) for n in (3, 4)]
    for sample in samples:
        sample.mask_T[:] = [False] * 2 + [True] * (len(sample.mask_T) - 2)
    samples[0].engine_logp_T[:] = -50.0  # far from the trainer's
    found = []
    for row in (samples, []):
        batch = pack(row, Update(3, 2, []), Config())
        found.append(policy_loss(-torch.ones(len(batch.mask_T)), batch, Config()).stats)
    total = reduce_stats(found)
    assert (total["train_tokens"], total["train_keys"]) == (7, 0 + 1 + 2 + 0 + 1 + 2 + 3)
    measured = step_metrics(total, 3, 1.0)
    assert mean_metrics([measured, measured])["train_tokens"] == 14


def test_the_mismatch_table_is_what_a_loop_over_tokens_finds():
    random, step, limit = np.random.default_rng(0), 9, 1.3
    samples = [make_sample(random, n, env) for n, env in ((70, "a"), (5, "b"), (30, "a"), (1, "b"))]
    samples[0].engine_logp_T[3] = np.nan
    logps = [s.engine_logp_T + random.normal(0, 0.3, len(s.mask_T)) for s in samples]
    expected = {}
    for sample, logp_T in zip(samples, logps, strict=True):
        used = [t for t in range(len(logp_T)) if sample.mask_T[t]]
        used = [t for t in used if np.isfinite(sample.engine_logp_T[t])]
        gaps = [float(logp_T[t] - sample.engine_logp_T[t]) for t in used]
        trusted = bool(gaps) and np.mean([np.exp(abs(g)) for g in gaps]) <= limit
        for place, (t, gap) in enumerate(zip(used, gaps, strict=True), 1):
            edges = next((4**p, 4 ** (p + 1) - 1) for p in range(9) if place < 4 ** (p + 1))
            lag = str(step - sample.version_T[t])
            keys = {"all": "", "env": sample.env, "lag": lag, "position": f"{edges[0]}-{edges[1]}"}
            for at in keys.items():
                row = (abs(gap), np.exp(gap) - 1 - gap, trusted)
                expected.setdefault(at, []).append(row)
    half = mismatch_table(samples[:2], np.concatenate(logps[:2]), step, limit)
    rest = mismatch_table(samples[2:], np.concatenate(logps[2:]), step, limit)
    rows = mismatch_rows([half, rest, {}])
    assert {(row["by"], row["key"]) for row in rows} == set(expected)
    for row in rows:
        values = np.array(expected[row["by"], row["key"]])
        assert row["tokens"] == len(values)
        assert row["max"] == pytest.approx(values[:, 0].max(), rel=1e-5)
        for column, name in enumerate(("mean", "k3", "kept")):
            assert row[name] == pytest.approx(values[:, column].mean(), rel=1e-4, abs=1e-9)


def test_metrics_of_several_updates_known_answers():
    first = {"probs_ratio_max": 9.0, "probs_ratio_min": 0.5, "num_masked_seqs": 4.0, "loss": 1.0}
    second = {"probs_ratio_max": 1.0, "probs_ratio_min": 0.9, "num_masked_seqs": 0.0, "kl": 2.0}
    merged = {"probs_ratio_max": 9.0, "probs_ratio_min": 0.5, "num_masked_seqs": 4.0}
    assert mean_metrics([first, second]) == merged | {"loss": 1.0, "kl": 2.0}
    assert mean_metrics([{"loss": 1.0}, {"loss": 2.0}]) == {"loss": 1.5}


def answer(reward: float, env: str = "a", score: float | None = None, **known) -> SampleInfo:
    """What is known of one answer; its score is the reward unless given."""
    info = Sample.empty().info()
    score = reward if score is None else score
    return dataclasses.replace(info, reward=reward, score=score, env=env, **known)


def test_validation_known_answers():
    answered = [
        [answer(1.0), answer(0.0)],
        [answer(0.5), answer(0.0)],
        [answer(1.0, "b", dataset="easy"), answer(1.0, "b", dataset="easy")],
    ]
    expected = {
        "": [6, pytest.approx(3.5 / 6), pytest.approx(3 / 6), pytest.approx(2 / 3)],
        "/a": [4, pytest.approx(1.5 / 4), 0.25, 0.5],
        **dict.fromkeys(("/b", "/b/easy"), [2, 1.0, 1.0, 1.0]),
    }
    names = [f"validation_{name}" for name in ("answers", "reward", "exact", "pass@2")]
    values = {
        name + of: v for of, vs in expected.items() for name, v in zip(names, vs, strict=True)
    }
    assert validation_metrics(answered, 2) == values
    assert "validation_pass@1" not in validation_metrics([[answer(1.0)]], 1)


test_right_answers_are_counted_with_wilsons_interval = gives(
    counted,
    (22 / 80, 80, "22/80 [0.19, 0.38]"),
    (1.0, 80, "80/80 [0.95, 1.00]"),
    (0.0, 80, "0/80 [0.00, 0.05]"),
    (1 / 3, 3, "1/3 [0.06, 0.79]"),
)


def test_validation_counts_what_it_leaves_out():
    assert validation_metrics([[answer(1.0)]], 1, dropped=3)["validation_dropped"] == 3
    assert "validation_dropped" not in validation_metrics([[answer(1.0)]], 1)


def test_an_answer_passes_by_its_score_and_counts_once_in_how_many_sequences_it_lies():
    """Low effort may shape the reward of a right answer to 0.98, and that of a wrong one to 1.4."""
    pieces = [answer(0.98, score=1.0), answer(0.98, score=1.0, continues=True)]
    found = validation_metrics([[*pieces, answer(0.0)], [answer(1.4, score=0.9), answer(0.0)]], 2)
    assert found["validation_pass@2"] == 0.5
    assert found["validation_reward"] == pytest.approx((0.98 + 1.4) / 4)
    assert found["validation_exact"] == 0.25


def test_rollout_metrics_by_environment_and_data_set_known_answers():
    """A group that agrees, one of another data set, and one of another environment, cut off."""
    told = {"response_tokens": 10, "oldest_version": 3, "newest_version": 3}
    same = [answer(1.0, "a", dataset="x", **told) for _ in range(2)]
    differ = [answer(r, "a", dataset="y", has_gradient=True, **told) for r in (0.0, 1.0)]
    other = {"has_gradient": True, "truncated": True, "response_tokens": 40}
    cut = [answer(0.5, "b", components={"tests": n}, **told | other) for n in (2.0, 4.0)]
    cut[1].components["style"] = 0.25
    found = rollout_metrics.rollout_metrics([same, differ, cut], 4)
    rewards = {"reward": pytest.approx(4 / 6), "reward/a": 0.75, "reward/b": 0.5}
    rewards |= {"reward/a/x": 1.0, "reward/a/y": 0.5}
    assert {k: v for k, v in found.items() if k.startswith("reward")} == rewards
    assert (found["response_tokens"], found["response_tokens/b"]) == (20, 40)
    assert (found["truncated_samples"], found["truncated_samples/a"]) == (pytest.approx(1 / 3), 0)
    zero = [found[f"zero_variance_groups{label}"] for label in ("", "/a", "/a/x", "/a/y", "/b")]
    assert zero == [pytest.approx(1 / 3), 0.5, 1.0, 0.0, 0.0]
    infos = {"info/tests/b": 3.0, "info/style/b": 0.25}
    assert {k: v for k, v in found.items() if k.startswith("info/")} == infos


def test_answers_count_once_in_how_many_sequences_they_lie():
    """One of three sequences at reward 1, one of a single one at reward 0: the mean is a half."""
    turns = [Turn(ids, [3], [-1.0], [4], "stop") for ids in ([1, 2], [9, 9], [8, 8])]
    long, short = stitch(turns), stitch(turns[:1])
    for sample in long:
        sample.reward = 1.0
    short[0].reward = 0.0
    infos = [sample.info() for sample in long + short]
    found = rollout_metrics.rollout_metrics([infos], 5)
    assert (found["reward"], found["broken_prefixes"], found["lag_max"]) == (0.5, 2, 1)
    whole = rollout_metrics.rollout_metrics([infos[:1]], 5)
    assert not {"broken_prefixes", "prefix_cache_hits"} & set(whole)


def test_prefix_cache_hits_are_the_mean_over_sequences_of_several_turns():
    hits = [answer(0.0, cache_hits=share) for share in (0.5, 1.0)]
    groups = [[*hits, answer(0.0)], [answer(0.0)]]
    assert rollout_metrics.rollout_metrics(groups, 0)["prefix_cache_hits"] == 0.75


def test_allowed_tokens_are_a_mean_over_the_tokens_of_samples_that_have_sets():
    cut = [answer(0.0, response_tokens=n, allowed_tokens=ids) for n, ids in ((1, 5), (3, 3))]
    groups = [[*cut, answer(0.0, response_tokens=9)]]
    assert rollout_metrics.rollout_metrics(groups, 0)["allowed_tokens"] == 2.0
    assert "allowed_tokens" not in rollout_metrics.rollout_metrics([groups[0][2:]], 0)


def test_an_answer_without_tokens_has_no_lag():
    samples = stitch([Turn([1, 2], [], [], [], "stop")]) + stitch([Turn([1], [3], [-1.0], [4], "")])
    infos = [sample.info() for sample in samples]
    for info in infos:
        info.reward = 0.0
    found = rollout_metrics.rollout_metrics([infos], 5)
    assert (found["lag_mean"], found["lag_max"]) == (1.0, 1)
