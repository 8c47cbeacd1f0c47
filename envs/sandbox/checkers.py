"""Checks that may hang, crash or run code: each answer is judged by a process of its own.

    Checkers --starts--> server, the library imported --forks, for each thread--> warden
    each request: thread --JSON line--> warden --forks--> check

A check judges one answer and ends, and nothing of it is left for the next. It has no file open but
its end of a socket, can write none, sees a scrubbed environment and gains no rights. Where this
user is not root it can start no process, and trace no warden and no other check. Its warden watches
it, kills and reaps all that it started, and alone speaks to the parent. A verdict counts behind a
token, which reaches the check's socket after the fork and is read when the answer has been judged.

Where services.sandbox is "bubblewrap" and works, all of this runs in it (envs/sandbox/sandbox.py):
a check sees the libraries, the code in envs/, no other process, and nothing else of this machine;
as root it can still start processes, which end with it. An answer that it
evaluates as Python can still pay itself: it can read the expected answer, or change the scorer.
Elsewhere it has this user's rights, and can
    escape its verdict: starve itself, or stop its warden, which is an error, not a 0
    kill or stop processes of this user, and rewrite those that are no checks, as root any
    leave processes behind: as root, or itself, where it kills its warden first
    read, empty or remove files, connect to hosts, use MEMORY in each child

No environment by itself: environments use it.
"""

import contextlib
import ctypes
import gc
import json
import logging
import os
import pkgutil
import resource
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from envs.sandbox.interpreter import count_all_memory

