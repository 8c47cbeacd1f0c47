"""What judges said in NeMo-Gym's rollouts and unit tests earns here what it earned there."""

import asyncio

import pytest

from envs import check_rows, registry, services
from envs.tools.simulation import DONE, Simulation, Step
from rollout.response import Response
from settings.environment_services import Services
from support.judges import as_judge
from support.oracle.our_rewards import recorded
from support.oracle.replays import CONVERSED, REPLAYS, Replay

AGENTS = {
    "safety, harmful": "jailbreak_detection", "safety, harmless": "over_refusal_detection",
    "equivalence": "equivalence_llm_judge", "genrm": "genrm_compare",
}  # fmt: skip
ASKED = {"input": [{"role": "user", "content": "1 + 1?"}]}


async def paid(name: str, replay: Replay) -> list[float]:
    """Our rewards for the answers of a replay, by the real client of judges."""
    row = replay.row | {"agent_ref": {"name": AGENTS.get(name, name)}}
    row |= {"responses_create_params": ASKED}
    check_rows.check_row(row)
    services.configure(Services())
    with recorded() as judge:
        if name == "genrm":
            return await judge.rewards(row, replay.answers, replay)
        made = [await judge.reward(row, Response.of(text), replay) for text in replay.answers]
        told = len(judge.served.asked)
    assert told == len(replay.replies) or replay.why, "each reply was asked for"
    return made


@pytest.mark.parametrize("name", REPLAYS)
def test_replies_of_judges_earn_what_they_earn_in_nemo_gym(name):
    for replay in REPLAYS[name]:
        expected = replay.rewards if replay.here is None else replay.here
        assert asyncio.run(paid(name, replay)) == pytest.approx(expected, abs=1e-5), replay
        assert (replay.here is None) == (replay.why == "") and replay.here != replay.rewards


async def conversed(replay: Replay) -> list[float]:
    """The reward of a conversation whose steps the judge sees, one after the other; [] for none."""
    said = iter(replay.replies)
    told = (("customer", "Hello"), ("representative", replay.answers[0]), ("customer", DONE))
    row = {"policy": "", "tools": [], "customer_scenario": {}}
    simulation = Simulation(row, [])
    simulation.steps += [Step(*step) for step in told]
    with as_judge("general", lambda messages: next(said)) as served:
        judges = {"general": {"url": served.url, "concurrency": 1}}
        services.configure(Services(judges=judges))
        try:
            return [float(not await simulation.verdict())]
        except services.CheckerError:
            return []
        finally:
            assert len(served.asked) == len(replay.replies)


def test_verdicts_on_a_conversation_earn_what_they_earn_in_nemo_gym():
    for replay in CONVERSED:
        expected = replay.rewards if replay.here is None else replay.here
        assert asyncio.run(conversed(replay)) == expected, replay
        assert (replay.here is None) == (replay.why == "") and replay.here != replay.rewards


def test_all_judged_environments_are_replayed():
    judged = {AGENTS.get(name, name) for name in REPLAYS}
    modules = {registry.served()[agent] for agent in judged}
    folder = {module for module in registry.served().values() if module.startswith("llm_judged/")}
    assert folder < modules and "maths/equivalence" in modules
