"""Whether a user may have as many processes as a run is promised: RLIMIT_NPROC, `ulimit -u`.

The kernel counts all processes and threads that the user has on the machine, and counts nowhere
that it has refused one. So a run's failure is its own only where, before and after it, there was
room for all that it was promised. What other users have is no use of it, nor what the run itself
had: it is dead by then.
"""

import asyncio
import contextlib
import glob
import os
import re
import resource
from pathlib import Path

from envs.sandbox.outcome import Limits
from envs.services import current

FULL = "the limit of a user's processes (ulimit -u) leaves a run fewer than it was promised"
NOBODY = 65534  # the user that runs have where this one is root
OWN = 8  # processes of a run that are bubblewrap's, or an interpreter's
DYING = 10  # looks, of a tenth of a second each, while killed processes end
COUNTED = re.compile(r"^Uid:\t(\d+).*^Threads:\t(\d+)", re.M | re.S)


def user(image: bool) -> int:
    """The user whose limit a run has, with the files of an image or of this machine."""
    isolated = current().sandbox == "bubblewrap" and not image
    return NOBODY if isolated and os.geteuid() == 0 else os.getuid()


def lifted() -> list[str]:
    """The command in front of one that raises this limit as far as any user may."""
    most = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    return [] if most == resource.RLIM_INFINITY else ["prlimit", f"--nproc={most}:{most}"]


def problem(limits: Limits) -> str:
    """Why a run can never have the processes that it is promised; "" if it can."""
    most, needs = resource.getrlimit(resource.RLIMIT_NPROC)[1], limits.processes + OWN
    if most == resource.RLIM_INFINITY or most >= needs:
        return ""
    return f"a user may have {most} processes (ulimit -Hu), and one run needs {needs}: raise it"


def full(limits: Limits, image: bool = False) -> bool:
    """Whether a run's user has no room for all that it is promised. The kernel bounds no root."""
    most, whose = resource.getrlimit(resource.RLIMIT_NPROC)[1], user(image)
    if most == resource.RLIM_INFINITY or whose == 0:
        return False
    free = most - limits.processes - OWN
    return of_machine() > free and of_user(whose) > free


async def full_after(limits: Limits, killed: bool, image: bool = False) -> bool:
    """The same after a run, of which some may not be dead yet where it was killed."""
    for _ in range(DYING if killed else 0):
        if not full(limits, image):
            return False
        await asyncio.sleep(0.1)
    return full(limits, image)


def of_machine() -> int:
    """The processes and threads of all users, also of those in other containers; a quick look."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])
    return 0


def of_user(whose: int) -> int:
    """The processes and threads of a user that this process can see."""
    total = 0
    for path in glob.iglob("/proc/[0-9]*/status"):
        with contextlib.suppress(OSError):
            found = COUNTED.search(Path(path).read_text(errors="replace"))
            total += int(found[2]) if found and int(found[1]) == whose else 0
    return total
