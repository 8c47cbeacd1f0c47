"""The maths: known answers of NeMo-RL's unit tests, plain formulas, and properties.

Axes, as suffixes:  T tokens of a packed row   G samples of a prompt
"""

import dataclasses
import functools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from envs import Reward
from grpo_async import (
    Advantage,
    Batch,
    Config,
    Correction,
    Episode,
    Group,
    LowEffort,
    Trainer,
    Update,
    group_advantages,
    importance_weights,
    k3,
    pack,
    plan_step,
    policy_loss,
    shaped_reward,
    token_mismatch,
)
from policy.sync.weight_sync import Sender
from rollout.answer_markup import FLAWS
from rollout.episode import Sample, Turn
from runtime.reporting.metrics import reduce_stats, step_metrics
from settings.config import Timeouts
from support.configs import changed

SUPER = Correction()  # of Nemotron 3 Super
OFF = Correction(low=1, high=1)  # every weight is 1
RAW = Correction(high=math.inf)
TIS = functools.partial(Correction, "token", "truncate")
ICEPOP = Correction("token", "mask", 0.5, 5)
SEQUENCE_MASK = Correction("sequence", "mask", 0.999, 1.002)
COMMON = {"A": [1.0, -1.0, 2.0], "old": [-1.0] * 3, "curr": [-1.69315, -1.0, -0.59453]}
COMMON |= {"gen": [-0.5, -1.5, -0.8], "ref": [-1.0] * 3}
UNIT = {"A": [1.0] * 3, "gen": [0.0] * 3, "curr": [math.log(x) for x in (0.1, 1, 3)]}


def config(
    correction: Correction = SUPER, sequence_error_limit: float = math.inf, **fields
) -> Config:
    """Symmetric clip and no sequence filter, as in the reference's tests."""
    rule = dataclasses.replace(correction, sequence_error_limit=sequence_error_limit)
    return changed(Config(), **{"ratio_clip": (0.2, 0.2), "correction": rule} | fields)


def make(*sequences: dict, tokens: int = 0, count: int = 0) -> tuple[torch.Tensor, Batch]:
    """(logp_T with gradient, a row): each sequence starts with a masked token full of junk."""

    def join(key: str, first: float, default: float = 0.0) -> torch.Tensor:
        parts = [[first, *s.get(key, [default] * len(s["curr"]))] for s in sequences]
        return torch.tensor([x for part in parts for x in part])

    optional = {f"{k}_logp_T": join(k, 0.0) for k in ("old", "ref") if k in sequences[0]}
    lengths = torch.tensor([1 + len(s["curr"]) for s in sequences])
    mask_T = join("mask", 0.0, 1.0).bool()
    batch = Batch(
        tokens_T=torch.zeros(len(mask_T), dtype=torch.int64),
        positions_T=torch.cat([torch.arange(n) for n in lengths]),
        seq_T=torch.arange(len(lengths)).repeat_interleave(lengths),
        mask_T=mask_T,
        engine_logp_T=join("gen", math.nan),
        advantage_T=join("A", 77.0),
        score_N=torch.tensor([s.get("score", 0.0) for s in sequences]),
        planned_tokens=tokens or int(mask_T.sum()),
        planned_sequences=count or len(lengths),
        **optional,
    )
    return join("curr", 0.0).requires_grad_(), batch


def forced(sequence: dict) -> dict:
    """The same sequence with one update per batch."""
    return {k: v for k, v in sequence.items() if k not in ("old", "ref")}


def ppo(sequence: dict) -> dict:
    return {k: v for k, v in sequence.items() if k != "ref"}


# --- known answers --------------------------------------------------------------------------------

DUAL = {"A": [1.0, -1.0, -4.0], "old": [-1.0, -1.0, -3.0], "gen": [-1.0, -1.0, -3.0]}
DUAL |= {"curr": [-1.69315, -1.0, -0.69741]}
POP = {"A": COMMON["A"], "curr": [-1.0] * 3, "gen": [-0.5, -3.5, -0.8]}
NEAR = {"A": COMMON["A"], "curr": [-1.0] * 3, "gen": [-1.0005] * 3}
FAR = {"A": COMMON["A"], "curr": [-1.0] * 3, "gen": [-1.003] * 3}
WIDE = {"A": COMMON["A"], "curr": [-1.0] * 3, "gen": [-1.5, -0.5, -1.0]}  # geometric mean 1


@pytest.mark.parametrize(("sequence", "fields", "expected"), [
    (ppo(COMMON), {"correction": OFF}, -0.633333),
    (ppo(COMMON), {"correction": OFF, "ratio_clip": (0.2, 0.28)}, -0.686666),
    (ppo(COMMON), {"correction": RAW}, -0.206499),
    (ppo(COMMON), {"correction": TIS(0, 0.8)}, -0.474421),
    (forced(COMMON), {"correction": OFF}, -0.666667),
    (forced(COMMON), {}, -0.370249),  # the objective of Nemotron 3 Super
    (DUAL, {"correction": OFF}, (-0.5 + 1 + 40) / 3),
    (POP, {"correction": ICEPOP}, -0.747997),
    (NEAR, {"correction": SEQUENCE_MASK}, -0.667000),
    (FAR, {"correction": SEQUENCE_MASK}, 0.0),
    (WIDE, {"correction": SEQUENCE_MASK}, -(math.exp(0.5) - math.exp(-0.5) + 2) / 3),
    (WIDE, {"correction": Correction("sequence", "truncate")}, -2 / 3),
    (FAR, {"correction": Correction("sequence", "truncate", 0, 0.9)}, -0.6),
    (UNIT, {"correction": TIS(0, 2)}, -1.033333),
    (UNIT, {"correction": TIS(0.5, 2)}, -1.166667),
])  # fmt: skip
def test_loss_known_answers(sequence, fields, expected):
    logp_T, batch = make(sequence)
    loss, stats = policy_loss(logp_T, batch, config(**fields))
    assert loss.item() == pytest.approx(expected, rel=1e-5, abs=2e-5)
    assert stats["loss"].item() == loss.item()


