"""Which engines there are: started, chosen by load, watched, replaced when they fail."""

import asyncio
import pickle
from typing import Any

import ray
from tqdm import tqdm

from runtime.cluster import actor
from runtime.waits import within


class Fleet:
    """Actors of a Generator class, and their process group with trainer rank 0.

    `missing` is set while some are lost; `synced` wakes those who wait for one that holds a policy.
    A lost engine's successor loads while the others serve, and is `fresh` until it gets a policy.
    """

    def __init__(self, Generator: type, cfg):
        self.Generator, self.cfg = Generator, cfg
        self.launched: dict[Any, asyncio.Future] = {}  # engine -> its start
        self.load: dict[Any, int] = {}  # engine -> groups it is working on
        self.fresh, self.grouped, self.watches = set(), set(), set()
        self.synced, self.missing = asyncio.Event(), asyncio.Event()
        self.repairs, self.discarded, self.error, self.proven = 0, 0, None, False

    def launch(self) -> None:
        """Starts as many engines as are missing; `started` waits for them.

        None after `max_engine_restarts` repairs: those that are left go on. Raises RuntimeError
        where there are none, with the last error.
        """
        cfg, gpus = self.cfg, self.cfg.generator_gpus * self.cfg.tensor_parallel
        lacking = cfg.generators - len(self.load) - len(self.launched)
        if lacking and self.error:
            if self.repairs == cfg.max_engine_restarts:
                if self.load or self.launched:
                    return
                told = f"engines were lost more often than max_engine_restarts = {self.repairs}"
                raise RuntimeError(f"{told}: {self.error}") from self.error
            self.repairs += 1
        options = {"max_concurrency": 100_000}  # control calls must not queue behind rollouts
        for _ in range(lacking):
            engine = actor(self.Generator, gpus, cfg, **options).remote(cfg)
            self.launched[engine] = asyncio.wrap_future(engine.start.remote().future())

    async def started(self) -> bool:
        """Waits for those that were launched, discards those that fail; whether some did not."""
        launched, limit = dict(self.launched), self.cfg.timeouts.start
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

    async def start(self, trainers: list, metas: list) -> None:
        """Waits for all engines, which will get these trainers' weights; none may fail at first."""
        self.trainers, self.metas = trainers, metas
        self.launch()
        await self.started()
        if self.error:
            raise self.error

    async def connect(self) -> None:
        """A process group of trainer rank 0 and all engines that have started, if it is another.

        Waits for engines only where there is none.
        """
        self.welcome()
        if self.grouped != set(self.load):  # whoever is dead by now would keep the others waiting
            await asyncio.gather(*map(self.is_alive, self.load))
        while not self.load:
            self.launch()
            await self.started()
            self.welcome()
        if self.grouped == set(self.load):
            return
        cfg, tp = self.cfg, self.cfg.tensor_parallel
        store = self.trainers[0].open_store.remote(1 + cfg.generators * tp)
        address = await within(cfg.timeouts.start, "trainer rank 0 to listen", store)
        members = list(self.load)  # from here on nobody may be missing: the others would wait
        world = 1 + len(members) * tp
        joins = [self.trainers[0].join_sync_group.remote(world)]
        for engine, rank in zip(members, range(1, world, tp), strict=True):
            args = pickle.dumps(cfg), *address, rank, world, self.metas
            joins.append(engine.join_sync_group.remote(*args))
        await within(cfg.timeouts.start, "trainer and engines to connect", asyncio.gather(*joins))
        self.grouped = set(members)

    def welcome(self) -> None:
        """Takes in those launched engines that have started."""
        for engine, start in list(self.launched.items()):
            if start.done() and not start.exception():
                del self.launched[engine]
                self.load[engine] = 0
                self.fresh.add(engine)
                self.watches.add(asyncio.create_task(self.watch(engine)))

    async def pick(self):
        """The least busy engine, once there is one that holds a policy; give it back."""
        limit = 2 * self.cfg.timeouts.start + self.cfg.timeouts.train + self.cfg.timeouts.sync
        await within(limit, "an engine that holds the policy", self.any_serving())
        engine = min(self.serving(), key=self.load.get)
        self.load[engine] += 1
        return engine

    def serving(self) -> list:
        """The engines that hold a policy."""
        return [engine for engine in self.load if engine not in self.fresh]

    async def any_serving(self) -> None:
        """Waits for an engine that lives and holds a policy."""
        while not self.serving():
            self.synced.clear()
            await self.synced.wait()

    def release(self, engine) -> None:
        """Gives an engine back."""
        if engine in self.load:  # it may have been lost meanwhile
            self.load[engine] -= 1

    async def is_alive(self, engine) -> bool:
        """Whether an engine still serves; a dead one is discarded."""
        try:
            await within(30, "an engine's health check", engine.check_health.remote())
        except Exception as error:
            self.discard([engine], error)
        return engine in self.load

    async def watch(self, engine) -> None:
        """Notices the death of an engine that nobody uses."""
        while await self.is_alive(engine):
            await asyncio.sleep(5)

    def discard(self, engines: list, error: Exception) -> None:
        """Kills engines that failed; `launch` starts others in their place."""
        for engine in engines:
            if self.load.pop(engine, self.launched.pop(engine, None)) is None:
                continue
            ray.kill(engine)
            self.fresh.discard(engine)
            self.error = error
            self.discarded += 1
            tqdm.write(f"an engine is lost: {error}")
            self.missing.set()

    def meters(self) -> dict[str, int]:
        """How many engines serve."""
        return {"engines": len(self.serving())}

    def all_synced(self) -> None:
        """All engines that are connected hold the policy now."""
        self.fresh.clear()
        self.proven = True
        self.synced.set()
        if len(self.load) == self.cfg.generators:
            self.missing.clear()
