"""Runs checks that may hang, crash or run code, in processes of their own.

    Checkers --starts--> server, the library imported --forks, for each thread--> warden
    each request: thread --JSON line--> warden --> check, which the warden forks

A check that may execute an answer judges one answer and ends, so it leaves nothing for the next. A
check that executes nothing judges MANY answers, or ends at its first failure. A check has no open
file except its end of a socket, can write no files, sees a scrubbed environment and gains no
rights. If this user is not root, it can start no process, and can trace neither a warden nor
another check. Its warden watches it, kills and reaps all processes that it started, and is the only
process that sends to the parent. A verdict counts only after a token, which the check reads from
its socket when it has judged the answer.

If services.sandbox is "bubblewrap", all of this runs in bubblewrap (envs/sandbox/sandbox.py), or
not at all; only checks that execute nothing run without bubblewrap if it is missing here. In
bubblewrap a check sees the libraries, the code in envs/, no other process, and nothing else of this
machine; as root it can still start processes, which end with it. An answer that it evaluates as
Python can still give itself a reward: it can read the expected answer, or change the scorer.
Without bubblewrap a check has this user's rights, and can
    escape its verdict: starve itself, or stop or kill its warden, which is an error, not a 0
    kill or stop processes of this user, and rewrite any that are not checks (as root, all)
    leave processes behind: as root, or itself, if it kills its warden first
    read, empty or remove files, connect to hosts, use MEMORY in each child

This is not an environment itself: environments use it.
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

from envs import services
from envs.sandbox.interpreter import ENOUGH, fork, oom_kills, refuse_calls
from envs.sandbox.outcome import OOM
from envs.sandbox.sandbox import around
from envs.services import CheckerError

DEADLINE = 10.0  # CPU seconds per check
WALL = 3  # wall-clock seconds per CPU second; a check that takes longer is starved
PATIENCE = 0.5  # CPU seconds; a longer check restarts in the slow lane
START_DEADLINE = 120.0  # seconds; a server needs about one second of CPU
TICK = 0.1  # seconds between two looks of a warden at its check
AWAKE = "RD"  # states of a process that does not sleep
STOPPED = "Tt"  # states of a process stopped from outside, if a check executes no answers
GRACE = 10.0  # seconds that a verdict may be late
MEMORY = 2 << 30  # bytes of address space; a check uses 0.1 GB
MANY = 100  # answers that a process judges; a fork of 166 MB costs more than most of them
LARGE = 512 << 20  # a check that uses more bytes ends after its answer: SymPy caches results
LONGEST = 64 << 20  # bytes of a verdict
TRIES = 3  # tries per answer; two are enough if the check dies in both
# The only environment variables that a check sees: no service's key, token or address.
ENVIRONMENT = ("LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "TMPDIR", "TZ")
ROOT = str(Path(__file__).resolve().parents[2])
TOKEN = 16  # bytes
SIZE = struct.Struct("I")  # size of what follows
PEER = struct.Struct("3i")  # pid, uid and gid of the sender
libc = ctypes.CDLL(None)
prctl = libc.prctl  # its options are numbered in linux/prctl.h
TIMEOUT = {"value": 0.0, "reason": "timeout"}
STARVED = {"failed": "starved of CPU"}
LATE = TIMEOUT | {"starved": True}  # it starved, but had used ENOUGH of its deadline


class Checkers:
    """Processes that run a function under a deadline; `factory`, "module:name", returns it.

    The function takes the request's fields and returns a dict of JSON values. The field `text`
    contains the answer. `children` checks run at once, one per CPU if None, plus half as many slow
    ones. Each judges `answers` answers: one, or MANY if it executes none of them, since changes
    that one answer makes to the process would affect the next. An instance is tied to no event
    loop. All processes start when first needed, and end with this process.
    """

    def __init__(self, factory: str, children: int | None = None, answers: int = 1) -> None:
        self.factory = factory
        self.answers = answers
        children = children or len(os.sched_getaffinity(0))
        self.quick = ThreadPoolExecutor(children)
        self.slow = ThreadPoolExecutor(max(1, children // 2))
        self.own = threading.local()  # each thread has its own warden
        self.lock = threading.Lock()
        self.server: tuple[subprocess.Popen, socket.socket] | None = None

    async def run(self, deadline: float, **request: object) -> dict:
        """Returns the function's verdict on `request`, or value 0.0 with reason "timeout".

        `deadline` is in seconds of CPU time or of sleep; waits for a free child or a CPU do not
        count. A check that is starved of CPU counts as a timeout if it has used half of its
        deadline, and as an error if not; both are counted. The verdict is value 0.0 with reason
        "crashed the checker", or "memory" if it was refused more, if a warden sees the check die
        twice, although it survives an empty `text`. Raises CheckerError if there is no verdict.
        """
        import asyncio  # slower to import than everything else that the registry imports

        for lane, limit in ((self.quick, min(PATIENCE, deadline)), (self.slow, deadline)):
            verdict = await asyncio.wrap_future(lane.submit(self._run, limit, request))
            if verdict not in (TIMEOUT, LATE, STARVED) or limit == deadline:
                break
        if verdict == LATE:
            services.count_starved("timeout")
            return dict(TIMEOUT)
        if verdict == STARVED:
            services.count_starved("error")
        if "failed" in verdict:
            raise CheckerError(f"{self.factory}: {verdict['failed']}, no verdict")
        return verdict

    def _run(self, deadline: float, request: dict) -> dict:
        harmless = request | {"text": ""}
        killed = oom_kills()
        deaths = 0
        for _ in range(TRIES):
            verdict = self._ask(deadline, request)
            if "failed" not in verdict or verdict == STARVED:
                return verdict
            if "failed" in self._ask(deadline, harmless):
                return verdict
            if "died" in verdict:
                deaths += 1
            if deaths > 1 and oom_kills() > killed:
                return {"failed": OOM}
            if deaths > 1 and verdict["failed"].startswith("MemoryError"):
                return {"value": 0.0, "reason": "memory"}
            if deaths > 1:
                return {"value": 0.0, "reason": "crashed the checker"}
        return verdict

    def _ask(self, deadline: float, request: dict) -> dict:
        """Returns the warden's verdict, or {"failed": ...}, with "died" if it saw the check die."""
        warden = getattr(self.own, "warden", None) or self._warden()
        self.own.warden = None
        try:
            verdict = warden.ask(json.dumps([deadline, request]), (WALL + 1) * deadline + GRACE)
        except TimeoutError:  # it would have answered, had it been given a CPU
            with contextlib.suppress(ProcessLookupError):
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
        except (OSError, ValueError) as error:
            if isinstance(error, TimeoutError):
                process.kill()
            try:
                why = f"it ended with code {process.wait(GRACE)} at its start"
            except subprocess.TimeoutExpired:  # it lives, and others need it
                why = "no warden could be forked"
            raise CheckerError(f"{self.factory}: {why}") from None

    def _start(self) -> tuple[subprocess.Popen, socket.socket]:
        path = [os.path.abspath(folder) for folder in sys.path]
        # Only the project's code can be read: other files of the project may contain the answers.
        reads = [folder for folder in path if folder != ROOT] + [sys.prefix, sys.base_prefix]
        reads += [os.path.join(ROOT, folder) for folder in ("core", "envs", "rollout", "settings")]
        code = f"import sys; sys.path[:] = {path!r}; from {__name__} import serve; serve()"
        env = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        # Address space for the stacks of 128 BLAS threads would alone exceed the memory limit.
        env |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        door, theirs = socket.socketpair()
        with theirs:
            before = around(reads, self.answers == 1)
            command = [*before, sys.executable, "-c", code, self.factory]
            command += [str(len(before)), str(self.answers)]
            process = subprocess.Popen(
                command,
                env=env,
                stdin=theirs.fileno(),
                stdout=2,
                start_new_session=True,  # since Ctrl-C is meant for the parent
            )
        return process, door


