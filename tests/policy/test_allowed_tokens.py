"""Logprobs over what the engine chose among, by enumeration of small vocabularies."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from grpo_async import Config, Update, pack
from policy.allowed_tokens import Allowed
from policy.logprobs import Entropy, Head, TokenLogprobs
from rollout.drafts import DraftedCall, last_sets, unreported
from rollout.episode import Sample, Turn, stitch
from runtime.checkpoints import archive
from support.configs import changed
from support.ranks import in_forks

N, H, V = 37, 8, 50
TEMPERATURE = 0.7


def drawn(seed: int = 0) -> tuple:
    """Hidden states, head, targets, the set of each, and a gradient of the logprobs."""
    draw = torch.Generator().manual_seed(seed)
    hidden_NH = torch.randn(N, H, generator=draw, dtype=torch.float64)
    weight_VH = torch.randn(V, H, generator=draw, dtype=torch.float64)
    sizes = [1, V, *torch.randint(1, 20, (N - 2,), generator=draw).tolist()]
    sets = [torch.randperm(V, generator=draw)[:size].tolist() for size in sizes]
    grad_N = torch.randn(N, generator=draw, dtype=torch.float64)
    return hidden_NH, weight_VH, torch.tensor([ids[0] for ids in sets]), sets, grad_N


def choices(sets: list[list[int]]):
    count_T, ids_M = map(torch.from_numpy, Allowed.of(sets))
    return Allowed(count_T, ids_M).at(torch.arange(len(sets)))


def by_enumeration(hidden_NH, weight_VH, target_N, sets, grad_N) -> list[torch.Tensor]:
    """Logprobs, both gradients, and the sum of the entropies."""
    h, w = hidden_NH.clone().requires_grad_(), weight_VH.clone().requires_grad_()
    logits_NV = h @ w.T / TEMPERATURE
    rows = zip(logits_NV, target_N, sets, strict=True)
    logp_N = torch.stack([z_V[y] - z_V[ids].logsumexp(0) for z_V, y, ids in rows])
    logp_N.backward(grad_N)
    of_sets = [z_V[ids].log_softmax(0) for z_V, ids in zip(logits_NV, sets, strict=True)]
    return [logp_N.detach(), h.grad, w.grad, -sum((x.exp() * x).sum() for x in of_sets).detach()]


def computed(hidden_NH, weight_VH, target_N, grad_N, chunk: int, head: Head) -> list[torch.Tensor]:
    h, w = hidden_NH.clone().requires_grad_(), weight_VH.clone().requires_grad_()
    logp_N = TokenLogprobs.apply(h, w, target_N, TEMPERATURE, chunk, head)
    logp_N.backward(grad_N)
    return [logp_N.detach(), h.grad, w.grad, head.entropy.sums[0]]


@pytest.mark.parametrize("chunk", [1, 10, 1000])
def test_value_gradients_and_entropy_are_those_of_the_sets_alone(chunk):
    hidden_NH, weight_VH, target_N, sets, grad_N = drawn()
    head = Head(entropy=Entropy(torch.device("cpu")), choices=choices(sets))
    found = computed(hidden_NH, weight_VH, target_N, grad_N, chunk, head)
    expected = by_enumeration(hidden_NH, weight_VH, target_N, sets, grad_N)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert found[0][0] == 0, "of a set of one the only token is certain"


def test_sets_of_the_whole_vocabulary_change_nothing():
    hidden_NH, weight_VH, target_N, _, grad_N = drawn()
    everything = choices([list(range(V))] * N)
    found = [
        computed(hidden_NH, weight_VH, target_N, grad_N, 10, Head(entropy=entropy, choices=chosen))
        for entropy, chosen in ((Entropy(torch.device("cpu")), c) for c in (everything, None))
    ]
    for truncated, whole in zip(*found, strict=True):
        torch.testing.assert_close(truncated, whole)


def test_what_is_outside_of_all_sets_has_no_gradient():
    hidden_NH, weight_VH, target_N, sets, grad_N = drawn()
    used = [[i for i in ids if i < 40] or [0] for ids in sets]
    target_N = torch.tensor([ids[0] for ids in used])
    head = Head(entropy=Entropy(torch.device("cpu")), choices=choices(used))
    _, _, d_weight_VH, _ = computed(hidden_NH, weight_VH, target_N, grad_N, 10, head)
    assert not d_weight_VH[40:].any() and d_weight_VH[:40].any()


def slice_of(rank: int, store: str) -> None:
    """Two slices of a vocabulary of 50, the second one padded to 30, against the whole."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    hidden_NH, weight_VH, target_N, sets, grad_N = drawn()
    padded = torch.cat([weight_VH, torch.full((10, H), 9.0, dtype=torch.float64)])
    entropy = Entropy(torch.device("cpu"))
    head = Head(dist.group.WORLD, 30 * rank, V, entropy, choices(sets))
    part = computed(hidden_NH, padded[30 * rank :][:30], target_N, grad_N, 10, head)
    for of_all in (part[1], part[3]):
        dist.all_reduce(of_all)
    whole = by_enumeration(hidden_NH, weight_VH, target_N, sets, grad_N)
    whole[2] = torch.cat([whole[2], torch.zeros(10, H)])[30 * rank :][:30]
    for mine, theirs in zip(part, whole, strict=True):
        torch.testing.assert_close(mine, theirs)
    dist.destroy_process_group()


