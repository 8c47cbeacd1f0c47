"""Which engines there are: started, leased by load, watched, brought to each policy version.

STARTING --started--> FRESH --update--> SERVING --death, failed update--> LOST
    ^                   ^------cut off------+                               |
    +----------------- runtime/engines/repair.py, a few times an hour --------------+
"""

import asyncio
import bisect
import contextlib
import dataclasses
import enum
import itertools
import math
import time
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from tqdm import tqdm

from core import waits
from core.errors import RunError
from core.waits import answer, within
from runtime.engines import repair
from runtime.engines.probe import Probe
from runtime.processes import placement
from runtime.processes.actors import actor, kill
from runtime.processes.cluster import Cluster
from runtime.reporting.console import phase
from settings.config import RunSettings

if TYPE_CHECKING:
    from runtime.engines.probe import Probe

CHECK_SECONDS = 5.0  # seconds between two health checks of an engine or a worker
CHECKS_PER_SECOND = 20.0  # health checks at most: a thousand actors would keep the driver busy


class State(enum.Enum):
    """How far an engine is."""

    STARTING = enum.auto()  # its process loads vLLM
    FRESH = enum.auto()  # its weights are noise, or of two policies, until the next update
    SERVING = enum.auto()  # it holds the policy: groups are leased to it
    LOST = enum.auto()  # dead, silent, or with other weights: killed, and never used again


@dataclasses.dataclass(eq=False)
class Engine:
    """One engine of the fleet, as the driver knows it."""

    actor: Any  # Ray's handle of a Generator
    number: int  # of the engines that were launched: equally busy ones are chosen in this order
    home: str  # its node; "" for any
    start: asyncio.Future  # done when it has started, or failed to
    state: State = State.STARTING
    groups: int = 0  # that it works on
    unanswered: bool = False  # a health check is on its way, so it may hang

    @property
    def place(self) -> tuple[int, int]:
        """Its place in the queue: the least busy engine is first."""
        return self.groups, self.number


class Received(NamedTuple):
    """An engine's result of a weight update."""

    phases: dict[str, float]  # seconds
    checksums: list[int]  # of what each worker received
    meters: dict[str, float]  # since the last update: tokens, seconds without a request, ...


