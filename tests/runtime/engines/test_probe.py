"""What engines are asked, how far their answers may be from the trainer's, and what follows."""

import contextlib
import math
import re
from types import SimpleNamespace

import pytest

from core.errors import RunError
from grpo_async import Config
from policy import WeightMeta
from runtime.engines.fleet import Engine, State
from runtime.engines.probe import (
    ANSWER,
    DOUBTS,
    EVERY,
    FLOOR,
    LENGTH,
    PROMPTS,
    TIMES,
    Probe,
    prompts,
)
from runtime.engines.repair import EnginesError
from support.actors import Actor, Answer
from support.configs import changed


def made(dtype: str = "float32", count: int = 2, **answers) -> Probe:
    """A probe of a model of 1,000 tokens, beside a trainer that a test controls."""
    shapes = {"embed_tokens": (1000, 8), "embed_positions": (64, 8), "mlp.up_proj": (4000, 8)}
    metas = [WeightMeta(name, shape, dtype) for name, shape in shapes.items()]
    cluster = SimpleNamespace(trainers=[Actor(**answers)], metas=metas)
    cfg = changed(Config(), seed=7, count=count, timeouts={"sync": 0.05})
    return Probe(cfg, cluster)


def engine(number: int = 0, state: State = State.SERVING, **answers) -> Engine:
    """An engine whose answers are the test's."""
    return Engine(Actor(**answers), number, "", None, state)


@pytest.mark.parametrize("vocabulary", [17, 101, 151_936])
def test_prompts_are_spread_over_the_vocabulary(vocabulary):
    asked = prompts(vocabulary)
    assert [len(ids) for ids in asked] == [LENGTH] * PROMPTS
    ids = sorted(i for prompt in asked for i in prompt)
    steps = [after - before for before, after in zip(ids, [*ids[1:], vocabulary], strict=True)]
    assert ids[0] == 0 and max(steps) - min(steps) <= 1
    for prompt in asked:
        assert min(prompt) < vocabulary / 8 and max(prompt) > vocabulary * 7 / 8


async def test_every_engine_answers_prompts_of_the_whole_vocabulary_whatever_it_would_say():
    engines = [engine(i, generate=[name]) for i, name in enumerate("ab")]
    probe = made(probe_gaps=[0.0, 0.5])
    assert await probe.gaps(engines) == {engines[0]: 0.0, engines[1]: 0.5}
    await probe.gaps(engines)
    for asked in engines:
        requests = [request for (request,) in asked.actor.called("generate")]
        assert [request.prompt_ids for request in requests] == prompts(1000) * 2
        assert len({request.name for request in requests}) == 2 * PROMPTS
        for i, request in enumerate(requests):
            assert (request.n, request.seed, request.priority) == (1, 7 + i % PROMPTS, -1)
            assert request.max_tokens == ANSWER and request.sampling == {"ignore_eos": True}
    (trainer,) = probe.cluster.trainers
    assert trainer.called("probe_gaps")[0] == [[["a"] * PROMPTS, ["b"] * PROMPTS]]
    assert await probe.gaps([]) == {}, "all were lost meanwhile"


async def test_an_engine_that_serves_and_has_no_room_is_left_out(capsys):
    """A late answer costs a new engine its place, and so does an error."""
    busy = engine(0, generate=lambda _: Answer(...))
    well = engine(1, generate=["turn"])
    probe = made(probe_gaps=lambda answers: [0.0] * len(answers))
    assert await probe.gaps([busy, well]) == {well: 0.0}
    assert await probe.gaps([busy]) == {}
    assert capsys.readouterr().out.count("too busy for 0 s to answer a probe") == 2
    for actor, message in ((busy.actor, "waited 0 s"), (Actor(generate=OSError("gone")), "gone")):
        failed = Engine(actor, 2, "", None, State.FRESH)
        with pytest.raises(EnginesError, match=message) as error:
            await probe.gaps([failed, well])
        assert error.value.engines == [actor]


@pytest.mark.parametrize(
    ("dtype", "gaps", "agrees"),
    [
        ("bfloat16", [[0.05]], True),
        ("bfloat16", [[0.11]], False),
        ("float32", [[0.05]], False),
        ("float32", [[1e-6, math.nan]], False),
        ("bfloat16", [[0.01], [0.039]], True),
        ("bfloat16", [[0.01], [0.041]], False),
        ("bfloat16", [[0.01, 0.012], [0.045]], True),
        ("bfloat16", [[1e-4], [0.019]], True),  # rounding
        ("bfloat16", [[0.05], [0.11]], False),  # above what any kernel does
        ("bfloat16", [[0.005], [], [0.03]], False),
        ("bfloat16", [[0.005], [0.019], [0.05]], False),  # the first one counts
    ],
)
def test_the_first_gap_sets_the_limit_of_later_ones(dtype, gaps, agrees):
    probe = made(dtype)
    new = [engine(i, State.FRESH) for i in range(2)]
    for version, of_engines in enumerate(gaps[:-1]):
        probe.judge(version, dict(zip(new, of_engines, strict=False)))
    with contextlib.nullcontext() if agrees else pytest.raises(RuntimeError, match="more than"):
        probe.judge(9, dict(zip(new, gaps[-1], strict=False)))


