"""What engines answer, scored by the trainer: the proof that what was sent is what is trained."""

import asyncio
from collections.abc import Iterable
from typing import Any

from core.waits import within
from rollout.episode import Request
from runtime.engines.repair import EnginesError
from runtime.processes.cluster import Cluster
from settings.config import RunSettings

PROMPTS = 8
LENGTH = 16  # tokens of a prompt
ANSWER = 32  # tokens, whatever they are
CEILING = {"bfloat16": 0.1, "float32": 1e-3}  # nats: no kernels differ by more
FLOOR = {"bfloat16": 0.02, "float32": 1e-5}  # nats: rounding
TIMES = 4  # the first gap


def prompts(vocabulary: int) -> list[list[int]]:
    """Token ids that are spread evenly over a vocabulary, each prompt over all of it."""
    ids = [place * vocabulary // (PROMPTS * LENGTH) for place in range(PROMPTS * LENGTH)]
    return [ids[i::PROMPTS] for i in range(PROMPTS)]


class Probe:
    """Prompts that engines answer, and how far the trainer's logprobs may be from theirs.

    The first gap of a run must be below a ceiling, later ones below a few times the first.
    """

    def __init__(self, cfg: RunSettings, cluster: Cluster):
        self.cfg = cfg
        self.cluster = cluster
        self.first: float | None = None  # nats

    async def gaps(self, engines: Iterable[Any]) -> list[float]:
        """Mean |logp - engine_logp| over the answers of each engine, nats.

        Raises EnginesError naming those that do not answer.
        """
        limit = self.cfg.timeouts.sync
        embeddings = [m.shape for m in self.cluster.metas if "embed" in m.name or "wte" in m.name]
        vocabulary = max((shape[0] for shape in embeddings), default=LENGTH)
        asked = [
            Request(f"probe {i}", ids, 1, self.cfg.seed + i, [], ANSWER, {"ignore_eos": True}, -1)
            for i, ids in enumerate(prompts(vocabulary))
        ]
        calls = {e: asyncio.gather(*(e.generate.remote(r) for r in asked)) for e in engines}
        if not calls:  # all were lost since they acknowledged the update
            return []
        for call in calls.values():  # asyncio complains about an exception that is never fetched
            call.add_done_callback(asyncio.Future.exception)
        await asyncio.wait(calls.values(), timeout=limit)
        late = TimeoutError(f"waited {limit:.0f} s for an engine to answer a probe")
        errors = {e: call.exception() if call.done() else late for e, call in calls.items()}
        if failed := [engine for engine, error in errors.items() if error]:
            raise EnginesError(failed, errors[failed[0]] or late)
        answers = [[turn for (turn,) in call.result()] for call in calls.values()]
        scores = asyncio.gather(*(t.probe_gaps.remote(answers) for t in self.cluster.trainers))
        return (await within(limit, "the trainers to score it", scores))[0]

    def judge(self, version: int, gaps: list[float]) -> None:
        """Raises RuntimeError where an engine scores unlike the trainer."""
        dtypes = {meta.dtype for meta in self.cluster.metas}
        dtype = "bfloat16" if "bfloat16" in dtypes else "float32"
        limit = CEILING[dtype]
        if self.first is not None:
            limit = min(limit, max(FLOOR[dtype], TIMES * self.first))
        if not all(gap <= limit for gap in gaps):  # so written, NaN is too far
            message = f"engines score unlike the trainer at version {version}"
            raise RuntimeError(f"{message}: {gaps} nats, expected at most {limit:.2g}")
        self.first = self.first or max(gaps, default=None)