def test_slices_of_the_vocabulary_are_one(tmp_path):
    """Sets lie in one slice, in the other or in both."""
    in_forks(slice_of, (str(tmp_path / "store"),), 2)


# --- from the engine's lists to a packed row ------------------------------------------------------


def turn(prompt: list[int], ids: list[int], sets: list[list[int]] | None) -> Turn:
    allowed = Allowed.of(sets) if sets is not None else None
    n = len(ids)
    return Turn(prompt, ids, [-1.0] * n, [0] * n, "stop", allowed=allowed)


FIRST = turn([1, 2], [3, 4], [[3, 9], [4]])
SECOND = turn([1, 2, 3, 4, 5], [6], [[7, 6, 8]])


def test_sets_follow_their_tokens_over_turns_and_rows():
    (sample,) = stitch([FIRST, SECOND])
    assert sample.allowed_T.tolist() == [0, 0, 2, 1, 0, 3]
    assert sample.allowed_M.tolist() == [3, 9, 4, 7, 6, 8]
    row = pack([sample, Sample.empty(), sample], Update(6, 2, []), Config())
    assert row.allowed.count_T.tolist() == [0, 0, 2, 1, 0, 3, 0, 0, 0, 2, 1, 0, 3]
    of_second = row.allowed.at(torch.tensor([12, 9]))
    assert of_second.first_N.tolist() == [9, 6] and of_second.count_N.tolist() == [3, 2]


def test_a_draft_and_its_rest_are_the_whole_answer():
    whole = turn([1], [2, 3, 4], [[2], [3, 5], [4, 6, 7]])
    draft = turn([1], [2], [[2]])
    assert draft.extended(whole.after(1)).allowed.ids_M.tolist() == whole.allowed.ids_M.tolist()
    assert whole.after(2).allowed.ids_M.tolist() == [4, 6, 7]
    pieces = [turn([], [], None), whole.after(0), whole.after(2)]
    (joined,) = DraftedCall([1], [pieces]).turns()
    assert joined.prompt_ids == [1] and joined.token_ids == [2, 3, 4, 4]
    assert joined.allowed.count_T.tolist() == [1, 2, 3, 3]
    assert joined.allowed.ids_M.tolist() == [2, 3, 5, 4, 6, 7, 4, 6, 7]
    assert turn([1], [], None).extended(whole).allowed is whole.allowed


def lists(*sets: list[int]):
    """vLLM's SamplingMaskLists of one step: without offsets where it has one token."""
    ends = np.cumsum([0, *map(len, sets)])
    ids = np.array(sum(sets, []), np.int32)
    return SimpleNamespace(token_ids=ids, offsets=ends if len(sets) > 1 else None)


@pytest.mark.parametrize("known", [0, 1, 2, 3, 4, 5, 6, 9])
def test_a_report_has_the_sets_of_its_new_tokens(known):
    sets = [[1], [2, 9], [3, 8, 7], [4], [5, 6]]
    steps = [lists([1]), lists([2, 9], [3, 8, 7], [4]), lists([5, 6])]
    found = last_sets(steps, max(0, 5 - known))
    assert found.count_T.tolist() == [len(ids) for ids in sets[known:]]
    assert found.ids_M.tolist() == sum(sets[known:], [])
    assert {x.dtype for x in found} == {np.dtype(np.int32)}


