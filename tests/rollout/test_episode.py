"""From turns to training samples: contiguity, masks, versions, flaws and experts."""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs import Reward
from rollout.episode import FLAWS, Episode, Sample, Turn, stitch
from support.samples import routed, turn

TOKENIZER = SimpleNamespace(decode=lambda ids: f"<{ids}>")


def of_vllm(ids: tuple, logps: list, spans: list, reason: str, experts=None) -> SimpleNamespace:
    """An answer as vLLM gives it; `spans` are (start, end, version)."""
    versions = [SimpleNamespace(start=s, end=e, version=v) for s, e, v in spans]
    given = {"token_ids": ids, "logprobs": SimpleNamespace(logprobs=logps), "finish_reason": reason}
    return SimpleNamespace(**given, weight_versions=versions, routed_experts=experts)


def columns(sample: Sample) -> list[tuple]:
    """(token, trained, logp, version, flaw) of each token."""
    arrays = (sample.tokens_T, sample.mask_T, sample.engine_logp_T, sample.version_T)
    return list(zip(*(a.tolist() for a in (*arrays, sample.flaw_T)), strict=True))


def test_a_single_turn():
    (sample,) = stitch([turn([7, 8], [1, 2], version=3)])
    prompt = [(7, False, 0, -1, 0), (8, False, 0, -1, 0)]
    assert columns(sample) == [*prompt, (1, True, -0.25, 3, 0), (2, True, -0.5, 3, 0)]
    assert not sample.truncated and sample.advantage == 0


def test_turns_that_continue_are_one_sample_and_the_environments_words_are_masked():
    first = turn([7], [1, 2], version=3)
    second = turn([7, 1, 2, 9, 9], [4], version=5, reason="length")
    (sample,) = stitch([first, second])
    before = [(7, False, 0, -1, 0), (1, True, -0.25, 3, 0), (2, True, -0.5, 3, 0)]
    after = [(9, False, 0, -1, 0), (9, False, 0, -1, 0), (4, True, -1.0, 5, 0)]
    assert columns(sample) == before + after
    assert sample.truncated


def test_versions_within_a_turn_stay_with_their_tokens():
    (sample,) = stitch([Turn([7], [1, 2, 3], [-1.0] * 3, [2, 2, 3], "stop")])
    assert sample.version_T.tolist() == [-1, 2, 2, 3]
    info = sample.info()
    assert (info.oldest_version, info.newest_version) == (2, 3)


@pytest.mark.parametrize("prompt", [
    [7, 1, 3, 9],  # a sampled token came back as another one
    [7, 1],  # history was cut
    [9],  # history was rewritten
    [],
])  # fmt: skip
def test_a_violation_of_contiguity_starts_a_new_sample(prompt):
    samples = stitch([turn([7], [1, 2]), turn(prompt, [4]), turn([*prompt, 4, 5], [6])])
    assert [s.tokens_T.tolist() for s in samples] == [[7, 1, 2], [*prompt, 4, 5, 6]]
    masks = [[False, True, True], [False] * len(prompt) + [True, False, True]]
    assert [s.mask_T.tolist() for s in samples] == masks


def test_flawed_turns_mark_their_own_tokens_only():
    (sample,) = stitch([turn([7], [1, 2], text="<tool_call>"), turn([7, 1, 2, 9], [4])])
    call, thinking = FLAWS.index("tool_call"), FLAWS.index("thinking")
    assert sample.flaw_T.tolist() == [0, call, call, 0, 0] and sample.flaw_T.dtype == np.int8
    (sample,) = stitch([turn([7], [1]), turn([7, 1, 9], [4, 5], text="</think></think>")])
    assert sample.flaw_T.tolist() == [0, 0, 0, thinking, thinking]


def test_flaws_are_found_and_forgotten_by_name():
    turns = [turn([7], [1], text="<tool_call>"), turn([7, 1], [2], text="</think></think>")]
    for kept in ([], ["tool_call"], ["thinking"], ["thinking", "tool_call"]):
        (sample,) = stitch(turns)
        sample.keep_flaws(kept)
        assert sample.flawed("tool_call").tolist() == [False, "tool_call" in kept, False]
        assert sample.flawed("thinking").tolist() == [False, False, "thinking" in kept]
        assert sample.flaw_T.dtype == np.int8


