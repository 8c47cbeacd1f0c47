"""What engines are asked, and how far their answers may be from the trainer's."""

import contextlib
import math
from types import SimpleNamespace

import pytest

from grpo_async import Config
from policy import WeightMeta
from runtime.engines.probe import ANSWER, LENGTH, PROMPTS, Probe, prompts
from support.actors import Actor
from support.configs import changed


def made(dtype: str = "float32", **answers) -> Probe:
    """A probe of a model of 1,000 tokens, beside a trainer that a test controls."""
    shapes = {"embed_tokens": (1000, 8), "embed_positions": (64, 8), "mlp.up_proj": (4000, 8)}
    metas = [WeightMeta(name, shape, dtype) for name, shape in shapes.items()]
    cluster = SimpleNamespace(trainers=[Actor(**answers)], metas=metas)
    return Probe(changed(Config(), seed=7), cluster)


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
    engines = [Actor(generate=[name]) for name in ("a", "b")]
    probe = made(probe_gaps=[0.0, 0.0])
    assert await probe.gaps(engines) == [0.0, 0.0]
    for engine in engines:
        requests = [request for (request,) in engine.called("generate")]
        assert [request.prompt_ids for request in requests] == prompts(1000)
        assert len({request.name for request in requests}) == PROMPTS
        for i, request in enumerate(requests):
            assert (request.n, request.seed, request.priority) == (1, 7 + i, -1)
            assert request.max_tokens == ANSWER and request.sampling == {"ignore_eos": True}
    (trainer,) = probe.cluster.trainers
    assert trainer.called("probe_gaps") == [[[["a"] * PROMPTS, ["b"] * PROMPTS]]]
    assert await probe.gaps([]) == [], "all were lost meanwhile"


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
    for version, of_engines in enumerate(gaps[:-1]):
        probe.judge(version, of_engines)
    with contextlib.nullcontext() if agrees else pytest.raises(RuntimeError, match="at most"):
        probe.judge(9, gaps[-1])