@pytest.mark.parametrize(("sequence", "rule", "outside"), [
    (UNIT, TIS(0, 2), 1 / 3),
    (UNIT, TIS(0.5, 2), 2 / 3),
    (POP, ICEPOP, 1 / 3),
    (NEAR, SEQUENCE_MASK, 0.0),
    (FAR, SEQUENCE_MASK, 1.0),
    (forced(COMMON), Correction(), 0.0),
])  # fmt: skip
def test_is_oob_ratio_is_the_share_of_tokens_outside(sequence, rule, outside):
    assert metrics_of(sequence, correction=rule)["is_oob_ratio"] == pytest.approx(outside)
    twice = metrics_of(sequence, forced(COMMON), rows=2, correction=rule)["is_oob_ratio"]
    other = metrics_of(forced(COMMON), correction=rule)["is_oob_ratio"]
    assert twice == pytest.approx((outside + other) / 2)  # NeMo-RL's sums over micro-batches


def metrics_of(*sequences: dict, rows: int = 1, **fields) -> dict[str, float]:
    """step_metrics of sequences packed in one row, or each in its own."""
    parts = [[s] for s in sequences] if rows > 1 else [sequences]
    tokens = sum(len(s["curr"]) for s in sequences)
    made = (make(*part, tokens=tokens, count=len(sequences)) for part in parts)
    stats = [policy_loss(*row, config(**fields))[1] for row in made]
    return step_metrics(reduce_stats(stats), tokens, 1.0)


def test_a_new_measure_of_tokens_is_reported_as_their_mean(monkeypatch):
    """A fork adds its name to `measured` and nothing else."""

    def with_another(logp_T, *others):
        return token_mismatch(logp_T, *others) | {"my_measure": torch.full_like(logp_T, 0.25)}

    monkeypatch.setattr("grpo_async.token_mismatch", with_another)
    assert metrics_of(UNIT, NEAR, rows=2)["my_measure"] == 0.25


ONE_UPDATE = {"token_mult_prob_error": 2.0580917, "gen_kl_error": 0.2225893}
ONE_UPDATE |= {"policy_kl_error": 0.4101890, "approx_entropy": 0.9641124, "loss": -0.370249}
ONE_UPDATE |= dict.fromkeys(("probs_ratio", "probs_ratio_clamped"), 1.0)
ONE_UPDATE |= dict.fromkeys(("probs_ratio_min", "probs_ratio_max"), 1.0)
ONE_UPDATE |= {"sampling_importance_ratio": (0.303264 + 1.648721 + 1.228102) / 3}
ONE_UPDATE |= dict.fromkeys(("seq_mult_prob_error", "seq_mult_prob_error_max"), 2.0580917)
ONE_UPDATE |= {"global_valid_toks": 3, "num_valid_samples": 1}
SEVERAL = {"probs_ratio": 1.0, "probs_ratio_clamped": 1.0, "probs_ratio_min": 0.5}
SEVERAL |= {"probs_ratio_max": 1.5}


@pytest.mark.parametrize(
    ("sequence", "rule", "expected", "near"),
    [(forced(COMMON), SUPER, ONE_UPDATE, 2e-6), (ppo(COMMON), RAW, SEVERAL, 1e-5)],
)
def test_metrics_known_answers(sequence, rule, expected, near):
    metrics = metrics_of(sequence, correction=rule)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=near)


def test_js_divergence_against_its_definition():
    p, q = (np.exp(np.array(COMMON[name])) for name in ("curr", "gen"))
    middle = (p + q) / 2
    expected = sum((x / middle - np.log(x / middle) - 1).mean() for x in (p, q)) / 2
    assert metrics_of(forced(COMMON))["js_divergence_error"] == pytest.approx(expected, rel=1e-5)


def test_minus_infinity_from_the_engine_under_a_sequence_mask():
    logp_T, batch = make(NEAR | {"gen": [-1.0005, -math.inf, -1.0005]})
    loss, stats = policy_loss(logp_T, batch, config(correction=SEQUENCE_MASK))
    loss.backward()
    assert loss.item() == pytest.approx(-1.0005 * 3 / 3, abs=1e-5)  # A = 1 and 2 are left
    assert logp_T.grad.isfinite().all() and logp_T.grad[2] == 0
    assert stats["nonfinite_engine_logprobs"] == 1 and stats["kept_tokens"] == 2


MOST = math.exp(20)  # of any ratio: float32 ends at exp(88)
FAR_OFF = {"A": [1.0], "old": [-51.0], "curr": [-1.0], "ref": [-1.0 - math.log(2)]}


