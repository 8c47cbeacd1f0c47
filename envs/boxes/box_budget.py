"""Limits how many boxes a node's processes hold at once, according to the node's memory.

A box's changed files are stored in memory. Together, the changed files of all boxes may take up
half of the node's memory: 128 boxes of 2 GiB each on a node with 512 GiB. The rest is for engines,
trainers and commands; no more commands run at once than the node has processors. GRPO_BOXES sets a
different number of boxes. A box beyond the limit waits for up to a quarter of the time that a
rollout may take.

A place is the name of an abstract socket, which only one process can hold at a time, and which the
kernel releases when that process ends. So no count can be wrong, and nothing is left behind. Each
user has separate places.

This is not an environment itself: envs/boxes/box.py uses it.
"""

import asyncio
import contextlib
import errno
import os
import re
import socket
import weakref
from collections.abc import AsyncIterator
from pathlib import Path

from core.waits import within
from envs import services
from envs.sandbox.outcome import cgroups
from envs.services import CheckerError

VARIABLE = "GRPO_BOXES"
MEMORY = "GRPO_BOX_GIB"
USUAL_GIB = 32
SHARE = 0.5  # share of the node's memory for the boxes' changed files
NUMBER = re.compile("[1-9][0-9]{0,5}")
WAIT = 0.25  # share of the time that a rollout may take
LOOK = 0.2  # seconds between two attempts to get a place
# One lock per event loop: the boxes that wait in it take turns.
_turns: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = (
    weakref.WeakKeyDictionary()
)


class Full(CheckerError):
    """Raised if no box on the node ended in time: a retry joins the end of the queue."""


@contextlib.asynccontextmanager
async def admitted(disk: int) -> AsyncIterator[None]:
    """Holds a place for a box with a layer of `disk` bytes. Raises Full if none becomes free."""
    most = boxes(disk)
    loop = asyncio.get_running_loop()
    turn = _turns.setdefault(loop, asyncio.Lock())

    async def waits() -> socket.socket:
        async with turn:
            while not (place := _place(disk, most)):
                await asyncio.sleep(LOOK)
            return place

    place = await within(
        WAIT * services.limits().seconds,
        "a place for a box on this node",
        waits(),
        lambda: f"{most} are open, which is the limit: {VARIABLE} sets another",
        late=Full,
    )
    with place:
        yield


def _place(disk: int, most: int) -> socket.socket | None:
    """Takes a free place; returns None if all are taken."""
    for i in range(most):
        place = socket.socket(socket.AF_UNIX)
        try:
            place.bind(f"\0grpo-box-{os.getuid()}-{disk}-{i}")
            return place
        except OSError as error:
            place.close()
            if error.errno != errno.EADDRINUSE:
                raise CheckerError(f"a box cannot get a place on this node: {error}") from None
    return None


def boxes(disk: int) -> int:
    """Returns how many boxes may be open at once on this node, at least one.

    Raises CheckerError if GRPO_BOXES is malformed.
    """
    given = os.environ.get(VARIABLE, "")
    if given and not NUMBER.fullmatch(given):
        raise CheckerError(f"{VARIABLE} = {given!r}: expected the maximum number of boxes")
    return int(given) if given else max(1, int(SHARE * memory() / max(1, disk)))


def box_memory() -> int:
    """Returns the bytes that a box's processes may use: GRPO_BOX_GIB, or 32 GiB.

    If GRPO_BOX_GIB is malformed, `problem` says so before a box is opened.
    """
    given = os.environ.get(MEMORY, "")
    return (int(given) if NUMBER.fullmatch(given) else USUAL_GIB) << 30


def memory() -> int:
    """Returns this node's memory in bytes, or less if a cgroup limits this process."""
    total = re.search(r"MemTotal: *(\d+) kB", Path("/proc/meminfo").read_text())
    assert total
    found = [int(total[1]) << 10]
    for folder in cgroups("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):  # "max" means no limit
                found.append(int((folder / name).read_text()))
    return min(found)


def problem(disk: int) -> str:
    """Returns why no box of this size can get a place, and how to fix it; "" if one can."""
    try:
        boxes(disk)
    except CheckerError as error:
        return str(error)
    given = os.environ.get(MEMORY, "")
    if given and not NUMBER.fullmatch(given):
        return f"{MEMORY} = {given!r}: expected the GiB of memory that a box may use"
    available = memory()
    if available < disk:
        return (
            f"this node has {available >> 20} MiB of memory, "
            f"but the files that one box changes may take up {disk >> 20} MiB"
        )
    return ""
