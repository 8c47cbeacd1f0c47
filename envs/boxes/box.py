"""Runs containers for agents and their judges, with limits, and copies files in and out.

    worker --starts--> holder: user, mount and PID namespaces; a layer over the image
    each command: nsenter --> the holder's namespaces --> bubblewrap --> box_host.sh --> bash

Changes made by commands stay in the layer, which no other box sees and which disappears with the
box. Each command has its own processes, shared memory and network (only loopback): anything that it
leaves running ends with it, so no process of the policy runs between two commands or while a patch
is read. Its output goes to a pipe, and its exit code to bubblewrap, so there is no delimiter
between them that a process in the box could forge. A command runs as root in the box, with rights
over the image's files and no others.

Programs from the original image, which a command cannot replace, can also read the files that it
left (`aside`). A node's memory limits how many boxes it holds at once (envs/boxes/box_budget.py). A
node may keep copies of their images (envs/boxes/image_cache.py).

An idle box consists of two processes: the holder, which is the first process in its PID namespace,
and the holder's parent. The holder reads from its worker, and so ends when the worker does, even if
the worker is killed by SIGKILL. When the holder ends, the kernel ends every process that has
entered its namespace.

This is not an environment itself: environments use it.
"""

import asyncio
import contextlib
import os
import resource
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

from core.waits import in_thread
from envs import services
from envs.boxes import box_budget, image_cache, sif
from envs.sandbox import sandbox, user_limit
from envs.sandbox.interpreter import oom_kills, seccomp_filter
from envs.sandbox.sandbox import TICK, Clock, Limits, memory_file
from envs.services import CheckerError

HOST = Path(__file__).with_name("box_host.sh").read_text(encoding="utf-8")
START = 60.0  # seconds for a box to start, or for a killed command to end
FILE_SECONDS = 60.0  # seconds to copy a file in or out
READY = b"ready\n"
# Creates a box's namespaces; the command after it runs as their first process.
OWN = ("unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--mount-proc")
# Shared memory is part of the layer, whose size limits both. /mnt/image shows the original image,
# with folders for the mounts of `aside`. sandbox.LAYER has set the working folder.
HOLD = """
mkdir -m 1777 /mnt/shm && mkdir /mnt/own /mnt/rest /mnt/image || exit
layers=lowerdir=.,upperdir=/mnt/own,workdir=/mnt/rest,userxattr
mount -t overlay -o "$layers" none /mnt/image && cd /mnt/image && mkdir -p tmp proc dev || exit
cd / && echo ready && exec 2>&- && read -r _
"""
PER_INODE = 4096  # bytes of the layer per file that it may hold
CALLS = seccomp_filter(memory=True)  # system calls that a command may not make
RIGHTS = ("CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID")
PATHS = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ENVIRONMENT = {"PATH": PATHS, "HOME": "/root", "LANG": "C.UTF-8", "TERM": "dumb"}
OPEN_FILES = 65_536  # open files per process
FIRST_KILLED = 900  # oom_score_adj of a command; engines have 0
QUICK = 16 << 20  # bytes of output read at full speed, then slowly, so that `yes` costs little
PART = 1 << 16  # bytes read at once
SLOWLY = 0.01  # seconds between two parts after QUICK bytes
BESIDE = "/tmp/box"  # the folder in which an `aside` command sees the box's files
SOON = 0.05  # seconds between two searches for processes that a killed command has left behind
PUT = 'mkdir -p -- "${1%/*}/" && cat >"$1"'
GET = '[ -f "$1" ] && exec head -c "$2" -- "$1"'
LONGEST = 100_000  # bytes of a command; the kernel refuses an argument of 128 KiB
TOO_LONG = "bash: Argument list too long\n"


class Size(NamedTuple):
    """The limits of a box."""

    memory: int = box_budget.box_memory()  # bytes that its processes and its layer may use
    disk: int = 2 << 30  # bytes that its layer may hold
    processes: int = 1000  # processes that a command may have


class Ran(NamedTuple):
    """How a command ended."""

    output: str  # stdout and stderr in order of arrival; the beginning and the end if it is long
    code: int | None  # None if the command did not end by itself
    ended: str  # "" if it ended by itself, else "time", "memory", "processes", or `Box.gone`
    seconds: float  # wall-clock seconds


class View(NamedTuple):
    """The files that a command sees."""

    mounts: list[str]  # bubblewrap arguments
    workdir: str