class Warden:
    """A thread's connection to its warden. Raises OSError or ValueError if the warden is gone."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.lines = connection.makefile("rw")
        self.connection.settimeout(START_DEADLINE)
        greeting, sent, _, _ = connection.recvmsg(1, socket.CMSG_SPACE(PEER.size))
        if not greeting:
            raise OSError("the server has ended")
        self.pid = PEER.unpack(sent[0][2])[0]  # in this process's namespace
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)

    def ask(self, line: str, timeout: float) -> dict:
        self.connection.settimeout(timeout)
        print(line, file=self.lines, flush=True)
        return json.loads(self.lines.readline())


def serve() -> None:
    """Forks a warden for each connection that the parent sends, until the parent hangs up."""
    door = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    refuse_calls()
    prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
    function = pkgutil.resolve_name(sys.argv[1])()
    gc.freeze()  # a collection would copy the pages that forks share
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # wardens leave no zombies
    while descriptors := socket.recv_fds(door, 1, 1)[1]:
        with socket.socket(fileno=descriptors[0]) as connection:
            pid = -1
            with contextlib.suppress(OSError):  # the connection closes without a greeting
                pid = fork()
            if not pid:
                door.close()
                attend(function, connection)
                sys.exit()


def attend(function: Callable[..., dict], connection: socket.socket) -> None:
    """Runs a warden: each request goes to a check, until the parent closes the connection."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: it inherits the orphans of its checks
    lines = connection.makefile("rw")
    connection.sendall(b".")
    check: Check | None = None
    for line in lines:
        deadline, request = json.loads(line)
        try:
            check = check if check and check.lives() else Check(function, int(sys.argv[3]))
            verdict = check.judge(request, deadline, connection)
        except OSError as error:  # for example, no room for a process or a file
            check = None
            verdict = {"failed": f"a check could not be started: {error}"}
        print(json.dumps(verdict), file=lines, flush=True)


