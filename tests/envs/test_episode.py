"""From turns to training samples: contiguity, masks, versions, flags, and shaped rewards."""

import asyncio
import json
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import envs
import grpo_async
from envs import Reward, episode
from envs.episode import EMPTY, Episode, Sample, Turn, describe, is_malformed, record, stitch
from grpo_async import Config, RolloutWorker
from rewards import shaped_reward


def turn(prompt, tokens, version=0, text="fine", reason="stop") -> Turn:
    logps = [-0.25 * t for t in tokens]
    return Turn(list(prompt), list(tokens), logps, [version] * len(tokens), reason, text)


TOKENIZER = SimpleNamespace(decode=lambda ids: f"<{ids}>")


def columns(sample: Sample) -> list[tuple]:
    """(token, trained, logp, version, malformed) of each token."""
    arrays = (sample.tokens_T, sample.mask_T, sample.engine_logp_T, sample.version_T)
    return list(zip(*(a.tolist() for a in (*arrays, sample.malformed_T)), strict=True))


# --- stitch ---------------------------------------------------------------------------------------


def test_a_single_turn():
    (sample,) = stitch([turn([7, 8], [1, 2], version=3)])
    assert columns(sample) == [
        (7, False, 0, -1, False),
        (8, False, 0, -1, False),
        (1, True, -0.25, 3, False),
        (2, True, -0.5, 3, False),
    ]
    assert not sample.truncated and sample.advantage == 0


def test_turns_that_continue_are_one_sample_and_the_environments_words_are_masked():
    first = turn([7], [1, 2], version=3)
    second = turn([7, 1, 2, 9, 9], [4], version=5, reason="length")
    (sample,) = stitch([first, second])
    assert columns(sample) == [
        (7, False, 0, -1, False),
        (1, True, -0.25, 3, False),
        (2, True, -0.5, 3, False),
        (9, False, 0, -1, False),
        (9, False, 0, -1, False),
        (4, True, -1.0, 5, False),
    ]
    assert sample.truncated


def test_versions_within_a_turn_stay_with_their_tokens():
    mixed = Turn([7], [1, 2, 3], [-1.0] * 3, [2, 2, 3], "stop")
    (sample,) = stitch([mixed])
    assert sample.version_T.tolist() == [-1, 2, 2, 3]
    info = describe(sample)
    assert (info.oldest_version, info.newest_version) == (2, 3)


@pytest.mark.parametrize(
    "prompt",
    [
        [7, 1, 3, 9],  # a sampled token came back as another one
        [7, 1],  # history was cut
        [9],  # history was rewritten
        [],
    ],
)
def test_a_violation_of_contiguity_starts_a_new_sample(prompt):
    samples = stitch([turn([7], [1, 2]), turn(prompt, [4]), turn([*prompt, 4, 5], [6])])
    assert [s.tokens_T.tolist() for s in samples] == [[7, 1, 2], [*prompt, 4, 5, 6]]
    masks = [[False, True, True], [False] * len(prompt) + [True, False, True]]
    assert [s.mask_T.tolist() for s in samples] == masks


def test_malformed_turns_mark_their_own_tokens_only():
    turns = [turn([7], [1, 2], text="<tool_call>"), turn([7, 1, 2, 9], [4])]
    (sample,) = stitch(turns)
    assert sample.malformed_T.tolist() == [False, True, True, False, False]
    (sample,) = stitch([turn([7], [1]), turn([7, 1, 9], [4, 5], text="</think></think>")])
    assert sample.malformed_T.tolist() == [False, False, False, True, True]


def test_only_the_last_turn_tells_whether_a_sample_is_truncated():
    turns = [turn([7], [1], reason="length"), turn([7, 1], [2])]
    assert [s.truncated for s in stitch(turns)] == [False]
    turns[1].prompt_ids = [8]
    assert [s.truncated for s in stitch(turns)] == [True, False]


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
    tokens, mask = (
        np.concatenate([getattr(s, k) for s in samples]) for k in ("tokens_T", "mask_T")
    )
    assert (logps == np.where(mask, -0.25 * tokens, 0)).all()
    ends = [t.prompt_ids + t.token_ids for t in turns]
    assert all(s.tokens_T.tolist() in ends for s in samples)


# --- what is said about a sample ------------------------------------------------------------------


