"""How many boxes a node holds at once: all its processes together, as its memory allows.

The changed files of a box lie in memory. Those of all boxes may take half of the node's: 128 boxes
of 2 GiB at once in 512 GiB. The rest is for engines, trainers and commands, of which no more run
than there are processors. GRPO_BOXES is another number of boxes. One more waits, for a quarter of
what a rollout may take.

A place is a name among the kernel's abstract sockets, which one process can have at a time and
loses when it ends. So no count can be wrong, and nothing is left. Each user has places of its own.

No environment by itself: envs/boxes/box.py uses it.
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
from typing import Any

from core.waits import within
from envs import services
from envs.sandbox.outcome import cgroups
from envs.services import CheckerError

VARIABLE = "GRPO_BOXES"
SHARE = 0.5  # of the node's memory, for what boxes have changed
WAIT = 0.25  # of what a rollout may take
LOOK = 0.2  # seconds between two looks for a place
# Those that wait in this process do so in turn.
_turns: weakref.WeakKeyDictionary[Any, asyncio.Lock] = weakref.WeakKeyDictionary()


class Full(CheckerError):
    """No box of the node has ended in time: another wait would be at the end of the queue."""


@contextlib.asynccontextmanager
async def admitted(disk: int) -> AsyncIterator[None]:
    """A place for a box with a layer of `disk` bytes. Raises Full where none gets free."""
    most = boxes(disk)
    loop = asyncio.get_running_loop()
    turn = _turns.setdefault(loop, asyncio.Lock())

    async def waits() -> socket.socket:
        async with turn:
            while not (place := _place(disk, most)):
                await asyncio.sleep(LOOK)
            return place

    what = "a place for a box on this node"
    state = f"{most} are open, as many as may be: {VARIABLE} sets another number"
    seconds = WAIT * services.limits().seconds
    place = await within(seconds, what, waits(), lambda: state, late=Full)
    with place:
        yield


def _place(disk: int, most: int) -> socket.socket | None:
    """One of the places, where one is free."""
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
    """How many boxes may be open at once on this node. Raises CheckerError where GRPO_BOXES is bad.

    One may always.
    """
    given = os.environ.get(VARIABLE, "")
    if given and not re.fullmatch("[1-9][0-9]{0,5}", given):
        raise CheckerError(f"{VARIABLE} = {given!r}: expected how many boxes a node holds at once")
    return int(given) if given else max(1, int(SHARE * memory() / max(1, disk)))


def memory() -> int:
    """The bytes of memory of this node, or of the part that a cgroup leaves to this process."""
    total = re.search(r"MemTotal: *(\d+) kB", Path("/proc/meminfo").read_text())
    assert total
    found = [int(total[1]) << 10]
    for folder in cgroups("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):  # "max" is none
                found.append(int((folder / name).read_text()))
    return min(found)


def problem(disk: int) -> str:
    """Why no box of this size gets a place, and how to mend it; "" for nothing."""
    try:
        boxes(disk)
    except CheckerError as error:
        return str(error)
    if (has := memory()) < disk:
        needs = f"the files that one box changes may take {disk >> 20}"
        return f"this node has {has >> 20} MiB of memory, {needs}"
    return ""
