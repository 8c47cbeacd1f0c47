"""The rule that chooses between one turn, many turns and comparison, and what it refuses."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from envs import Reward, registry, services
from rollout.episode import Episode, Turn

PARAMS = {"input": [{"role": "user", "content": "1 + 1?"}], "tools": ["t"]}
ROW = {"_line": 5, "agent_ref": {"name": "mine"}, "responses_create_params": PARAMS}


class Scripted:
    """A sampler whose answers are counted up; the prompt has opened a thought."""

    def __init__(self, name: str = "a"):
        self.name, self.asked = name, []

    def render(self, messages: list[dict], tools: list | None = None) -> list[int]:
        """The prompt, once the row's conversation is asked for."""
        assert messages == ROW["responses_create_params"]["input"] and tools == ["t"]
        return [7, 8]

    async def generate(self, prompt_ids: list[int], n: int = 1) -> list[Turn]:
        self.asked.append((prompt_ids, n))
        said = [-1.0], [0], "stop"
        return [Turn(prompt_ids, [j], *said, f"{self.name}{j}", "<think>") for j in range(n)]


@pytest.fixture
def environment(monkeypatch):
    """A function that makes the row's environment of the functions it is given."""
    return lambda **functions: monkeypatch.setattr(
        registry, "environment", lambda name: SimpleNamespace(**functions)
    )


def run(samplers: list) -> list[Episode]:
    return asyncio.run(registry.rollouts(ROW, samplers))


def test_one_turn_is_one_request_of_the_first_sampler(environment):
    judged = []

    def verify(row, response):
        judged.append((row, response))
        return Reward(float(response[-1]), {"seen": response})

    environment(verify=verify)
    samplers = [Scripted() for _ in range(3)]
    episodes = run(samplers)
    assert [sampler.asked for sampler in samplers] == [[([7, 8], 3)], [], []]
    assert judged == [(ROW, f"<think>a{j}") for j in range(3)], "the judged text"
    assert [e.reward.value for e in episodes] == [0, 1, 2]
    assert [[t.token_ids for t in e.turns] for e in episodes] == [[[0]], [[1]], [[2]]]


def test_many_turns_are_one_rollout_of_each_sampler(environment):
    async def rollout(row, sampler):
        (turn,) = await sampler.generate([1])
        return Episode([turn], Reward(0.5, {"by": sampler.name}))

    environment(rollout=rollout, verify=lambda *args: pytest.fail("it has a rollout"))
    episodes = run([Scripted("a"), Scripted("b")])
    assert [e.reward for e in episodes] == [Reward(0.5, {"by": name}) for name in "ab"]


@pytest.mark.parametrize("turns", ["one", "many", "only compared"])
def test_comparison_comes_after_the_answers(environment, turns):
    async def rollout(row, sampler):
        return Episode(await sampler.generate([1], n=2), Reward(0))

    async def score_group(rows, responses):
        assert rows == [ROW] * 2
        return [Reward(9.0, {"last": text}) for text in responses]

    first = {"one": {"verify": lambda *args: 0}, "many": {"rollout": rollout}}.get(turns, {})
    environment(score_group=score_group, **first)
    episodes = run([Scripted("a"), Scripted("b")])
    last = ["<think>a1", "<think>b1"] if turns == "many" else ["<think>a0", "<think>a1"]
    assert [e.reward for e in episodes] == [Reward(9.0, {"last": text}) for text in last]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(("verdict", "reward"), [
    (0.5, Reward(0.5)),
    (1, Reward(1.0)),
    (True, Reward(1.0)),
    (np.float32(0.5), Reward(0.5)),
    (Reward(1, {"reason": "x"}), Reward(1, {"reason": "x"})),
])  # fmt: skip
def test_a_verdict_may_be_a_number_or_a_reward(environment, verdict, reward, is_async):
    async def later(row, response):
        return verdict

    environment(verify=later if is_async else lambda *args: verdict)
    assert asyncio.run(registry.verify(ROW, "four")) == reward
    (episode,) = run([Scripted()])
    assert episode.reward == reward


@pytest.mark.parametrize("is_async", [False, True])
def test_a_check_that_starves_is_counted_for_its_environment(environment, is_async):
    def verify(row, response):
        services.count_starved("timeout")
        return 0.0

    async def later(row, response):
        return verify(row, response)

    environment(verify=later if is_async else verify)
    before = services.report().starved
    run([Scripted()])
    assert services.report().starved - before == {"mine/timeout": 1}


@pytest.mark.parametrize(
    "verdict", [None, "1.0", [1.0], Reward(None), Reward("right"), Reward(1.0, None), 1j]
)
@pytest.mark.parametrize("shape", ["verify", "rollout", "score_group"])
def test_anything_else_is_refused_by_the_name_of_its_environment(environment, verdict, shape):
    async def rollout(row, sampler):
        return Episode(await sampler.generate([1]), verdict)

    async def score_group(rows, responses):
        return [verdict] * len(rows)

    functions = {"verify": lambda *args: verdict, "rollout": rollout, "score_group": score_group}
    environment(**{"verify": lambda *args: 0.0, shape: functions[shape]})
    with pytest.raises(TypeError, match="environment 'mine' returned .*expected a number or a Re"):
        run([Scripted()])


def test_an_episode_without_turns_is_refused_by_the_name_of_its_environment(environment):
    async def rollout(row, sampler):
        return Episode([], Reward(0))

    environment(rollout=rollout)
    with pytest.raises(ValueError, match="environment 'mine' returned an episode without turns"):
        run([Scripted()])


def test_a_comparison_must_score_every_answer(environment):
    async def score_group(rows, responses):
        return [Reward(0)]

    environment(verify=lambda *args: 0, score_group=score_group)
    with pytest.raises(ValueError, match="score_group of environment 'mine' returned 1 rewards, e"):
        run([Scripted(), Scripted()])


async def test_an_error_in_one_rollout_ends_its_siblings(environment):
    alive = []

    async def rollout(row, sampler):
        if sampler.name == "b":
            raise ConnectionError("the tool server is gone")
        alive.append(sampler)
        try:
            await asyncio.sleep(60)
        finally:
            alive.remove(sampler)

    environment(rollout=rollout)
    for _ in range(2):
        with pytest.raises(ConnectionError):
            await registry.rollouts(ROW, [Scripted("a"), Scripted("b")])
        assert not alive