def test_a_probe_is_due_every_so_many_versions_and_while_an_engine_is_new_or_in_doubt():
    probe = made()
    due = [version for version in range(3 * EVERY) if probe.is_due(version, [engine()])]
    assert due == [0, EVERY, 2 * EVERY]
    assert all(EVERY % n for n in range(2, EVERY)), "a prime"
    assert probe.is_due(1, [engine(), engine(1, State.FRESH)])
    doubted = engine()
    doubted.doubts = 1
    assert probe.is_due(1, [engine(), doubted])


class Judged:
    """Engines that agreed with the trainer at version 0, and what becomes of them."""

    def __init__(self, count: int):
        self.probe = made(count=count)
        self.engines = [engine(i, State.FRESH) for i in range(count)]
        self.version = -1
        self.said(*[1e-7] * count)
        for each in self.engines:
            each.state = State.SERVING

    def said(self, *gaps: float) -> str:
        """The error that a probe of the engines raises, with the numbers of those it names."""
        self.version += 1
        try:
            self.probe.judge(self.version, dict(zip(self.engines, gaps, strict=True)))
        except EnginesError as error:
            named = [e.number for e in self.engines if e.actor in error.engines]
            return f"{named}: {error}"
        except RunError as error:
            return f"the end: {error}"
        return ""

    def renew(self, *numbers: int) -> None:
        """Successors of engines."""
        for number in numbers:
            self.engines[number] = engine(number, State.FRESH)


def test_an_engine_is_replaced_when_it_is_wrong_for_the_second_time(capsys):
    judged = Judged(3)
    assert judged.said(1e-7, 0.5, 1e-7) == ""
    assert "the scores of 1 of 3 engines differ from the trainer's" in capsys.readouterr().out
    assert judged.said(1e-7, 1e-7, 1e-7) == "", "as if it left out every second update"
    found = judged.said(1e-7, 0.5, 1e-7)
    assert found.startswith("[1]: the scores of 1 of 3 engines differ from the trainer's at")
    assert "at version 3, by up to 0.5 nats, more than 1e-05" in found
    judged.renew(1)
    assert judged.said(1e-7, 1e-7, 1e-7) == "" and judged.probe.agreed == 4


def test_an_engine_that_was_right_often_enough_is_trusted_again():
    judged = Judged(2)
    for _ in range(3):
        assert judged.said(0.5, 1e-7) == ""
        for _ in range(DOUBTS):
            assert judged.probe.is_due(1, judged.engines)
            assert judged.said(1e-7, 1e-7) == ""
        assert not judged.probe.is_due(1, judged.engines)


def test_a_new_engine_that_is_wrong_is_replaced_at_once():
    judged = Judged(2)
    judged.renew(0)
    assert judged.said(math.nan, 1e-7).startswith("[0]: the scores of 1 of 2 engines differ")


@pytest.mark.parametrize(("of_new", "guilty"), [(0.5, "trainer is"), (1e-7, "engines are")])
@pytest.mark.parametrize("count", [1, 2])
def test_new_engines_show_who_is_at_fault_when_all_are_wrong(count, of_new, guilty):
    judged = Judged(count)
    assert judged.said(*[1e-7] * count) == ""
    assert judged.said(*[0.25] * count) == ""
    everyone = list(range(count))
    charge = f"the scores of {count} of {count} engines differ from the trainer's at version "
    assert judged.said(*[0.25] * count).startswith(f"{everyone}: {charge}3, by up to 0.25 nats")
    judged.renew(*everyone)
    found = judged.said(*[of_new] * count)
    assert found.startswith(f"the end: the {guilty} at fault: {charge}")
    assert re.search(r"All were right at version 1$", found)


def test_an_engine_that_is_left_alone_is_not_all_engines():
    """The other one was lost for a reason of its own."""
    judged = Judged(2)
    lost = judged.engines.pop(0)
    assert judged.said(0.5) == ""
    assert judged.said(0.5).startswith("[1]: ")
    judged.engines = [lost]
    judged.renew(0)
    assert judged.said(1e-7) == "", "the run goes on"


def test_the_limits_are_those_that_the_page_names():
    assert (TIMES, FLOOR) == (4, {"bfloat16": 0.02, "float32": 1e-5})
