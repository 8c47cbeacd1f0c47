"""Which engines there are: started, leased by load, watched, replaced when they fail.

launched --started--> fresh --first update--> serving --death, failed update--> discarded
    ^                                                                                |
    +--------------------- `launch`, at most max_restarts times an hour -------------+
"""

import asyncio
import bisect
import contextlib
import dataclasses
import itertools
import math
import os
import pickle
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, NamedTuple

import ray
import torch
from tqdm import tqdm

from core.waits import answer, together, within
from policy.weight_sync import Sender, Wire
from runtime import placement
from runtime.cluster import Cluster, actor
from runtime.console import phase
from runtime.probe import Probe
from settings.run import RunSettings

EVERY = 5.0  # seconds between two questions to an engine or a worker whether it lives
ASKED = 20.0  # such questions a second at most: a thousand actors would keep the driver busy
HOUR = 3600.0


class Received(NamedTuple):
    """What an engine says of a weight update: seconds by phase, and each worker's checksum."""

    phases: dict[str, float]
    checksums: list[int]


class Place(NamedTuple):
    """An engine's place among those that wait for work: equals are asked in order of `number`."""

    groups: int  # that it works on
    number: int  # of the engines that have started
    engine: Any


class Fleet:
    """Actors of a Generator class, and their process group with the trainer ranks that send.

    `missing` is set while some are lost; `synced` wakes those who wait for one that holds a policy.
    A lost engine's successor loads while the others serve, and is `fresh` until it gets a policy.
    """

    def __init__(self, Generator: type, cfg: RunSettings, cluster: Cluster):
        self.Generator = Generator
        self.cfg = cfg
        self.cluster = cluster
        self.launched: dict[Any, asyncio.Future] = {}  # engine -> its start
        self.homes: dict[Any, str] = {}  # the node of each engine that lives or starts
        self.alive: dict[Any, Place] = {}  # started engine -> its place in the queue
        self.queue: list[Place] = []  # the places of all, in order: who is least busy is first
        self.numbers = itertools.count()
        self.fresh: set[Any] = set()  # started, without a policy
        self.grouped: set[Any] = set()  # members of the process group
        self.asked: set[Any] = set()  # engines that have not answered yet whether they live
        self.watches: set[asyncio.Task] = set()
        self.synced = asyncio.Event()
        self.missing = asyncio.Event()
        self.repairs: list[float] = []  # when
        self.is_held = False  # no engine is replaced until the hour is over
        self.discarded = 0
        self.free_since = 0.0  # joining and updates keep engines from answering; inf: one does now
        self.error: BaseException | None = None  # of the engine that was lost last
        self.proven = False  # one update of all has worked
        self.kv_bytes = 0  # of an engine's worker, as the first ones found by profiling
        self.sent: list[asyncio.Future] = []  # what the trainer ranks do in the latest update
        self.probe = Probe(cfg, cluster)

    def launch(self) -> None:
        """Starts as many engines as are missing; `started` waits for them.

        None after `engine.max_restarts` repairs in an hour: those that are left go on. Raises
        RuntimeError where there are none, with the last error.
        """
        cfg = self.cfg
        limit = cfg.engine.max_restarts
        lacking = cfg.engine.count - len(self.alive) - len(self.launched)
        if lacking and self.error:
            now = time.monotonic()
            self.repairs = [at for at in self.repairs if now - at < HOUR]
            if len(self.repairs) == limit:
                if self.alive or self.launched:
                    self.hold(limit)
                    return
                often = f"more often in an hour than engine.max_restarts = {limit}"
                raise RuntimeError(f"engines were lost {often}: {self.error}") from self.error
            self.repairs.append(now)
            self.is_held = False
            if self.cluster.shares_gpus():
                cfg = self.beside_trainers()
        gpus = placement.shares(cfg).engine
        options = {"max_concurrency": 100_000}  # control calls must not queue behind rollouts
        for _ in range(lacking):
            home = self.cluster.places.free_home(self.homes.values())
            place = placement.on(home)
            engine = actor(self.Generator, gpus, cfg, **options, **place).remote(cfg)
            self.homes[engine] = home
            self.launched[engine] = asyncio.wrap_future(engine.start.remote().future())

    def hold(self, limit: int) -> None:
        """Says once that lost engines are not replaced for a while."""
        if not self.is_held:
            self.is_held = True
            why = f"engine.max_restarts = {limit} in the last hour"
            tqdm.write(f"{len(self.alive)} engines go on, a lost one is not replaced yet: {why}")

    def beside_trainers(self) -> RunSettings:
        """Settings of an engine whose GPU a trainer rank uses meanwhile; frees what that one can.

        vLLM's profiling would take what the rank needs or frees for its own, and refuses to start.
        """
        for trainer in self.cluster.trainers:  # long before the engine's process looks
            trainer.call.options(concurrency_group="watch").remote(torch.cuda.empty_cache)
        known = {"kv_cache_memory_bytes": self.kv_bytes} if self.kv_bytes else {}
        engine = dataclasses.replace(self.cfg.engine, args=known | self.cfg.engine.args)
        return dataclasses.replace(self.cfg, engine=engine)

    async def started(self) -> bool:
        """Waits for those that were launched, discards those that fail; whether some did not."""
        launched = dict(self.launched)
        limit = self.cfg.timeouts.start
        if not launched:
            return False
        starts = asyncio.wait(launched.values())
        try:
            await within(limit, f"{len(launched)} engines to start", starts)
        except TimeoutError as error:
            self.discard([e for e, start in launched.items() if not start.done()], error)
        for engine, start in launched.items():
            if start.done() and start.exception():
                self.discard([engine], start.exception())
        return any(start.done() and not start.exception() for start in launched.values())

    async def start(self) -> None:
        """Waits for all engines; none may fail at first."""
        self.launch()
        phase(f"starting vLLM (engines: {self.cfg.engine.count})")
        await self.started()
        if self.error:
            raise self.error

    async def connect(self) -> None:
        """A process group of the senders and all engines that have started, if it is another.

        Waits for engines only where there is none.
        """
        self.welcome()
        # Whoever is dead or hangs by now would keep the others waiting.
        await asyncio.gather(*map(self.is_alive, self.alive))
        while not self.alive:
            self.launch()
            await self.started()
            self.welcome()
        if self.grouped == set(self.alive):
            return
        cfg = self.cfg
        if not self.proven:
            phase("sending the policy to the engines")
        tp = cfg.engine.tensor_parallel
        senders = self.cluster.senders
        store = senders[0].open_store.remote(len(senders) + cfg.engine.count * tp)
        address = await within(cfg.timeouts.start, "trainer rank 0 to listen", store)
        members = list(self.alive)  # from here on nobody may be missing: the others would wait
        world = len(senders) + len(members) * tp
        limit = cfg.timeouts.answer
        wire = pickle.dumps(Wire(self.cluster.metas, limit, cfg.timeouts.sync, cfg.gpu_share < 1))
        joins = [s.join_sync_group.remote(*address, i, world) for i, s in enumerate(senders)]
        for engine, rank in zip(members, range(len(senders), world, tp), strict=True):
            joins.append(engine.join_sync_group.remote(wire, *address, rank, world))
        with self.occupying():
            # Each of them gives up after `limit` by itself, and says why.
            joined = within(2 * limit, "trainer and engines to connect", together(joins))
            of_engines = (await joined)[len(senders) :]
        self.kv_bytes = self.kv_bytes or min(itertools.chain(*of_engines))
        self.grouped = set(members)

    def welcome(self) -> None:
        """Takes in those launched engines that have started."""
        for engine, start in list(self.launched.items()):
            if start.done() and not start.exception():
                del self.launched[engine]
                self.admit(engine)
                self.fresh.add(engine)
                self.watches.add(asyncio.create_task(self.watch(engine)))

    def admit(self, engine: Any) -> None:
        """Gives an engine that has started a place in the queue."""
        self.alive[engine] = Place(0, next(self.numbers), engine)
        bisect.insort(self.queue, self.alive[engine])

    def occupy(self, engine: Any, groups: int) -> None:
        """Moves an engine in the queue: it works on so many groups more."""
        place = self.alive[engine]
        del self.queue[bisect.bisect_left(self.queue, place)]
        self.alive[engine] = place._replace(groups=place.groups + groups)
        bisect.insort(self.queue, self.alive[engine])

    @contextlib.asynccontextmanager
    async def lease(self) -> AsyncIterator[Any]:
        """The least busy engine for a group's rollouts, once there is one that holds a policy."""
        limits = self.cfg.timeouts
        if not self.some_serve():  # a deadline costs more than all the rest
            limit = 2 * limits.start + limits.train + limits.sync
            await within(limit, "an engine that holds the policy", self.any_serving())
        engine = self.least_busy()
        self.occupy(engine, 1)
        try:
            yield engine
        finally:
            if engine in self.alive:  # it may have been lost meanwhile
                self.occupy(engine, -1)

    def least_busy(self) -> Any:
        """The engine for the next group: the first in the queue that holds a policy.

        One that has yet to answer whether it lives comes last: it may hang, and so seem idle.
        """
        serving = (place.engine for place in self.queue if place.engine not in self.fresh)
        first = next(serving)
        if first not in self.asked:
            return first
        return next((engine for engine in serving if engine not in self.asked), first)

    def some_serve(self) -> bool:
        """Whether an engine holds a policy; those without one are among the living."""
        return len(self.alive) > len(self.fresh)

    def serving(self) -> list:
        """The engines that hold a policy."""
        return [engine for engine in self.alive if engine not in self.fresh]

    async def any_serving(self) -> None:
        """Waits for an engine that lives and holds a policy."""
        while not self.some_serve():
            self.synced.clear()
            await self.synced.wait()

    async def is_alive(self, engine: Any) -> bool:
        """Whether an engine still serves; one that is dead or does not answer is discarded.

        It is asked again where joining or an update may have kept it from answering.
        """
        while engine in self.alive:
            began = time.monotonic()
            self.asked.add(engine)
            try:
                await answer(engine.check_health.remote(), self.cfg.timeouts.answer, "an engine")
                return engine in self.alive
            except Exception as error:
                if not isinstance(error, TimeoutError) or self.free_since < began:
                    self.discard([engine], error)
            finally:
                self.asked.discard(engine)
        return False

    @contextlib.contextmanager
    def occupying(self) -> Iterator[None]:
        """Something that may keep the engines from answering whether they live."""
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
        """Notices that an engine dies or hangs, even if nobody uses it."""
        while await self.is_alive(engine):
            await asyncio.sleep(max(EVERY, len(self.alive) / ASKED))

    def discard(self, engines: list, error: BaseException) -> None:
        """Kills engines that failed; `launch` starts others in their place."""
        for engine in engines:
            if engine in self.alive:
                self.queue.remove(self.alive.pop(engine))
            elif self.launched.pop(engine, None) is None:
                continue
            ray.kill(engine)
            del self.homes[engine]
            self.fresh.discard(engine)
            self.error = error
            self.discarded += 1
            tqdm.write(f"an engine is lost: {error}")
            self.missing.set()

    async def replaced(self) -> None:
        """Waits for engines to be lost, and for their successors to start."""
        while True:
            await self.missing.wait()
            await asyncio.sleep(1)  # those that are lost together are replaced together
            self.launch()
            if await self.started():
                return

    async def exchange(self, sends: list[Any], updates: dict[Any, Any]) -> list[Received]:
        """One weight update: the trainers' `sends`, and each engine's call in `updates`.

        Raises the first error once no send is left waiting, and discards the engines that failed,
        did not answer, or received other bytes than were sent.
        """
        limit = self.cfg.timeouts.sync
        self.sent = sent = [asyncio.wrap_future(send.future()) for send in sends]
        received = {asyncio.wrap_future(call.future()): e for e, call in updates.items()}
        both = {*sent, *received}
        with self.occupying():
            await asyncio.wait(both, timeout=limit, return_when=asyncio.FIRST_EXCEPTION)
        failures = (task.exception() for task in both if task.done())
        errors = [error for error in failures if error]
        if not errors and all(task.done() for task in both):
            updates = {engine: task.result() for task, engine in received.items()}
            return self.compare(sent[0].result(), updates)
        # Engines that have all buckets are done in a moment; the others never.
        await asyncio.wait(received, timeout=2 if errors else 0)
        error = errors[0] if errors else TimeoutError(f"no answer in {limit:.0f} s")
        self.discard([e for t, e in received.items() if not t.done() or t.exception()], error)
        # The dead engines' sockets are closed now, so a send that waits for them ends as well. NCCL
        # has none, and must be told.
        await self.ask(self.cluster.senders, Sender.abort)
        await within(limit, "the trainers' sends to end", asyncio.wait(sent))
        raise error

    async def ask(self, trainers: list, function: Callable) -> None:
        """Calls a function in the first trainer ranks, whatever they do. TimeoutError names one."""
        limit = self.cfg.timeouts.answer
        asked = [t.call.options(concurrency_group="watch").remote(function) for t in trainers]
        await together(answer(a, limit, f"trainer rank {i}") for i, a in enumerate(asked))

    def compare(self, sent: int, received: dict[Any, Received]) -> list[Received]:
        """Discards engines where a worker's checksum is not `sent`. Raises RuntimeError."""
        error = None
        for engine, update in received.items():
            if any(checksum != sent for checksum in update.checksums):
                error = RuntimeError("weights arrived at an engine other than they were sent")
                self.discard([engine], error)
        if error:
            raise error
        return list(received.values())

    async def blame(self, error: Exception, discarded: int) -> None:
        """Discards the engines that are dead after a failed update.

        `discarded` is the count before it. Where none is found guilty, all are suspect. Raises the
        error where no update has ever worked: another start would not mend that. Raises
        TimeoutError where it is a trainer rank that hangs.
        """
        if not self.proven:
            raise error
        await self.ask(self.cluster.trainers, os.getpid)
        if not all(send.done() for send in self.sent):
            raise error  # no trainer rank would take part in another update
        await asyncio.gather(*map(self.is_alive, list(self.alive)))
        if self.discarded == discarded:
            self.discard(list(self.alive), error)

    def all_synced(self) -> None:
        """All engines that are connected hold the policy now."""
        self.fresh.clear()
        self.proven = True
        self.synced.set()
        if len(self.alive) == self.cfg.engine.count:
            self.missing.clear()
