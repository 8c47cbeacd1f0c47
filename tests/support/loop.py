"""Calls of coroutines from a test that is none."""

import asyncio
from collections.abc import Awaitable, Iterable


def at_once(calls: Iterable[Awaitable]) -> list:
    """What calls return that are made at once, in an event loop of their own."""

    async def gathered() -> list:
        return await asyncio.gather(*calls)

    return asyncio.run(gathered())
