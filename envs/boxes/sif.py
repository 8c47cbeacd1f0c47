"""The image of a row: a .sif or an unpacked folder below services.images.

A .sif is a squashfs with a header. One process of squashfuse_ll shows its files to all boxes of a
worker that use it, in namespaces of its own: no other process sees the mount, and no privilege is
needed. It ends with the last of these boxes, or with the worker. Where that is root of the machine,
it and its boxes belong to the user nobody, whose processes the kernel bounds.

No environment by itself: envs/boxes/box.py uses it.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import NamedTuple

from core.waits import in_thread
from envs import services
from envs.boxes import image_cache
from envs.boxes.image_names import folder_of
from envs.sandbox import sandbox, user_limit
from envs.services import CheckerError

# Of the header, and of each descriptor of what the file holds (github.com/sylabs/sif, pkg/sif).
HEADER = struct.Struct("<32s10s3s3s16s8q")
DESCRIPTOR = struct.Struct("<i?3I7q128s2i376s")
MAGIC, SQUASHFS = b"SIF_MAGIC\0", b"hsqs"
SYSTEM = (0x4004, 1, 2)  # a partition, with a squashfs, which is the primary system
MOST = 1000  # descriptors
START = 60.0  # seconds that a mount may take
LOOK = 0.01  # seconds between two looks whether it is there
WHERE = "/mnt"  # any folder that exists: it is covered only in the mount's own namespace


AS_ROOT = "GRPO_BOXES_AS_ROOT"
WHY_NOT = (
    "the kernel bounds no processes of root, and its files in a folder need root: use a .sif, "
    f"or another user, or set {AS_ROOT}=1"
)


class Lower(NamedTuple):
    """The files of an image."""

    user: list[str]  # the command in front of one that becomes the user who owns them
    enter: list[str]  # and of one that sees them
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
        if root_is_refused():
            raise CheckerError(f"{image} is a folder, and this user is root: {WHY_NOT}")
        yield Lower(user_limit.lifted(), [], str(image), str)
        return
    mount = Mount.shown.get(image)
    if not mount or mount.process.poll() is not None:
        mount = Mount.shown[image] = Mount(image)
    mount.users += 1
    try:
        await mount.ready()
        yield Lower(mount.user, mount.enter, WHERE, mount.lost)
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
        self.user = sandbox.as_run_user() if is_root() else user_limit.lifted()
        command = [*self.user, "setpriv", "--pdeathsig", "KILL", "unshare", "--user"]
        command += ["--map-root-user", "--mount", "squashfuse_ll", "-f", "-o", options]
        self.errors = sandbox.memory_file("")
        try:
            with open(image, "rb") as file:  # which lies where that user may not look
                command += ["/proc/self/fd/0", WHERE]
                self.process: subprocess.Popen = sandbox.popen(command, file.fileno(), self.errors)
        except CheckerError:
            os.close(self.errors)
            raise
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


def problem() -> str:
    """Why no image can be opened, and how to mend it; "" for nothing."""
    images = services.current().images
    if not images or not os.path.isdir(images):
        expected = "expected a folder of images as `bash launch/images.sh ROWS FOLDER` makes it"
        return f"services.images = {images!r}, {expected}"
    if not any(Path(images).glob("*.sif")):
        return f"root opens no folders: {WHY_NOT}" if root_is_refused() else ""
    if not shutil.which("squashfuse_ll"):
        return "squashfuse_ll is not on the path: apt install squashfuse, or dnf install squashfuse"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse cannot be opened, which shows the files of a .sif: modprobe fuse"
    return image_cache.problem()


def root_is_refused() -> bool:
    """Whether this user opens no folders."""
    return is_root() and os.environ.get(AS_ROOT) != "1"


def is_root() -> bool:
    """Whether this is root of the machine, and not of a user namespace."""
    inside, outside, _ = Path("/proc/self/uid_map").read_text().split(maxsplit=2)
    return os.geteuid() == 0 and inside == outside == "0"


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