def test_ratios_of_policies_that_are_far_apart_are_bounded():
    rule = Correction("token", "truncate", 0, math.inf)
    metrics = metrics_of(FAR_OFF | {"gen": [-101.0]}, correction=rule, **KL)
    assert metrics["probs_ratio"] == pytest.approx(MOST)
    assert metrics["sampling_importance_ratio"] == pytest.approx(MOST)
    assert metrics["token_mult_prob_error"] == pytest.approx(MOST)
    assert metrics["seq_mult_prob_error"] == pytest.approx(MOST)
    assert metrics["kl_penalty"] == pytest.approx(MOST * (0.5 - 1 + math.log(2)))
    assert metrics["gen_kl_error"] == pytest.approx(MOST - 21)
    assert metrics["policy_kl_error"] == pytest.approx(19)
    assert metrics["approx_entropy"] == pytest.approx(MOST)  # -logp is 1


def test_the_bounds_of_a_ratio_are_inside():
    one_T = torch.ones(1, dtype=torch.bool)
    for action in ("truncate", "mask"):
        rule = Correction("token", action, 1.0, 1.0)
        weight_T, inside_T = importance_weights(torch.zeros(1), one_T, torch.zeros(1).long(), rule)
        assert weight_T.item() == 1 and inside_T.all()


def test_ratios_have_a_lower_bound_as_well():
    rule = Correction("sequence", "truncate", 0, math.inf)
    near, far = torch.tensor([-1.0]), torch.tensor([-101.0])
    mask_T = torch.ones(1, dtype=torch.bool)
    weight_T, _ = importance_weights(far - near, mask_T, torch.zeros(1).long(), rule)
    assert weight_T.item() == pytest.approx(1 / MOST)
    found = token_mismatch(far, far, near)
    assert found["approx_entropy"].item() == pytest.approx(101 / MOST)
    assert found["gen_kl_error"].item() == pytest.approx(19)
    assert found["policy_kl_error"].item() == pytest.approx(MOST - 21)


def slope(sequence: dict, **fields) -> torch.Tensor:
    """The gradient of the loss, for the masked token and each of the sequence."""
    logp_T, batch = make(sequence)
    policy_loss(logp_T, batch, config(**fields))[0].backward()
    return logp_T.grad


def test_forced_on_policy_gradient_is_weighted_reinforce():
    weights = [0.303264, 1.5, 1.228102]
    expected = [-w * a / 3 for w, a in zip(weights, COMMON["A"], strict=True)]
    found = slope(forced(COMMON), correction=TIS(0, 1.5)).tolist()
    assert found == pytest.approx([0, *expected], abs=1e-6)


@pytest.mark.parametrize(("i", "flat"), [(0, False), (1, False), (2, True)])
def test_ppo_gradient_vanishes_only_beyond_the_clip_on_the_side_of_the_advantage(i, flat):
    assert (slope(ppo(COMMON), correction=OFF)[1 + i] == 0) == flat


# --- KL -------------------------------------------------------------------------------------------

KL = {"kl_coef": 0.3, "skip_zero_advantage": False}
DRIFTED = {"A": [0.0] * 2, "curr": [-1.2, -0.7], "gen": [-1.5, -0.4], "ref": [-0.9, -1.1]}


def test_kl_alone():
    curr = [0.0, -1.0, -2.0]
    logp_T, batch = make({"A": [0.0] * 3, "curr": curr, "gen": curr, "ref": [-1.0] * 3})
    loss, _ = policy_loss(logp_T, batch, config(**KL | {"kl_coef": 0.1}))
    assert loss.item() == pytest.approx(0.0362054, abs=1e-6)


def test_kl_penalty_is_weighted_by_the_importance_ratio():
    sequence = forced(COMMON) | {"ref": COMMON["ref"]}
    assert metrics_of(sequence, **KL)["kl_penalty"] == pytest.approx(0.0605485, abs=1e-6)


@pytest.mark.parametrize(
    ("gen", "expected"),
    [(DRIFTED["curr"], [-0.0524788, 0.0494520]), (DRIFTED["gen"], [-0.0708390, 0.0366349])],
)
def test_kl_gradient_does_not_flow_through_its_weight(gen, expected):
    assert slope(DRIFTED | {"gen": gen}, **KL).tolist() == pytest.approx([0, *expected], abs=1e-6)


def test_k3_is_finite_and_not_negative():
    k3_T = k3(torch.tensor([-math.inf, -1e30, -1.0, 0.0, 1.0, 1e30, math.inf]))
    assert k3_T.isfinite().all() and (k3_T >= 0).all() and k3_T[3] == 0


def test_k3_of_small_ratios_is_not_negative_in_float32():
    random = torch.Generator().manual_seed(0)
    x_T = 1e-4 * torch.randn(100_000, generator=random)
    k3_T = k3(x_T)
    assert k3_T.dtype == torch.float32 and (k3_T >= 0).all()
    exact_T = x_T.double().expm1() - x_T.double()
    torch.testing.assert_close(k3_T.double(), exact_T, rtol=0, atol=2e-11)  # an ulp of 1e-4
    assert (x_T.exp() - 1 - x_T < 0).sum() > 10_000  # the plain formula


# --- the sequence error filter, and one divisor ---------------------------------------------------


def off_by(error: float, n: int = 2, **more) -> dict:
    """A sequence whose mean multiplicative error is `error`, on both sides of the truth."""
    gap = [math.log(error) * (-1) ** i for i in range(n)]
    return {"A": [1.0] * n, "curr": [-5.0] * n, "gen": [-5.0 + g for g in gap]} | more


