"""Keeps copies of images on a node's disk, for the boxes of all its processes.

GRPO_IMAGE_CACHE names a folder on that disk; without it, images are read in place.
GRPO_IMAGE_CACHE_GIB limits the total size of the copies; if it is not set, the limit is half of the
disk. If a new copy does not fit, the least recently used copies are removed, except copies in use.

A copy is a file, NAME-DIGEST.sif; its timestamp shows its last use. Its readers hold a shared lock
on it, and a process that writes or removes it holds an exclusive one: the kernel releases these
locks when their process ends. A copy is written as NAME-DIGEST.partial, checked against the digest
that launch/images.sh wrote, and renamed.

This is not an environment itself: envs/boxes/box.py uses it.
"""

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import re
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import BinaryIO

from core.waits import in_thread
from envs.services import CheckerError

log = logging.getLogger(__name__)
FOLDER, MOST = "GRPO_IMAGE_CACHE", "GRPO_IMAGE_CACHE_GIB"
SHARE = 0.5  # share of the disk
COPY = 900.0  # seconds that a copy may take, by this process or another
LOOK = 0.1  # seconds between two checks of a copy that another process is writing
PART = 1 << 22  # bytes copied at once
LONGEST = 150  # characters of an image's name that are used
_noted: list[str] = []  # why images are read in place, once that has been logged


@contextlib.asynccontextmanager
async def near(image: Path) -> AsyncIterator[Path]:
    """Yields this node's copy of a .sif, which stays until the block ends, or the image itself.

    Yields the image if no copy can be created, for example on a full disk. Raises CheckerError if
    the image differs from its digest.
    """
    folder = os.environ.get(FOLDER)
    if not folder or image.is_dir():
        yield image
        return
    making = asyncio.ensure_future(in_thread(copy_of, image, Path(folder)))
    try:
        copy = await asyncio.shield(making)
    except asyncio.CancelledError:
        making.add_done_callback(_give_up)
        raise
    except OSError as error:
        if not _noted:
            _noted.append(str(error))
            log.warning("images are read in place, because %s has no copy: %s", folder, error)
        yield image
        return
    with copy:
        yield Path(copy.name)


def _give_up(making: asyncio.Future[BinaryIO]) -> None:
    """Closes a copy that was completed too late to be used."""
    if not making.cancelled() and not making.exception():
        making.result().close()


def copy_of(image: Path, folder: Path) -> BinaryIO:
    """Returns an image's copy, locked while it is open. Raises OSError if none can be created.

    Raises CheckerError if the image differs from its digest.
    """
    digest = digest_of(image)
    stat = os.stat(image)
    mark = digest[:16] or f"{stat.st_size:x}-{stat.st_mtime_ns:x}"
    whole = folder / f"{image.stem[:LONGEST]}-{mark}.sif"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    end = time.monotonic() + COPY
    while time.monotonic() < end:
        if copy := _opened(whole, fcntl.LOCK_SH):
            os.utime(whole)
            return copy
        partial = whole.with_suffix(".partial")
        partial.touch()
        if new := _opened(partial, fcntl.LOCK_EX):
            with new:
                _write(image, digest, new, whole)
        else:
            time.sleep(LOOK)
    raise TimeoutError(errno.ETIMEDOUT, f"no copy of {image} was completed in {COPY:g} s")


