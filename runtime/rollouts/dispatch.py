"""Sends prompts to rollout workers and engines, and tries again what failed.

A row may kill or block its worker, and with it all other groups there. Each of them is suspect
then: it is tried again by a worker that has nothing else to do. So only the guilty one is dropped.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from tqdm import tqdm

from core import waits
from core.errors import RunError
from core.waits import Ref, answer, within
from envs import services
from envs.services import Away
from rollout.episode import Group, SampleInfo
from runtime.engines.fleet import CHECK_SECONDS, CHECKS_PER_SECOND, Fleet
from runtime.processes.actors import cancel, cpus, kill
from runtime.processes.cluster import Cluster
from runtime.rollouts.outages import Outages
from settings.config import RunSettings

if TYPE_CHECKING:
    from runtime.rollouts.outages import Outages

T = TypeVar("T")
SPENT = ("wait_for_rollouts", "train_seconds")  # metrics of a step, added up over its parts
ATTEMPTS = 3  # of one prompt before it is dropped and its slot is refilled with the next
CPUS_PER_SUSPECT = 2  # in the cluster, for each of the workers that suspects have to themselves


class Slot(NamedTuple):
    """Where a group belongs: prompt `number` of the stream, or row `number` of an evaluation."""

    number: int
    evaluation: int | None = None  # policy version that is evaluated; None: for training

    def __str__(self) -> str:
        """As messages, seeds and dropped.jsonl name it."""
        step = "" if self.evaluation is None else f"val-{self.evaluation}-"
        return f"{step}{self.number}"

    def record(self, prompts_per_step: int) -> dict[str, int | None]:
        """What rollouts.jsonl says of it: `step` trains on it, or `evaluation` evaluates it."""
        step = self.number // prompts_per_step + 1 if self.evaluation is None else None
        return {"step": step, "slot": self.number, "evaluation": self.evaluation}

    def lines(self, records: list[dict], cfg: RunSettings) -> bytes:
        """Its group for rollouts.jsonl."""
        place = self.record(cfg.prompts_per_step)
        return "".join(json.dumps(place | r, default=str) + "\n" for r in records).encode()


@dataclasses.dataclass
class Parts:
    """What a step has trained so far, part by part."""

    groups: list[Group] = dataclasses.field(default_factory=list)
    tables: list[dict] = dataclasses.field(default_factory=list)  # of mismatch, of each rank
    scores: list[tuple] = dataclasses.field(default_factory=list)  # (places, logprobs) likewise
    seconds: dict[str, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(SPENT, 0.0))


@dataclasses.dataclass
class Tries:
    """The tries of one prompt so far."""

    row: dict
    slot: Slot
    rank: int  # of the worker that has all of them, as long as it lives: it keeps the drafts
    failed: int = 0
    is_suspect: bool = False  # its worker died in a try
    error: BaseException = dataclasses.field(default_factory=BaseException)  # of the last one

    @property
    def name(self) -> str:
        """As error messages name it."""
        return f"the rollouts of slot {self.slot}, line {self.row['_line']}"


class Crew:
    """The rollout workers: asked in turn, watched, replaced when they die or do not answer."""

    def __init__(self, cfg: RunSettings, cluster: Cluster):
        self.cfg = cfg
        self.cluster = cluster
        self.outages: Outages | None = None  # once a worker has reported one, or a failed call
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
        suspects = max(1, cpus() // CPUS_PER_SUSPECT)
        for rank in range(count, count + suspects):
            self.seats.put_nowait(rank)

    def launch(self, rank: int) -> Any:
        """Starts one worker."""
        worker = self.cluster.start_worker()
        self.ranks[worker] = rank
        self.watches.add(asyncio.create_task(self.watch(worker)))
        return worker

    async def of_rank(self, rank: int) -> Any:
        """The living worker of a rank, which has started; a new one where there is none.

        Raises RunError where ATTEMPTS in turn do not start: no row has reached them.
        """
        for _ in range(ATTEMPTS):
            living = (worker for worker, its_rank in self.ranks.items() if its_rank == rank)
            worker = next(living, None) or self.launch(rank)
            if worker in self.started or await self.is_alive(worker):
                return worker
        raise RunError(f"{ATTEMPTS} rollout workers did not start; see logs/RolloutWorker-*.log")

    @contextlib.asynccontextmanager
    async def worker(self, tries: Tries) -> AsyncIterator[Any]:
        """The worker for a try. A suspect gets one of its own, and waits for a free seat.

        The deadline of its step bounds that wait.
        """
        if not tries.is_suspect:
            yield await self.of_rank(tries.rank)
            return
        rank = await self.seats.get()
        try:
            yield await self.of_rank(rank)
        finally:
            self.seats.put_nowait(rank)

    async def is_alive(self, worker: Any) -> bool:
        """Whether a worker answers; one that does not is killed."""
        limit = waits.ANSWER_SECONDS if worker in self.started else self.cfg.timeouts.start
        try:
            asked = worker.call.remote(services.report)
            report = await answer(asked, limit, "a rollout worker")
            if worker in self.ranks:  # or another call has given it up meanwhile
                self.receive(worker, report)
                self.started.add(worker)
        except Exception as error:
            if self.outages:
                self.outages.forget(worker)
            if self.ranks.pop(worker, None) is not None:
                kill(worker)
                tqdm.write(f"a rollout worker is lost: {str(error).partition(chr(10))[0]}")
        return worker in self.ranks

    def receive(self, worker: Any, report: services.Report) -> None:
        """Takes note of what a worker has seen of servers outside."""
        if not self.outages and (report.away or report.failures):
            self.outages = Outages()
        if self.outages:
            self.outages.receive(worker, report)

    def seconds_away(self) -> float:
        """Seconds so far in which a server outside was away."""
        return self.outages.seconds() if self.outages else 0.0

    async def watch(self, worker: Any) -> None:
        """Notices that a worker dies or hangs, and which judges it finds away."""
        while await self.is_alive(worker):
            await asyncio.sleep(max(CHECK_SECONDS, len(self.ranks) / CHECKS_PER_SECOND))


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
        self.attempts = ATTEMPTS

    @property
    def prompt_seconds(self) -> float:
        """What all tries of a prompt may take: rollouts, and a health check after each failure."""
        return self.attempts * (self.cfg.timeouts.rollout + waits.ANSWER_SECONDS)

    async def roll_out(self, row: dict, slot: Slot, n: int, version: int) -> Group:
        """One row's n rollouts, whose engines hold policy `version` or a later one.

        Tried `attempts` times; then the last error is raised. RunError is raised at once. A failure
        is never a reward. No try begins while a judge is away that the row needs.
        """
        tries = Tries(row, slot, next(self.crew.turns) % self.cfg.rollout_workers)
        while True:
            if self.crew.outages:
                await self.crew.outages.over(row)
            async with self.crew.worker(tries) as worker, self.fleet.lease() as engine:
                call = worker.rollout_group.options(num_returns=3).remote(engine, row, slot, n)
                infos, samples, lines = call
                try:
                    found, written = await self.result(infos, lines, tries.name)
                except Exception as error:
                    tries.error = error
                    await self.count_failure(tries, engine, worker)
                else:
                    await self.write(written)
                    return Group(slot.number, version, row["_line"], found, samples)
            await asyncio.sleep(2**tries.failed)

    async def count_failure(self, tries: Tries, engine: Any, worker: Any) -> None:
        """Counts a try that failed with `tries.error`, and waits before the next one.

        A try that an engine's death or a judge that is away has ended does not count. Raises the
        error after the last try; RuntimeError where the row ended a worker that ran nothing else.
        """
        crew = self.crew
        asked = self.fleet.is_alive(engine), crew.is_alive(worker)
        engine_lives, worker_lives = await asyncio.gather(*asked)
        away = isinstance(tries.error, Away) or bool(
            crew.outages and crew.outages.concern(tries.row)
        )
        counts = engine_lives and not away
        tries.failed += counts
        is_last = counts and tries.failed >= self.attempts
        if is_last and worker_lives:
            worker.forget.remote(tries.slot, tries.row["_line"])
            raise tries.error
        if is_last and tries.is_suspect:
            alone = "crashed its worker while running alone: the row or its environment is at fault"
            raise RuntimeError(f"{tries.name} {alone}") from tries.error
        tries.is_suspect |= not worker_lives

    async def result(
        self, infos: Ref[list[SampleInfo]], lines: Ref[bytes], what: str
    ) -> tuple[list[SampleInfo], bytes]:
        """The small results of a call, which is cancelled where they do not come."""

        async def both() -> tuple[list[SampleInfo], bytes]:
            return await infos, await lines

        try:
            return await self.wait(self.cfg.timeouts.rollout, what, both())
        except BaseException:
            cancel(infos)
            raise

    async def wait(self, seconds: float, what: str, call: Awaitable[T], judged: bool = True) -> T:
        """Awaits under a named deadline; for what is judged, not while a judge is away."""
        stopped = self.crew.seconds_away if judged else float
        return await within(seconds, what, call, self.state, stopped)

    def state(self) -> str:
        """The census of the run, and the judges that are away."""
        away = self.crew.outages.state() if self.crew.outages else ""
        return "; ".join(filter(None, (self.census(), away)))

    def meters(self) -> dict[str, float]:
        """What judges cost since the last call: seconds away, and failed calls by reason."""
        return self.crew.outages.meters() if self.crew.outages else {}
