"""Engines join the run: they start, and meet the trainer ranks that send weights."""

import asyncio
import itertools
import time
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

from core import waits
from core.waits import together, within
from runtime.reporting.console import phase

if TYPE_CHECKING:
    from runtime.engines.fleet import Fleet


class EnginesError(RuntimeError):
    """Engines that live failed at something: replacing them is enough."""

    def __init__(self, engines: list, error: BaseException):
        super().__init__(str(error))
        self.engines = engines


async def started(fleet: "Fleet") -> bool:
    """Waits for launched engines, discards those that fail; whether some did not."""
    launched = fleet.starting
    if not launched:
        return False
    starts = asyncio.wait([e.start for e in launched])
    try:
        await within(fleet.cfg.timeouts.start, f"{len(launched)} engines to start", starts)
    except TimeoutError as error:
        fleet.discard([e.actor for e in launched if not e.start.done()], error)
    for engine in launched:
        if engine.start.done() and (failure := engine.start.exception()):
            fleet.discard([engine.actor], failure)
    return any(e.start.done() and not e.start.exception() for e in launched)


async def join(fleet: "Fleet") -> None:
    """A process group of the senders and all engines that have started.

    Waits for engines only where there is none.
    """
    while not fleet.alive:
        fleet.launch()
        await started(fleet)
        fleet.take_in_started()
    members = fleet.alive  # from here on none may be missing: the others would wait
    if fleet.grouped == set(members):
        return
    fleet.grouped = set()  # until all have joined: a group that lacks one is none
    if not fleet.worked:
        phase("sending the policy to the engines")
    cfg = fleet.cfg
    tp = cfg.engine.tensor_parallel
    senders = fleet.cluster.senders
    meeting = senders[0].open_sync_group.remote(len(senders) + cfg.engine.count * tp)
    meeting = await within(cfg.timeouts.start, "trainer rank 0 to listen", meeting)
    world = len(senders) + len(members) * tp
    joins = [s.join_sync_group.remote(meeting, i, world) for i, s in enumerate(senders)]
    for engine, rank in zip(members, range(len(senders), world, tp), strict=True):
        joins.append(member(engine, engine.join_sync_group.remote(*meeting, rank, world)))
    with fleet.occupying():
        # Each of them gives up after ANSWER_SECONDS by itself, and says why.
        limit = 2 * waits.ANSWER_SECONDS
        joined = await within(limit, "trainer and engines to connect", together(joins))
    closed = senders[0].close_store.remote()
    await within(cfg.timeouts.start, "trainer rank 0 to close its store", closed)
    fleet.kv_bytes = fleet.kv_bytes or min(itertools.chain(*joined[len(senders) :]))
    fleet.grouped = set(members)


async def member(engine: Any, joining: Awaitable[list[int]]) -> list[int]:
    """What an engine reports once it has joined.

    Raises EnginesError where it fails before it could have waited too long for another member.
    """
    began = time.monotonic()
    try:
        return await joining
    except Exception as error:
        if time.monotonic() - began < waits.ANSWER_SECONDS:
            raise EnginesError([engine], error) from error
        raise
