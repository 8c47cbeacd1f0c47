"""Boxes against hostile programs, and cancelled at every wait: `bash tests/run.sh swe`."""

import asyncio
import itertools
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_box import SMALL, cancelled_everywhere, killed_worker

from envs.boxes.box import Box
from support.box_images import adopting, left, make_image, make_sif, orphans, present
from support.hostile_programs import ESCAPES, OUT
from support.program import ROOT

pytestmark = pytest.mark.skipif("GRPO_SWE" not in os.environ, reason="bash tests/run.sh swe")
KINDS = ("folder", "sif")
# What a box has of its own, so that a program may reach it: its root user, its files, which are
# the image's and its layer's, and its first processes, which are two shells of bash.
OWN = {
    "memory of the parent",
    "environment of the parent",
    "files of the parent",
    "pipe of the parent",
    "read passwords",
    "read the environment",
    "write outside",
    "write in usr",
    "write in etc",
    "symlink to the root",
    "symlink of the parent's root",
    "root of the first process",
    "become root",
    "set-user-id file",
}
OUTSIDE = [Path(name) for name in ("/escaped", "/usr/escaped", "/etc/x", "/tmp/0", "/tmp/sh")]


@pytest.fixture(scope="module", params=KINDS)
def image(request, tmp_path_factory):
    """A small image, as a folder and as a .sif."""
    root = make_image(tmp_path_factory.mktemp("box") / "image", {"calc.py": "x = 1\n"})
    if request.param == "folder":
        return root
    if not shutil.which("squashfuse_ll") or not shutil.which("mksquashfs"):
        pytest.skip("needs squashfuse and squashfs-tools")
    return make_sif(root, root.with_suffix(".sif"))


def hashes(path: Path) -> dict[str, tuple[int, int]]:
    """Sizes and times of all files of an image."""
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    return {str(each): (each.lstat().st_size, each.lstat().st_mtime_ns) for each in files}


async def test_no_program_gets_out(image):
    """Nothing of the host is reached or changed, and no program hurts the next box."""
    before, files = present(), hashes(image)
    reached: set[str] = set()
    gone: dict[str, str] = {}
    rest = iter(ESCAPES.items())

    async def worker() -> None:
        for name, program in rest:
            async with Box(image, workdir="/tmp", size=SMALL) as box:
                await box.put("/tmp/program", program.encode("utf-8", "surrogatepass"))
                ran = await box.run("echo 7 | python /tmp/program", 3, most=4000)
                if name in OUT and ran.output.rstrip().endswith("49"):
                    reached.add(name)
                then = await box.run("printf 1", 10)
                if (then.output, then.code) != ("1", 0):
                    gone[name] = box.gone or then.output

    await asyncio.gather(worker(), worker())
    assert reached <= OWN, reached - OWN
    assert set(gone.values()) <= {"memory"}, gone
    assert not [path for path in OUTSIDE if path.exists()]
    assert hashes(image) == files
    assert await asyncio.to_thread(left, before) == set()


async def test_an_episode_may_be_cancelled_at_every_wait(image):
    assert await cancelled_everywhere(image, 1, 1) > 12


def test_a_worker_of_any_image_leaves_nothing(image):
    for _ in itertools.repeat(None, 3):
        killed_worker(image)


OPENS = """
import asyncio, sys
from envs.boxes.box import Box, Size
async def main():
    async with Box(sys.argv[1], size=Size(300 << 20, 32 << 20, 40)) as box:
        print("begins", flush=True)
        await box.run("sleep 100", 99)
asyncio.run(main())
"""


def test_a_worker_that_is_killed_as_a_command_begins_leaves_nothing(image):
    """In its first 30 ms, where nothing of it may yet end with what is above it."""
    dice = random.Random(0)
    with adopting() as before:
        for _ in range(20):
            worker = subprocess.Popen(
                [sys.executable, "-c", OPENS, str(image)], cwd=ROOT, stdout=subprocess.PIPE
            )
            with worker:
                assert worker.stdout.readline() == b"begins\n"
                time.sleep(dice.uniform(0, 0.03))
                worker.kill()
            assert orphans(before) == {}


def test_two_hundred_boxes_at_once():
    done = subprocess.run([sys.executable, "tests/boxes.py"], cwd=ROOT, capture_output=True)
    print(done.stdout.decode())
    assert done.returncode == 0, done.stdout + done.stderr