@pytest.mark.parametrize(("opening", "flawed"), [("", True), ("<think>", False)])
def test_a_thought_that_the_prompt_opened_is_no_flaw(opening, flawed):
    """Cut off, its tool call is a part of the thought; without a thought it is left over."""
    cut = turn([7], [1], text="I could <tool_call>", reason="length")
    cut.opening = opening
    (sample,) = stitch([cut])
    assert sample.flaw_T.any() == flawed


def test_an_episode_is_truncated_with_all_its_sequences_where_its_last_turn_was_cut_off():
    turns = [turn([7], [1], reason="length"), turn([7, 1], [2])]
    assert [s.truncated for s in stitch(turns)] == [False]
    turns[1].prompt_ids = [8]
    assert [s.truncated for s in stitch(turns)] == [False, False]
    turns[1].finish_reason = "length"
    assert [s.truncated for s in stitch(turns)] == [True, True]
    assert [s.continues for s in stitch(turns)] == [False, True]


IDS = st.lists(st.integers(0, 5), max_size=4)


@given(st.lists(st.tuples(IDS, IDS.filter(len), st.booleans()), min_size=1, max_size=5))
def test_stitching_neither_loses_nor_invents_a_token(steps):
    turns, seen = [], []
    for k, (added, answer, keeps) in enumerate(steps):
        prompt = [*seen, *added] if keeps else [77 + k, *added]
        turns.append(turn(prompt, answer, version=k))
        seen = [*prompt, *answer]
    samples = stitch(turns)
    breaks = sum(not keeps for _, _, keeps in steps[1:])
    assert len(samples) == 1 + breaks
    sampled = [t for s in samples for t in s.tokens_T[s.mask_T].tolist()]
    assert sampled == [t for _, answer, _ in steps for t in answer]
    versions = [v for s in samples for v in s.version_T[s.mask_T].tolist()]
    assert versions == [k for k, (_, answer, _) in enumerate(steps) for _ in answer]
    logps = np.concatenate([s.engine_logp_T for s in samples])
    tokens = np.concatenate([s.tokens_T for s in samples])
    mask = np.concatenate([s.mask_T for s in samples])
    assert (logps == np.where(mask, -0.25 * tokens, 0)).all()
    ends = [t.prompt_ids + t.token_ids for t in turns]
    assert all(s.tokens_T.tolist() in ends for s in samples)


def test_info():
    (sample,) = stitch([turn([7], [1, 2], 3), turn([7, 1, 2, 9], [4], 5, reason="length")])
    sample.reward, sample.score, sample.advantage = 0.5, 0.25, -1.0
    expected = {"tokens": 5, "trained_tokens": 3, "response_tokens": 3, "has_gradient": True}
    expected |= {"reward": 0.5, "score": 0.25, "oldest_version": 3, "newest_version": 5}
    expected |= {"truncated": True, "continues": False, "cache_hits": 0.0, "allowed_tokens": -1}
    expected |= {"env": "", "dataset": "", "components": {}, "judging": 0.0}
    assert dataclasses.asdict(sample.info()) == expected


def test_info_counts_the_answer_of_a_sample_that_lost_its_loss():
    (sample,) = stitch([turn([7], [1, 2], 3)])
    sample.mask_T[:] = False  # overlong_filtering
    info = sample.info()
    assert (info.trained_tokens, info.response_tokens, info.has_gradient) == (0, 2, False)


@pytest.mark.parametrize(("advantage", "text", "expected"), [
    (0.0, "fine", False), (0.5, "fine", True), (0.0, "<tool_call>", True),
])  # fmt: skip
def test_a_flawed_sample_without_advantage_still_has_a_gradient(advantage, text, expected):
    (sample,) = stitch([turn([7], [1], text=text)])
    sample.advantage = advantage
    assert sample.info().has_gradient is expected


def test_the_empty_sample_trains_nothing():
    info = Sample.empty().info()
    assert (info.tokens, info.trained_tokens, info.has_gradient) == (1, 0, False)