DEADLINE = 10.0  # seconds of CPU of one check; thrice that where others have the CPUs
PATIENCE = 0.5  # seconds of CPU; a longer check begins again in the slow lane
START_DEADLINE = 120.0  # seconds; a server needs about one second of CPU
TICK = 0.1  # seconds between two looks at a check
GRACE = 10.0  # seconds that a verdict may be late
MEMORY = 2 << 30  # bytes of address space; a check uses 0.1 GB
LONGEST = 64 << 20  # bytes of a verdict
# Of the environment a check sees these, and no key, token or address of a service.
ENVIRONMENT = ("LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "TMPDIR", "TZ")
ROOT = str(Path(__file__).resolve().parents[2])
PEER = struct.Struct("3i")  # pid, uid and gid of whoever sent
libc = ctypes.CDLL(None)
prctl = libc.prctl  # its options are numbered in linux/prctl.h
TIMEOUT = {"value": 0.0, "reason": "timeout"}
STARVED = {"failed": "starved of CPU"}


class CheckerError(RuntimeError):
    """A check could not run: its processes do not start, die of any answer, or are starved."""


class Checkers:
    """Processes that run the function made by `factory`, "module:name", under a deadline.

    The function takes the request's fields and returns a dict of at most 64 KiB of JSON. `text` is
    the field that holds the answer. `children` checks run at once, as many as CPUs if None, and
    half as many slow ones beside them. Tied to no event loop. All start when first needed, and end
    with this process.
    """

    def __init__(self, factory: str, children: int | None = None) -> None:
        self.factory = factory
        children = children or len(os.sched_getaffinity(0))
        self.quick = ThreadPoolExecutor(children)
        self.slow = ThreadPoolExecutor(max(1, children // 2))
        self.own = threading.local()  # each thread has its own warden
        self.lock = threading.Lock()
        self.server: tuple[subprocess.Popen, socket.socket] | None = None

    async def run(self, deadline: float, **request: object) -> dict:
        """The function's answer to `request`; value 0.0 with reason "timeout" after `deadline`.

        In seconds of CPU, or of sleep; neither the wait for a free child nor that for a CPU
        counts. Value 0.0 with reason "crashed the checker" if the check dies twice, and lives with
        an empty `text`. Raises CheckerError.
        """
        import asyncio  # takes longer than all else that the registry imports with this module

        for lane, limit in ((self.quick, min(PATIENCE, deadline)), (self.slow, deadline)):
            verdict = await asyncio.wrap_future(lane.submit(self._run, limit, request))
            if verdict not in (TIMEOUT, STARVED) or limit == deadline:
                break
        if "failed" in verdict:
            raise CheckerError(f"{self.factory}: {verdict['failed']}, no verdict")
        return verdict

    def _run(self, deadline: float, request: dict) -> dict:
        harmless = request | {"text": ""}
        for _ in range(2):
            verdict = self._ask(deadline, request)
            if "failed" not in verdict or verdict == STARVED:
                return verdict
            if "failed" in self._ask(deadline, harmless):
                return verdict
        return {"value": 0.0, "reason": "crashed the checker"}

    def _ask(self, deadline: float, request: dict) -> dict:
        """The warden's verdict, or what `failed`."""
        warden = getattr(self.own, "warden", None) or self._warden()
        self.own.warden = None
        try:
            verdict = warden.ask(json.dumps([deadline, request]), 4 * deadline + GRACE)
        except TimeoutError:  # it would have answered, had it been given a CPU
            os.kill(warden.pid, signal.SIGKILL)
            return STARVED
        except (OSError, ValueError):
            return {"failed": "the warden died"}
        self.own.warden = warden
        return verdict

    def _warden(self) -> "Warden":
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        with self.lock, theirs:
            if self.server is None or self.server[0].poll() is not None:
                self.server = self._start()
            process, door = self.server
            with contextlib.suppress(OSError):  # it died just now: the greeting will not come
                socket.send_fds(door, [b"."], [theirs.fileno()])
        try:
            return Warden(ours)
        except (OSError, ValueError):
            process.kill()
            raise CheckerError(f"{self.factory}: code {process.wait()} at its start") from None

    def _start(self) -> tuple[subprocess.Popen, socket.socket]:
        from envs.sandbox.sandbox import around

        path = [os.path.abspath(folder) for folder in sys.path]
        # Of the project its code alone: what lies beside it may be the data, with the answers.
        reads = [folder for folder in path if folder != ROOT] + [sys.prefix, sys.base_prefix]
        reads += [os.path.join(ROOT, folder) for folder in ("core", "envs", "runtime", "settings")]
        code = f"import sys; sys.path[:] = {path!r}; from {__name__} import serve; serve()"
        env = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        # Address space for the stacks of 128 BLAS threads would alone exceed the memory limit.
        env |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        door, theirs = socket.socketpair()
        with theirs:  # in a session of its own, since Ctrl-C is meant for the parent
            before = around(reads)
            command = [*before, sys.executable, "-c", code, self.factory, str(len(before))]
            return subprocess.Popen(
                command, env=env, stdin=theirs.fileno(), stdout=2, start_new_session=True
            ), door


class Warden:
    """A thread's connection to its warden. Raises OSError or ValueError where that is gone."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.lines = connection.makefile("rw")
        self.connection.settimeout(START_DEADLINE)
        greeting, sent, _, _ = connection.recvmsg(1, socket.CMSG_SPACE(PEER.size))
        if not greeting:
            raise OSError("the server has ended")
        self.pid = PEER.unpack(sent[0][2])[0]  # as this process's namespace counts
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)

    def ask(self, line: str, timeout: float) -> dict:
        self.connection.settimeout(timeout)
        print(line, file=self.lines, flush=True)
        return json.loads(self.lines.readline())


def serve() -> None:
    """The server's life: a fork for each connection that the parent sends, until it closes."""
    door = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    count_all_memory()
    prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
    function = pkgutil.resolve_name(sys.argv[1])()
    gc.freeze()  # a collection would copy the pages that forks share
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # wardens leave no zombies
    while descriptors := socket.recv_fds(door, 1, 1)[1]:
        with socket.socket(fileno=descriptors[0]) as connection:
            if not os.fork():
                door.close()
                attend(function, connection)
                sys.exit()


def attend(function: Callable[..., dict], connection: socket.socket) -> None:
    """A warden's life: a fork for each request, until the parent closes the connection."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: it inherits the orphans of its checks
    lines = connection.makefile("rw")
    connection.sendall(b".")
    for line in lines:
        deadline, request = json.loads(line)
        print(json.dumps(judge(function, request, deadline, connection)), file=lines, flush=True)


def judge(
    function: Callable[..., dict], request: dict, deadline: float, connection: socket.socket
) -> dict:
    """What one check says, or what became of it."""
    ours, theirs = socket.socketpair()
    with ours:
        pid = begin(function, request, theirs, int(deadline) + 2)
        theirs.close()
        token = secrets.token_bytes(16)  # the fork has no copy of it
        ours.sendall(b"." + token)
        said = bytearray()
        try:
            verdict = watch(pid, deadline, connection, ours, said)
        except OSError as error:  # such as where /proc is mounted with hidepid
            verdict = {"failed": f"the check cannot be watched: {error}"}
        code = end(pid)
        ours.settimeout(TICK)
        while hear(ours, said):
            pass
    if verdict or not said:
        return verdict or {"failed": f"code {code}"}
    with contextlib.suppress(ValueError):
        if said.startswith(token) and isinstance(verdict := json.loads(said[len(token) :]), dict):
            return verdict
    return {"value": 0.0, "reason": "forged a verdict"}


def begin(
    function: Callable[..., dict], request: dict, channel: socket.socket, seconds: int
) -> int:
    """Forks a check, which in bubblewrap sees no other process if the kernel allows it; its pid."""
    told, tell = os.pipe()
    between = os.fork()
    if not between:
        try:
            if sys.argv[2] != "0":
                libc.unshare(0x30020000)  # CLONE_NEWUSER, NEWPID (for the next fork) and NEWNS
                # MS_REMOUNT, BIND, NODEV, NOSUID and RDONLY: libraries have written there by now
                libc.mount(b"none", b"/tmp", None, 0x1027, None)
                libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())
            pid = os.fork()
            if not pid:
                check(function, request, channel, seconds)
            os.write(tell, str(pid).encode())
        finally:
            os._exit(0)
    os.waitpid(between, 0)  # and the check becomes this process's child
    with open(told) as numbers:
        os.close(tell)
        return int(os.read(numbers.fileno(), 20))


def check(
    function: Callable[..., dict], request: dict, channel: socket.socket, seconds: int
) -> None:
    """A check's life, of so many seconds of CPU at most."""
    try:
        channel.recv(1)  # until the warden is its parent
        os.setsid()
        prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: end with the warden
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        os.dup2(0, 1)
        os.dup2(0, 2)
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor not in (0, 1, 2, channel.fileno()):
                with contextlib.suppress(OSError):  # that of the listing is closed already
                    os.close(descriptor)
        for limit in (resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE):  # neither forks nor writes
            resource.setrlimit(limit, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))  # should it kill its warden
        try:
            verdict = function(**request)
        except BaseException as error:
            verdict = {"failed": f"{type(error).__name__}: {error}"[:200]}
        channel.sendall(channel.recv(16) + json.dumps(verdict).encode())
    finally:
        os._exit(0)


def watch(
    pid: int, deadline: float, connection: socket.socket, channel: socket.socket, said: bytearray
) -> dict:
    """{} once the process has ended, TIMEOUT, STARVED; ends with the parent.

    Gathers what the check says, as a long verdict would not fit into the channel.
    """
    began = before = time.monotonic()
    ran_before, busy_before, _ = clock(pid)
    spent = 0.0
    is_open = True
    while not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        if not is_open:
            signal.sigtimedwait({signal.SIGCHLD}, TICK)
        elif select.select([channel, connection], [], [], TICK)[0] == [channel]:
            is_open = hear(channel, said)
        now = time.monotonic()
        ran, busy, idle = clock(pid)
        slept = idle and busy - busy_before < (now - before) / 2
        # A pause of the whole machine is no sleep.
        spent += min(now - before, 2 * TICK) if slept else ran - ran_before
        before, ran_before, busy_before = now, ran, busy
        if select.select([connection], [], [], 0)[0]:
            end(pid)
            sys.exit()
        if spent >= deadline:
            return TIMEOUT
        if now - began > 3 * deadline:
            return STARVED
    return {}


def hear(channel: socket.socket, said: bytearray) -> bool:
    """Adds what a check has said since; whether it may say more."""
    part = b""
    with contextlib.suppress(OSError):  # it ended before it had read its token, or is silent
        part = channel.recv(1 << 16)
    said += part
    return bool(part) and len(said) < LONGEST


def clock(pid: int) -> tuple[float, float, bool]:
    """Seconds a process ran, and ran or waited for a CPU; whether it wants neither CPU nor disk."""
    folder = Path(f"/proc/{pid}")
    ran, queued, _ = map(int, (folder / "schedstat").read_text().split())
    state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
    return ran / 1e9, (ran + queued) / 1e9, state not in "RD"


def end(pid: int) -> int:
    """Kills the process and all that it began, which are this process's children or become it."""
    os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, os.WNOHANG)
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
            for child in map(int, children.split()):
                os.kill(child, signal.SIGKILL)
    return code
