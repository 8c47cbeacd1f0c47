"""Probes engines: the trainer scores their answers, which shows whether they hold its weights.

An engine that acknowledges updates but does not load them can pass every other check, because those
run in its own process. Its answers show what it computes with:

    an engine is wrong once                 it is asked again after each of the next updates
    it is wrong twice, others are right     it is replaced
    it is wrong twice, and so are all       all are replaced, and the new engines are the witnesses:
        they are wrong as well              the trainer is at fault: the run ends
        they are right                      the engines were at fault: the run ends
"""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from core.errors import RunError
from core.waits import within
from rollout.episode import Request, Turn
from runtime.engines.repair import EnginesError, failure
from runtime.processes.cluster import Cluster
from settings.config import RunSettings

if TYPE_CHECKING:
    from runtime.engines.fleet import Engine

PROMPTS = 8
LENGTH = 16  # tokens of a prompt
ANSWER = 32  # tokens of each answer, which an end-of-text token does not end
# Policy versions from one probe to the next. It is prime: an engine that leaves out every second or
# third update, for example, is not asked only after the updates that it loads.
EVERY = 11
DOUBTS = 4  # further updates after which an engine that was wrong is asked again
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
        self.agreed = -1  # the last version at which all engines that were asked were right
        self.asked = 0  # number of probes so far
        self.accusation = ""  # why all engines were replaced, until the new ones have answered

    def is_due(self, version: int, engines: "Sequence[Engine]") -> bool:
        """Returns whether to ask: every EVERY versions, and while an engine is new or in doubt."""
        return version % EVERY == 0 or any(engine.is_new or engine.doubts for engine in engines)

    async def gaps(self, engines: "Sequence[Engine]") -> "dict[Engine, float]":
        """Returns the mean |logp - engine_logp| over the answers of each engine, in nats.

        An engine that serves may have no room for more requests: if it does not answer in time, it
        is left out. Raises EnginesError naming the engines that fail, or that are new and late.
        """
        limit = self.cfg.timeouts.sync
        requests = self.requests()
        calls: dict[Engine, asyncio.Future[list[list[Turn]]]] = {}
        for engine in engines:
            calls[engine] = asyncio.gather(*(engine.actor.generate.remote(r) for r in requests))
        if not calls:  # all engines were lost after they acknowledged the update
            return {}
        for call in calls.values():  # asyncio complains about an exception that is never fetched
            call.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.wait(calls.values(), timeout=limit)
        late = TimeoutError(f"waited {limit:.0f} s for an engine to answer a probe")
        answers: dict[Engine, list[Turn]] = {}  # one to each prompt
        errors: dict[Engine, BaseException] = {}
        for engine, call in calls.items():
            error = failure(call)
            if error:
                errors[engine] = error
            elif call.done():
                answers[engine] = [turn for (turn,) in call.result()]
            elif engine.is_new:
                errors[engine] = late
            else:
                tqdm.write(f"an engine was too busy for {limit:.0f} s to answer a probe")
        if errors:
            failed = [engine.actor for engine in errors]
            raise EnginesError(failed, next(iter(errors.values())))
        if not answers:
            return {}
        turns = list(answers.values())
        scores = asyncio.gather(*(t.probe_gaps.remote(turns) for t in self.cluster.trainers))
        of_ranks = await within(limit, "the trainers to score the probe", scores)
        return dict(zip(answers, of_ranks[0], strict=True))  # all ranks have the same gaps

    def requests(self) -> list[Request]:
        """Returns the requests of the next probe."""
        embeddings = [m.shape for m in self.cluster.metas if "embed" in m.name or "wte" in m.name]
        vocabulary = max((shape[0] for shape in embeddings), default=LENGTH)
        self.asked += 1  # an engine that was too busy may still have the last probe's requests
        requests = []
        for i, ids in enumerate(prompts(vocabulary)):
            request = Request(
                name=f"probe {self.asked}, prompt {i}",
                prompt_ids=ids,
                n=1,
                seed=self.cfg.seed + i,
                drafts=[],
                max_tokens=ANSWER,
                sampling={"ignore_eos": True},
                priority=-1,
            )
            requests.append(request)
        return requests

    @property
    def limit(self) -> float:
        """The largest gap of an engine that is right, in nats."""
        dtypes = {meta.dtype for meta in self.cluster.metas}
        dtype = "bfloat16" if "bfloat16" in dtypes else "float32"
        if self.first is None:
            return CEILING[dtype]
        return min(CEILING[dtype], max(FLOOR[dtype], TIMES * self.first))

    def judge(self, version: int, gaps: "dict[Engine, float]") -> None:
        """Judges the engines by their gaps; the first good gap of the run limits later ones.

        Raises EnginesError naming engines to replace, or RunError if that would not help.
        """
        if not gaps:
            return
        limit = self.limit
        wrong = [engine for engine, gap in gaps.items() if not gap <= limit]  # NaN is wrong too
        guilty = [engine for engine in wrong if engine.is_new or engine.doubts]
        for engine in gaps:
            engine.doubts = DOUBTS if engine in wrong else max(0, engine.doubts - 1)
        if not wrong:
            self.accept(version, gaps)
            return
        worst = np.max([gaps[engine] for engine in wrong])  # NaN if one of them is
        charge = (
            f"the scores of {len(wrong)} of {len(gaps)} engines differ from the trainer's at "
            f"version {version}, by up to {worst:.2g} nats, more than {limit:.2g}"
        )
        if not guilty:
            tqdm.write(f"{charge}. They are asked again after the next update")
            return
        if len(wrong) < len(gaps):
            raise EnginesError([engine.actor for engine in guilty], RuntimeError(charge))
        if self.first is None:
            raise RunError(charge)
        if any(engine.is_new for engine in wrong):
            raise RunError(
                f"the trainer is at fault: {charge}, and new engines, whose weights were read "
                f"back, are among them. All were right at version {self.agreed}"
            )
        if len(wrong) == self.cfg.engine.count:
            self.accusation = charge
        raise EnginesError([engine.actor for engine in wrong], RuntimeError(charge))

    def accept(self, version: int, gaps: "dict[Engine, float]") -> None:
        """Notes that all engines were right. Raises RunError if those before them were wrong."""
        if self.accusation:
            raise RunError(
                f"the engines are at fault: {self.accusation}, and new engines are right. "
                f"All were right at version {self.agreed}"
            )
        if not self.first:
            self.first = max(gaps.values())
        self.agreed = version
