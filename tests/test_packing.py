"""From sample lengths to packed rows: planning, the divisor, and the tensors of a row."""

import dataclasses
import math
import random
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3Config

from grpo_async import Batch, Config, Group, Update, divisor, pack, plan_step, probe_gaps
from policy.model_shape import even_length
from policy.packing import Share, plan_rows, spread
from rollout.episode import Sample, SampleInfo, Turn
from support.configs import changed

LENGTHS = st.lists(st.integers(1, 150), max_size=40)
EVEN = st.sampled_from([0, 50, 1_000_000])  # attention alone, both, weights alone


def info(tokens: int, trained: int | None = None, gradient: bool = True) -> SampleInfo:
    trained = tokens - 1 if trained is None else trained
    return SampleInfo(tokens, trained, 0.0, 0.0, gradient, trained, 0, 0, False, "")


def config(**fields) -> Config:
    return changed(Config(), **({"row_tokens": 100, "prompts_per_step": 4} | fields))


# --- rows -----------------------------------------------------------------------------------------


def work_of(plan: list[list[list[int]]], lengths: list[int], even: int) -> list[list[int]]:
    """Work of each rank's rows: n (n + even) of each sample."""
    return [[sum(lengths[i] * (lengths[i] + even) for i in row) for row in rows] for rows in plan]


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 4), EVEN)
def test_rows_hold_every_sample_once_within_capacity(lengths, ranks, even):
    plan = plan_rows(lengths, 100, ranks, even)
    assert len(plan) == ranks and len({len(rows) for rows in plan}) == 1 and plan[0]
    rows = [row for rows in plan for row in rows]
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    for row in rows:
        assert sum(lengths[i] for i in row) <= 100 or len(row) == 1
    least = max(1, -(-sum(min(n, 100) for n in lengths) // 100))
    assert len(rows) <= 2 * least + 2 * ranks  # half-full rows at worst


@settings(deadline=None)
@given(LENGTHS, st.integers(2, 4), EVEN)
def test_ranks_differ_by_no_more_than_the_heaviest_row(lengths, ranks, even):
    work = work_of(plan_rows(lengths, 100, ranks, even), lengths, even)
    sums = [sum(rank) for rank in work]
    assert max(sums) - min(sums) <= max(max(rank) for rank in work)


@pytest.mark.parametrize("ranks", [2, 8])
def test_rows_that_run_together_are_balanced(ranks):
    lengths = np.random.default_rng(0).lognormal(7, 1, 1024).astype(int).clip(1, 8192).tolist()
    work = np.array(work_of(plan_rows(lengths, 8192, ranks, 0), lengths, 0))
    assert work.max(0).sum() <= 1.05 * work.sum() / ranks  # every rank waits for the slowest row
    assert sum(lengths) >= 0.9 * 8192 * work.size  # tokens of room


@pytest.mark.parametrize(("even", "slowest"), [(51_412, 1.06), (373_332, 1.04)])
def test_weights_are_work_beside_attention(even, slowest):
    """64 ranks with 3 rows of 16,384 tokens each: Qwen3-8B and Nemotron 3 Super."""
    lengths = np.random.default_rng(0).lognormal(7.53, 1, 780).astype(int).clip(1, 12_288).tolist()
    mean = sum(length * (length + even) for length in lengths) / 64
    blind, seeing = (plan_rows(lengths, 16_384, 64, known) for known in (0, even))
    assert {len(rows) for rows in blind + seeing} == {3}
    assert waited_for(blind, lengths, even) > 1.15 * mean
    assert waited_for(seeing, lengths, even) < slowest * mean


@pytest.mark.parametrize("ranks", [1, 4])
def test_samples_longer_than_a_row_cost_no_empty_rows(ranks):
    assert all(row for rows in plan_rows([50_000] * 8, 100, ranks, 0) for row in rows)
    plan = plan_rows([50_000] * 100 + [50] * 100, 100, ranks, 0)
    assert sum(map(len, plan)) in range(150, 150 + ranks)


def test_a_small_batch_is_spread_over_the_ranks():
    assert [len(rows[0]) for rows in plan_rows([10] * 8, 100, 4, 0)] == [2, 2, 2, 2]
    shares = plan_rows([30, 9, 30, 9, 9], 100, 3, 0)
    assert sorted(sorted(rows[0]) for rows in shares) == [[0], [1, 3, 4], [2]]


def plan_by_search(
    lengths: list[int], capacity: int, ranks: int, even: int
) -> list[list[list[int]]]:
    """The same rule without a heap: looks at every row for every sample, and starts over."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    least = max(1, sum(min(n, capacity) for n in lengths) / capacity)
    least = max(least, sum(n > capacity // 2 for n in lengths))
    count = math.ceil(least / ranks) * ranks
    while True:
        rows = [[] for _ in range(count)]
        work = [0] * count
        room = [capacity] * count
        for i in order:
            fits = (r for r in range(count) if not rows[r] or room[r] >= lengths[i])
            r = min(fits, key=work.__getitem__, default=None)
            if r is None:
                break
            rows[r].append(i)
            work[r] += lengths[i] * (lengths[i] + even)
            room[r] -= lengths[i]
        else:
            break
        count += ranks
    heaviest_first = sorted(range(count), key=lambda r: -work[r])
    return [[rows[r] for r in heaviest_first[rank::ranks]] for rank in range(ranks)]


def waited_for(plan: list[list[list[int]]], lengths: list[int], even: int) -> int:
    """Work until the last rank is done, where rows that run together wait for the heaviest."""
    return sum(map(max, zip(*work_of(plan, lengths, even), strict=True)))


def test_the_heap_balances_as_well_as_the_search():
    numbers = random.Random(0)
    same = []
    rows = []
    waits = []
    for trial in range(2000):
        longest = numbers.choice([10, 30, 40, 60, 100, 150])
        ranks = numbers.randint(1, 8)
        lengths = [numbers.randint(1, longest) for _ in range(numbers.randint(1, 60))]
        parts = (lengths, 100, ranks, trial % 2 * 50)
        plans = plan_rows(*parts), plan_by_search(*parts)
        same.append(plans[0] == plans[1])
        rows.append([len(plan[0]) for plan in plans])
        waits.append([waited_for(plan, lengths, parts[-1]) for plan in plans])
    ours, theirs = np.array(rows).T
    assert np.mean(same) > 0.9
    assert ours.sum() <= theirs.sum() and (ours <= theirs + 1).all()
    waits = np.array(waits)
    ratios = waits[:, 0] / waits[:, 1]
    assert ratios.mean() <= 1.001 and ratios.max() <= 1.25


def operations(plan, lengths: list[int]) -> int:
    """Bytecodes that a plan executes in its own file."""
    count = 0
    outer = sys.gettrace()

    def trace(frame, event, _):
        nonlocal count
        if frame.f_code.co_filename != plan.__code__.co_filename:
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        count += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        plan(lengths, 8192, 4, 500)
    finally:
        sys.settrace(outer)
    return count


@pytest.mark.parametrize("shape", ["lognormal", "just_over_a_third", "half"])
def test_four_times_the_samples_cost_four_times_the_work(shape):
    lengths = {
        "lognormal": np.random.default_rng(0).lognormal(7, 1, 1024).astype(int).clip(1, 8192),
        "just_over_a_third": np.full(1024, 8192 // 3 + 1),
        "half": np.full(1024, 8192 // 2),
    }[shape].tolist()
    growth = operations(plan_rows, lengths) / operations(plan_rows, lengths[::4])
    assert 3 < growth < 5


def test_the_count_of_operations_detects_a_quadratic_plan():
    lengths = np.random.default_rng(0).lognormal(7, 1, 512).astype(int).clip(1, 8192).tolist()
    assert operations(plan_by_search, lengths) > 8 * operations(plan_by_search, lengths[::4])


# --- the step -------------------------------------------------------------------------------------


def groups_of(*sizes: list[SampleInfo]) -> list[Group]:
    return [Group(slot, 0, 1, list(infos), None) for slot, infos in enumerate(sizes)]


def places(share: Share, k: int = 0) -> list[tuple[int, int]]:
    """The samples of a replica's update k, by (group of the batch, place in the group)."""
    return sorted((share.groups[g], j) for row in share.updates[k].rows for g, j in row)


@pytest.mark.parametrize(("fields", "computed"), [
    ({}, [(0, 0), (0, 1), (2, 0)]),
    ({"skip_zero_advantage": False}, [(0, 0), (0, 1), (1, 0), (2, 0)]),
    ({"skip_zero_advantage": False, "kl_coef": 0.1}, [(0, 0), (0, 1), (1, 0), (2, 0)]),
])  # fmt: skip
def test_skipped_samples_stay_in_the_divisor_and_overlong_ones_leave_it(fields, computed):
    groups = groups_of(
        [info(11), info(21)],
        [info(31, gradient=False)],  # no advantage: skipped, but planned
        [info(41), info(51, trained=0)],  # filtered out: neither
    )
    (share,) = plan_step(groups, config(**fields))
    (update,) = share.updates
    assert (update.planned_tokens, update.planned_sequences) == (10 + 20 + 30 + 40, 4)
    assert places(share) == computed
    assert share.groups == sorted({g for g, _ in computed})


def test_a_plan_counts_the_model_that_it_is_for(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 192, "head_dim": 16, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
    Qwen3Config(**sizes, tie_word_embeddings=False).save_pretrained(tmp_path)
    weights = 3 * (64 * (64 + 2 * 32 + 64) + 3 * 64 * 192 + 2 * 64 + 2 * 16) + 64 + 512 * 64
    even = round(weights / (4 * 16 * 3))
    assert even_length(str(tmp_path), frozen=False) == even
    # Beside adapters the weights take two passes of three.
    assert even_length(str(tmp_path), frozen=True) == round(weights * 2 / 3 / (4 * 16 * 3))
    assert even_length(str(tmp_path / "absent"), frozen=False) == 0
    tokens = np.random.default_rng(0).integers(9, 90, 40).tolist()
    plans = []
    for model in (str(tmp_path), "absent"):
        cfg = dataclasses.replace(config(ranks=4, prompts_per_step=40), model=model)
        plan = plan_step(groups_of(*([info(n)] for n in tokens)), cfg)
        found = [
            [share.groups[g] for g, _ in row] for share in plan for row in share.updates[0].rows
        ]
        plans.append(found)
    planned = (sum(plan_rows(tokens, 100, 4, known), []) for known in (even, 0))
    assert plans == [*planned] and plans[0] != plans[1]


def test_a_step_without_gradient_is_an_empty_row_for_every_rank():
    plan = plan_step(groups_of([info(9, gradient=False)], [info(9, 0)]), config(ranks=3))
    updates = [update for share in plan for update in share.updates]
    assert [update.rows for update in updates] == [[[]]] * 3
    assert [share.groups for share in plan] == [[]] * 3
    assert {(u.planned_tokens, u.planned_sequences) for u in updates} == {(8, 1)}
    (share,) = plan_step(groups_of([info(9, 0)]), config())
    (update,) = share.updates
    assert (update.planned_tokens, update.planned_sequences) == (0, 0)
    assert divisor(0, 0, config()) == 1


def test_updates_split_the_batch_in_slot_order():
    groups = groups_of(*([info(10 * g + 5), info(10 * g + 6)] for g in range(4)))
    plan = plan_step(groups, config(updates_per_batch=2, ranks=2))
    assert [len(share.updates) for share in plan] == [2, 2]
    for k, slots in enumerate(([0, 1], [2, 3])):
        updates = [share.updates[k] for share in plan]
        seen = sorted(at for share in plan for at in places(share, k))
        assert seen == [(g, j) for g in slots for j in (0, 1)]
        assert len({len(update.rows) for update in updates}) == 1
        tokens = sum(10 * g + 4 + 10 * g + 5 for g in slots)
        assert {(u.planned_tokens, u.planned_sequences) for u in updates} == {(tokens, 4)}


ROUTED = {"kind": "megatron", "replay_routing": True}
SAMPLE_INFOS = st.builds(info, st.integers(2, 120), st.sampled_from([None, 0, 1]), st.booleans())


@settings(deadline=None)
@given(
    st.lists(st.lists(SAMPLE_INFOS, min_size=1, max_size=4), min_size=4, max_size=4),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
)
def test_every_sample_is_computed_once_or_has_a_reason_not_to_be(
    infos, updates, ranks, skip, routed
):
    fields = {"updates_per_batch": updates, "ranks": ranks, "skip_zero_advantage": skip}
    fields |= ROUTED if routed else {}
    plan = plan_step(groups_of(*infos), config(**fields))
    seen = sorted(at for share in plan for k in range(updates) for at in places(share, k))
    every = [(g, j, i) for g, group in enumerate(infos) for j, i in enumerate(group)]
    expected = [(g, j) for g, j, i in every if i.trained_tokens and (i.has_gradient or not skip)]
    assert seen == expected
    assert len({tuple(len(update.rows) for update in share.updates) for share in plan}) == 1
    for share in plan:
        rows = [row for update in share.updates for row in update.rows]
        for row in rows:
            lengths = [infos[share.groups[g]][j].tokens for g, j in row]
            assert sum(lengths) <= 100 or len(lengths) == 1
        assert share.groups == sorted({g for k in range(updates) for g, _ in places(share, k)})
        assert share.places(7) == [(7 + share.groups[g], j) for row in rows for g, j in row]
    size = 4 // updates
    for share in plan:
        for k, update in enumerate(share.updates):
            part = [i.trained_tokens for group in infos[k * size : k * size + size] for i in group]
            assert update.planned_tokens == sum(part)
            assert update.planned_sequences == sum(n > 0 for n in part)


SUPER = 373_332  # tokens at which its attention costs what its weights do


def slowest(plan: list[Share], lengths: list[list[int]]) -> int:
    """The work of the replica that has most of it, of matrices and attention."""
    of_replicas = ([lengths[g][j] for g, j in share.places(0)] for share in plan)
    return max(sum(n * (SUPER + n) for n in of_replica) for of_replica in of_replicas)


@pytest.mark.parametrize(("groups", "replicas", "alike", "most"), [
    (256, 8, 0.0, 0.126),  # Super's first stage of RL: 0.89 where samples are dealt out
    (256, 8, 0.5, 0.126),  # lengths of a group are more alike than those of two
    (32, 8, 0.5, 0.16),  # an eighth of its batch (`train_parts`)
    (256, 32, 0.0, 0.035),
    (16, 8, 0.5, 0.22),
])  # fmt: skip
def test_a_replica_with_routes_needs_few_groups_and_none_has_more_work(
    groups, replicas, alike, most, monkeypatch
):
    monkeypatch.setattr("policy.model_shape.even_length", lambda *_: SUPER)
    random = np.random.default_rng(0)
    normal = alike**0.5 * random.normal(size=(groups, 1))
    normal = normal + (1 - alike) ** 0.5 * random.normal(size=(groups, 16))
    lengths = (1000 + np.exp(9 + normal)).clip(1, 65536).astype(int).tolist()
    batch = groups_of(*([info(n) for n in group] for group in lengths))
    fields = {"row_tokens": 65536, "prompts_per_step": groups, "ranks": replicas}
    whole, dealt = (plan_step(batch, config(**fields | more)) for more in (ROUTED, {}))
    assert whole == plan_step(batch, config(**fields, **ROUTED))
    needed, before = ([len(share.groups) / groups for share in plan] for plan in (whole, dealt))
    assert np.mean(needed) <= most < 0.4 * np.mean(before)
    assert slowest(whole, lengths) <= 1.02 * slowest(dealt, lengths)
    rows, fewest = (len(plan[0].updates[0].rows) for plan in (whole, dealt))
    assert rows <= 1.2 * fewest + 1


def test_a_group_is_split_where_replicas_would_stand_idle():
    batch = groups_of([info(50)] * 8, [info(20)] * 4)
    plan = plan_step(batch, config(ranks=4, **ROUTED))
    tokens = [sum(batch[g].infos[j].tokens for g, j in share.places(0)) for share in plan]
    assert sum(tokens) == 480 and max(tokens) <= 150


def test_the_sample_that_balances_best_is_given_away():
    lengths = {(0, 0): 10, (0, 1): 7, (0, 2): 5}  # works of 100, 49 and 25
    assert spread(lengths, 2, 0) == [[(0, 1), (0, 2)], [(0, 0)]]


# --- the row --------------------------------------------------------------------------------------


@st.composite
def samples(draw):
    n = draw(st.integers(1, 9))
    numbers = np.random.default_rng(draw(st.integers(0, 9)))
    mask_T = numbers.random(n) < 0.6
    mask_T[0] = False
    return Sample(
        tokens_T=numbers.integers(0, 200_000, n, dtype=np.int32),
        mask_T=mask_T,
        engine_logp_T=np.where(mask_T, -numbers.random(n), 0).astype(np.float32),
        version_T=np.where(mask_T, 3, -1).astype(np.int32),
        flaw_T=np.where(mask_T, numbers.integers(0, 3, n), 0).astype(np.int8),
        truncated=False,
        reward=float(numbers.integers(0, 2)),
        score=float(numbers.integers(0, 2)),
        advantage=draw(st.sampled_from([-1.5, 0.0, 2.0])),
    )


@settings(deadline=None)
@given(st.lists(samples(), min_size=1, max_size=5))
def test_a_row_is_its_samples_side_by_side(parts):
    penalties = {"tool_call": -7.0, "thinking": -3.0}
    batch = pack(parts, Update(17, 3, []), config(penalties=penalties))
    assert (batch.planned_tokens, batch.planned_sequences) == (17, 3)
    assert batch.old_logp_T is None and batch.ref_logp_T is None
    start = 0
    for i, part in enumerate(parts):
        here = slice(start, start := start + len(part.tokens_T))
        assert batch.tokens_T[here].tolist() == part.tokens_T.tolist()
        assert batch.positions_T[here].tolist() == list(range(len(part.tokens_T)))
        assert (batch.seq_T[here] == i).all()
        assert batch.mask_T[here].tolist() == part.mask_T.tolist()
        assert batch.engine_logp_T[here].tolist() == part.engine_logp_T.tolist()
        expected = [(part.advantage, -7.0, -3.0)[flaw] for flaw in part.flaw_T]
        assert batch.advantage_T[here].tolist() == expected
        assert batch.score_N[i] == part.score
    assert len(batch.tokens_T) == start and len(batch.score_N) == len(parts)


def test_an_empty_row_is_one_token_that_trains_nothing():
    batch = pack([], Update(5, 2, [[]]), config())
    kinds = {k: str(v.dtype)[6:] for k, v in vars(batch).items() if hasattr(v, "dtype")}
    expected = dict.fromkeys(("tokens_T", "positions_T", "seq_T"), "int64") | {"mask_T": "bool"}
    assert kinds == expected | dict.fromkeys(("engine_logp_T", "advantage_T", "score_N"), "float32")
    assert len(batch.tokens_T) == 1 and not batch.mask_T.any()


@pytest.mark.parametrize(("row_tokens", "rows"), [(1, 3), (23, 3), (24, 2), (36, 1)])
def test_a_row_of_a_probe_holds_as_many_engines_as_it_has_room_for(row_tokens, rows):
    """Each of 3 engines gives two answers of 4 tokens to a prompt of 2, so 12 tokens each."""
    answers = []
    for logp in (-1.0, -2.0, math.nan):
        answers.append([Turn([1, 2], [3] * 4, [logp] * 4, [0] * 4, "length") for _ in range(2)])
    seen = []

    def logprobs(batches: list[Batch]) -> list[torch.Tensor]:
        """A trainer that is 0.5 nats away from answers with even numbers, and 1 from the others."""
        seen.extend(batches)
        return [b.engine_logp_T + 0.5 * (1 + b.seq_T % 2) for b in batches]

    cfg = config(row_tokens=row_tokens)
    first, second, third = probe_gaps(SimpleNamespace(logprobs=logprobs), answers, cfg)
    assert (first, second) == (0.75, 0.75) and math.isnan(third)
    assert len(seen) == rows and sum(len(batch.tokens_T) for batch in seen) == 36