def test_sequence_error_filter_known_answers():
    sequences = [off_by(1.047), off_by(1.288, 3, score=1.0), off_by(1.764, 4)]
    metrics = metrics_of(*sequences, sequence_error_limit=1.2)
    assert metrics["num_masked_seqs"] == 2 and metrics["num_valid_samples"] == 1
    assert metrics["masked_correct_pct"] == 0.5 and metrics["global_valid_toks"] == 2
    assert metrics["seq_mult_prob_error"] == pytest.approx((1.047 + 1.288 + 1.764) / 3)
    assert metrics["seq_mult_prob_error_max"] == pytest.approx(1.764)


def test_sequences_without_trained_tokens_are_no_part_of_the_error_metrics():
    hidden = off_by(16.0, mask=[0.0, 0.0])
    metrics = metrics_of(off_by(2.0), off_by(4.0), hidden, sequence_error_limit=1.0)
    assert metrics["seq_mult_prob_error"] == pytest.approx(3.0)
    assert metrics["seq_mult_prob_error_max"] == pytest.approx(4.0)
    assert metrics["num_masked_seqs"] == 2 and metrics["num_valid_samples"] == 0


@pytest.mark.parametrize(("limit", "kept"), [(1.9, 0), (2.1, 1)])
def test_the_error_is_a_mean_of_ratios_not_a_ratio_of_means(limit, kept):
    sequence = {"A": [1.0] * 2, "curr": [-5.0] * 2, "gen": [-5.0 - math.log(3), -5.0]}
    _, stats = policy_loss(*make(sequence), config(sequence_error_limit=limit))
    assert stats["kept_sequences"] == kept and stats["kept_tokens"] == 2 * kept


def test_sequences_without_an_error_pass_the_tightest_filter():
    _, stats = policy_loss(*make(off_by(1.0), off_by(1.01)), config(sequence_error_limit=1.0))
    assert stats["kept_sequences"] == 1


def test_a_dropped_sequence_leaves_the_loss_of_the_others():
    alone = policy_loss(*make(forced(COMMON)), config())[0]
    logp_T, batch = make(forced(COMMON), off_by(9.0, 5))
    loss, stats = policy_loss(logp_T, batch, config(sequence_error_limit=3))
    scale = batch.planned_tokens / stats["kept_tokens"]
    assert (loss * scale).item() == pytest.approx(alone.item(), rel=1e-6)


@pytest.mark.parametrize("reduction", ["token", "sequence"])
def test_nothing_to_train_is_a_loss_of_zero(reduction):
    hidden = forced(COMMON) | {"mask": [0.0] * 3}
    for sequence in (hidden, off_by(50.0)):
        logp_T, batch = make(sequence, tokens=3)
        fields = {"reduction": reduction, "sequence_error_limit": 2.0}
        loss, stats = policy_loss(logp_T, batch, config(**fields))
        loss.backward()
        assert loss == 0 and (logp_T.grad == 0).all() and stats["kept_tokens"] == 0
        assert all(math.isfinite(v) for v in step_metrics(reduce_stats([stats]), 3, 1.0).values())


def test_reductions_against_plain_formulas():
    sequences = [forced(COMMON), off_by(1.1, 1, A=[-3.0]), off_by(1.2, 4, A=[0.5] * 4)]
    terms = [
        [-min(math.exp(c - g), 5) * a for c, g, a in zip(s["curr"], s["gen"], s["A"], strict=True)]
        for s in sequences
    ]
    by_token = sum(map(sum, terms)) / 8
    by_sequence = sum(sum(t) / len(t) for t in terms) / 3
    for reduction, expected in (("token", by_token), ("sequence", by_sequence)):
        loss, _ = policy_loss(*make(*sequences), config(reduction=reduction))
        assert loss.item() == pytest.approx(expected, rel=1e-5)


class TablePolicy:
    """A policy whose logprob of a token is a table entry: gradients are easy to compare."""

    dp_group = None
    reports = True

    def __init__(self, table, lr: float = 1.0):
        self.table_V = torch.tensor(table, requires_grad=True)
        self.lr = lr
        self.grads = []

    def forward_backward(self, batches, loss_fn, more=False):
        every = []
        for batch in batches:
            loss, stats = loss_fn(self.table_V[batch.tokens_T], batch)
            loss.backward()
            every.append(stats)
        return every

    def logprobs(self, batches):
        return [self.table_V.detach()[batch.tokens_T] for batch in batches]

    def named_weights(self):
        return iter(())

    def weight_metas(self):
        return []

    def optimizer_step(self, grad_scale):
        self.grads.append(self.table_V.grad * grad_scale)
        self.table_V.data -= self.lr * self.grads[-1]
        self.table_V.grad = None
        return {}


class EarlierStage(TablePolicy):
    """A pipeline stage before the last one: it gets the stats, and `loss_fn` is not called."""

    reports = False

    def __init__(self, table, loss):
        super().__init__(table)
        self.loss = loss  # (logp_T, batch) -> RowLoss, as on the last stage

    def forward_backward(self, batches, loss_fn, more=False):
        return super().forward_backward(batches, self.loss, more)


def trainer(policy: TablePolicy, **fields) -> Trainer:
    made = Trainer(config(**fields))
    made.policy = policy
    made.reference = None
    made.sender = Sender(policy, Timeouts(), False)
    return made


