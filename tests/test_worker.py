"""What a rollout worker makes of a group: shaped rewards, advantages, samples, the log."""

import json
from types import SimpleNamespace

import pytest

import grpo_async
from envs import Reward, registry
from envs.services import Away
from grpo_async import Config, LowEffort, RolloutWorker, Slot, shaped_reward
from rollout.episode import FLAWS, Episode, Request, Turn, stitch
from support.actors import Actor
from support.configs import changed
from support.samples import asking, routed, turn

TOKENIZER = SimpleNamespace(decode=lambda ids, **_: f"<{ids}>")
ROW = asking("1 + 1?", "math", _line=5)
LOW = "{reasoning effort: low}"
EFFORT = LowEffort(weight=1.0, tokens=10)


@pytest.mark.parametrize(("messages", "rule", "expected"), [
    ([f"1 + 1? {LOW}"], EFFORT, 1.8),
    (["1 + 1?"], EFFORT, 1.0),
    ([LOW, "and now?"], EFFORT, 1.0),  # only the last message counts
    (["before", f"now {LOW}"], EFFORT, 1.8),
    ([f"1 + 1? {LOW}"], LowEffort(), 1.0),  # off
    ([f"1 + 1? {LOW}"], LowEffort(weight=1.0, tokens=10, marker="be brief"), 1.0),
    (["1 + 1? be brief"], LowEffort(weight=1.0, tokens=10, marker="be brief"), 1.8),
    (["1 + 1?\n\\be 'brief'"], LowEffort(weight=1.0, tokens=10, marker="\n\\be 'brief'"), 1.8),
    ([("system", LOW)], EFFORT, 1.0),
    ([f"1 + 1? {LOW}", ("assistant", "a call"), ("tool", "its result")], EFFORT, 1.8),
    (["1 + 1?", ("assistant", LOW)], EFFORT, 1.0),
    ([[{"type": "input_text", "text": f"1 + 1? {LOW}"}]], EFFORT, 1.8),
])  # fmt: skip
def test_low_effort_is_asked_for_by_the_last_user_message(messages, rule, expected):
    pairs = [m if isinstance(m, tuple) else ("user", m) for m in messages]
    row = {"responses_create_params": {"input": [{"role": r, "content": m} for r, m in pairs]}}
    turns = [turn([7], [1] * 9), turn([7, *[1] * 9], [2, 2])]  # the last answer's length counts
    reward = shaped_reward(row, Episode(turns, Reward(1)), rule)
    assert reward == pytest.approx(expected) and isinstance(reward, float)


@pytest.fixture
def finish(tmp_path, monkeypatch):
    """Lets a worker finish episodes; returns its samples, their infos and what it wrote."""
    monkeypatch.setattr("rollout.sampler.load_tokenizer", lambda model: TOKENIZER)

    def finish(episodes, row=ROW, evaluation=None, **fields):
        cfg = changed(Config(), run_dir=str(tmp_path), prompts_per_step=4, **fields)
        slot = Slot(9, evaluation)
        infos, samples, lines = RolloutWorker(cfg).finish(row, slot, episodes)
        return samples, infos, [json.loads(line) for line in lines.splitlines()]

    return finish


def test_a_group_is_compared_and_written(finish):
    two = [turn([7], [1], text="a\nb"), turn([9], [2, 3])]  # not contiguous: two samples
    values = [(two, 3), ([turn([7], [4])], 1), ([turn([7], [5])], 2)]
    samples, infos, lines = finish([Episode(t, Reward(v, {"x": set()})) for t, v in values])
    assert [s.tokens_T.tolist() for s in samples] == [[7, 1], [9, 2, 3], [7, 4], [7, 5]]
    assert [s.reward for s in samples] == [s.score for s in samples] == [3, 3, 1, 2]
    assert [s.continues for s in samples] == [False, True, False, False]
    expected = [2.121317, 2.121317, -2.121317, 0]
    assert [s.advantage for s in samples] == pytest.approx(expected, abs=1e-5)
    assert infos == [sample.info() for sample in samples]
    found = [(line["step"], line["slot"], line["reward"], line["response"]) for line in lines]
    assert found == [(3, 9, 3, ["a\nb", "fine"]), (3, 9, 1, ["fine"]), (3, 9, 2, ["fine"])]


def test_the_score_is_the_reward_before_it_was_shaped(finish):
    row = asking(f"1 + 1? {LOW}", "math", _line=5)
    samples, infos, _ = finish([Episode([turn([7], [1])], Reward(1))], row, low_effort=EFFORT)
    assert samples[0].reward == pytest.approx(1.9) and samples[0].score == infos[0].score == 1


@pytest.mark.parametrize("filtering", [False, True])
def test_overlong_filtering_keeps_the_reward_in_the_baseline(finish, filtering):
    cut = Episode([turn([7], [1, 2], reason="length")], Reward(0))
    done = Episode([turn([7], [3])], Reward(1))
    samples, infos, _ = finish([cut, done], overlong_filtering=filtering)
    assert [i.trained_tokens for i in infos] == [0 if filtering else 2, 1]
    assert [s.advantage for s in samples] == [-1, 1]