def test_describe():
    (sample,) = stitch([turn([7], [1, 2], 3), turn([7, 1, 2, 9], [4], 5, reason="length")])
    sample.reward, sample.advantage = 0.5, -1.0
    info = describe(sample)
    assert vars(info) == {
        "tokens": 5,
        "trained_tokens": 3,
        "reward": 0.5,
        "has_gradient": True,
        "response_tokens": 3,
        "oldest_version": 3,
        "newest_version": 5,
        "truncated": True,
        "env": "",
        "continues": False,
    }


def test_describe_counts_the_answer_of_a_sample_that_lost_its_loss():
    (sample,) = stitch([turn([7], [1, 2], 3)])
    sample.mask_T[:] = False  # overlong_filtering
    info = describe(sample)
    assert (info.trained_tokens, info.response_tokens, info.has_gradient) == (0, 2, False)


@pytest.mark.parametrize(
    ("advantage", "text", "expected"),
    [(0.0, "fine", False), (0.5, "fine", True), (0.0, "<tool_call>", True)],
)
def test_a_malformed_sample_without_advantage_still_has_a_gradient(advantage, text, expected):
    (sample,) = stitch([turn([7], [1], text=text)])
    sample.advantage = advantage
    assert describe(sample).has_gradient is expected


def test_the_empty_sample_trains_nothing():
    info = describe(EMPTY)
    assert (info.tokens, info.trained_tokens, info.has_gradient) == (1, 0, False)


@pytest.mark.parametrize(
    ("text", "malformed"),
    [
        ("plain", False),
        ("", False),
        ("a thought</think>an answer", False),
        ("<think>a thought</think>an answer", False),
        ("</think>an answer", False),
        ("a</think>b</think>c", True),
        ("a</think>b<think>c", True),
        ("<think><think>a</think>b", True),
        ("<think>a</think><think>b</think>c", True),
        ("a<tool_call>b", True),
        ("a</tool_call>", True),
        ("<function_call>", True),
        ("</function_call>", True),
        ("a<tool_call></think>answer", True),
        ("I call a tool_call", False),
        ("a < b and think > c", False),
    ],
)
def test_is_malformed(text, malformed):
    assert is_malformed(text) is malformed


def test_record():
    turns = [Turn([7], [1, 2, 3], [-1.0] * 3, [2, 2, 3], "stop", "a"), turn([9], [4], 3, "b")]
    episode = Episode(turns, Reward(1.0, {"reason": None}))
    sample = stitch(turns)[-1]
    sample.reward, sample.advantage = 1.0, 0.25
    row = {"_line": 5, "agent_ref": {"name": "math"}}
    assert record(TOKENIZER, row, episode, sample) == {
        "row": 5,
        "env": "math",
        "prompt": "<[7]>",
        "response": ["a", "b"],
        "reward": 1.0,
        "advantage": 0.25,
        "versions": [[2, 2], [3, 2]],
        "finish_reason": "stop",
        "info": {"reason": None},
    }


def test_a_turn_takes_ids_logprobs_and_version_spans_from_vllm():
    spans = [(0, 2, "4"), (2, 3, "5")]
    answer = SimpleNamespace(
        token_ids=(7, 8, 9),
        logprobs=SimpleNamespace(logprobs=[-0.5, -1.0, -1.5]),
        weight_versions=[SimpleNamespace(start=s, end=e, version=v) for s, e, v in spans],
        routed_experts=None,
        finish_reason="length",
    )
    expected = Turn([1, 2], [7, 8, 9], [-0.5, -1.0, -1.5], [4, 4, 5], "length")
    assert Turn.from_vllm([1, 2], answer) == expected


def test_verify_may_be_a_function_or_a_coroutine(monkeypatch):
    async def later(row, response):
        return Reward(len(response))

    known = {"later": later, "now": lambda row, response: Reward(len(response))}
    monkeypatch.setattr(envs, "environment", lambda name: SimpleNamespace(verify=known[name]))
    for name in known:
        assert asyncio.run(envs.verify({"agent_ref": {"name": name}}, "four")).value == 4


# --- rewards --------------------------------------------------------------------------------------

LOW = "{reasoning effort: low}"
EFFORT = Config(low_effort={"weight": 1.0, "tokens": 10})