def sample(tokens, gen, advantage=1.0) -> Sample:
    """A sample of the table policy: one prompt token, then `tokens`."""
    n = len(tokens)
    arrays = {"tokens_T": np.array([0, *tokens], np.int32), "mask_T": np.arange(n + 1) > 0}
    arrays |= {"engine_logp_T": np.array([0.0, *gen], np.float32)}
    arrays |= {"version_T": np.zeros(n + 1, np.int32), "flaw_T": np.zeros(n + 1, np.int8)}
    return Sample(**arrays, truncated=False, reward=0.0, score=0.0, advantage=advantage)


def gradient(samples: list[Sample], rows: list[list[int]], table, **fields) -> torch.Tensor:
    """The scaled gradient that one update of these samples, packed so, hands to the optimizer."""
    policy = TablePolicy(table)
    present = [s for s in samples if s.mask_T.any()]
    tokens = sum(int(s.mask_T.sum()) for s in present)
    places = [[(0, i) for i in row] for row in rows]
    update = Update(max(tokens, 1), max(len(present), 1), places)
    trainer(policy, **fields).train_step(0, [update], samples)
    return policy.grads[0]


def test_a_stage_that_computes_no_loss_steps_and_reports_nothing():
    cfg = config()
    policy = EarlierStage([0.0, -1.0, -1.2], lambda logp_T, batch: policy_loss(logp_T, batch, cfg))
    group = [sample([1, 2], [-1.1, -1.3], 0.5)]
    found = trainer(policy).train_step(0, [Update(2, 1, [[(0, 0)]])], group)
    assert len(policy.grads) == 1 and found.metrics["global_valid_toks"] == 2
    assert not found.mismatch and len(found.logps) == 0


def trained_in_parts(groups: list[Group], parts: int, **fields) -> tuple[TablePolicy, dict]:
    """The policy and the metrics after a step whose groups came in this order, on one rank."""
    policy = TablePolicy([0.0, -1.0, -1.2, -0.7])
    made = trainer(policy, prompts_per_step=len(groups), train_parts=parts, **fields)
    size = len(groups) // parts
    for first in range(0, len(groups), size):
        part = groups[first : first + size]
        (share,) = plan_step(part, made.cfg, more=first + size < len(groups))
        assert len(policy.grads) == 0
        samples = (part[g].samples for g in share.groups)
        metrics, _, logps = made.train_step(0, share.updates, *samples)
        assert len(logps) == sum(part[g].infos[j].tokens for g, j in share.places(0))
    return policy, metrics


# Of each group: (tokens, logprobs of the engine, advantage) of its samples. The filter drops those
# of -4, and the group of -0.5 agreed.
STEP = [
    [([1, 2], [-1.1, -1.3], 0.5), ([3], [-0.6], -0.5)],
    [([3, 3, 1], [-0.6, -0.8, -0.9], -2.0), ([2] * 4, [-4.0] * 4, 7.0)],
    [([1], [-1.0], 0.0), ([2, 3], [-1.2, -0.7], 0.0)],
    [([1] * 5, [-4.0] * 5, 3.0), ([2], [-4.0], -3.0)],
]


@pytest.mark.parametrize("row_tokens", [4, 100])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1), (3, 2, 1, 0)])
@pytest.mark.parametrize("limit", [2.0, math.inf])
@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("reduction", ["token", "sequence"])
def test_gradients_of_parts_are_those_of_one(reduction, skips, limit, order, row_tokens):
    """Also where all groups of a part are filtered, agree, or come first."""
    groups = []
    for slot in order:
        samples = [sample(*of_sample) for of_sample in STEP[slot]]
        groups.append(Group(slot, 0, 1, [s.info() for s in samples], samples))
    fields = {"reduction": reduction, "skip_zero_advantage": skips, "sequence_error_limit": limit}
    fields["row_tokens"] = row_tokens
    whole, expected = trained_in_parts(groups, 1, **fields)
    assert whole.grads[0].abs().sum() > 0
    for parts in (2, 4):
        policy, metrics = trained_in_parts(groups, parts, **fields)
        torch.testing.assert_close(policy.grads, whole.grads, rtol=1e-5, atol=1e-7)
        assert metrics.keys() == expected.keys()
        for name in metrics.keys() - {"train_seconds"}:
            assert metrics[name] == pytest.approx(expected[name], rel=1e-5), name


@pytest.mark.parametrize("reduction", ["token", "sequence"])
def test_rescaling_by_planned_over_kept_is_normalising_by_what_is_kept(reduction):
    table = [0.0, -1.0, -1.2, -0.7]
    kept = [sample([1, 2], [-1.1, -1.3], 0.5), sample([3, 3, 1], [-0.6, -0.8, -0.9], -2.0)]
    dropped = [sample([2, 2, 2, 2], [-4.0] * 4, 7.0)]
    limits = {"reduction": reduction, "sequence_error_limit": 2.0}
    all_of_it = gradient(kept + dropped, [[0, 2], [1]], table, **limits)
    torch.testing.assert_close(all_of_it, gradient(kept, [[0, 1]], table, **limits))
    assert all_of_it.abs().sum() > 0


def test_samples_that_were_skipped_stay_in_the_divisor():
    policy = TablePolicy([0.0, -1.0])
    update = Update(planned_tokens=10, planned_sequences=5, rows=[[(0, 0)], [(0, 1)]])
    group = [sample([1, 1], [-1.0, -1.0]), sample([1, 1], [-9.0, -9.0])]
    metrics, *_ = trainer(policy, sequence_error_limit=2.0).train_step(0, [update], group)
    assert policy.grads[0][1].item() == pytest.approx(-2 / (10 - 2))
    assert metrics["global_valid_toks"] == 8 and metrics["loss"] == pytest.approx(-2 / 8)