class Box:
    """One container, for use in `async with`, which raises CheckerError if it does not start.

    `image` is a folder or a .sif, `workdir` the folder in it where commands start. Methods raise
    CheckerError if the machine fails, but never because of a command, even if it removes all files
    or kills all processes. Each method occupies a `sandbox.place()`. If the node has no room for
    another box, the start waits.
    """

    def __init__(
        self, image: Path | str, workdir: str = "/testbed", size: Size | None = None
    ) -> None:
        self.image = Path(image)
        self.workdir = workdir
        self.size = size or Size()
        self.peak = 0  # highest memory use seen, in bytes
        self.started = 0.0  # seconds that the start took
        self.gone = ""  # "memory" once the box can no longer be used
        self.holder: subprocess.Popen | None = None
        self.channel: socket.socket | None = None
        self.lower: sif.Lower | None = None
        self.stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> "Box":
        try:
            await self.stack.enter_async_context(box_budget.admitted(self.size.disk))
            began = time.monotonic()
            file = await self.stack.enter_async_context(image_cache.near(self.image))
            async with sandbox.place():
                await self._start(file)
        except BaseException:
            await self._close()
            raise
        self.started = time.monotonic() - began
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    async def run(self, command: str, seconds: float, most: int = 1 << 20) -> Ran:
        """Runs a bash command in the working folder, for at most `seconds`.

        Returns at most `most` bytes of its output.
        """
        written = command.encode("utf-8", "replace").replace(b"\0", b"")
        if len(written) > LONGEST:
            return Ran(TOO_LONG, 126, "", 0.0)
        output = Output(most)
        ran = await self._placed(["bash", "-c", os.fsdecode(written)], seconds, output)
        return ran._replace(output=output.text())

    async def put(self, path: str, content: bytes) -> None:
        """Writes a file, creating its parent folders. Raises ValueError if that is impossible."""
        if not _is_path(path):
            raise ValueError(f"{path!r}: expected an absolute path")
        output = Output(1000)
        argv = ["bash", "-c", PUT, "put", path]
        ran = await self._placed(argv, FILE_SECONDS, output, content)
        if ran.code != 0:
            raise ValueError(f"{path}: {output.text().strip() or ran.ended or ran.code}")

    async def get(self, path: str, most: int) -> bytes | None:
        """Returns the first `most` bytes of a file; None if there is no such file."""
        if not _is_path(path):
            return None
        output = Output(most, head=most)
        argv = ["bash", "-c", GET, "get", path, str(most)]
        ran = await self._placed(argv, FILE_SECONDS, output)
        return bytes(output.head) if ran.code == 0 else None

    async def aside(self, command: str, seconds: float, most: int, folder: str) -> bytes | None:
        """Runs a command in the original image, and returns the first `most` bytes that it prints.

        Returns None if the command fails. It starts in a folder of the box, whose files it sees
        below BESIDE and cannot change. Files that it writes to /tmp are lost.
        """
        output = Output(most, head=most)
        view = self._aside(folder)
        ran = await self._placed(["bash", "-c", command], seconds, output, view=view)
        return bytes(output.head) if ran.code == 0 else None

    async def _start(self, file: Path) -> None:
        """Starts the holder, then a command that does nothing. Raises CheckerError if one fails."""
        if sandbox.isolates() != "bubblewrap":
            raise CheckerError("a box needs services.sandbox = 'bubblewrap'")
        self.lower = await self.stack.enter_async_context(sif.opened(file))
        size = f"{self.size.disk},nr_inodes={self.size.disk // PER_INODE}"
        own = [*OWN, "sh", "-c", sandbox.LAYER, self.lower.folder, size]
        command = [*self.lower.user, *self.lower.enter, *own]
        errors = memory_file("")
        self.stack.callback(os.close, errors)
        self.channel, theirs = socket.socketpair()
        with theirs:
            self.holder = sandbox.popen([*command, "sh", "-c", HOLD], theirs.fileno(), errors)
        self.channel.setblocking(False)
        try:
            async with asyncio.timeout(START):
                said = await asyncio.get_running_loop().sock_recv(self.channel, len(READY))
        except (TimeoutError, OSError) as error:
            said = repr(error).encode()
        output = Output(1000)
        if said == READY:
            ran = await self._command([":"], START, output)
            if ran.code == 0:
                return
        why = os.pread(errors, 1000, 0).decode("utf-8", "replace") + output.text()
        reason = " ".join(why.split()) or repr(said)
        raise CheckerError(f"cannot start a box from the image {self.image}: {reason}")

    async def _placed(
        self,
        argv: list[str],
        seconds: float,
        output: "Output",
        given: bytes = b"",
        view: "View | None" = None,
    ) -> Ran:
        """Runs a command once it gets a `sandbox.place()`."""
        if self.gone:
            return Ran("", None, self.gone, 0.0)
        async with sandbox.place():
            return await self._command(argv, seconds, output, given, view)

    async def _command(
        self,
        argv: list[str],
        seconds: float,
        output: "Output",
        given: bytes = b"",
        view: "View | None" = None,
    ) -> Ran:
        """Runs a command with `given` as its input. Raises CheckerError if it did not start."""
        with contextlib.ExitStack() as stack:
            status = memory_file("")
            stack.callback(os.close, status)
            stdin = memory_file(given)
            stack.callback(os.close, stdin)
            calls = memory_file(CALLS)
            stack.callback(os.close, calls)
            command = [*self._entering(status, calls, view or self._inside()), *argv]
            killed = oom_kills()
            process = await sandbox.start(
                command, stdin=stdin, stderr=subprocess.STDOUT, pass_fds=(status, calls)
            )
            ran = await self._finish(process, seconds, output)
            begun = b"exit-code" in os.pread(status, 1000, 0)
            # Nothing ran, but only an earlier command can have removed the shell.
            begun |= ran.code == 1 and output.head.startswith(b"bwrap: execvp bash")
        if not ran.ended and ran.code == 128 + signal.SIGKILL and oom_kills() > killed:
            ran = ran._replace(code=None, ended="memory")
        if ran.ended == "memory":
            self.gone = "memory"
        if why := self.lower.lost() if self.lower else "":
            raise CheckerError(why)
        if not ran.ended and not begun:
            self._must_live()
            said = " ".join(output.text().split())[-300:]
            raise CheckerError(f"a command in a box did not run: code {ran.code}: {said}")
        return ran

    async def _finish(
        self, process: asyncio.subprocess.Process, seconds: float, output: "Output"
    ) -> Ran:
        """Waits until a command ends or exceeds a limit, and kills all processes it started."""
        clock = Clock(process.pid)
        reads = asyncio.create_task(output.read(process.stdout))
        waits = asyncio.create_task(process.wait())
        ended = ""
        try:
            while not ended and process.returncode is None:
                await asyncio.wait({waits}, timeout=TICK)
                if process.returncode is None:
                    ended = self._passed(clock, seconds)
        finally:
            sweeps = asyncio.create_task(self._sweep())
            try:
                await _end(process)
                await asyncio.wait({reads}, timeout=START)
            finally:
                for task in (reads, waits, sweeps):
                    task.cancel()
        took = time.monotonic() - clock.began
        return Ran("", None if ended else process.returncode, ended, took)

    async def _sweep(self) -> None:
        """Kills the processes of a bubblewrap that was killed before its child was tied to it.

        They keep the output open, and asyncio waits for a process until its output has been read.
        """
        assert self.holder
        while self.holder.poll() is None:
            for pid in sandbox.family(self.holder.pid)[2:]:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(SOON)

    def _passed(self, clock: Clock, seconds: float) -> str:
        """Returns the limit that a command exceeded, or "". Raises CheckerError if starved."""
        layer = self._layer()
        limits = Limits(seconds, self.size.memory - layer, self.size.processes)
        ended = clock.verdict(limits)
        self.peak = max(self.peak, clock.memory + layer)
        return ended

    def _layer(self) -> int:
        """Returns the bytes used by the layer, which includes shared memory.

        Raises CheckerError if the box is gone.
        """
        assert self.holder
        try:
            found = os.statvfs(f"/proc/{self.holder.pid}/root{sif.WHERE}")
        except OSError as error:
            raise CheckerError(f"the holder of a box has ended: {error}") from None
        return (found.f_blocks - found.f_bfree) * found.f_frsize

    def _inside(self) -> "View":
        """Returns the View for a command in the box."""
        mounts = ["--bind", "/mnt/root", "/", "--proc", "/proc", "--dev", "/dev"]
        return View([*mounts, "--bind", "/mnt/shm", "/dev/shm"], self.workdir)

    def _aside(self, folder: str) -> "View":
        """Returns the View for a command that runs alongside the box.

        The command's own files may take up twice the size of the layer. The image's working folder
        is hidden, because it contains answers that the box no longer does.
        """
        mounts = ["--ro-bind", "/mnt/image", "/", "--proc", "/proc", "--dev", "/dev"]
        mounts += ["--size", "4096", "--tmpfs", folder]
        mounts += ["--size", str(2 * self.size.disk), "--tmpfs", "/tmp"]
        # Links among the box's files, mounted below /tmp, lead to the image, not to the machine.
        return View([*mounts, "--ro-bind", "/mnt/root", BESIDE], f"{BESIDE}{folder}")

    def _must_live(self) -> None:
        """Raises CheckerError if the box's holder has ended."""
        assert self.holder
        if self.holder.poll() is not None:
            raise CheckerError(f"the holder of a box has ended: code {self.holder.returncode}")

    def _entering(self, status: int, calls: int, view: "View") -> list[str]:
        """Returns the prefix that makes a command run in the box, or alongside it."""
        self._must_live()
        assert self.holder and self.lower
        command = ["choom", "-n", str(FIRST_KILLED), "--", *self.lower.user]
        files = min(OPEN_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        command += ["prlimit", "--core=0", f"--nofile={files}"]
        command += ["nsenter", "--user", "--mount", "--preserve-credentials"]
        command += ["--target", str(self.holder.pid)]
        command += [f"--pid=/proc/{self.holder.pid}/ns/pid_for_children"]
        command += ["bwrap", "--unshare-all", "--unshare-user", "--uid", "0", "--gid", "0"]
        command += ["--disable-userns", "--die-with-parent", "--new-session", "--clearenv"]
        command += ["--cap-drop", "ALL", *(word for cap in RIGHTS for word in ("--cap-add", cap))]
        command += [*view.mounts, "--remount-ro", "/dev", *sandbox.read_only_kernel()]
        for name, value in ENVIRONMENT.items():
            command += ["--setenv", name, value]
        command += ["--json-status-fd", str(status), "--as-pid-1"]
        command += ["--seccomp", str(calls)] if CALLS else []
        return [*command, "bash", "-c", HOST, "box", str(self.size.processes), view.workdir]

    async def _close(self) -> None:
        """Ends the holder and with it the layer, then releases the image."""
        if self.channel:
            self.channel.close()
        try:
            if self.holder:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.holder.pid, signal.SIGKILL)
                await in_thread(self.holder.wait)
        finally:
            await self.stack.aclose()


