"""Sends prompts to rollout workers and engines, and repeats what failed."""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import ray

from envs.episode import SampleInfo
from runtime.cluster import Cluster
from runtime.fleet import Fleet
from runtime.settings import RunSettings
from runtime.waits import within


class Slot(NamedTuple):
    """Where a group belongs: prompt `number` of the stream, or row `number` of an evaluation."""

    number: int
    evaluation: int | None = None  # policy version that is evaluated; None: for training

    def __str__(self) -> str:
        """As messages, seeds and dropped.jsonl name it."""
        return (
            f"{self.number}" if self.evaluation is None else f"val-{self.evaluation}-{self.number}"
        )

    def record(self, prompts_per_step: int) -> dict[str, int | None]:
        """What rollouts.jsonl says of it: `step` trains on it, or `evaluation` evaluates it."""
        step = self.number // prompts_per_step + 1 if self.evaluation is None else None
        return {"step": step, "slot": self.number, "evaluation": self.evaluation}


class Rollouts(NamedTuple):
    """A prompt's scored answers; `samples` is a list[Sample], or Ray's reference to one."""

    infos: list[SampleInfo]
    samples: Any


class Dispatcher:
    """Chooses worker and engine for each prompt; `census` describes the run in error messages."""

    def __init__(self, cfg: RunSettings, cluster: Cluster, fleet: Fleet, census: Callable[[], str]):
        self.cfg = cfg
        self.cluster = cluster
        self.fleet = fleet
        self.census = census
        self.turns = itertools.count()

    async def roll_out(self, row: dict, slot: Slot, n: int) -> Rollouts:
        """One row's n rollouts.

        Tried `rollout_attempts` times, not counting those that an engine's death ended; then the
        last error is raised. A failure is never a reward. One worker has all tries of a prompt: it
        keeps what lost engines had written.
        """
        what = f"the rollouts of slot {slot}, line {row['_line']}"
        workers = self.cluster.workers
        worker = workers[next(self.turns) % len(workers)]
        attempts = 0
        while True:
            async with self.fleet.lease() as engine:
                call = worker.rollout_group.options(num_returns=2).remote(engine, row, slot, n)
                try:
                    limit = self.cfg.timeouts.rollout
                    return Rollouts(await within(limit, what, call[0], self.census), call[1])
                except BaseException as error:
                    ray.cancel(call[0])
                    if not isinstance(error, Exception):  # nobody waits for it any more
                        raise
                    attempts += await self.fleet.is_alive(engine)
                    if attempts >= self.cfg.rollout_attempts:
                        worker.forget.remote(slot, row["_line"])
                        raise
            await asyncio.sleep(2**attempts)