def test_several_updates_weigh_by_the_policy_before_the_first():
    policy = TablePolicy([0.0, -1.0, -2.0], lr=0.5)
    group = [sample([1, 2], [-1.1, -1.9]) for _ in range(2)]
    updates = [Update(2, 1, [[(0, 0)]]), Update(2, 1, [[(0, 1)]])]
    rule = {"correction": TIS(0, 1.2), "ratio_clip": (0.2, 0.9)}
    metrics, *_ = trainer(policy, **rule).train_step(0, updates, group)
    weight_V = torch.tensor([0.0, -1.0 + 1.1, -2.0 + 1.9]).exp() * torch.tensor([0.0, 1.0, 1.0])
    first_V = -weight_V / 2
    torch.testing.assert_close(policy.grads[0], first_V)
    ratio_V = (-0.5 * first_V).exp()
    torch.testing.assert_close(policy.grads[1], -weight_V * ratio_V / 2)
    assert metrics["probs_ratio_max"] == pytest.approx(ratio_V.max().item())


NAN, INF = math.nan, math.inf
ODD = [NAN, INF, -INF, 1e30, -1e30, 3.4e38, -3.4e38, 100.0, -100.0, 0.0]
ENGINE = st.one_of(st.sampled_from(ODD), st.floats(-12, 0, width=32))
RULES = st.builds(
    lambda level, action, low, high: Correction(level, action, min(low, high), max(low, high)),
    st.sampled_from(["token", "sequence"]),
    st.sampled_from(["truncate", "mask"]),
    st.sampled_from([0.0, 0.5, 0.999]),
    st.sampled_from([0.7, 1.002, 5.0]),
)
REDUCTIONS = st.sampled_from(["token", "sequence"])
LIMITS = st.sampled_from([1.2, 2.0, INF])


@settings(deadline=None, max_examples=200)
@given(st.data(), RULES, REDUCTIONS, LIMITS, st.booleans(), st.booleans())
def test_whatever_the_engine_says_the_loss_is_finite(data, rule, reduction, limit, old, ref):
    def sequence() -> dict:
        n = data.draw(st.integers(1, 5))
        lists = functools.partial(st.lists, min_size=n, max_size=n)
        logprobs = lists(st.floats(-120, 0, width=32))
        part = {"A": data.draw(lists(st.floats(-50, 50, width=32))), "curr": data.draw(logprobs)}
        part["gen"] = data.draw(lists(ENGINE))
        return part | {k: data.draw(logprobs) for k, on in (("old", old), ("ref", ref)) if on}

    logp_T, batch = make(*(sequence() for _ in range(data.draw(st.integers(1, 4)))))
    fields = {"correction": rule, "reduction": reduction, "sequence_error_limit": limit}
    loss, stats = policy_loss(logp_T, batch, config(**fields, **KL if ref else {}))
    loss.backward()
    bad_T = batch.mask_T & ~batch.engine_logp_T.isfinite()
    assert loss.isfinite() and logp_T.grad.isfinite().all()
    assert (logp_T.grad[bad_T | ~batch.mask_T] == 0).all()
    assert stats["nonfinite_engine_logprobs"] == bad_T.sum()
    assert stats["kept_tokens"] <= (batch.mask_T & ~bad_T).sum()
    metrics = step_metrics(reduce_stats([stats]), batch.planned_tokens, 1.0)
    assert all(math.isfinite(v) for v in metrics.values()), metrics


@settings(deadline=None)
@given(st.lists(st.one_of(st.floats(width=32)), min_size=1, max_size=8), RULES)
def test_weights_stay_within_their_bounds(gaps, rule):
    gap_T = torch.tensor(gaps)
    mask_T = torch.ones(len(gaps), dtype=torch.bool)
    seq_T = torch.zeros(len(gaps)).long()
    weight_T, inside_T = importance_weights(gap_T, mask_T, seq_T, rule)
    if rule.level == "token":
        ratio_T = gap_T.double().exp()
        assert (inside_T | ~((rule.low < ratio_T) & (ratio_T < rule.high - 1e-6))).all()
        assert not inside_T[gap_T.isnan()].any()
        seen_T = weight_T[~gap_T.isnan()]
        assert ((seen_T >= rule.low) | (rule.action == "mask")).all() and (seen_T <= 5.0).all()
    if rule.action == "mask":
        assert (weight_T[~inside_T] == 0).all()
    if rule.level == "sequence":
        assert inside_T.all() or not inside_T.any()


@st.composite
def packings(draw):
    """(samples, two ways to distribute them over rows)."""
    one = st.builds(
        lambda tokens, shift, advantage, bad: sample(
            tokens, [NAN if b else shift for b, _ in zip(bad, tokens, strict=False)], advantage
        ),
        st.lists(st.integers(1, 4), min_size=1, max_size=6),
        st.sampled_from([-1.0, -1.5, -0.5, -3.0]),
        st.sampled_from([-5.0, -1.0, 0.0, 0.3, 2.0]),
        st.lists(st.sampled_from([False] * 9 + [True]), min_size=6, max_size=6),
    )
    samples = draw(st.lists(one, min_size=1, max_size=8))
    ways = []
    for _ in range(2):
        rows: list[list[int]] = [[] for _ in range(draw(st.integers(1, 4)))]
        for i in draw(st.permutations(range(len(samples)))):
            draw(st.sampled_from(rows)).append(i)
        ways.append(rows)
    return samples, ways