def _opened(path: Path, lock: int) -> BinaryIO | None:
    """Opens a file and locks it; returns None if another process has locked it, or it is gone."""
    with contextlib.suppress(FileNotFoundError):
        file = open(path, "rb")  # noqa: SIM115
        try:
            fcntl.flock(file, lock | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                return file
        except BlockingIOError:
            pass
        except BaseException:
            file.close()
            raise
        file.close()
    return None


def _write(image: Path, digest: str, lock: BinaryIO, whole: Path) -> None:
    """Copies an image to the locked file, and renames that to `whole`. Raises OSError."""
    partial = Path(lock.name)
    try:
        if whole.exists():  # another process has created it in the meantime
            return
        with open(image, "rb") as source, open(partial, "wb") as target:
            size = os.fstat(source.fileno()).st_size
            with _sole(whole.parent):
                _make_room(whole.parent, size)
                if size:
                    os.posix_fallocate(target.fileno(), 0, size)
            seen = hashlib.sha256()
            while part := source.read(PART):
                target.write(part)
                seen.update(part)
            if target.tell() != size:
                raise OSError(errno.EIO, f"{target.tell():,} of {size:,} bytes", str(image))
            target.flush()
            os.fsync(target.fileno())
        if digest and seen.hexdigest() != digest:
            raise CheckerError(
                f"the image {image} differs from its .sha256: "
                "VERIFY=true bash launch/images.sh fetches it again"
            )
        with _sole(whole.parent):
            partial.rename(whole)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def _sole(folder: Path) -> Iterator[None]:
    """Locks the folder against other processes that make room. Raises OSError after COPY seconds.

    Making room takes only moments if the file system can reserve space.
    """
    end = time.monotonic() + COPY
    path = folder / "lock"
    path.touch()
    while not (file := _opened(path, fcntl.LOCK_EX)):
        if time.monotonic() > end:
            raise TimeoutError(errno.ETIMEDOUT, f"{path} was not free within {COPY:g} s")
        time.sleep(LOOK)
    with file:
        yield


def _make_room(folder: Path, size: int) -> None:
    """Removes unused copies until `size` bytes are free. Raises OSError if that is impossible."""
    found = list(_copies(folder))
    taken = sum(stat.st_size for _, stat in found)
    most = limit(folder)
    if size <= most:
        for path, stat in sorted(found, key=lambda each: each[1].st_mtime):
            if taken + size <= most and size <= shutil.disk_usage(folder).free:
                return
            taken -= stat.st_size * _removed(path)
    if taken + size > most or size > shutil.disk_usage(folder).free:
        raise OSError(
            errno.ENOSPC,
            f"{taken >> 20} of {most >> 20} MiB are in use, so {size >> 20} MiB more do not fit",
            str(folder),
        )


def _copies(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yields the copies in a folder, including unfinished ones."""
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if path.suffix in (".sif", ".partial"):
                yield path, path.stat()


def _removed(path: Path) -> bool:
    """Removes a copy; returns False if it is in use or being written."""
    file = _opened(path, fcntl.LOCK_EX)
    if file:
        with file:
            path.unlink()
    return bool(file)


def digest_of(image: Path) -> str:
    """Returns the SHA-256 next to an image, as launch/images.sh writes it; "" if it is missing."""
    with contextlib.suppress(OSError, ValueError):
        found = re.match("[0-9a-f]{64}", image.with_name(f"{image.name}.sha256").read_text())
        return found[0] if found else ""
    return ""


def limit(folder: Path) -> int:
    """Returns how many bytes the copies may take up."""
    given = os.environ.get(MOST)
    return int(float(given) * (1 << 30)) if given else int(SHARE * shutil.disk_usage(folder).total)


def problem() -> str:
    """Returns why no copy can be kept, and how to fix it; "" if nothing prevents it."""
    folder = os.environ.get(FOLDER)
    given = os.environ.get(MOST)
    if given and not re.fullmatch(r"\d{1,9}(\.\d{1,9})?", given):
        return f"{MOST} = {given!r}: expected how many GiB the copies may take up"
    if not folder:
        return f"{MOST} = {given!r} without {FOLDER}, the folder for the copies" if given else ""
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
    except OSError as error:
        return f"{FOLDER} = {folder!r}: expected a folder on this node's disk: {error.strerror}"
    if not folder.startswith("/") or not os.access(folder, os.W_OK | os.X_OK):
        return f"{FOLDER} = {folder!r}: expected the absolute path of a writable folder"
    return ""