def test_record():
    turns = [Turn([7], [1, 2, 3], [-1.0] * 3, [2, 2, 3], "stop", "a"), turn([9], [4], 3, "b")]
    episode = Episode(turns, Reward(1.0, {"reason": None}))
    row = {"_line": 5, "agent_ref": {"name": "math"}, "dataset": "aime"}
    sample = episode.samples(row)[-1]
    sample.reward, sample.advantage = 1.0, 0.25
    expected = {"row": 5, "env": "math", "dataset": "aime", "prompt": "<[7]>"}
    expected |= {"response": ["a", "b"], "reward": 1.0, "advantage": 0.25}
    expected |= {"versions": [[2, 2], [3, 2]], "finish_reason": "stop", "info": {"reason": None}}
    assert episode.record(TOKENIZER, row, sample) == expected


@pytest.mark.parametrize(("dataset", "name"), [(None, ""), ("aime", "aime"), (7, "7")])
def test_samples_know_what_row_and_environment_say_of_them(dataset, name):
    """Each sequence of the episode does; of `info` they keep what can be averaged."""
    info = {"right": True, "tests": 3, "reason": "slow", "nan": math.nan, "huge": 10**400}
    turns = [turn([7], [1]), turn([9], [4])]  # the second prompt starts anew
    row = {"agent_ref": {"name": "math"}, "dataset": dataset}
    first, second = Episode(turns, Reward(0.5, info)).samples(row)
    assert (first.continues, second.continues) == (False, True)
    for sample in (first, second):
        assert (sample.env, sample.dataset, sample.score) == ("math", name, 0.5)
        assert sample.info().components == {"right": 1.0, "tests": 3.0}


def test_a_turn_takes_ids_logprobs_and_version_spans_from_vllm():
    answer = of_vllm((7, 8, 9), [-0.5, -1.0, -1.5], [(0, 2, "4"), (2, 3, "5")], "length")
    expected = Turn([1, 2], [7, 8, 9], [-0.5, -1.0, -1.5], [4, 4, 5], "length")
    assert Turn.from_vllm([1, 2], answer) == expected
    assert Turn.from_vllm([1, 2], answer, cached=2).cached == 2
    answer.finish_reason = "abort"
    with pytest.raises(RuntimeError, match="vLLM ended a request with 'abort'"):
        Turn.from_vllm([1, 2], answer)
    answer.finish_reason, answer.token_ids = "stop", (7, 8)
    with pytest.raises(RuntimeError, match="2 tokens, 3 logprobs and 3 versions"):
        Turn.from_vllm([1, 2], answer)


def test_prefix_cache_hits_are_those_of_later_turns():
    turns = [turn([7, 8], [1, 2]), turn([7, 8, 1, 2, 9], [4]), turn([5], [6])]
    for made, cached in zip(turns, (2, 4, 1), strict=True):
        made.cached = cached
    longer = turn([7, 8, 1, 2, 9, 4, 3, 3, 3, 3], [5])
    longer.cached = 8
    assert [sample.info().cache_hits for sample in stitch([*turns[:2], longer])] == [12 / 15]
    alone = [sample.cache_hits for sample in stitch(turns)]
    assert alone == [0.8, -1.0], "a sequence of one turn has no later prompt"


def test_a_token_keeps_the_experts_that_read_it_first():
    turns = [routed([7, 8], [1, 2], 0), routed([7, 8, 1, 2, 9], [4], 100)]
    (sample,) = stitch(turns)
    assert sample.routes_T.dtype == np.int16 and sample.routes_T.shape == (6, 3, 2)
    assert (sample.routes_T[:3] == turns[0].routes[0]).all()
    assert (sample.routes_T[3:5] == turns[1].routes[0][3:]).all()
    assert (sample.routes_T[5] == -1).all(), "the engine never read the last token"
    (plain,) = stitch([turn([7], [1])])
    assert plain.routes_T is None
    (partly,) = stitch([turns[0], turn([7, 8, 1, 2, 9], [4])])
    assert partly.routes_T is None, "half of them would be taken for all"


def test_an_answer_that_another_engine_finished_has_the_experts_of_that_one():
    experts = np.ones((3, 3, 2), np.int16)  # it read prompt and draft
    answer = of_vllm((9,), [-1.5], [(0, 1, "5")], "stop", experts)
    (sample,) = stitch([turn([7, 8], [1]).extended(Turn.from_vllm([], answer))])
    assert (sample.routes_T[:3] == 1).all() and len(sample.routes_T) == 4
