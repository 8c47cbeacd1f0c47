"""Opens a row's image: a .sif or an unpacked folder below services.images.

A .sif is a squashfs with a header. One squashfuse_ll process serves its files to all of a worker's
boxes that use it, in separate namespaces: no other process sees the mount, and no privilege is
needed. The process ends with the last of these boxes, or with the worker. If the worker runs as the
machine's root, the process and its boxes run as the user nobody, because the kernel limits the
number of processes of any user but root.

This is not an environment itself: envs/boxes/box.py uses it.
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

# Layout of the header, and of each part's descriptor (github.com/sylabs/sif, pkg/sif).
HEADER = struct.Struct("<32s10s3s3s16s8q")
DESCRIPTOR = struct.Struct("<i?3I7q128s2i376s")
MAGIC, SQUASHFS = b"SIF_MAGIC\0", b"hsqs"
SYSTEM = (0x4004, 1, 2)  # a partition that contains a squashfs and is the primary system
MOST = 1000  # maximum number of descriptors
START = 60.0  # seconds that a mount may take
LOOK = 0.01  # seconds between two checks for the mount
WHERE = "/mnt"  # any folder that exists: it is covered only in the mount's own namespace

AS_ROOT = "GRPO_BOXES_AS_ROOT"
WHY_NOT = (
    "the kernel does not limit the number of root's processes, and root's files need root: "
    f"use a .sif, or another user, or set {AS_ROOT}=1"
)


class Lower(NamedTuple):
    """An image's files."""

    user: list[str]  # prefix that makes a command run as the user who owns the files
    enter: list[str]  # prefix that makes a command see the files
    folder: str
    lost: Callable[[], str]  # returns why the files are gone, or ""


def find(image: str) -> Path:
    """Returns an image's folder, or else its .sif. Raises CheckerError if both are missing."""
    folder = folder_of(image)
    file = folder.with_name(f"{folder.name}.sif")
    if folder.is_dir():
        return folder
    if file.is_file():
        return file
    raise CheckerError(
        f"the image {image} is missing: expected {file}, or a folder: "
        "bash launch/images.sh ROWS FOLDER fetches the images that a file of rows names"
    )


@contextlib.asynccontextmanager
async def opened(image: Path) -> AsyncIterator[Lower]:
    """Makes an image's files available inside the block. Raises CheckerError if that fails."""
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
    """The files of a .sif, mounted by a process. Raises CheckerError if it cannot be mounted."""

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
            with open(image, "rb") as file:  # opened here: the run's user may lack permission
                command += ["/proc/self/fd/0", WHERE]
                self.process: subprocess.Popen = sandbox.popen(command, file.fileno(), self.errors)
        except CheckerError:
            os.close(self.errors)
            raise
        self.enter = ["nsenter", "--user", "--mount", "--preserve-credentials", "--target"]
        self.enter += [str(self.process.pid), "--"]

    async def ready(self) -> None:
        """Waits until the files are mounted. Raises CheckerError if that fails."""
        end = time.monotonic() + START
        while time.monotonic() < end:
            if why := self.lost():
                raise CheckerError(why)
            with contextlib.suppress(OSError):
                mounts = Path(f"/proc/{self.process.pid}/mounts").read_text()
                if f" {WHERE} fuse" in mounts:
                    return
            await asyncio.sleep(LOOK)
        raise CheckerError(f"the image {self.image} was not mounted within {START:g} s")

    def lost(self) -> str:
        """Returns the process's error output and how it ended; "" while it is running."""
        if self.process.poll() is None:
            return ""
        said = os.pread(self.errors, 1000, 0).decode("utf-8", "replace")
        code = self.process.returncode
        return f"the image {self.image} is not mounted: code {code}: {' '.join(said.split())}"

    async def close(self) -> None:
        """Ends the process, and with it the mount."""
        if self.shown.get(self.image) is self:
            del self.shown[self.image]
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        os.close(self.errors)
        await in_thread(self.process.wait)


def problem() -> str:
    """Returns why no image can be opened, and how to fix it; "" if nothing prevents it."""
    images = services.current().images
    if not images or not os.path.isdir(images):
        return (
            f"services.images = {images!r}, "
            "expected a folder of images, which `bash launch/images.sh ROWS FOLDER` creates"
        )
    if not any(Path(images).glob("*.sif")):
        return f"root cannot open folders: {WHY_NOT}" if root_is_refused() else ""
    if not shutil.which("squashfuse_ll"):
        return "squashfuse_ll is not on the path: apt install squashfuse, or dnf install squashfuse"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse, through which a .sif is mounted, cannot be opened: modprobe fuse"
    return image_cache.problem()


def root_is_refused() -> bool:
    """Returns whether this user is not allowed to use images that are folders."""
    return is_root() and os.environ.get(AS_ROOT) != "1"


def is_root() -> bool:
    """Returns whether this user is the machine's root, not the root of a user namespace."""
    inside, outside, _ = Path("/proc/self/uid_map").read_text().split(maxsplit=2)
    return os.geteuid() == 0 and inside == outside == "0"


def squashfs_at(path: Path) -> int:
    """Returns the byte offset of the squashfs in a .sif. Raises CheckerError if it has none."""
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
            raise ValueError(f"none of its {total} parts is a squashfs primary system partition")
    except (OSError, ValueError, struct.error) as error:
        raise CheckerError(f"the image {path} is not a .sif that can be mounted: {error}") from None
