"""The image of a row: a .sif or an unpacked folder below services.images.

A .sif is a squashfs with a header. One process of squashfuse_ll shows its files to all boxes of a
worker that use it, in namespaces of its own: no other process sees the mount, and no privilege is
needed. It ends with the last of these boxes, or with the worker.

No environment by itself: envs/swe/box.py uses it.
"""

import asyncio
import contextlib
import os
import signal
import struct
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import NamedTuple

from core.waits import in_thread
from envs.rollout.services import CheckerError
from envs.sandbox import sandbox
from envs.swe.images import folder_of

# Of the header, and of each descriptor of what the file holds (github.com/sylabs/sif, pkg/sif).
HEADER = struct.Struct("<32s10s3s3s16s8q")
DESCRIPTOR = struct.Struct("<i?3I7q128s2i376s")
MAGIC, SQUASHFS = b"SIF_MAGIC\0", b"hsqs"
SYSTEM = (0x4004, 1, 2)  # a partition, with a squashfs, which is the primary system
MOST = 1000  # descriptors
START = 60.0  # seconds that a mount may take
LOOK = 0.01  # seconds between two looks whether it is there
WHERE = "/mnt"  # any folder that exists: it is covered only in the mount's own namespace


class Lower(NamedTuple):
    """The files of an image."""

    enter: list[str]  # the command in front of one that sees them
    folder: str
    lost: Callable[[], str]  # why they are there no more, "" while they are


def find(image: str) -> Path:
    """The folder of an image, or else its .sif. Raises CheckerError where both are missing."""
    folder = folder_of(image)
    file = folder.with_name(f"{folder.name}.sif")
    if folder.is_dir():
        return folder
    if file.is_file():
        return file
    remedy = "bash launch/images.sh ROWS FOLDER fetches those of a file of rows"
    raise CheckerError(f"the image {image} is missing: expected {file}, or a folder: {remedy}")


@contextlib.asynccontextmanager
async def opened(image: Path) -> AsyncIterator[Lower]:
    """The files of an image while a box uses them. Raises CheckerError where there are none."""
    if image.is_dir():
        yield Lower([], str(image), str)
        return
    mount = Mount.shown.get(image)
    if not mount or mount.process.poll() is not None:
        mount = Mount.shown[image] = Mount(image)
    mount.users += 1
    try:
        await mount.ready()
        yield Lower(mount.enter, WHERE, mount.lost)
    finally:
        mount.users -= 1
        if not mount.users:
            await mount.close()


class Mount:
    """The files of a .sif, shown by a process. Raises CheckerError where it cannot be."""

    shown: dict[Path, "Mount"] = {}

    def __init__(self, image: Path) -> None:
        self.image = image
        self.users = 0
        options = f"ro,offset={squashfs_at(image)}"
        command = ["setpriv", "--pdeathsig", "KILL", "unshare", "--user", "--map-root-user"]
        command += ["--mount", "squashfuse_ll", "-f", "-o", options, str(image), WHERE]
        self.errors = sandbox.memory_file("")
        nothing = sandbox.memory_file("")
        try:
            self.process: subprocess.Popen = sandbox.popen(command, nothing, self.errors)
        except CheckerError:
            os.close(self.errors)
            raise
        finally:
            os.close(nothing)
        self.enter = ["nsenter", "--user", "--mount", "--preserve-credentials", "--target"]
        self.enter += [str(self.process.pid), "--"]

    async def ready(self) -> None:
        """Waits until its files are there. Raises CheckerError where they do not come."""
        end = time.monotonic() + START
        while time.monotonic() < end:
            if why := self.lost():
                raise CheckerError(why)
            with contextlib.suppress(OSError):
                mounts = Path(f"/proc/{self.process.pid}/mounts").read_text()
                if f" {WHERE} fuse" in mounts:
                    return
            await asyncio.sleep(LOOK)
        raise CheckerError(f"the image {self.image} was not mounted in {START:g} s")

    def lost(self) -> str:
        """What its process said and how it ended, "" while it lives."""
        if self.process.poll() is None:
            return ""
        said = os.pread(self.errors, 1000, 0).decode("utf-8", "replace")
        code = self.process.returncode
        return f"the image {self.image} is not mounted: code {code}: {' '.join(said.split())}"

    async def close(self) -> None:
        """Ends it."""
        if self.shown.get(self.image) is self:
            del self.shown[self.image]
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        os.close(self.errors)
        await in_thread(self.process.wait)


def squashfs_at(path: Path) -> int:
    """Where the squashfs of a .sif begins, in bytes. Raises CheckerError where it has none."""
    try:
        with open(path, "rb") as file:
            start = file.read(HEADER.size)
            if start.startswith(SQUASHFS):
                return 0
            _, magic, *_, total, at, _, _, _ = HEADER.unpack(start)
            if magic != MAGIC:
                raise ValueError(f"magic {magic!r}, expected {MAGIC!r}")
            file.seek(at)
            found = [DESCRIPTOR.unpack(file.read(DESCRIPTOR.size)) for _ in range(min(total, MOST))]
            for kind, used, _, _, _, offset, *_, system, part, _ in found:
                file.seek(offset)
                if used and (kind, system, part) == SYSTEM and file.read(4) == SQUASHFS:
                    return offset
            raise ValueError(f"none of its {total} parts is a squashfs with the primary system")
    except (OSError, ValueError, struct.error) as error:
        raise CheckerError(f"the image {path} is no .sif that can be mounted: {error}") from None