class Output:
    """A command's output: its first `head` bytes, and the last bytes of the rest."""

    def __init__(self, most: int, head: int | None = None) -> None:
        self.first = most // 2 if head is None else head
        self.last = most - self.first
        self.head = bytearray()
        self.tail = bytearray()
        self.total = 0

    async def read(self, stream: asyncio.StreamReader | None) -> None:
        """Reads a stream to its end; slowly after QUICK bytes, so that the writer has to wait."""
        while stream and (part := await stream.read(PART)):
            self.total += len(part)
            room = self.first - len(self.head)
            self.head += part[:room]
            self.tail += part[room:] if room < len(part) else b""
            if len(self.tail) > 2 * self.last + PART:
                del self.tail[: len(self.tail) - self.last]
            if self.total > QUICK:
                await asyncio.sleep(SLOWLY)

    def text(self) -> str:
        """Returns the whole output, or its beginning and its end if it is long."""
        tail = self.tail[max(0, len(self.tail) - self.last) :]
        missing = self.total - len(self.head) - len(tail)
        if not missing:
            return bytes(self.head + tail).decode("utf-8", "replace")
        beginning = self.head.decode("utf-8", "replace")
        end = tail.decode("utf-8", "replace")
        return f"{beginning}\n[... {missing} bytes of output are left out ...]\n{end}"


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ends a command. If bubblewrap is still running, the command's processes end before it does.

    Bubblewrap's own first process is the child of nsenter.
    """
    try:
        if process.returncode is None:
            for pid in sandbox.family(process.pid)[2:]:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.wait_for(process.wait(), TICK)
    except TimeoutError:
        pass  # bubblewrap has not started anything yet
    finally:
        await sandbox.kill(process)


def _is_path(path: str) -> bool:
    """Returns whether a path is absolute and can be passed to a command."""
    written = path.encode("utf-8", "replace")
    return path[:1] == "/" and b"\0" not in written and written.decode() == path[:4096]


def problem() -> str:
    """Returns why no box can be started, and how to fix it; "" if nothing prevents it."""
    backend = services.current().sandbox
    if backend != "bubblewrap":
        return f"services.sandbox = {backend!r}, expected 'bubblewrap'"
    why = sandbox.problem() or user_limit.problem(Limits()) or sif.problem()
    return why or box_budget.problem(Size().disk)


NEED = services.Need("boxes", problem)
