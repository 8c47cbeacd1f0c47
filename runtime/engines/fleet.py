"""Keeps the engines: starts them, leases them by load, watches them, and updates them.

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
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tqdm import tqdm

from core import waits
from core.errors import RunError, in_one_line
from core.waits import answer, within
from runtime.engines import repair
from runtime.engines.probe import Probe
from runtime.processes import placement
from runtime.processes.actors import actor, kill
from runtime.processes.cluster import Cluster
from runtime.reporting.console import phase
from runtime.reporting.metrics import SYNC
from settings.config import RunSettings

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

CHECK_SECONDS = 5.0  # seconds between two health checks of an engine or a worker
CHECKS_PER_SECOND = 20.0  # health checks at most: a thousand actors would keep the driver busy


class State(enum.Enum):
    """The states of an engine's life."""

    STARTING = enum.auto()  # its process loads vLLM
    FRESH = enum.auto()  # until the next update, its weights are noise, or mixed from two policies
    SERVING = enum.auto()  # it holds the policy: groups are leased to it
    LOST = enum.auto()  # dead, silent, or with wrong weights: killed, and never used again


@dataclasses.dataclass(eq=False)
class Engine:
    """One engine of the fleet, as the driver knows it."""

    actor: "ActorHandle"  # actor of a Generator
    number: int  # order of launch; of equally busy engines the lowest number is chosen
    home: str  # its node; "" for any node
    start: asyncio.Future  # done when it has started, or failed to start
    state: State = State.STARTING
    groups: int = 0  # number of groups that it works on
    unanswered: bool = False  # a health check is pending, so it may hang
    doubts: int = 0  # updates after which a probe asks it again, because its scores were wrong

    @property
    def place(self) -> tuple[int, int]:
        """The sort key of `Fleet.serving`: the least busy engine is first."""
        return self.groups, self.number

    @property
    def is_new(self) -> bool:
        """Whether it has started, but has not served yet, or not since an update was cut off."""
        return self.state is State.FRESH


class Received(NamedTuple):
    """An engine's report of a weight update."""

    phases: dict[str, float]  # seconds per phase in SYNC
    checksums: list[int]  # checksum of the bytes that each worker received
    meters: dict[str, float]  # since the last update: tokens, seconds without a request, ...


# How several engines' meters become one metric; all other meters are added up.
MERGE: dict[str, Callable[[list[float]], float]] = {
    "wait_for_training": statistics.fmean,
    "kv_use": max,
}


def combined(received: Sequence[Received]) -> dict[str, float]:
    """Returns the metrics of a weight update: the longest time of each phase, and merged meters."""
    found: dict[str, float] = {}
    if received:
        found = {phase: max(update.phases[phase] for update in received) for phase in SYNC}
    names = dict.fromkeys(name for update in received for name in update.meters)
    for name in names:
        merge = MERGE.get(name, sum)
        found[name] = merge([update.meters[name] for update in received if name in update.meters])
    return found