@pytest.mark.parametrize(
    ("messages", "cfg", "expected"),
    [
        ([f"1 + 1? {LOW}"], EFFORT, 1.8),
        (["1 + 1?"], EFFORT, 1.0),
        ([LOW, "and now?"], EFFORT, 1.0),  # only the last message counts
        (["before", f"now {LOW}"], EFFORT, 1.8),
        ([f"1 + 1? {LOW}"], Config(), 1.0),  # off
        ([f"1 + 1? {LOW}", ("assistant", "a call"), ("tool", "its result")], EFFORT, 1.8),
        (["1 + 1?", ("assistant", LOW)], EFFORT, 1.0),
        ([[{"type": "input_text", "text": f"1 + 1? {LOW}"}]], EFFORT, 1.8),
    ],
)
def test_low_effort_is_asked_for_by_the_last_user_message(messages, cfg, expected):
    pairs = [m if isinstance(m, tuple) else ("user", m) for m in messages]
    row = {"responses_create_params": {"input": [{"role": r, "content": m} for r, m in pairs]}}
    turns = [turn([7], [1] * 9), turn([7, *[1] * 9], [2, 2])]  # the last answer's length counts
    reward = shaped_reward(row, Episode(turns, Reward(1)), cfg.low_effort)
    assert reward == pytest.approx(expected) and isinstance(reward, float)


# --- experts --------------------------------------------------------------------------------------


def routed(prompt, tokens, first: int) -> Turn:
    """A turn whose tokens, but the last, were read by experts that are counted up."""
    made = turn(prompt, tokens)
    n = len(prompt) + len(tokens) - 1
    made.routes = np.arange(first, first + 6 * n, dtype=np.uint16).reshape(n, 3, 2)
    return made


def test_a_token_keeps_the_experts_that_read_it_first():
    turns = [routed([7, 8], [1, 2], 0), routed([7, 8, 1, 2, 9], [4], 100)]
    (sample,) = stitch(turns)
    assert sample.routes_T.dtype == np.int16 and sample.routes_T.shape == (6, 3, 2)
    assert (sample.routes_T[:3] == turns[0].routes).all()
    assert (sample.routes_T[3:5] == turns[1].routes[3:]).all()
    assert (sample.routes_T[5] == -1).all(), "the engine never read the last token"
    (plain,) = stitch([turn([7], [1])])
    assert plain.routes_T is None
    (partly,) = stitch([turns[0], turn([7, 8, 1, 2, 9], [4])])
    assert partly.routes_T is None, "half of them would be taken for all"


def test_an_answer_that_another_engine_finished_has_the_experts_of_that_one():
    answer = SimpleNamespace(
        token_ids=(9,),
        logprobs=SimpleNamespace(logprobs=[-1.5]),
        weight_versions=[SimpleNamespace(start=0, end=1, version="5")],
        routed_experts=np.ones((3, 3, 2), np.uint16),  # it read prompt and draft
        finish_reason="stop",
    )
    whole = turn([7, 8], [1]).extended(Turn.from_vllm([], answer))
    (sample,) = stitch([whole])
    assert (sample.routes_T[:3] == 1).all() and len(sample.routes_T) == 4


def test_an_answer_that_was_finished_before_its_engine_died_keeps_its_prompt():
    """The engine that goes on hands it back whole; it does not answer again."""
    generator = grpo_async.Generator(Config())
    draft = Turn([], [5, 1], [-1.0, -2.0], [0, 0], "stop")
    (turn,) = asyncio.run(generator.generate([7, 8], 1, seed=0, call="again", drafts=[draft]))
    assert turn == Turn([7, 8], [5, 1], [-1.0, -2.0], [0, 0], "stop")
    assert stitch([turn])[0].mask_T.tolist() == [False, False, True, True]


def test_a_row_has_the_experts_of_all_its_samples_or_none():
    (one,), (two,) = stitch([routed([7], [1, 2], 0)]), stitch([routed([7, 8], [1], 50)])
    update = grpo_async.Update(1, 1, [])
    batch = grpo_async.pack([one, two], update, Config())
    expected = np.concatenate([one.routes_T, two.routes_T])
    assert (batch.routes_T.numpy() == expected).all()
    two.routes_T = None
    assert grpo_async.pack([one, two], update, Config()).routes_T is None
    assert grpo_async.pack([], update, Config()).routes_T is None