class Fleet:
    """Actors of a Generator class, and their process group with the trainer ranks that send.

    `missing` is set while some are lost. A lost engine's successor loads while the others serve.
    """

    def __init__(self, Generator: type, cfg: RunSettings, cluster: Cluster):
        self.Generator = Generator
        self.cfg = cfg
        self.cluster = cluster
        self.engines: dict[Any, Engine] = {}  # by actor; lost ones are not among them
        self.queue: list[Engine] = []  # those that serve, the least busy first
        self.grouped: set[Any] = set()  # actors in the process group
        self.probe = Probe(cfg, cluster)  # compares engines with the trainer
        self.numbers = itertools.count()
        self.watches: set[asyncio.Task] = set()
        self.synced = asyncio.Event()  # wakes what waits for an engine that holds the policy
        self.missing = asyncio.Event()
        self.free_since = 0.0  # joining and updates keep engines from answering; inf: one does now
        self.kv_bytes = 0  # of an engine's worker, as the first ones found by profiling
        self.sent: list[asyncio.Future] = []  # what the trainer ranks do in the latest update
        self.worked = False  # one update of all has
        self.discarded = 0  # engines so far
        self.error: BaseException | None = None  # of the engine that was lost last
        self.repairs: list[float] = []  # when
        self.is_held = False  # no engine is replaced until the hour is over

    def of(self, *states: State) -> list[Any]:
        """The actors of the engines in some states, in the order of their launch."""
        return [e.actor for e in self.engines.values() if e.state in states]

    @property
    def alive(self) -> list[Any]:
        """The actors that have started."""
        return self.of(State.FRESH, State.SERVING)

    @property
    def starting(self) -> list[Engine]:
        """Those that were launched, and have not been taken in."""
        return [e for e in self.engines.values() if e.state is State.STARTING]

    @property
    def fresh(self) -> list[Any]:
        """The actors that have started, and hold no policy."""
        return self.of(State.FRESH)

    def launch(self) -> None:
        """Starts as many engines as are missing; `repair.started` waits for them.

        Fewer, or none, if `repair.allowed` forbids it. Raises RuntimeError if none would be left.
        """
        cfg = self.cfg
        lacking = cfg.engine.count - len(self.engines)
        if lacking and self.error:
            if not repair.allowed(self):
                return
            cfg = repair.settings_of_successors(self)
        gpus = placement.shares(cfg).engine
        options = {"max_concurrency": 100_000}  # control calls must not queue behind rollouts
        for _ in range(lacking):
            home = self.cluster.places.free_home(e.home for e in self.engines.values())
            made = actor(self.Generator, gpus, cfg, **options, **placement.on(home)).remote(cfg)
            start = asyncio.wrap_future(made.start.remote().future())
            self.engines[made] = Engine(made, next(self.numbers), home, start)

    async def start(self) -> None:
        """Waits for all engines; none may fail at first."""
        phase(f"starting vLLM (engines: {self.cfg.engine.count})")
        self.launch()
        await repair.started(self)
        if self.error:
            raise self.error

    def take_in_started(self) -> None:
        """Takes in those launched engines that have started."""
        for engine in self.starting:
            if engine.start.done() and not engine.start.exception():
                engine.state = State.FRESH
                self.watches.add(asyncio.create_task(self.watch(engine.actor)))

    async def connect(self) -> None:
        """A process group of the senders and all engines that have started, if it is another."""
        self.take_in_started()
        # One that is dead or hangs by now would keep the others waiting.
        await asyncio.gather(*map(self.is_alive, self.alive))
        while not self.alive or self.grouped != set(self.alive):  # one may die once it has joined
            await repair.join(self)

    @contextlib.asynccontextmanager
    async def lease(self) -> AsyncIterator[Any]:
        """The least busy engine for a group's rollouts, once there is one that holds a policy.

        Raises RunError where there is none for too long.
        """
        limits = self.cfg.timeouts
        if not self.queue:  # a deadline costs more than all the rest
            limit = 4 * limits.start + 2 * limits.train + 3 * limits.sync  # of three repairs
            what = "an engine that holds the policy"
            await within(limit, what, self.any_serving(), late=RunError)
        engine = self.least_busy()
        self.occupy(engine, 1)
        try:
            yield engine.actor
        finally:
            if engine.state is State.SERVING:
                self.occupy(engine, -1)
            else:  # it is lost, or an update was cut off
                engine.groups -= 1

    def least_busy(self) -> Engine:
        """The engine for the next group; one that owes a health check may hang, and is last."""
        return next((e for e in self.queue if not e.unanswered), self.queue[0])

    def occupy(self, engine: Engine, groups: int) -> None:
        """Moves an engine in the queue: it works on `groups` more groups."""
        del self.queue[bisect.bisect_left(self.queue, engine.place, key=lambda e: e.place)]
        engine.groups += groups
        bisect.insort(self.queue, engine, key=lambda e: e.place)

    async def any_serving(self) -> None:
        """Waits for an engine that lives and holds a policy."""
        while not self.queue:
            self.synced.clear()
            await self.synced.wait()

    async def exchange(self, sends: list[Any], updates: dict[Any, Any]) -> dict[str, float]:
        """One weight update: the trainers' `sends`, and each engine's call in `updates`.

        Returns its metrics. Raises the first error once no send is left waiting, and discards the
        engines that failed, did not answer, or received other bytes than were sent.
        """
        self.sent = [asyncio.wrap_future(send.future()) for send in sends]
        received = {asyncio.wrap_future(call.future()): e for e, call in updates.items()}
        both = {*self.sent, *received}
        for task in both:  # asyncio complains about an exception that is never fetched
            task.add_done_callback(asyncio.Future.exception)
        with self.occupying():
            limit = self.cfg.timeouts.sync
            await asyncio.wait(both, timeout=limit, return_when=asyncio.FIRST_EXCEPTION)
        if not all(task.done() and not task.exception() for task in both):
            raise await repair.end_update(self, received)
        checksum = self.sent[0].result()
        changed = [e for t, e in received.items() if any(c != checksum for c in t.result()[1])]
        if changed:
            error = RuntimeError("weights arrived at an engine other than they were sent")
            self.discard(changed, error)
            raise error
        from runtime.reporting.speed import combined

        return combined([Received(*task.result()) for task in received])

    def all_synced(self) -> None:
        """All engines that are connected hold the policy now."""
        for engine in self.engines.values():
            if engine.state is State.FRESH:
                engine.state = State.SERVING
                bisect.insort(self.queue, engine, key=lambda e: e.place)
        self.worked = True
        self.synced.set()
        if len(self.queue) == self.cfg.engine.count:
            self.missing.clear()

    @contextlib.contextmanager
    def occupying(self) -> Iterator[None]:
        """Something that may keep the engines from answering a health check."""
        self.free_since = math.inf
        try:
            yield
        finally:
            self.free_since = time.monotonic()

    async def gaps(self) -> list[float]:
        """How far new engines' logprobs, or all engines', are from the trainer's, nats."""
        with self.occupying():  # their first answers may wait for kernels that are compiled
            return await self.probe.gaps(self.fresh or self.alive)

    async def watch(self, engine: Any) -> None:
        """Notices that an engine dies or hangs, even if no group uses it."""
        while await self.is_alive(engine):
            await asyncio.sleep(max(CHECK_SECONDS, len(self.engines) / CHECKS_PER_SECOND))

    async def is_alive(self, engine: Any) -> bool:
        """Whether an engine still serves; one that is dead or does not answer is discarded.

        It is asked again where joining or an update may have kept it from answering.
        """
        while known := self.engines.get(engine):
            began = time.monotonic()
            known.unanswered = True
            try:
                await answer(engine.check_health.remote(), waits.ANSWER_SECONDS, "an engine")
                return engine in self.engines
            except Exception as error:
                if not isinstance(error, TimeoutError) or self.free_since < began:
                    self.discard([engine], error)
            finally:
                known.unanswered = False
        return False

    def discard(self, actors: list, error: BaseException) -> None:
        """Kills engines that failed; `launch` starts others in their place."""
        for engine in [self.engines.pop(made) for made in actors if made in self.engines]:
            self.retire(engine, State.LOST)
            kill(engine.actor)
            self.error = error
            self.discarded += 1
            tqdm.write(f"an engine is lost: {error}")
            self.missing.set()

    def retire(self, engine: Engine, state: State = State.FRESH) -> None:
        """Leases no group to an engine from here on, or until the next update."""
        if engine.state is State.SERVING:
            self.queue.remove(engine)
        engine.state = state
