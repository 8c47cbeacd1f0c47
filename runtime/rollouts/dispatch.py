"""Sends prompts to rollout workers and engines, and retries the prompts that failed.

A row may kill or block its worker, and with it all other groups there. Each of these groups is
then suspect, and is retried by a worker that runs nothing else. So only the group at fault is
dropped.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from tqdm import tqdm

from core import waits
from core.errors import RunError
from core.waits import Ref, answer, together, within
from envs import services
from envs.services import Away
from rollout.episode import Group, Rollouts, SampleInfo
from runtime.engines.fleet import CHECK_SECONDS, CHECKS_PER_SECOND, Fleet
from runtime.processes.actors import cancel, cpus, kill
from runtime.processes.cluster import Cluster
from runtime.rollouts.outages import Outages
from settings.config import RunSettings

if TYPE_CHECKING:
    from ray.actor import ActorHandle

T = TypeVar("T")
ATTEMPTS = 3  # tries of one prompt before it is dropped and its slot gets the next prompt
CPUS_PER_SUSPECT = 2  # CPUs in the cluster per worker that runs a suspect alone


class Slot(NamedTuple):
    """The place of a group: prompt `number` of the stream, or row `number` of an evaluation."""

    number: int
    evaluation: int | None = None  # the policy version that is evaluated; None in training

    def __str__(self) -> str:
        """Returns the slot's name in messages, seeds and dropped.jsonl."""
        step = "" if self.evaluation is None else f"val-{self.evaluation}-"
        return f"{step}{self.number}"

    def record(self, prompts_per_step: int) -> dict[str, int | None]:
        """Returns its fields in rollouts.jsonl: the `step` that trains on it, or `evaluation`."""
        step = self.number // prompts_per_step + 1 if self.evaluation is None else None
        return {"step": step, "slot": self.number, "evaluation": self.evaluation}

    def lines(self, records: list[dict], cfg: RunSettings) -> bytes:
        """Returns the lines of the slot's group for rollouts.jsonl."""
        place = self.record(cfg.prompts_per_step)
        lines = [json.dumps(place | record, default=str) + "\n" for record in records]
        return "".join(lines).encode()


@dataclasses.dataclass
class Tries:
    """The tries of one prompt so far."""

    row: dict
    slot: Slot
    rank: int  # rank of the worker that gets every try while it lives, because it keeps the drafts
    failed: int = 0
    is_suspect: bool = False  # True if its worker died during a try
    error: BaseException = dataclasses.field(default_factory=BaseException)  # error of the last try

    @property
    def name(self) -> str:
        """The prompt's name in error messages."""
        return f"the rollouts of slot {self.slot}, line {self.row['_line']}"