# --- what a rollout worker makes of a group -------------------------------------------------------

ROW = {
    "_line": 5,
    "agent_ref": {"name": "math"},
    "responses_create_params": {"input": [{"role": "user", "content": "1 + 1?"}]},
}


@pytest.fixture
def finish(tmp_path, monkeypatch):
    """Lets a worker finish episodes; returns its samples, their infos and what it wrote."""
    monkeypatch.setattr(grpo_async, "load_tokenizer", lambda model: TOKENIZER)

    def finish(episodes, slot=9, **fields):
        cfg = Config(run_dir=str(tmp_path), prompts_per_step=4, **fields)
        infos, samples = RolloutWorker(cfg, 0).finish(ROW, slot, episodes)
        lines = (tmp_path / "rollouts.jsonl").read_text().splitlines()
        return samples, infos, [json.loads(line) for line in lines]

    return finish


def test_a_group_is_compared_and_written(finish):
    two = [turn([7], [1], text="a\nb"), turn([9], [2, 3])]  # not contiguous: two samples
    values = [(two, 3), ([turn([7], [4])], 1), ([turn([7], [5])], 2)]
    samples, infos, lines = finish([Episode(t, Reward(v, {"x": set()})) for t, v in values])
    assert [s.tokens_T.tolist() for s in samples] == [[7, 1], [9, 2, 3], [7, 4], [7, 5]]
    assert [s.reward for s in samples] == [3, 3, 1, 2]
    assert [s.continues for s in samples] == [False, True, False, False]
    expected = [2.121317, 2.121317, -2.121317, 0]
    assert [s.advantage for s in samples] == pytest.approx(expected, abs=1e-5)
    assert infos == [describe(s) for s in samples]
    told = [(line["step"], line["slot"], line["reward"], line["response"]) for line in lines]
    assert told == [(3, 9, 3, ["a\nb", "fine"]), (3, 9, 1, ["fine"]), (3, 9, 2, ["fine"])]


@pytest.mark.parametrize("filtering", [False, True])
def test_overlong_filtering_keeps_the_reward_in_the_baseline(finish, filtering):
    cut = Episode([turn([7], [1, 2], reason="length")], Reward(0))
    done = Episode([turn([7], [3])], Reward(1))
    samples, infos, _ = finish([cut, done], overlong_filtering=filtering)
    assert [i.trained_tokens for i in infos] == [0 if filtering else 2, 1]
    assert [s.advantage for s in samples] == [-1, 1]


@pytest.mark.parametrize("penalize", [False, True])
def test_malformed_messages_are_penalized_only_if_asked_for(finish, penalize):
    episodes = [Episode([turn([7], [1], text="<tool_call>")], Reward(1)) for _ in range(2)]
    samples, infos, _ = finish(episodes, penalize_malformed=penalize)
    assert [s.malformed_T.any() for s in samples] == [penalize] * 2
    assert [i.has_gradient for i in infos] == [penalize] * 2


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_an_error(finish, value):
    with pytest.raises(ValueError, match="rewards must be finite"):
        finish([Episode([turn([7], [1])], Reward(value)), Episode([turn([7], [1])], Reward(1))])


def test_validation_rollouts_have_no_step(finish):
    _, _, lines = finish([Episode([turn([7], [1])], Reward(1))], slot="val-3-0")
    assert (lines[0]["step"], lines[0]["slot"], lines[0]["advantage"]) == (None, "val-3-0", 0)