@settings(deadline=None, max_examples=60)
@given(packings(), RULES, REDUCTIONS, LIMITS)
def test_packing_does_not_change_the_gradient(packing, rule, reduction, limit):
    samples, (one, other) = packing
    table = [0.0, -1.0, -1.3, -0.8, -2.0]
    fields = {"correction": rule, "reduction": reduction, "sequence_error_limit": limit}
    grads = [gradient(samples, rows, table, **fields) for rows in (one, other)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-6)


def test_splitting_a_batch_into_rows_sums_to_its_loss():
    sequences = [forced(COMMON), off_by(1.1, 1), off_by(1.3, 4), off_by(7.0, 2)]
    cfg = config(sequence_error_limit=3.0)
    whole = policy_loss(*make(*sequences), cfg)[0]
    parts = [policy_loss(*make(s, tokens=10, count=4), cfg)[0] for s in sequences]
    assert sum(parts).item() == pytest.approx(whole.item(), rel=1e-6)


# --- advantages -----------------------------------------------------------------------------------

THIRD = 0.258198


@pytest.mark.parametrize(("rewards", "expected"), [
    ([1, 2, 3], [-2.121317, 0, 2.121317]),
    ([7], [0]),
    ([0, 1], [-1, 1]),
    ([3, 3.5], [-0.5, 0.5]),
    ([1] + [0] * 15, [1] + [-THIRD] * 15),
    ([1] * 8 + [0] * 8, [1.032794] * 8 + [-1.032794] * 8),
    ([1] * 15 + [0], [THIRD] * 15 + [-1]),
    ([1, 1, 0, 0], [1.154699, 1.154699, -1.154699, -1.154699]),
    ([0.9] * 16, [0] * 16),
    ([1] + [0.9] * 15, [0.1] + [-THIRD] * 15),  # NeMo-RL: 394
    ([1] + [0.9, 0.9000001] * 5, [0.1] + [None] * 10),
    ([0, 0.001, 1], [None, None, 50]),
    ([0, 0.001, -1], [None, None, -50]),
])  # fmt: skip
def test_advantages_known_answers(rewards, expected):
    rewards_G = torch.tensor(rewards, dtype=torch.float32)
    found = group_advantages(rewards_G, Advantage()).tolist()
    for value, wanted in zip(found, expected, strict=True):
        assert wanted is None or value == pytest.approx(wanted, abs=1e-5)


SPREAD = 0.001 / math.sqrt(2) + 1e-6
HIGH, LOW = (1 - 0.0005) / SPREAD, (-1 - 0.0005) / SPREAD


@pytest.mark.parametrize(
    ("clip", "expected"),
    [((-50.0, 100.0), (100, -50)), ((-2.0, 3.0), (3, -2)), ((0.0, math.inf), (HIGH, 0))]
    + [((-math.inf, math.inf), (HIGH, LOW))],
)
def test_advantages_are_clamped_into_an_interval(clip, expected):
    rule = Advantage(clip=clip)
    highest = group_advantages(torch.tensor([0, 0.001, 1]), rule)[2].item()
    lowest = group_advantages(torch.tensor([0, 0.001, -1]), rule)[2].item()
    assert (highest, lowest) == pytest.approx(expected, rel=1e-5)


FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
GROUPS = st.lists(st.integers(-20, 20).map(lambda n: n / 4), min_size=2, max_size=16)


def advantages(rewards, clip: float = 1e9, **rule) -> np.ndarray:
    rewards_G = torch.tensor(rewards, dtype=torch.float32)
    return group_advantages(rewards_G, Advantage(clip=(-clip, clip), **rule)).double().numpy()


@settings(deadline=None)
@given(GROUPS)
def test_baseline_mean_compares_with_all_of_the_group(rewards):
    A_G = advantages(rewards, baseline="mean")
    spread = np.std(rewards, ddof=1)
    scale = spread + 1e-6 if spread else 1.0
    expected = [(r - np.mean(rewards)) / scale for r in rewards]
    np.testing.assert_allclose(A_G, expected, rtol=1e-5, atol=1e-6)


@settings(deadline=None)
@given(GROUPS)
def test_without_normalisation_the_difference_stays_as_it_is(rewards):
    total = sum(rewards)
    others = [(total - r) / (len(rewards) - 1) for r in rewards]
    expected = [r - mean for r, mean in zip(rewards, others, strict=True)]
    assert advantages(rewards, normalize=False) == pytest.approx(expected, abs=1e-5)
    expected = [r - total / len(rewards) for r in rewards]
    A_G = advantages(rewards, normalize=False, baseline="mean")
    np.testing.assert_allclose(A_G, expected, atol=1e-5)


@pytest.mark.parametrize("scale", [1e-6, 1e-5])
def test_rewards_of_a_small_scale_are_normalised(scale):
    rewards = [scale * r for r in (0.0, 0.25, 0.5, 1.0)]
    others = [(r, np.delete(rewards, i)) for i, r in enumerate(rewards)]
    expected = [(r - rest.mean()) / (rest.std(ddof=1) + 1e-6) for r, rest in others]
    assert advantages(rewards) == pytest.approx(expected, rel=1e-5)
    assert max(expected) > 0.2


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0, 1e3])
def test_a_spread_of_rounding_is_not_divided_by(scale):
    """One reward of ten above fifteen equal ones, at any scale."""
    rewards = [scale * 1.0] + [scale * 0.9] * 15
    assert advantages(rewards)[0] == pytest.approx(scale * 0.1, rel=1e-5)


