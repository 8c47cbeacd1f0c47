"""Tests that are coroutines."""

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterable


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """The test as a function that runs it in an event loop of its own."""

    @functools.wraps(test)
    def run(*args, **named) -> None:
        asyncio.run(test(*args, **named))

    return run


def at_once(calls: Iterable[Awaitable]) -> list:
    """What calls return that are made at once, in an event loop of their own."""

    async def gathered() -> list:
        return await asyncio.gather(*calls)

    return asyncio.run(gathered())