def test_a_report_does_not_look_at_sets_that_are_known():
    """Each is of the whole answer else, every few seconds, for each request of an engine."""
    state = SimpleNamespace(
        sampling_mask_chunks=[None] * 1000 + [lists([3, 4])],  # None has no ids
        _weight_version_spans=lambda: [SimpleNamespace(version="0", start=0, end=1001)],
        _new_completion_output=lambda *_: SimpleNamespace(
            token_ids=[3] * 1001,
            logprobs=SimpleNamespace(logprobs=[-1.0] * 1001),
            routed_experts=None,
            sampling_mask=None,
        ),
    )
    new = unreported(1003, turn([1], [3] * 3, [[3]] * 3), state)
    assert new.token_ids == [3] and new.allowed.ids_M.tolist() == [3, 4]


@pytest.mark.parametrize(
    ("sets", "what"),
    [
        ([[3, 9]], "returned 1 token sets for 2 sampled tokens"),
        ([[3, 9], []], "returned 1 token sets for 2 sampled tokens"),
        ([[3, 9], [4], [5]], "returned 3 token sets for 2 sampled tokens"),
        ([[3, 9], [3]], "token 4 was sampled, but is not in the set"),
    ],
)
def test_a_token_without_its_set_is_an_error(sets, what):
    with pytest.raises(RuntimeError, match=what):
        Sample.of([turn([1, 2], [3, 4], sets)])


def test_a_turn_without_sets_beside_others_is_an_error():
    with pytest.raises(RuntimeError, match="returned 0 token sets for 1 sampled tokens"):
        Sample.of([FIRST, turn([1, 2, 3, 4, 5], [6], None)])


def test_a_sample_without_sets_where_sampling_is_truncated_is_an_error():
    truncated = changed(Config(), top_p=0.9)
    plain = Sample.of([turn([1], [2], None)])
    assert pack([plain], Update(1, 1, []), Config()).allowed is None
    assert pack([Sample.empty()], Update(1, 1, []), truncated).allowed.count_T.tolist() == [0]
    for samples, cfg in (([plain], truncated), ([plain, Sample.of([FIRST])], Config())):
        with pytest.raises(ValueError, match="a sample has no token sets.*expected them.*top_p"):
            pack(samples, Update(1, 1, []), cfg)
    plain.mask_T &= False
    assert pack([plain, Sample.of([FIRST])], Update(1, 1, []), truncated).allowed is not None


def test_a_file_keeps_apart_samples_with_sets_and_without(tmp_path):
    """Such as a group of which an episode ended before the policy had said anything."""
    mute = Sample.of([turn([5, 6, 7], [], None)])
    path = str(tmp_path / "step_000001.npz")
    archive.write_groups(path, [(0, 0, 0)], [], [mute, Sample.of([FIRST]), mute])
    _, read = archive.read_groups(path)
    row = pack(read, Update(2, 3, []), changed(Config(), top_p=0.9))
    assert row.allowed.count_T.tolist() == [0, 0, 0, 0, 0, 2, 1, 0, 0, 0]
    assert row.allowed.at(row.mask_T.nonzero().squeeze(1)).first_N.tolist() == [0, 2]


def test_sets_with_other_ids_than_they_count_are_an_error():
    sample = Sample.of([FIRST])
    sample.allowed_M = sample.allowed_M[:-1]
    with pytest.raises(ValueError, match="the sets of a sample have 2 ids, expected 3"):
        pack([sample], Update(2, 1, []), changed(Config(), top_p=0.9))


def test_a_trained_token_with_an_empty_set_is_an_error():
    count_T, ids_M = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([4, 5])
    with pytest.raises(ValueError, match="a trained token has no set"):
        Allowed(count_T, ids_M).at(torch.tensor([0, 1]))


def test_a_missing_answer_of_the_engine_is_an_error():
    from runtime.engines.engine import take_sets

    answer = SimpleNamespace(
        sampling_mask=SimpleNamespace(token_ids=[[1, 2], [3]]), token_ids=[1, 3]
    )
    take_sets([answer])
    assert answer.sampling_mask.count_T.tolist() == [2, 1]
    answer.sampling_mask = None
    with pytest.raises(RuntimeError, match="vLLM returned no token sets for 2 tokens"):
        take_sets([answer])


def test_wide_and_narrow_sets_share_a_chunk():
    """A set of 2,048 beside sets of one, as rows of a chunk are."""
    sets = [list(range(2048)), [7], [9]]
    logits_CV = torch.zeros(3, 4096)
    choices(sets).keep(logits_CV, slice(0, 3), 0)
    assert np.isfinite(logits_CV.numpy()).sum(1).tolist() == [2048, 1, 1]