class Crew:
    """The rollout workers: used in turn, watched, and replaced when they die or do not answer."""

    def __init__(self, cfg: RunSettings, cluster: Cluster):
        self.cfg = cfg
        self.cluster = cluster
        self.outages: Outages | None = None  # set at the first report that is not empty
        self.ranks: dict[ActorHandle, int] = {}  # living worker -> its rank
        self.started: set[ActorHandle] = set()  # the workers that have answered at least once
        self.watches: set[asyncio.Task] = set()
        self.turns = itertools.count()
        self.seats: asyncio.LifoQueue[int] = asyncio.LifoQueue()  # free ranks for suspects

    def start(self) -> None:
        """Starts the workers to which prompts are sent in turn."""
        count = self.cfg.rollout_workers
        for rank in range(count):
            self.launch(rank)
        suspects = max(1, cpus() // CPUS_PER_SUSPECT)
        for rank in range(count, count + suspects):
            self.seats.put_nowait(rank)

    def launch(self, rank: int) -> "ActorHandle":
        """Starts one worker."""
        worker = self.cluster.start_worker()
        self.ranks[worker] = rank
        self.watches.add(asyncio.create_task(self.watch(worker)))
        return worker

    async def of_rank(self, rank: int) -> "ActorHandle":
        """Returns the started worker of a rank; launches one if no worker of the rank lives.

        Raises RunError if ATTEMPTS workers in a row do not start. No row has reached these workers.
        """
        for _ in range(ATTEMPTS):
            living = [worker for worker, its_rank in self.ranks.items() if its_rank == rank]
            worker = living[0] if living else self.launch(rank)
            if worker in self.started or await self.is_alive(worker):
                return worker
        raise RunError(f"{ATTEMPTS} rollout workers did not start; see logs/RolloutWorker-*.log")

    @contextlib.asynccontextmanager
    async def worker(self, tries: Tries) -> "AsyncIterator[ActorHandle]":
        """Yields the worker for a try. A suspect gets its own worker, and waits for a free seat.

        The deadline of the step that needs the group bounds that wait.
        """
        if not tries.is_suspect:
            yield await self.of_rank(tries.rank)
            return
        rank = await self.seats.get()
        try:
            yield await self.of_rank(rank)
        finally:
            self.seats.put_nowait(rank)

    async def is_alive(self, worker: "ActorHandle") -> bool:
        """Returns True if a worker answers; kills it if it does not."""
        limit = waits.ANSWER_SECONDS if worker in self.started else self.cfg.timeouts.start
        try:
            asked = worker.call.remote(services.report)
            report = await answer(asked, limit, "a rollout worker")
            if worker in self.ranks:  # otherwise another call has given up on it
                self.receive(worker, report)
                self.started.add(worker)
        except Exception as error:
            if self.outages:
                self.outages.forget(worker)
            if self.ranks.pop(worker, None) is not None:
                kill(worker)
                tqdm.write(f"a rollout worker is lost: {str(error).partition(chr(10))[0]}")
        return worker in self.ranks

    def receive(self, worker: "ActorHandle", report: services.Report) -> None:
        """Notes a worker's report: outside servers that are down, failed calls, starved checks."""
        if not self.outages and any(report):
            self.outages = Outages()
        if self.outages:
            self.outages.receive(worker, report)

    def seconds_away(self) -> float:
        """Returns the seconds so far during which an outside server was down."""
        return self.outages.seconds() if self.outages else 0.0

    async def watch(self, worker: "ActorHandle") -> None:
        """Checks a worker from time to time, to notice its death or an outage of its judges."""
        while await self.is_alive(worker):
            await asyncio.sleep(max(CHECK_SECONDS, len(self.ranks) / CHECKS_PER_SECOND))


class Dispatcher:
    """Sends each prompt to a worker and an engine, and retries it if it fails.

    `write` writes the lines of a group's rollouts, once. `census` describes the run in error
    messages.
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
        """Seconds that all tries of a prompt may take, with a health check after each failure."""
        return self.attempts * (self.cfg.timeouts.rollout + waits.ANSWER_SECONDS)

    async def roll_out(self, row: dict, slot: Slot, n: int, version: int) -> Group:
        """Returns one row's n rollouts, sampled by policy `version` or a later one.

        Tries `attempts` times, and raises the error of the last try. A RunError is raised at once.
        A failure never becomes a reward. No try begins while a judge that the row needs is down.
        """
        tries = Tries(row, slot, next(self.crew.turns) % self.cfg.rollout_workers)
        while True:
            if self.crew.outages:
                await self.crew.outages.over(row)
            async with self.crew.worker(tries) as worker, self.fleet.lease() as engine:
                rollout_group = worker.rollout_group.options(num_returns=len(Rollouts._fields))
                infos, samples, lines = rollout_group.remote(engine, row, slot, n)
                try:
                    found, written = await self.result(infos, lines, tries.name)
                except Exception as error:
                    tries.error = error
                    await self.count_failure(tries, engine, worker)
                else:
                    await self.write(written)
                    return Group(slot.number, version, row["_line"], found, samples)
            await asyncio.sleep(2**tries.failed)

    async def roll_out_all(
        self, rows: Sequence[dict], slots: Sequence[Slot], n: int
    ) -> list[Group | Exception]:
        """Returns n rollouts of each validation row, or the error of a row that failed.

        The first RunError ends all of them and is raised.
        """

        async def result(row: dict, slot: Slot) -> Group | Exception:
            try:
                return await self.roll_out(row, slot, n, slot.evaluation or 0)
            except RunError:
                raise
            except Exception as error:
                return error

        return await together(map(result, rows, slots))

    async def count_failure(
        self, tries: Tries, engine: "ActorHandle", worker: "ActorHandle"
    ) -> None:
        """Counts a try that failed with `tries.error`.

        The try does not count if its engine died or a judge was down. After the last try the error
        is raised. Raises RuntimeError if the row ended a worker that ran nothing else.
        """
        crew = self.crew
        engine_lives, worker_lives = await asyncio.gather(
            self.fleet.is_alive(engine), crew.is_alive(worker)
        )
        is_away = isinstance(tries.error, Away)
        if crew.outages and crew.outages.concern(tries.row):
            is_away = True
        if engine_lives and not is_away:
            tries.failed += 1
            is_last = tries.failed >= self.attempts
            if is_last and worker_lives:
                worker.forget.remote(tries.slot, tries.row["_line"])
                raise tries.error
            if is_last and tries.is_suspect:
                raise RuntimeError(
                    f"{tries.name} crashed its worker while running alone: "
                    "the row or its environment is at fault"
                ) from tries.error
        if not worker_lives:
            tries.is_suspect = True

    async def result(
        self, infos: Ref[list[SampleInfo]], lines: Ref[bytes], what: str
    ) -> tuple[list[SampleInfo], bytes]:
        """Awaits the small results of a call; cancels the call if they do not arrive in time."""

        async def both() -> tuple[list[SampleInfo], bytes]:
            return await infos, await lines

        try:
            return await self.wait(self.cfg.timeouts.rollout, what, both())
        except BaseException:
            cancel(infos)
            raise

    async def wait(
        self, seconds: float, what: str, call: Awaitable[T], needs_judges: bool = True
    ) -> T:
        """Awaits under a named deadline, whose clock stops while a judge is down.

        The clock always runs if the call needs no judges.
        """
        stopped = self.crew.seconds_away if needs_judges else float
        return await within(seconds, what, call, self.state, stopped)

    def state(self) -> str:
        """Returns the census of the run and the judges that are down, for error messages."""
        away = self.crew.outages.state() if self.crew.outages else ""
        return f"{self.census()}; {away}" if away else self.census()

    def meters(self) -> dict[str, float]:
        """Returns metrics of judges and starved checks since the last call."""
        return self.crew.outages.meters() if self.crew.outages else {}