@settings(deadline=None)
@given(GROUPS)
def test_advantages_against_a_plain_loop(rewards):
    A_G = advantages(rewards)
    weighted = 0.0
    for i, r in enumerate(rewards):
        others = np.array(rewards[:i] + rewards[i + 1 :])
        spread = others.std(ddof=1) if len(others) > 1 else 0.0
        scale = spread + 1e-6 if spread else 1.0
        assert A_G[i] == pytest.approx((r - others.mean()) / scale, rel=1e-5, abs=1e-6)
        assert np.sign(A_G[i]) == np.sign(r - others.mean())
        weighted += A_G[i] * scale
    assert weighted == pytest.approx(0, abs=1e-4 * (1 + max(map(abs, rewards))))


@settings(deadline=None)
@given(GROUPS.filter(lambda r: len(r) > 2), st.integers(-64, 64), st.sampled_from([2, 8, 0.5]))
def test_advantages_do_not_see_shift_scale_or_order(rewards, shift, scale):
    A_G = advantages(rewards)
    assert np.allclose(advantages([r + shift for r in rewards]), A_G, atol=1e-4)
    assert np.allclose(advantages(rewards[::-1])[::-1], A_G, atol=1e-5)
    spreads = [np.std(rewards[:i] + rewards[i + 1 :]) for i in range(len(rewards))]
    if min(spreads) > 0:
        assert np.allclose(advantages([r * scale for r in rewards]), A_G, rtol=1e-4, atol=1e-4)
    assert np.allclose(advantages([-r for r in rewards]), -A_G, atol=1e-5)


@settings(deadline=None)
@given(FINITE, st.integers(1, 64))
def test_a_group_that_agrees_has_no_advantage(reward, size):
    assert (advantages([reward] * size, 50.0) == 0).all()


@settings(deadline=None)
@given(st.lists(FINITE, min_size=1, max_size=16))
def test_advantages_are_finite_and_clipped(rewards):
    A_G = advantages(rewards, 50.0)
    assert np.isfinite(A_G).all() and (np.abs(A_G) <= 50).all()


# --- effort ---------------------------------------------------------------------------------------

SHORT = LowEffort(weight=0.2, tokens=3000, penalty=1.0)  # of Nemotron 3 Super
PLAIN = LowEffort(weight=1.0, tokens=1000)
STEEP = LowEffort(weight=1.0, tokens=100, penalty=2.0)


def reward_of(value: float, tokens: int, rule: LowEffort, content: str) -> float:
    """The shaped reward of an answer of so many tokens to a message."""
    row = {"responses_create_params": {"input": [{"role": "user", "content": content}]}}
    turn = Turn([7], [1] * tokens, [-1.0] * tokens, [0] * tokens, "stop")
    return shaped_reward(row, Episode([turn], Reward(value)), rule)


@pytest.mark.parametrize(("rule", "reward", "tokens", "expected"), [
    (PLAIN, 1.0, 100, 1.9),
    (STEEP, 1.0, 200, -1.0),
    (SHORT, 1.0, 0, 1.2),
    (SHORT, 1.0, 3000, 1.0),
    (SHORT, 1.0, 3300, 0.98),
    (SHORT, 1.0, 6000, 0.8),
    (SHORT, 1.0, 30000, 1 - 1.8),
    (SHORT, 0.0, 0, 0.0),
    (SHORT, 0.0, 6000, -0.2),
    (LowEffort(weight=9.0, tokens=1000), 1.0, 0, 2.0),
])  # fmt: skip
def test_low_effort_known_answers(rule, reward, tokens, expected):
    assert reward_of(reward, tokens, rule, f"? {rule.marker}") == pytest.approx(expected)
    assert reward_of(reward, tokens, rule, "?") == reward


# --- penalties ------------------------------------------------------------------------------------


def test_each_flaw_has_a_penalty_of_its_own():
    flawed = sample([1, 2, 3], [-1.0] * 3, advantage=0.5)
    flawed.flaw_T[2] = FLAWS.index("tool_call")
    flawed.flaw_T[3] = FLAWS.index("thinking")
    update = Update(3, 1, [])
    for penalties, expected in (
        ({}, [0.5, 0.5, 0.5, 0.5]),
        ({"tool_call": -5.0}, [0.5, 0.5, -5.0, 0.5]),
        ({"thinking": -2.0}, [0.5, 0.5, 0.5, -2.0]),
        ({"tool_call": -60.0, "thinking": -2.0}, [0.5, 0.5, -60.0, -2.0]),  # after the clip
    ):
        batch = pack([flawed], update, config(penalties=penalties))
        assert batch.advantage_T.tolist() == expected


# --- an empty row ---------------------------------------------------------------------------------


def test_empty_row_trains_nothing():
    policy = TablePolicy([-1.0, -1.0])
    update = Update(planned_tokens=1, planned_sequences=1, rows=[[]])
    metrics, *_ = trainer(policy).train_step(0, [update])
    assert (policy.grads[0] == 0).all() and all(math.isfinite(v) for v in metrics.values())