class Check:
    """A process that judges one answer at a time. It ends after `left` answers, or a failure."""

    def __init__(self, function: Callable[..., dict], left: int) -> None:
        self.left = left
        self.channel, theirs = socket.socketpair()
        with theirs:
            self.pid = begin(function, theirs, left)
        self.go = b"."

    def lives(self) -> bool:
        """Returns whether it may judge another answer; reaps it if it has been killed."""
        if self.left and os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            self.left = 0
            end(self.pid)
        return self.left > 0

    def judge(self, request: dict, deadline: float, connection: socket.socket) -> dict:
        """Returns the verdict on one answer, or the reason why there is none."""
        token = secrets.token_bytes(TOKEN)
        text = json.dumps([deadline, request]).encode()
        received = bytearray()
        code = 0
        self.left -= 1
        try:
            self.channel.sendall(self.go + SIZE.pack(len(text)) + text + token)
            self.go = b""
            verdict = watch(self.pid, deadline, connection, self.channel, received, token)
        except OSError as error:  # for example, /proc is mounted with hidepid
            verdict = {"failed": f"the check cannot be watched: {error}"}
        found = verdict_of(received, token)
        if verdict or not found or "failed" in found or memory(self.pid) > LARGE:
            self.left = 0
        if not self.left:
            code = end(self.pid)
            self.channel.settimeout(TICK)
            while receive(self.channel, received):
                pass
            self.channel.close()
        if verdict or not received:
            return verdict or {"failed": f"code {code}", "died": True}
        if received.startswith(token) and not is_whole(received, token):
            return {"failed": f"code {code} in the middle of a verdict"}
        return verdict_of(received, token) or {"value": 0.0, "reason": "forged a verdict"}


def verdict_of(received: bytearray, token: bytes) -> dict:
    """Returns the verdict that a check sent after the token, {"failed": ...}, or {} if forged."""
    with contextlib.suppress(ValueError):
        if is_whole(received, token):
            verdict = json.loads(received[TOKEN + SIZE.size :])
            return verdict if isinstance(verdict, dict) else {}
    return {}


def memory(pid: int) -> int:
    """Returns a process's resident bytes, shared ones included; 0 if it is gone."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    return 0


def begin(function: Callable[..., dict], channel: socket.socket, left: int) -> int:
    """Forks a check, which becomes this process's child; returns its pid. Raises OSError."""
    ours, numbers = socket.socketpair()
    with ours:
        with numbers:
            if not (between := fork()):
                isolate(function, channel, left, numbers)
            os.waitpid(between, 0)
        pid = ours.recv(20)
    if not pid:
        raise OSError("its process could not be forked")
    return int(pid)


def isolate(
    function: Callable[..., dict], channel: socket.socket, left: int, numbers: socket.socket
) -> None:
    """Forks a check, which in bubblewrap sees no other process if the kernel allows it.

    Sends its pid in the sender's namespace, and ends this process.
    """
    try:
        if sys.argv[2] != "0":
            libc.unshare(0x30020000)  # CLONE_NEWUSER, NEWPID (for the next fork) and NEWNS
            # MS_REMOUNT, BIND, NODEV, NOSUID and RDONLY: libraries have written there by now
            libc.mount(b"none", b"/tmp", None, 0x1027, None)
            libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())
        pid = fork()
        if not pid:
            check(function, channel, left)
        numbers.sendall(str(pid).encode())
    finally:
        os._exit(0)


