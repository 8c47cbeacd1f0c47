"""Checks hostile programs by the thousand, gives others up midway, and prints what got out.

    python tests/escapes.py [CANDIDATES] [CANCELLED] [SEED]     ten minutes for the defaults

Every second candidate is one of support/hostile_programs.py, the others are right; each is checked
as an answer of a row is, sixteen at once. A check is given up at a random moment of its first
second; one that has ended by then is not counted. Afterwards no process, file, mount or shared
memory may be there that was not there before.

The exit status is 1 where a hostile program was paid, a right one was not, or something is left.
"""

import asyncio
import itertools
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

from support.hostile_programs import ESCAPES

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from envs.coding import code  # noqa: E402
from envs.sandbox import sandbox  # noqa: E402
from envs.sandbox.programs import Interpreter  # noqa: E402
from envs.services import CheckerError  # noqa: E402

ROW = {"verifier_metadata": {"unit_tests": {"inputs": ["7\n"], "outputs": ["49"]}}}
RIGHT = "print(int(input()) ** 2)"
PLACES = ("/", "/usr", "/etc", "/tmp", "/dev/shm", str(Path.home()), str(ROOT))


def present() -> set[str]:
    """What a program could leave behind: processes, files, mounts, shared memory."""
    found = {f"process {pid}" for pid in sandbox.family(os.getpid())}
    found |= {f"file {path}" for place in PLACES for path in Path(place).glob("*")}
    found |= {f"mount {line}" for line in Path("/proc/self/mounts").read_text().splitlines()}
    shared = Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
    return found | {f"shared memory {line.split()[1]}" for line in shared}


async def earned(source: str) -> str:
    """The reward of a program as text, or that its check failed."""
    try:
        return str((await code.verify(ROW, f"```python\n{source}\n```")).value)
    except CheckerError as error:
        return f"not checked: {str(error)[:80]}"


async def at_once(count: int, work: Callable[[int], Awaitable[None]]) -> None:
    """Does `count` pieces of work, sixteen at a time."""
    rest = iter(range(count))

    async def worker() -> None:
        for i in rest:
            await work(i)
            if i % 500 == 499:
                print(f"{i + 1} of {count}", flush=True)

    await asyncio.gather(*(worker() for _ in range(16)))


async def main(candidates: int, cancelled: int, rng: random.Random) -> int:
    """The exit status."""
    code.LIMITS = sandbox.Limits(seconds=1.0, memory=1 << 30)
    found: dict[str, Counter] = {"attempts": Counter(), "right": Counter(), "given up": Counter()}
    paid: Counter = Counter()
    names = itertools.cycle(ESCAPES)

    async def check(i: int) -> None:
        if i % 2:
            found["right"][await earned(RIGHT)] += 1
            return
        name = next(names)
        reward = await earned(ESCAPES[name])
        found["attempts"][reward] += 1
        paid[name] += reward == "1.0"

    async def give_up(_: int) -> None:
        how = ""
        while how not in ("cancelled", "late"):
            name = rng.choice(list(ESCAPES))
            task = asyncio.create_task(earned(ESCAPES[name]))
            await asyncio.wait({task}, timeout=rng.uniform(0, 1))
            task.cancel()
            done, _ = await asyncio.wait({task}, timeout=60)
            how = "late" if not done else "cancelled" if task.cancelled() else task.result()
            found["given up"][how] += 1
            paid[name] += how == "1.0"

    before = present()
    began = time.monotonic()
    await at_once(candidates, check)
    await at_once(cancelled, give_up)
    for python in itertools.chain(*Interpreter.idle.values()):
        await python.close()
    Interpreter.idle.clear()
    await asyncio.sleep(5)
    left = present() - before
    print(f"{time.monotonic() - began:.0f} s")
    for what, ends in found.items():
        print(f"{what}: {dict(ends)}")
    print(f"paid: {dict(+paid)}")
    print(f"left: {sorted(left)}")
    unfair = found["right"].total() - found["right"]["1.0"]
    return int(bool(+paid or left or unfair or found["given up"]["late"]))


if __name__ == "__main__":
    given = [int(word) for word in sys.argv[1:]]
    candidates, cancelled, seed = given + [10_000, 2_000, 0][len(given) :]
    sys.exit(asyncio.run(main(candidates, cancelled, random.Random(seed))))
