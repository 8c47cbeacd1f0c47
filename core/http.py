"""Reads servers' replies up to a limit, and opens URLs without a proxy."""

import urllib.request
from http.client import HTTPResponse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import aiohttp


class Broken(Exception):
    """Raised if a body is longer than allowed."""


async def whole(answer: "aiohttp.ClientResponse", most: int) -> bytes:
    """Returns the body of a reply. Raises Broken if it has more than `most` bytes."""
    body = bytearray()
    async for part in answer.content.iter_any():
        body += part
        if len(body) > most:
            raise Broken(f"the answer has more than {most} bytes")
    return bytes(body)


def directly(request: urllib.request.Request | str, seconds: float) -> HTTPResponse:
    """Opens a URL without a proxy, as aiohttp does."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return opener.open(request, timeout=seconds)