class Fleet:
    """Actors of a Generator class, and their process group with the ranks that send weights.

    `missing` is set while engines are lost. A lost engine's successor loads while the others serve.
    """

    def __init__(self, Generator: type, cfg: RunSettings, cluster: Cluster):
        self.Generator = Generator
        self.cfg = cfg
        self.cluster = cluster
        self.engines: dict[ActorHandle, Engine] = {}  # by actor; lost engines are left out
        self.serving: list[Engine] = []  # least busy first
        self.grouped: set[ActorHandle] = set()  # the engines in the process group
        self.probe = Probe(cfg, cluster)  # compares engines with the trainer
        self.numbers = itertools.count()
        self.watches: set[asyncio.Task] = set()
        self.synced = asyncio.Event()  # wakes the callers that wait for a serving engine
        self.missing = asyncio.Event()
        # Engines may not answer while they join a group or receive an update. This is when the
        # last of these ended; inf while one is running.
        self.free_since = 0.0
        self.kv_bytes = 0  # per engine worker, found by the first engines when they profiled
        self.sent: list[asyncio.Future] = []  # the trainer ranks' sends of the latest update
        self.worked = False  # whether any update has succeeded
        self.discarded = 0  # number of engines discarded so far
        self.error: BaseException | None = None  # error of the engine that was lost last
        self.repairs: list[float] = []  # times of the repairs
        self.is_held = False  # True: no engine is replaced for the rest of the hour

    def of(self, *states: State) -> "list[ActorHandle]":
        """Returns the actors of the engines in these states, in the order of launch."""
        return [e.actor for e in self.engines.values() if e.state in states]

    @property
    def alive(self) -> "list[ActorHandle]":
        """The actors that have started."""
        return self.of(State.FRESH, State.SERVING)

    @property
    def starting(self) -> list[Engine]:
        """The engines that were launched but not yet taken in."""
        return [e for e in self.engines.values() if e.state is State.STARTING]

    @property
    def fresh(self) -> "list[ActorHandle]":
        """The actors that have started and hold no policy."""
        return self.of(State.FRESH)

    def launch_missing(self) -> None:
        """Starts the missing engines, if `repair.allowed` permits; `repair.started` waits for them.

        Raises RuntimeError if no engine would be left.
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

    async def launch_and_wait(self) -> None:
        """Starts all engines and waits for them. Raises the error of the first one that fails."""
        phase(f"starting vLLM (engines: {self.cfg.engine.count})")
        self.launch_missing()
        await repair.started(self)
        if self.error:
            raise self.error

    def take_in_started(self) -> None:
        """Takes in the launched engines that have started, and watches them."""
        for engine in self.starting:
            if engine.start.done() and not engine.start.exception():
                engine.state = State.FRESH
                self.watches.add(asyncio.create_task(self.watch(engine.actor)))

    async def connect(self) -> None:
        """Rebuilds the process group if the set of live engines has changed."""
        self.take_in_started()
        # An engine that has died or hung by now would keep the others waiting.
        await asyncio.gather(*map(self.is_alive, self.alive))
        while not self.alive or self.grouped != set(self.alive):  # one may die after it has joined
            await repair.join(self)

    @contextlib.asynccontextmanager
    async def lease(self) -> "AsyncIterator[ActorHandle]":
        """Yields the least busy serving engine for a group's rollouts; waits until one serves.

        Raises RunError if no engine serves within the limit.
        """
        limits = self.cfg.timeouts
        if not self.serving:  # if one serves, no deadline: it would cost more than all the rest
            limit = 4 * limits.start + 2 * limits.train + 3 * limits.sync  # time for three repairs
            await within(
                limit, "an engine that holds the policy", self.any_serving(), late=RunError
            )
        engine = self.least_busy()
        self.occupy(engine, 1)
        try:
            yield engine.actor
        finally:
            if engine.state is State.SERVING:
                self.occupy(engine, -1)
            else:  # it is lost, or was cut off from an update
                engine.groups -= 1

    def least_busy(self) -> Engine:
        """Returns the least busy engine, if possible one that owes no health check: it may hang."""
        for engine in self.serving:
            if not engine.unanswered:
                return engine
        return self.serving[0]

    def occupy(self, engine: Engine, groups: int) -> None:
        """Notes that an engine works on `groups` more groups, and moves it in `serving`."""
        del self.serving[bisect.bisect_left(self.serving, engine.place, key=lambda e: e.place)]
        engine.groups += groups
        bisect.insort(self.serving, engine, key=lambda e: e.place)

    async def any_serving(self) -> None:
        """Waits for an engine that serves."""
        while not self.serving:
            self.synced.clear()
            await self.synced.wait()

    async def exchange(
        self, sends: "list[ObjectRef[int]]", updates: "dict[ActorHandle, ObjectRef[Received]]"
    ) -> dict[str, float]:
        """Awaits one weight update: the trainers' `sends`, and each engine's call in `updates`.

        Returns its metrics. If some engines fail, do not answer, or receive bytes other than those
        sent, they are discarded, and the first error is raised once no send is left waiting.
        """
        self.sent = [asyncio.wrap_future(send.future()) for send in sends]
        received: dict[asyncio.Future[Received], ActorHandle] = {}
        for engine, call in updates.items():
            received[asyncio.wrap_future(call.future())] = engine
        both = {*self.sent, *received}
        for task in both:  # asyncio complains about an exception that is never fetched
            task.add_done_callback(asyncio.Future.exception)
        with self.occupying():
            limit = self.cfg.timeouts.sync
            await asyncio.wait(both, timeout=limit, return_when=asyncio.FIRST_EXCEPTION)
        if not all(task.done() and not task.exception() for task in both):
            raise await repair.end_update(self, received)
        checksum = self.sent[0].result()
        changed = []
        for task, engine in received.items():
            if any(arrived != checksum for arrived in task.result().checksums):
                changed.append(engine)
        if changed:
            error = RuntimeError("an engine received weights that differ from those sent")
            self.discard(changed, error)
            raise error
        return combined([task.result() for task in received])

    def all_synced(self) -> None:
        """Notes that all connected engines hold the policy now."""
        for engine in self.engines.values():
            if engine.state is State.FRESH:
                engine.state = State.SERVING
                bisect.insort(self.serving, engine, key=lambda e: e.place)
        self.worked = True
        self.synced.set()
        if len(self.serving) == self.cfg.engine.count:
            self.missing.clear()

    @contextlib.contextmanager
    def occupying(self) -> Iterator[None]:
        """Marks a block that may keep the engines from answering a health check."""
        self.free_since = math.inf
        try:
            yield
        finally:
            self.free_since = time.monotonic()

    async def compare(self, version: int, verify: bool) -> dict[str, float]:
        """Compares all engines with the trainer if a probe is due; returns its metric.

        Raises EnginesError naming engines that must be replaced, or RunError if no new engine can
        help.
        """
        engines = [self.engines[made] for made in self.alive]
        if not verify and not self.probe.is_due(version, engines):
            return {}
        # The first answers of a new engine may wait until kernels are compiled.
        compiling = any(engine.is_new for engine in engines)
        with self.occupying() if compiling else contextlib.nullcontext():
            gaps = await self.probe.gaps(engines)
        self.probe.judge(version, gaps)
        return {"probe_gap": max(gaps.values())} if gaps else {}

    async def watch(self, engine: "ActorHandle") -> None:
        """Checks an engine's health from time to time, to notice its death even if it is idle."""
        while await self.is_alive(engine):
            await asyncio.sleep(max(CHECK_SECONDS, len(self.engines) / CHECKS_PER_SECOND))

    async def is_alive(self, engine: "ActorHandle") -> bool:
        """Returns whether an engine still answers; discards it if it is dead or silent.

        It is asked again if joining a group or an update may have kept it from answering.
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

    def discard(self, actors: "list[ActorHandle]", error: BaseException) -> None:
        """Kills engines that failed; `launch_missing` starts others in their place."""
        for failed in actors:
            if failed not in self.engines:
                continue
            engine = self.engines.pop(failed)
            self.retire(engine, State.LOST)
            kill(engine.actor)
            self.error = error
            self.discarded += 1
            tqdm.write(f"an engine is lost: {in_one_line(error)}")
            self.missing.set()

    def retire(self, engine: Engine, state: State = State.FRESH) -> None:
        """Takes an engine out of `serving`, for good or until the next update."""
        if engine.state is State.SERVING:
            self.serving.remove(engine)
        engine.state = state
