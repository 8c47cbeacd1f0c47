"""Sends prompts to rollout workers and engines, and repeats what failed.

A row may kill or block its worker, and with it all other groups there. Each of them is suspect
then: it is tried again by a worker that has nothing else to do. So only the guilty one is dropped.
"""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

import ray
from tqdm import tqdm

from core.waits import answer, in_turn, within
from envs.judge import judge
from envs.rollout.episode import SampleInfo
from runtime.cluster import Cluster
from runtime.fleet import ASKED, EVERY, Fleet
from runtime.outages import Outages
from settings.run import RunSettings

T = TypeVar("T")
CPUS_PER_SUSPECT = 2  # in the cluster, for each of the workers that suspects have to themselves


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
    lines: bytes = b""  # for rollouts.jsonl, until they are written


class Crew:
    """The rollout workers: asked in turn, watched, replaced when they die or do not answer."""

    def __init__(self, cfg: RunSettings, cluster: Cluster):
        self.cfg = cfg
        self.cluster = cluster
        self.outages = Outages()
        self.ranks: dict[Any, int] = {}  # of each living worker: its place among them
        self.started: set[Any] = set()  # those that have answered once
        self.watches: set[asyncio.Task] = set()
        self.turns = itertools.count()
        self.seats: asyncio.LifoQueue[int] = asyncio.LifoQueue()  # free ranks for suspects

    def start(self) -> None:
        """Starts the workers that prompts are sent to in turn."""
        count = self.cfg.rollout_workers
        for rank in range(count):
            self.launch(rank)
        suspects = max(1, int(ray.cluster_resources().get("CPU", 0)) // CPUS_PER_SUSPECT)
        for rank in range(count, count + suspects):
            self.seats.put_nowait(rank)

    def launch(self, rank: int) -> Any:
        """Starts one worker."""
        worker = self.cluster.start_worker()
        self.ranks[worker] = rank
        self.watches.add(asyncio.create_task(self.watch(worker)))
        return worker

    async def of_rank(self, rank: int) -> Any:
        """The living worker of a rank, which has started; a new one where there is none."""
        living = (worker for worker, its_rank in self.ranks.items() if its_rank == rank)
        worker = next(living, None) or self.launch(rank)
        if worker not in self.started:
            await self.is_alive(worker)
        return worker

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[int]:
        """The rank of a worker for one suspect. The deadline of its step bounds the wait."""
        rank = await self.seats.get()
        try:
            yield rank
        finally:
            self.seats.put_nowait(rank)

    async def is_alive(self, worker: Any) -> bool:
        """Whether a worker answers; one that does not is killed."""
        limits = self.cfg.timeouts
        limit = limits.answer if worker in self.started else limits.start
        try:
            asked = worker.call.remote(judge.report)
            self.outages.hear(worker, await answer(asked, limit, "a rollout worker"))
            self.started.add(worker)
        except Exception as error:
            self.outages.forget(worker)
            if self.ranks.pop(worker, None) is not None:
                ray.kill(worker)
                tqdm.write(f"a rollout worker is lost: {str(error).partition(chr(10))[0]}")
        return worker in self.ranks

    async def watch(self, worker: Any) -> None:
        """Notices that a worker dies or hangs, and which judges it finds away."""
        while await self.is_alive(worker):
            await asyncio.sleep(max(EVERY, len(self.ranks) / ASKED))


class Dispatcher:
    """Chooses worker and engine for each prompt; has its rollouts written, once, by `write`.

    `census` describes the run in error messages.
    """

    def __init__(
        self,
        cfg: RunSettings,
        cluster: Cluster,
        fleet: Fleet,
        census: Callable[[], str],
        write: Callable[[bytes], Awaitable[None]],
    ):
        self.cfg = cfg
        self.fleet = fleet
        self.crew = Crew(cfg, cluster)
        self.census = census
        self.write = write

    async def roll_out(self, row: dict, slot: Slot, n: int) -> Rollouts:
        """One row's n rollouts.

        Tried `rollout_attempts` times, not counting those that an engine's death or a judge that is
        away ended; then the last error is raised. WriteError is raised at once. A failure is never
        a reward. One worker has all tries of a prompt, as long as it lives: it keeps what engines
        have written. No try begins while a judge is away that the row needs.
        """
        what = f"the rollouts of slot {slot}, line {row['_line']}"
        shared = next(self.crew.turns) % self.cfg.rollout_workers
        suspect = False
        attempts = 0
        while True:
            await self.crew.outages.over(row)
            place = self.crew.alone() if suspect else contextlib.nullcontext(shared)
            async with place as rank, self.fleet.lease() as engine:
                worker = await self.crew.of_rank(rank)
                call = worker.rollout_group.options(num_returns=3).remote(engine, row, slot, n)
                try:
                    rollouts = await self.result(call, what)
                except Exception as error:
                    asked = self.fleet.is_alive(engine), self.crew.is_alive(worker)
                    engine_lives, worker_lives = await asyncio.gather(*asked)
                    away = isinstance(error, judge.Away) or self.crew.outages.concern(row)
                    attempts += engine_lives and not away
                    is_last = attempts >= self.cfg.rollout_attempts and not away
                    if is_last and worker_lives:
                        worker.forget.remote(slot, row["_line"])
                        raise
                    if is_last and suspect:
                        raise RuntimeError(f"{what} ended a worker that had no others") from error
                    suspect |= not worker_lives
                else:
                    await self.write(rollouts.lines)
                    return rollouts._replace(lines=b"")
            await asyncio.sleep(2**attempts)

    async def result(self, call: list, what: str) -> Rollouts:
        """The rollouts of a call, which is cancelled where they do not come."""
        infos, samples, lines = call
        try:
            both = in_turn(infos, lines)
            found, written = await self.wait(self.cfg.timeouts.rollout, what, both)
            return Rollouts(found, samples, written)
        except BaseException:
            ray.cancel(infos)
            raise

    async def wait(self, seconds: float, what: str, awaitable: Awaitable[T]) -> T:
        """Awaits under a named deadline; time in which a judge is away does not count."""
        outages = self.crew.outages
        return await within(seconds, what, awaitable, self.state, outages.seconds)

    def state(self) -> str:
        """The census of the run, and the judges that are away."""
        return "; ".join(filter(None, (self.census(), self.crew.outages.state())))

    def meters(self) -> dict[str, float]:
        """What judges cost since the last call: seconds away, and failed calls by reason."""
        return self.crew.outages.meters()