def check(function: Callable[..., dict], channel: socket.socket, left: int) -> None:
    """Judges `left` answers, each within a CPU time limit, and ends the process."""
    try:
        os.dup2(0, 1)
        os.dup2(0, 2)
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor not in (0, 1, 2, channel.fileno()):
                with contextlib.suppress(OSError):  # the listing's own descriptor is closed already
                    os.close(descriptor)
        exactly(channel, 1)  # waits until the warden is its parent
        os.setsid()
        prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: end with the warden
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        for limit in (resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE):  # neither forks nor writes
            resource.setrlimit(limit, (0, 0))
        for others in reversed(range(left)):
            (size,) = SIZE.unpack(exactly(channel, SIZE.size))
            deadline, request = json.loads(exactly(channel, size))
            seconds = int(time.process_time() + deadline) + 2  # in case it kills its warden
            most = resource.RLIM_INFINITY if others else seconds
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, most))
            try:
                verdict = function(**request)
            except BaseException as error:
                verdict = {"failed": f"{type(error).__name__}: {error}"[:200]}
                if not isinstance(error, OSError | ImportError):  # the machine's faults
                    verdict["died"] = True
            text = json.dumps(verdict).encode()
            channel.sendall(exactly(channel, TOKEN) + SIZE.pack(len(text)) + text)
    finally:
        os._exit(0)


def exactly(channel: socket.socket, size: int) -> bytes:
    """Returns the next `size` bytes. Raises EOFError if the warden is gone."""
    received = b""
    while len(received) < size:
        part = channel.recv(size - len(received))
        if not part:
            raise EOFError
        received += part
    return received


def is_whole(received: bytearray, token: bytes) -> bool:
    """Returns whether a check has sent the token and a whole verdict after it."""
    head = TOKEN + SIZE.size
    if len(received) < head or not received.startswith(token):
        return False
    return len(received) >= head + SIZE.unpack(received[TOKEN:head])[0]


def watch(
    pid: int,
    deadline: float,
    connection: socket.socket,
    channel: socket.socket,
    received: bytearray,
    token: bytes,
) -> dict:
    """Returns {} once the verdict is whole or the process has ended, or TIMEOUT, LATE or STARVED.

    Collects the check's output in the meantime, because a long verdict would not fit into the
    channel. Ends this process if the parent is gone.
    """
    began = before = time.monotonic()
    ran_before, busy_before, _ = clock(pid)
    spent = 0.0
    is_open = True
    while not is_whole(received, token):
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            break
        if not is_open:
            signal.sigtimedwait({signal.SIGCHLD}, TICK)
        elif select.select([channel, connection], [], [], TICK)[0] == [channel]:
            is_open = receive(channel, received)
        now = time.monotonic()
        ran, busy, idle = clock(pid)
        slept = idle and busy - busy_before < (now - before) / 2
        # A pause of the whole machine does not count as sleep.
        spent += min(now - before, 2 * TICK) if slept else ran - ran_before
        before = now
        ran_before = ran
        busy_before = busy
        if select.select([connection], [], [], 0)[0]:
            end(pid)
            sys.exit()
        if spent >= deadline:
            return TIMEOUT
        if now - began > WALL * deadline:
            return LATE if spent >= ENOUGH * deadline else STARVED
    return {}


def receive(channel: socket.socket, received: bytearray) -> bool:
    """Appends the new output of a check; returns whether more may follow."""
    part = b""
    with contextlib.suppress(OSError):  # it ended before it had read its token, or is silent
        part = channel.recv(1 << 16)
    received += part
    return bool(part) and len(received) < LONGEST


def clock(pid: int) -> tuple[float, float, bool]:
    """Returns a process's CPU seconds, these plus its waits for a CPU, and whether it is idle.

    A process is idle if it sleeps because of the answer.
    """
    folder = Path(f"/proc/{pid}")
    ran, queued, _ = map(int, (folder / "schedstat").read_text().split())
    state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
    awake = AWAKE if sys.argv[3:] == ["1"] else AWAKE + STOPPED
    return ran / 1e9, (ran + queued) / 1e9, state not in awake


def end(pid: int) -> int:
    """Kills a process and all that it started; these are or become children of this process."""
    os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, os.WNOHANG)
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
            for child in map(int, children.split()):
                os.kill(child, signal.SIGKILL)
    return code
