"""Checks that a user may have all processes that a run is promised: RLIMIT_NPROC, `ulimit -u`.

The kernel counts all processes and threads that the user has on the machine, and records nowhere
that it has refused one. So a run's failure is its own only if, before and after it, there was room
for all processes that it was promised. Other users' processes do not count, nor do the run's own,
which have ended by then.
"""

import asyncio
import contextlib
import glob
import os
import re
import resource
from pathlib import Path

from envs.sandbox.outcome import OWN, Limits
from envs.services import current

FULL = "the limit on a user's processes (ulimit -u) leaves a run fewer than it was promised"
NOBODY = 65534  # the user that owns runs if this process is root
DYING = 10  # checks, a tenth of a second apart, while killed processes end
COUNTED = re.compile(r"^Uid:\t(\d+).*^Threads:\t(\d+)", re.M | re.S)


def user(image: bool) -> int:
    """Returns the user whose limit applies to a run on an image's files, or on this machine's."""
    isolated = current().sandbox == "bubblewrap" and not image
    return NOBODY if isolated and os.geteuid() == 0 else os.getuid()


def lifted() -> list[str]:
    """Returns the prefix that makes a command raise this limit as far as any user may."""
    most = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    return [] if most == resource.RLIM_INFINITY else ["prlimit", f"--nproc={most}:{most}"]


def problem(limits: Limits) -> str:
    """Returns why a run can never have the processes that it is promised; "" if it can."""
    most = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    needs = limits.processes + OWN
    if most == resource.RLIM_INFINITY or most >= needs:
        return ""
    return f"a user may have {most} processes (ulimit -Hu), but one run needs {needs}: raise it"


def full(limits: Limits, image: bool = False) -> bool:
    """Returns whether a run's user has no room for all processes that the run is promised."""
    most = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    whose = user(image)
    if most == resource.RLIM_INFINITY or whose == 0:  # root has no limit
        return False
    free = most - limits.processes - OWN
    return of_machine() > free and of_user(whose) > free


async def full_after(limits: Limits, killed: bool, image: bool = False) -> bool:
    """Returns `full` after a run; if `killed`, first waits for processes that are still ending."""
    for _ in range(DYING if killed else 0):
        if not full(limits, image):
            return False
        await asyncio.sleep(0.1)
    return full(limits, image)


def of_machine() -> int:
    """Returns how many processes and threads all users have in all containers; 0 if unknown."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])
    return 0


def of_user(whose: int) -> int:
    """Returns how many processes and threads of a user this process can see."""
    total = 0
    for path in glob.iglob("/proc/[0-9]*/status"):
        with contextlib.suppress(OSError):
            found = COUNTED.search(Path(path).read_text(errors="replace"))
            total += int(found[2]) if found and int(found[1]) == whose else 0
    return total
