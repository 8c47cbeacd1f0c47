"""Probes engines: the trainer scores their answers, to prove that they hold its weights."""

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

from core.waits import within
from rollout.episode import Request, Turn
from runtime.engines.repair import EnginesError
from runtime.processes.cluster import Cluster
from settings.config import RunSettings

if TYPE_CHECKING:
    from ray.actor import ActorHandle

PROMPTS = 8
LENGTH = 16  # tokens of a prompt
ANSWER = 32  # tokens of each answer, which an end-of-text token does not end
CEILING = {"bfloat16": 0.1, "float32": 1e-3}  # nats: kernels differ by less
FLOOR = {"bfloat16": 0.02, "float32": 1e-5}  # nats: rounding
TIMES = 4  # limit for later gaps, relative to the first


def prompts(vocabulary: int) -> list[list[int]]:
    """Returns prompts of token ids, each spread evenly over the whole vocabulary."""
    ids = [place * vocabulary // (PROMPTS * LENGTH) for place in range(PROMPTS * LENGTH)]
    return [ids[i::PROMPTS] for i in range(PROMPTS)]


class Probe:
    """Compares the logprobs of engines' answers with the trainer's.

    The first gap of a run must be below a ceiling, later ones below a few times the first.
    """

    def __init__(self, cfg: RunSettings, cluster: Cluster):
        self.cfg = cfg
        self.cluster = cluster
        self.first: float | None = None  # nats

    async def gaps(self, engines: "Iterable[ActorHandle]") -> list[float]:
        """Returns the mean |logp - engine_logp| over the answers of each engine, in nats.

        Raises EnginesError naming the engines that do not answer.
        """
        limit = self.cfg.timeouts.sync
        embeddings = [m.shape for m in self.cluster.metas if "embed" in m.name or "wte" in m.name]
        vocabulary = max((shape[0] for shape in embeddings), default=LENGTH)
        requests = []
        for i, ids in enumerate(prompts(vocabulary)):
            request = Request(
                name=f"probe {i}",
                prompt_ids=ids,
                n=1,
                seed=self.cfg.seed + i,
                drafts=[],
                max_tokens=ANSWER,
                sampling={"ignore_eos": True},
                priority=-1,
            )
            requests.append(request)
        calls: dict[ActorHandle, asyncio.Future[list[list[Turn]]]] = {}
        for engine in engines:
            calls[engine] = asyncio.gather(*(engine.generate.remote(r) for r in requests))
        if not calls:  # all engines were lost after they acknowledged the update
            return []
        for call in calls.values():  # asyncio complains about an exception that is never fetched
            call.add_done_callback(asyncio.Future.exception)
        await asyncio.wait(calls.values(), timeout=limit)
        late = TimeoutError(f"waited {limit:.0f} s for an engine to answer a probe")
        errors: dict[ActorHandle, BaseException] = {}
        for engine, call in calls.items():
            error = call.exception() if call.done() else late
            if error:
                errors[engine] = error
        if errors:
            raise EnginesError(list(errors), next(iter(errors.values())))
        answers: list[list[Turn]] = []  # per engine, one answer to each prompt
        for call in calls.values():
            answers.append([turn for (turn,) in call.result()])
        scores = asyncio.gather(*(t.probe_gaps.remote(answers) for t in self.cluster.trainers))
        of_ranks = await within(limit, "the trainers to score the probe", scores)
        return of_ranks[0]  # all ranks have the same gaps

    def judge(self, version: int, gaps: list[float]) -> None:
        """Raises RuntimeError if a gap is too large; the first good one limits later ones."""
        dtypes = {meta.dtype for meta in self.cluster.metas}
        dtype = "bfloat16" if "bfloat16" in dtypes else "float32"
        limit = CEILING[dtype]
        if self.first is not None:
            limit = min(limit, max(FLOOR[dtype], TIMES * self.first))
        if not all(gap <= limit for gap in gaps):  # written so that NaN fails too
            raise RuntimeError(
                f"the engines' scores differ from the trainer's at version {version}: "
                f"by {gaps} nats, expected at most {limit:.2g}"
            )
        if not self.first:
            self.first = max(gaps, default=None)
