"""How the ranks of a network start: actors find each other at rank 0's store, and load."""

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple

from core.waits import within
from runtime.processes import placement

if TYPE_CHECKING:
    from runtime.processes.layout import Places
    from settings.config import TrainingSettings


class Met(NamedTuple):
    """Ranks that have started, by their number."""

    ranks: list[Any]
    nodes: list[str]  # of each
    starts: list[Any]  # what the `start` of each returned


async def meet(made: list[Any], what: str, cfg: "TrainingSettings", places: "Places") -> Met:
    """Numbers the actors of a network by their GPUs, and starts them.

    Ends them all where one does not start. TimeoutError says which of them were awaited.
    """
    import ray

    limit = cfg.timeouts.start
    try:
        asked = asyncio.gather(*(actor.call.remote(placement.where) for actor in made))
        found = await within(limit, f"the {what}s to start", asked)
        order = places.in_order(found)
        ranks = [made[i] for i in order]
        store = ranks[0].open_store.remote(len(ranks))
        address = await within(limit, f"{what} 0 to start", store)
        calls = (actor.start.remote(rank, address) for rank, actor in enumerate(ranks))
        starts = await within(limit, f"the {what}s to load", asyncio.gather(*calls))
        closed = ranks[0].close_store.remote()
        await within(limit, f"{what} 0 to close its store", closed)
    except BaseException:
        for actor in made:
            ray.kill(actor)
        raise
    return Met(ranks, [found[i][0] for i in order], starts)
