"""Images for boxes: root folders with the bash, git, Python and pytest of this machine."""

import contextlib
import ctypes
import os
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from envs.sandbox import sandbox

PROGRAMS = """bash git python3 env cat cp mv rm mkdir rmdir ls ln chmod chown touch head tail wc
sort uniq tr cut tee seq sleep yes dd stat date id sed grep find xargs diff tar gzip mount mknod
setsid timeout unshare nsenter test true false printf dirname basename readlink nproc df ps awk
mktemp realpath kill"""
PACKAGES = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")
FOLDERS = ("tmp", "dev", "proc", "root", "etc", "var/tmp", "testbed")
USER = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]


def git(*args: str, at: Path, text: str | None = None) -> str:
    """What git prints in a repository of this machine."""
    return subprocess.check_output(["git", "-C", at, *USER, *args], text=True, input=text)


def place(source: Path | str, target: Path | str) -> None:
    """Puts a file in an image: a link, since no box changes its image; or else a copy."""
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError):
        os.link(source, target)
        return
    shutil.copy2(source, target)


def make_image(root: Path, files: dict[str, str]) -> Path:
    """A root folder with a repository in /testbed, of which one commit has these files."""
    found = {name: shutil.which(name, path="/usr/bin:/bin") for name in PROGRAMS.split()}
    for name, program in found.items():
        if not program:
            continue
        source = Path(program).resolve()
        # Without LD_PRELOAD, which a test may have set for vLLM.
        said = subprocess.run(["ldd", source], text=True, capture_output=True, env={"PATH": "/bin"})
        linked = said.stdout.split()
        for file in {Path(word) for word in linked if word.startswith("/")}:
            if not (root / str(file)[1:]).exists():
                place(file.resolve(), root / str(file)[1:])
        place(source, root / "usr/bin" / name)
        if name == "python3":
            (root / "usr/bin/python").symlink_to("python3")
            library = Path("usr/lib", source.name)
            ignored = shutil.ignore_patterns("test", "tests", "__pycache__", "idlelib", "config-*")
            shutil.copytree("/" / library, root / library, ignore=ignored, copy_function=place)
    (root / "usr/bin/sh").symlink_to("bash")
    for file in (file for package in PACKAGES for file in metadata.files(package)):
        if ".." not in file.parts and "__pycache__" not in file.parts:
            place(Path(file.locate()), root / library / file)
    (root / "bin").symlink_to("usr/bin")
    for name in FOLDERS:
        (root / name).mkdir(parents=True, exist_ok=True)
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")
    (root / "etc/group").write_text("root:x:0:\n")
    for path, text in files.items():
        (root / "testbed" / path).parent.mkdir(parents=True, exist_ok=True)
        (root / "testbed" / path).write_text(text)
    git("init", "-q", at=root / "testbed")
    git("add", ".", at=root / "testbed")
    git("commit", "-q", "--allow-empty", "-m", "first", at=root / "testbed")
    return root


def make_sif(root: Path, path: Path) -> Path:
    """A root folder as a file of Apptainer: a header, what else may be in it, and a squashfs."""
    squash = path.with_suffix(".squashfs")
    quiet = ["-quiet", "-no-progress", "-all-root", "-Xcompression-level", "1"]
    subprocess.run(["mksquashfs", root, squash, *quiet], check=True, capture_output=True)
    body = squash.read_bytes()
    squash.unlink()
    start = struct.pack(
        "<32s10s3s3s16s", b"#!/usr/bin/env run-singularity\n", b"SIF_MAGIC", *[b""] * 3
    )
    start += struct.pack("<8q", 0, 0, 45, 48, 4096, 48 * 585, 32768, len(body))
    # The text that it was built from, a part that is no system, and the system.
    parts = ((0x4001, 16384, 0, 0), (0x4004, 16384, 3, 3), (0x4004, 32768, 1, 2))
    for i, (kind, at, system, part) in enumerate(parts):
        entry = struct.pack(
            "<i?IIIqqq4q128sii", kind, True, i, 0, 0, at, 1, 1, *[0] * 4, b"", system, part
        )
        start = start.ljust(4096 + 585 * i, b"\0") + entry
    path.write_bytes(start.ljust(32768, b"\0") + body)
    return path


def present() -> set[str]:
    """What a box could leave behind: processes, mounts, descriptors, files where it mounts."""
    found = {f"process {pid}" for pid in sandbox.family(os.getpid())}
    found |= {f"mount {line}" for line in Path("/proc/self/mounts").read_text().splitlines()}
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(f"descriptor {descriptor} {os.readlink(f'/proc/self/fd/{descriptor}')}")
    return found | {f"file {path}" for path in Path("/mnt").glob("*")}


def left(before: set[str], seconds: float = 5.0) -> set[str]:
    """What is there that was not before, once processes have had time to end."""
    end = time.monotonic() + seconds
    while (found := present() - before) and time.monotonic() < end:
        time.sleep(0.05)
    return found


CHILD_SUBREAPER = 36  # of prctl


@contextlib.contextmanager
def adopting() -> Iterator[set[int]]:
    """Orphans become children of this process. Yields the processes that it had before."""
    before = set(sandbox.family(os.getpid()))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        yield before
    finally:
        prctl(CHILD_SUBREAPER, 0, 0, 0, 0)


def orphans(before: set[int], seconds: float = 5.0) -> dict[int, bytes]:
    """Adopted processes, and what came from them, that do not end in time: their commands."""
    end = time.monotonic() + seconds
    while found := set(sandbox.family(os.getpid())) - before:
        for pid in found:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > end:
            return {pid: command_of(pid) for pid in found}
        time.sleep(0.05)
    return {}


def command_of(pid: int) -> bytes:
    """The command of a process; empty where it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""
