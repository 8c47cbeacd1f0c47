"""Waits that have a name and a deadline."""

import asyncio
from collections.abc import Awaitable

from tqdm import tqdm


async def together(awaitables) -> list:
    """asyncio.gather, but an error ends the others too, before it is raised: no orphan works on."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def within(seconds: float, what: str, awaitable: Awaitable, state=lambda: ""):
    """Awaits under a named deadline. Raises TimeoutError with that name and `state`.

    Says so in a line of its own when half of that time has gone.
    """

    def warn():
        tqdm.write(f"waiting for {what} since {seconds / 2:.0f} s of {seconds:.0f}. {state()}")

    warning = asyncio.get_running_loop().call_later(seconds / 2, warn)
    try:
        async with asyncio.timeout(seconds) as deadline:
            return await awaitable
    except TimeoutError:
        if not deadline.expired():
            raise
        raise TimeoutError(f"waited {seconds:.0f} s for {what}. {state()}") from None
    finally:
        warning.cancel()
