"""Opens many boxes at once on a small image, runs a command in each, and prints what they cost.

    python tests/boxes.py [BOXES] [CANCELLED] [SEED]     200 and 200: minutes on two cores

Once on a folder, and once on a .sif where squashfuse_ll and mksquashfs are there. Then as many
boxes are cancelled at random moments. The exit status is 1 where a box did not open, a command was
not right, an idle box costs more than a MiB, or a process, mount, descriptor or file is left.
"""

import asyncio
import contextlib
import os
import random
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from envs.boxes.box import Box, Size  # noqa: E402
from envs.sandbox import sandbox  # noqa: E402
from support.box_images import left, make_image, make_sif, present  # noqa: E402

os.environ.setdefault("GRPO_BOXES_AS_ROOT", "1")
SIZE = Size(memory=1 << 30, disk=32 << 20, processes=100)
MOST = 1 << 20  # bytes of an idle box


def memory(pids: list[int]) -> int:
    """The bytes of processes, with their part of what they share."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total << 10


def processor() -> float:
    """Seconds of processor time of this process and of all that have ended."""
    times = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in times)


async def at_once(image: Path, count: int) -> bool:
    """Whether all boxes open, are right and cheap."""
    began, used = time.monotonic(), processor()
    async with contextlib.AsyncExitStack() as stack:
        boxes = [Box(image, size=SIZE) for _ in range(count)]
        opened = await asyncio.gather(*map(stack.enter_async_context, boxes))
        opened_in = time.monotonic() - began
        idle = sandbox.family(os.getpid())[1:]
        each = memory(idle) / count
        print(f"{image.name}: {count} open in {opened_in:.1f} s, CPU {processor() - used:.1f} s")
        print(f"  idle: {len(idle) / count:.2f} processes and {each / 2**20:.2f} MiB each")
        began, used = time.monotonic(), processor()
        rans = await asyncio.gather(*(box.run("git log --oneline | wc -l", 60) for box in opened))
        seconds = (time.monotonic() - began) / count
        print(f"  a command: {seconds:.3f} s, CPU {(processor() - used) / count:.3f} s")
    right = sum(ran.output.strip() == "1" and ran.code == 0 for ran in rans)
    print(f"  right: {right} of {count}")
    return right == count and each <= MOST


async def cancelled(image: Path, count: int, rng: random.Random) -> bool:
    """Whether boxes that are given up at random moments end in time."""

    async def episode() -> None:
        async with Box(image, size=SIZE) as box:
            await box.put("/a", b"x")
            await box.run("setsid sleep 60 & sleep 1", 10)

    async def one() -> bool:
        task = asyncio.create_task(episode())
        await asyncio.wait({task}, timeout=rng.expovariate(1 / 2))
        task.cancel()
        return bool((await asyncio.wait({task}, timeout=120))[0])

    ended = await asyncio.gather(*(one() for _ in range(count)))
    print(f"  given up: {sum(ended)} of {count} ended")
    return all(ended)


def main(boxes: int, given_up: int, rng: random.Random) -> int:
    """The exit status."""
    good = True
    with tempfile.TemporaryDirectory() as folder:
        images = [make_image(Path(folder, "folder"), {"calc.py": "x = 1\n"})]
        if shutil.which("squashfuse_ll") and shutil.which("mksquashfs"):
            images.append(make_sif(images[0], Path(folder, "image.sif")))
        for image in images:
            before = present()
            good &= asyncio.run(at_once(image, boxes))
            good &= asyncio.run(cancelled(image, given_up, rng))
            found = left(before, 10)
            print(f"  left: {sorted(found)}", flush=True)
            good &= not found
    return int(not good)


if __name__ == "__main__":
    given = [int(word) for word in sys.argv[1:]]
    boxes, given_up, seed = given + [200, 200, 0][len(given) :]
    sys.exit(main(boxes, given_up, random.Random(seed)))
