"""What a server sends: within a limit, and not by a proxy."""

import urllib.request
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import aiohttp


class Broken(Exception):
    """A body that is longer than it may be."""


async def whole(answer: "aiohttp.ClientResponse", most: int) -> bytes:
    """The body of an answer. Raises Broken where it has more than `most` bytes."""
    body = bytearray()
    async for part in answer.content.iter_any():
        body += part
        if len(body) > most:
            raise Broken(f"the answer has more than {most} bytes")
    return bytes(body)


def directly(request: urllib.request.Request | str, seconds: float) -> Any:
    """Opens a URL without a proxy, as aiohttp does."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, None, seconds)
