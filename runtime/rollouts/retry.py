"""What follows a try of a prompt that failed: which of row, worker, engine or judge is at fault.

A row may kill or block its worker, and with it all other groups there. Each of them is suspect
then: it is tried again by a worker that has nothing else to do. So only the guilty one is dropped.
"""

import asyncio
from typing import TYPE_CHECKING, Any

from envs.services import Away

if TYPE_CHECKING:
    from runtime.rollouts.dispatch import Dispatcher, Tries


async def count(dispatcher: "Dispatcher", tries: "Tries", engine: Any, worker: Any) -> None:
    """Counts a try that failed with `tries.error`, and waits before the next one.

    A try that an engine's death or a judge that is away has ended does not count. Raises the error
    after the last try; RuntimeError where the row ended a worker that ran nothing else.
    """
    crew = dispatcher.crew
    asked = dispatcher.fleet.is_alive(engine), crew.is_alive(worker)
    engine_lives, worker_lives = await asyncio.gather(*asked)
    away = isinstance(tries.error, Away) or bool(crew.outages and crew.outages.concern(tries.row))
    counts = engine_lives and not away
    tries.failed += counts
    is_last = counts and tries.failed >= dispatcher.attempts
    if is_last and worker_lives:
        worker.forget.remote(tries.slot, tries.row["_line"])
        raise tries.error
    if is_last and tries.is_suspect:
        alone = "crashed its worker while running alone: the row or its environment is at fault"
        raise RuntimeError(f"{tries.name} {alone}") from tries.error
    tries.is_suspect |= not worker_lives
