"""Starts engines, joins them to the weight group, and replaces those that fail."""

import asyncio
import dataclasses
import os
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm

from core import waits
from core.errors import RunError, in_one_line
from core.waits import answer, together, unless_stopped, within
from policy.sync.weight_sync import CutOff, Sender
from runtime.reporting.console import phase
from settings.config import RunSettings

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from runtime.engines.fleet import Fleet, Received


CUT_SECONDS = 2.0  # limit for an engine to notice that an update has ended
LOAD_SECONDS = 5e-4  # additional time per tensor for vLLM's loaders, and for reading it back
HOUR = 3600.0
MAX_RESTARTS = 3  # times per hour that lost engines are replaced


def allowed(fleet: "Fleet") -> bool:
    """Returns whether lost engines may be replaced now: MAX_RESTARTS times an hour.

    Beyond that, the run continues with the engines that are left. Raises RuntimeError, with the
    last error, if no engine is left.
    """
    now = time.monotonic()
    fleet.repairs = [at for at in fleet.repairs if now - at < HOUR]
    if len(fleet.repairs) < MAX_RESTARTS:
        fleet.repairs.append(now)
        fleet.is_held = False
        return True
    if not fleet.engines:
        assert fleet.error
        raise RuntimeError(
            f"engines were lost more than MAX_RESTARTS = {MAX_RESTARTS} times in an hour "
            f"(runtime/engines/repair.py): {in_one_line(fleet.error)}"
        ) from fleet.error
    if not fleet.is_held:
        fleet.is_held = True
        tqdm.write(
            f"{len(fleet.alive)} engines continue, a lost one is not replaced yet: "
            f"MAX_RESTARTS = {MAX_RESTARTS} (runtime/engines/repair.py) in the last hour"
        )
    return False


def settings_of_successors(fleet: "Fleet") -> RunSettings:
    """Returns the settings of engines that start while others run.

    If a trainer rank uses their GPU meanwhile, vLLM's profiling would count the memory that the
    rank takes or frees as its own, and vLLM would refuse to start. So the rank frees what it can,
    and vLLM gets the size of the KV cache that the first engines found.
    """
    cfg = fleet.cfg
    if not fleet.cluster.shares_gpus():
        return cfg
    for trainer in fleet.cluster.trainers:  # long before the engine's process checks the memory
        trainer.call.options(concurrency_group="watch").remote(torch.cuda.empty_cache)
    args = cfg.engine.args
    if fleet.kv_bytes:
        args = {"kv_cache_memory_bytes": fleet.kv_bytes} | args
    return dataclasses.replace(cfg, engine=dataclasses.replace(cfg.engine, args=args))


async def replace(fleet: "Fleet") -> None:
    """Starts successors of lost engines; returns when some have started."""
    while True:
        await fleet.missing.wait()
        await asyncio.sleep(1)  # engines that are lost together are replaced together
        fleet.launch_missing()
        if await started(fleet):
            return


async def end_update(
    fleet: "Fleet", received: "dict[asyncio.Future[Received], ActorHandle]"
) -> BaseException:
    """Discards the engines that failed in an update.

    `received` are the engines' calls. Returns the first error, once no send is left waiting. An
    engine that was cut off from the update survives and waits for the next one. Raises TimeoutError
    if a send does not end.
    """
    limit = fleet.cfg.timeouts.sync
    errors: list[BaseException] = []
    for call in {*fleet.sent, *received}:
        error = failure(call)
        if error and not isinstance(error, CutOff):
            errors.append(error)
    if errors:
        failed = [engine for call, engine in received.items() if failure(call) in errors]
        fleet.discard(failed, errors[0])
    # The sockets of dead engines are closed now, so a send that waits for them ends as well. NCCL
    # has no sockets: its sends are aborted. Engines with all buckets still load or read back.
    await ask(fleet, fleet.cluster.senders, Sender.abort)
    loading = LOAD_SECONDS * len(fleet.cluster.metas)
    await asyncio.wait(received, timeout=CUT_SECONDS + loading)
    cut_off: list[ActorHandle] = []
    lost: list[ActorHandle] = []
    for call, engine in received.items():
        error = failure(call)
        if isinstance(error, CutOff):
            cut_off.append(engine)
            continue
        if error:
            errors.append(error)
        if error or not call.done():
            lost.append(engine)
    reason = errors[0] if errors else TimeoutError(f"no answer in {limit:.0f} s")
    fleet.discard(lost, reason)
    for engine in cut_off:
        if engine in fleet.engines:
            fleet.retire(fleet.engines[engine])
    fleet.grouped = set()
    await within(limit, "the trainers' sends to end", asyncio.wait(fleet.sent))
    return reason