def test_overlong_filtering_takes_all_sequences_of_an_episode(finish):
    """Its history was rewritten after the first turn, so the episode is two sequences."""
    cut = Episode([turn([7], [1, 2]), turn([9], [3], reason="length")], Reward(0))
    _, infos, _ = finish([cut, Episode([turn([7], [3])], Reward(1))], overlong_filtering=True)
    assert [i.trained_tokens for i in infos] == [0, 0, 1]


@pytest.mark.parametrize(("penalties", "penalised"), [
    ({}, []),
    ({"tool_call": -5.0}, ["tool_call"]),
    ({"thinking": -2.0}, ["thinking"]),
    ({"tool_call": -5.0, "thinking": -2.0}, ["tool_call", "thinking"]),
])  # fmt: skip
def test_each_flaw_has_a_penalty_of_its_own(finish, penalties, penalised):
    texts = {"tool_call": "<tool_call>", "thinking": "a</think>b</think>"}
    episodes = [Episode([turn([7], [1], text=text)], Reward(1)) for text in texts.values()]
    samples, infos, _ = finish(episodes, penalties=penalties)
    assert [FLAWS[s.flaw_T[1]] for s in samples] == [n if n in penalised else "" for n in texts]
    assert [i.has_gradient for i in infos] == [name in penalised for name in texts]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_an_error(finish, value):
    with pytest.raises(ValueError, match="rewards must be finite"):
        finish([Episode([turn([7], [1])], Reward(value)), Episode([turn([7], [1])], Reward(1))])


def test_validation_rollouts_have_no_step(finish):
    _, _, lines = finish([Episode([turn([7], [1])], Reward(1))], evaluation=3)
    (line,) = lines
    assert (line["step"], line["slot"], line["evaluation"], line["advantage"]) == (None, 9, 3, 0)


async def test_an_answer_that_was_finished_before_its_engine_died_keeps_its_prompt():
    """The engine that goes on hands it back whole; it does not answer again."""
    generator = grpo_async.Generator(Config())
    draft = Turn([], [5, 1], [-1.0, -2.0], [0, 0], "stop")
    (answer,) = await generator.generate(Request("again", [7, 8], 1, 0, [draft], 9))
    assert answer == Turn([7, 8], [5, 1], [-1.0, -2.0], [0, 0], "stop")
    assert stitch([answer])[0].mask_T.tolist() == [False, False, True, True]


def test_a_row_has_the_experts_of_all_its_samples_or_none():
    (one,), (two,) = stitch([routed([7], [1, 2], 0)]), stitch([routed([7, 8], [1], 50)])
    update = grpo_async.Update(1, 1, [])
    batch = grpo_async.pack([one, two], update, Config())
    assert batch.routes_N[0] is one.routes_T and batch.routes_N[1] is two.routes_T, "a copy"
    two.routes_T = None
    assert grpo_async.pack([one, two], update, Config()).routes_N is None
    assert grpo_async.pack([], update, Config()).routes_N is None


async def test_a_retry_never_reads_what_an_orphan_of_the_last_attempt_writes(tmp_path, monkeypatch):
    monkeypatch.setattr("rollout.sampler.load_tokenizer", lambda model: TOKENIZER)
    handed = []

    async def rollout(row, sampler):
        handed.append(sampler.drafts)
        raise ConnectionError("the tool server is gone")

    env = SimpleNamespace(rollout=rollout)
    monkeypatch.setattr(registry, "environment", lambda name: env)
    worker = RolloutWorker(changed(Config(), run_dir=str(tmp_path)))

    for _ in range(2):
        with pytest.raises(ConnectionError):
            await worker.rollout_group(None, ROW, Slot(0), 2)
    assert len({id(drafts) for drafts in handed}) == len(handed) == 4


async def test_answers_whose_judge_was_away_are_not_sampled_again(tmp_path, monkeypatch):
    names = {"eos_token_id": 1, "pad_token_id": 0, "name_or_path": ""}
    tokenizer = SimpleNamespace(decode=lambda ids, **_: f"<{ids}>", **names)
    monkeypatch.setattr("rollout.sampler.load_tokenizer", lambda model: tokenizer)
    monkeypatch.setattr("rollout.sampler.render_messages", lambda *_: [7, 8])
    judged = []

    async def verify(row, response):
        judged.append(response)
        if len(judged) <= 2:
            raise Away("judge 'general' is down")
        return 1.0

    monkeypatch.setattr(registry, "environment", lambda name: SimpleNamespace(verify=verify))
    worker = RolloutWorker(changed(Config(), run_dir=str(tmp_path)))
    sampled = [turn([7, 8], [5, j], reason="length") for j in range(2)]
    engine = Actor(generate=lambda request: sampled)
    with pytest.raises(Away):
        await worker.rollout_group(engine, ROW, Slot(0), 2)
    infos, _, _ = await worker.rollout_group(engine, ROW, Slot(0), 2)
    assert len(engine.calls) == 1, "whole answers are played again"
    assert judged[:2] == judged[2:] and [info.reward for info in infos] == [1, 1]