def test_an_answer_that_nobody_waits_for_is_cancelled(monkeypatch):
    cancelled = []
    monkeypatch.setattr(episode.ray, "cancel", cancelled.append)

    async def give_up():
        request = asyncio.get_running_loop().create_future()
        generator = SimpleNamespace(generate=SimpleNamespace(remote=lambda *args: request))
        policy = episode.Policy(generator, None, None, 0, drafts=[])
        task = asyncio.ensure_future(policy.generate([1, 2]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return request

    assert cancelled == [asyncio.run(give_up())]


def test_a_retry_starts_from_what_was_written(monkeypatch):
    """The second try hands the engine the first one's drafts, as long as the prompt is the same."""
    monkeypatch.setattr(episode, "DRAFT_SECONDS", 0.01)
    asked, known = [], []

    class Engine:
        """Lost during the first request, well afterwards."""

        def __init__(self):
            self.generate = SimpleNamespace(remote=self.answer)
            self.drafts = SimpleNamespace(remote=self.written)

        async def written(self, call, counts):
            known.append(counts)
            first = [turn([], [5], reason=""), turn([], [7])]
            return [turn([], [6], reason=""), None] if counts else first

        async def answer(self, prompt_ids, n, seed, call, drafts):
            asked.append((prompt_ids, list(drafts)))
            if len(asked) == 1:
                while len(known) < 3:
                    await asyncio.sleep(0.01)
                raise RuntimeError("lost")
            return [episode.Turn(prompt_ids, [5, 6], [-1.0] * 2, [0, 1], "stop")]

    async def twice():
        drafts, tokenizer = [], SimpleNamespace(decode=lambda ids, **_: str(ids))
        first = episode.Policy(Engine(), tokenizer, None, 0, drafts)
        with pytest.raises(RuntimeError, match="lost"):
            await first.generate([1, 2])
        (turn,) = await episode.Policy(Engine(), tokenizer, None, 0, drafts).generate([1, 2])
        await episode.Policy(Engine(), tokenizer, None, 0, drafts).generate([9])
        return turn

    assert asyncio.run(twice()).token_ids == [5, 6]
    assert [prompt_ids for prompt_ids, _ in asked] == [[1, 2], [1, 2], [9]]
    (_, first), (_, (draft, whole)), (_, last) = asked
    assert first == last == [] and draft.prompt_ids == whole.prompt_ids == [1, 2]
    assert draft.token_ids == [5] + [6] * (len(known) - 1) and not draft.finish_reason
    assert (whole.token_ids, whole.finish_reason) == ([7], "stop")
    assert known[:3] == [[], [1, None], [2, None]], "no token travels twice"


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """A rollout worker with a character tokenizer, an environment and no engine."""
    tokenizer = SimpleNamespace(decode=lambda ids, **_: "".join(map(chr, ids)))
    monkeypatch.setattr(grpo_async, "load_tokenizer", lambda model: tokenizer)
    env = SimpleNamespace()
    monkeypatch.setattr(grpo_async.envs, "environment", lambda name: env)
    made = RolloutWorker(Config(run_dir=str(tmp_path)), 0)
    made.finish = lambda row, slot, episodes: episodes
    return made, env


def test_an_error_in_one_rollout_ends_its_siblings_and_no_retry_reads_what_they_write(worker):
    made, env = worker
    alive, handed = [], []

    async def rollout(row, policy):
        handed.append(policy.drafts)
        if len(handed) % 2 == 0:
            raise ConnectionError("the tool server is gone")
        alive.append(policy)
        try:
            await asyncio.sleep(60)
        finally:
            policy.drafts.append(([1], [turn([1], [2])]))  # an orphan's last word
            alive.remove(policy)

    async def twice():
        for _ in range(2):
            with pytest.raises(ConnectionError):
                await made.rollout_group(None, ROW, 0, 2)
            assert not alive

    env.rollout = rollout
    asyncio.run(twice())
    assert len(handed) == 4 and len({id(drafts) for drafts in handed}) == 4


@pytest.mark.parametrize(("prompt", "judged"), [("go<think>\n", "<think>4"), ("go\n", "4")])
def test_thinking_that_the_prompt_began_is_judged_with_the_answer(
    worker, monkeypatch, prompt, judged
):
    """Templates of reasoning models end with `<think>`; an answer cut off there is no answer."""
    made, env = worker
    seen = []

    async def answer(prompt_ids, *rest):
        return [turn(prompt_ids, [ord("4")], text="") for _ in range(2)]

    async def verify(row, text):
        seen.append(text)
        return Reward(0)

    async def score_group(rows, texts):
        seen.extend(texts)
        return [Reward(0)] * 2

    monkeypatch.setattr(grpo_async, "render", lambda *args: list(map(ord, prompt)))
    monkeypatch.setattr(grpo_async.envs, "verify", verify)
    env.score_group = score_group
    generator = SimpleNamespace(generate=SimpleNamespace(remote=answer))
    groups = asyncio.run(made.rollout_group(generator, ROW, 0, 2))
    assert seen == [judged] * 4 and [e.turns[0].text for e in groups] == ["4"] * 2
