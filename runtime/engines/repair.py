"""Starts engines, joins them to the weight group, and replaces those that fail."""

import asyncio
import dataclasses
import itertools
import os
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from core import waits
from core.waits import answer, together, unless_stopped, within
from policy.sync.weight_sync import CutOff, Sender
from runtime.reporting.console import phase
from settings.config import RunSettings

if TYPE_CHECKING:
    from runtime.engines.fleet import Fleet


CUT_SECONDS = 2.0  # that an engine may take to notice that an update is over
LOAD_SECONDS = 5e-4  # and for each tensor: to load it, read it back and ask vLLM's loaders of it
HOUR = 3600.0
MAX_RESTARTS = 3  # times an hour that lost engines are replaced


def allowed(fleet: "Fleet") -> bool:
    """Whether lost engines may be replaced now: MAX_RESTARTS times an hour.

    Beyond that those that are left go on. Raises RuntimeError where none is, with the last error.
    """
    now = time.monotonic()
    fleet.repairs = [at for at in fleet.repairs if now - at < HOUR]
    if len(fleet.repairs) < MAX_RESTARTS:
        fleet.repairs.append(now)
        fleet.is_held = False
        return True
    if not fleet.engines:
        raise RuntimeError(
            f"engines were lost more often in an hour than MAX_RESTARTS = {MAX_RESTARTS} "
            f"(runtime/engines/repair.py): {fleet.error}"
        ) from fleet.error
    if not fleet.is_held:
        fleet.is_held = True
        why = f"MAX_RESTARTS = {MAX_RESTARTS} (runtime/engines/repair.py) in the last hour"
        left = len(fleet.alive)
        tqdm.write(f"{left} engines go on, a lost one is not replaced yet: {why}")
    return False


def settings_of_successors(fleet: "Fleet") -> RunSettings:
    """The settings of engines that start beside others.

    Where a trainer rank uses their GPU meanwhile, vLLM's profiling would take what the rank needs
    or frees for its own, and refuse to start. So the rank frees what it can, and vLLM gets the
    size of the KV cache that the first engines found.
    """
    cfg = fleet.cfg
    if not fleet.cluster.shares_gpus():
        return cfg
    for trainer in fleet.cluster.trainers:  # long before the engine's process looks
        trainer.call.options(concurrency_group="watch").remote(torch.cuda.empty_cache)
    known = {"kv_cache_memory_bytes": fleet.kv_bytes} if fleet.kv_bytes else {}
    engine = dataclasses.replace(cfg.engine, args=known | cfg.engine.args)
    return dataclasses.replace(cfg, engine=engine)


async def replace(fleet: "Fleet") -> None:
    """Starts successors of lost engines; returns when some have started."""
    while True:
        await fleet.missing.wait()
        await asyncio.sleep(1)  # those that are lost together are replaced together
        fleet.launch()
        if await started(fleet):
            return


async def end_update(fleet: "Fleet", received: dict[asyncio.Future, Any]) -> BaseException:
    """Discards the engines that failed in an update; its error, once no send is left waiting.

    `received` are the engines' calls. An engine from which the update was cut off lives: it waits
    for the next one. Raises TimeoutError where a send does not end.
    """
    limit = fleet.cfg.timeouts.sync
    failures = [t.exception() for t in {*fleet.sent, *received} if t.done()]
    errors = [e for e in failures if e and not isinstance(e, CutOff)]
    if errors:
        known = {e for t, e in received.items() if t.done() and t.exception() in errors}
        fleet.discard(list(known), errors[0])
    # The dead engines' sockets are closed now, so a send that waits for them ends as well. NCCL
    # has no sockets: its sends are aborted. Engines that have all buckets still load and read back.
    await ask(fleet, fleet.cluster.senders, Sender.abort)
    loading = LOAD_SECONDS * len(fleet.cluster.metas)
    await asyncio.wait(received, timeout=CUT_SECONDS + loading)
    cut = {e for t, e in received.items() if t.done() and isinstance(t.exception(), CutOff)}
    lost = {e for t, e in received.items() if not t.done() or t.exception()} - cut
    errors += [e for t in received if t.done() and (e := t.exception()) and received[t] in lost]
    error = errors[0] if errors else TimeoutError(f"no answer in {limit:.0f} s")
    fleet.discard(list(lost), error)
    for actor in cut & fleet.engines.keys():
        fleet.retire(fleet.engines[actor])
    fleet.grouped = set()
    await within(limit, "the trainers' sends to end", asyncio.wait(fleet.sent))
    return error


async def discard_dead(fleet: "Fleet", error: Exception, discarded: int) -> None:
    """Discards the engines that are dead after a failed update.

    Those that the error names are discarded as well. Where it names none, and no more are lost than
    the `discarded` ones before the update, all are suspect. Re-raises the errors that restarting an
    engine cannot fix: where no update has ever worked, or a send still runs. Raises TimeoutError
    where a trainer rank hangs.
    """
    if not fleet.worked:
        raise error
    await ask(fleet, fleet.cluster.trainers, os.getpid)
    if not all(send.done() for send in fleet.sent):
        raise error  # no trainer rank would take part in another update
    await asyncio.gather(*map(fleet.is_alive, fleet.alive))
    if isinstance(error, EnginesError):
        fleet.discard(error.engines, error)
    elif fleet.discarded == discarded:
        fleet.discard(fleet.alive, error)


async def unless_left(
    fleet: "Fleet", sync: Coroutine[Any, Any, dict | None], leaving: Callable[[], Any]
) -> dict[str, float]:
    """The result of `sync`; cancels it and returns {} once the run is leaving and no engine lives.

    Also where no engine may be started any more. Raises what `sync` raises in any other case.
    """

    async def stranded() -> None:
        while not leaving() or fleet.alive:
            await asyncio.sleep(1)

    try:
        return await unless_stopped(stranded(), asyncio.ensure_future(sync)) or {}
    except RuntimeError:
        if leaving() and not fleet.alive:
            return {}
        raise


async def ask(fleet: "Fleet", trainers: list, function: Callable) -> None:
    """Calls a function in trainer ranks, whatever they do. TimeoutError names the first one."""
    asked = [t.call.options(concurrency_group="watch").remote(function) for t in trainers]
    limit = waits.ANSWER_SECONDS
    await together(answer(a, limit, f"trainer rank {i}") for i, a in enumerate(asked))


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