def failure(call: asyncio.Future) -> BaseException | None:
    """Returns the error of a call; None if the call has succeeded or still runs."""
    return call.exception() if call.done() else None


async def discard_dead(fleet: "Fleet", error: Exception, discarded: int) -> None:
    """Discards the engines that are dead after a failed update, and the engines that `error` names.

    If it names no engine, and no more have been lost than `discarded`, the number before the
    update, all are suspect. Re-raises the error if restarting an engine cannot fix it: no update
    has ever worked, a send still runs, or it is a RunError. Raises TimeoutError if a trainer rank
    hangs.
    """
    if not fleet.worked or isinstance(error, RunError):
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
    fleet: "Fleet", sync: Awaitable[dict[str, float] | None], leaving: Callable[[], str]
) -> dict[str, float]:
    """Returns the result of `sync`; {} if the run is leaving and no engine lives.

    In that case, no engine may be started any more: `sync` is cancelled, and its error is ignored.
    Otherwise an error of `sync` is raised.
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


async def ask(
    fleet: "Fleet", trainers: "list[ActorHandle]", function: Callable[[], int | None]
) -> None:
    """Calls a function in trainer ranks, whatever else they are doing.

    Raises TimeoutError naming the first rank that does not answer.
    """
    limit = waits.ANSWER_SECONDS
    answers: list[Awaitable[int | None]] = []
    for rank, trainer in enumerate(trainers):
        call = trainer.call.options(concurrency_group="watch").remote(function)
        answers.append(answer(call, limit, f"trainer rank {rank}"))
    await together(answers)


class EnginesError(RuntimeError):
    """A failure of living engines: replacing them is enough."""

    def __init__(self, engines: "list[ActorHandle]", error: BaseException):
        super().__init__(str(error))
        self.engines = engines


async def started(fleet: "Fleet") -> bool:
    """Waits for launched engines, and discards the ones that fail.

    Returns whether at least one has started.
    """
    launched = fleet.starting
    if not launched:
        return False
    starts = asyncio.wait([engine.start for engine in launched])
    try:
        await within(fleet.cfg.timeouts.start, f"{len(launched)} engines to start", starts)
    except TimeoutError as late:
        fleet.discard([engine.actor for engine in launched if not engine.start.done()], late)
    for engine in launched:
        if error := failure(engine.start):
            fleet.discard([engine.actor], error)
    return any(engine.start.done() and not engine.start.exception() for engine in launched)


async def join(fleet: "Fleet") -> None:
    """Creates the process group of the senders and all engines that have started.

    Waits for starting engines only if no engine has started.
    """
    while not fleet.alive:
        fleet.launch_missing()
        await started(fleet)
        fleet.take_in_started()
    members = fleet.alive  # if one is lost from here on, the others wait for it
    if fleet.grouped == set(members):
        return
    fleet.grouped = set()  # until all have joined: a group that lacks a member is useless
    if not fleet.worked:
        phase("sending the policy to the engines")
    cfg = fleet.cfg
    tp = cfg.engine.tensor_parallel
    senders = fleet.cluster.senders
    listens = senders[0].open_sync_group.remote(len(senders) + cfg.engine.count * tp)
    meeting = await within(cfg.timeouts.start, "trainer rank 0 to listen", listens)
    world = len(senders) + len(members) * tp
    joins: list[Awaitable[list[int] | None]] = []
    for rank, sender in enumerate(senders):
        joins.append(sender.join_sync_group.remote(meeting, rank, world))
    for engine, rank in zip(members, range(len(senders), world, tp), strict=True):
        joins.append(member(engine, engine.join_sync_group.remote(*meeting, rank, world)))
    with fleet.occupying():
        # Each member gives up after ANSWER_SECONDS by itself, with a reason.
        limit = 2 * waits.ANSWER_SECONDS
        joined = await within(limit, "trainer and engines to connect", together(joins))
    closed = senders[0].close_store.remote()
    await within(cfg.timeouts.start, "trainer rank 0 to close its store", closed)
    if not fleet.kv_bytes:
        of_engines = joined[len(senders) :]
        fleet.kv_bytes = min(kv for of_workers in of_engines for kv in of_workers or ())
    fleet.grouped = set(members)


async def member(engine: "ActorHandle", joining: Awaitable[list[int]]) -> list[int]:
    """Returns the KV bytes of each of an engine's workers, once it has joined.

    Raises EnginesError if the engine fails before it could have waited too long for another member.
    """
    began = time.monotonic()
    try:
        return await joining
    except Exception as error:
        if time.monotonic() - began < waits.ANSWER_SECONDS:
            raise EnginesError([engine], error) from error
        raise
