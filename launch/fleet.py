"""Which engines there are: started, chosen by load, watched, discarded when they fail."""

import asyncio
import pickle
from typing import Any

import ray
from tqdm import tqdm

from launch.cluster import actor, within


class Fleet:
    """Actors of a Generator class, and their process group with trainer rank 0.

    `missing` is set while some are lost, `synced` while those that live hold a policy.
    """

    def __init__(self, Generator: type, cfg, trainers: list, metas: list):
        self.Generator, self.cfg, self.trainers, self.metas = Generator, cfg, trainers, metas
        self.load: dict[Any, int] = {}  # engine -> groups it is working on
        self.synced, self.missing = asyncio.Event(), asyncio.Event()
        self.repairs, self.discarded, self.error = 0, 0, None
        self.unproven, self.watches = True, set()

    async def start(self, count: int) -> None:
        """Starts `count` engines and connects all of them with trainer rank 0."""
        cfg, gpus = self.cfg, self.cfg.generator_gpus * self.cfg.tensor_parallel
        options = {"max_concurrency": 100_000}  # control calls must not queue behind rollouts
        fresh = [actor(self.Generator, gpus, cfg, **options).remote(cfg) for _ in range(count)]
        self.load |= dict.fromkeys(fresh, 0)
        self.unproven = True
        starts = asyncio.gather(*(engine.start.remote() for engine in fresh))
        try:
            await within(cfg.timeouts.start, f"{count} engines to start", starts)
        except Exception as error:
            self.discard(fresh, error)
            raise
        world = 1 + len(self.load) * cfg.tensor_parallel
        store = self.trainers[0].open_store.remote(world)
        address = await within(cfg.timeouts.start, "trainer rank 0 to listen", store)
        joins = [self.trainers[0].join_sync_group.remote(world)]
        for engine, rank in zip(self.load, range(1, world, cfg.tensor_parallel), strict=True):
            args = pickle.dumps(cfg), *address, rank, world, self.metas
            joins.append(engine.join_sync_group.remote(*args))
        await within(cfg.timeouts.start, "trainer and engines to connect", asyncio.gather(*joins))
        self.watches |= {asyncio.create_task(self.watch(engine)) for engine in fresh}

    async def pick(self):
        """The least busy engine, once there is one that holds a policy; give it back."""
        limit = 2 * self.cfg.timeouts.start + self.cfg.timeouts.train + self.cfg.timeouts.sync
        await within(limit, "an engine that holds the policy", self.any_synced())
        engine = min(self.load, key=self.load.get)
        self.load[engine] += 1
        return engine

    async def any_synced(self) -> None:
        """Waits for an engine that lives and holds a policy."""
        while not (self.synced.is_set() and self.load):
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
        """Kills engines that failed; the next `sync` starts others in their place."""
        for engine in engines:
            if self.load.pop(engine, None) is not None:
                ray.kill(engine)
                self.error = error
                self.discarded += 1
                tqdm.write(f"an engine is lost: {error}")
                self.missing.set()
        if not self.load:
            self.synced.clear()
