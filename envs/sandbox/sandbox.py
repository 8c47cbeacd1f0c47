"""Runs all untrusted code of this program: in bubblewrap, in a service, or unprotected on demand.

    bubblewrap   new user, pid, net, ipc, uts and mount namespaces; no capabilities; the machine's
                 /usr and Python, read-only; a sized tmpfs as working folder; a cleared environment
    http         NeMo-Skills' sandbox service at services.sandbox_url (SANDBOX_CONTAINER)
    unsafe       a process of this user, with limits and a deadline. It can read and write
                 everything that this user can. A warning in the log says so

A run has limits on processor time, memory, processes, file sizes, open files and output, and a
deadline after which all processes that it started are killed. Waiting for a free place, or for a
busy processor, does not count against the deadline.

A run does not outlive this process, even if this process is killed while the run starts: bubblewrap
is tied to its parent only some milliseconds later, so its parent is a guard
(envs/sandbox/guard.py).
"""

import asyncio
import contextlib
import functools
import glob
import logging
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import weakref
from asyncio.subprocess import PIPE
from collections.abc import Collection, Iterable
from pathlib import Path

from envs import services
from envs.sandbox import service, user_limit
from envs.sandbox.interpreter import ENOUGH, oom_kills, seccomp_filter
from envs.sandbox.outcome import OOM, OWN, REFUSED, Limits, Ran, refusals
from envs.sandbox.user_limit import FULL
from envs.services import CheckerError, current

log = logging.getLogger(__name__)
GUARD = Path(__file__).with_name("guard.py").read_text(encoding="utf-8")
TICK = 0.5  # seconds between two checks of a run
NOBODY = ["--reuid", "65534", "--regid", "65534", "--clear-groups"]
CALLS = seccomp_filter(memory=False)  # system calls that a command may not make
WORK = "/work"  # the working folder of a run
PACKAGES = "/packages"  # libraries for sessions
PATIENCE = 5  # a run may take this many times its deadline if other processes keep CPUs busy
HUNGRY = 8  # threads of a run; if there are this many, they may just be waiting for each other
START = 60.0  # seconds that an interpreter may take to start
STDERR = 2000  # last characters of stderr that are kept
BOUND = ("/usr", "/lib", "/lib64", "/lib32", "/bin", "/sbin")
# Files that the machine's root owns, and can write to unless they are mounted read-only.
OF_ROOT = ("/proc/sys", "/proc/sysrq-trigger", "/proc/fs", "/proc/acpi", "/proc/scsi")
# Changes to the folder $0 go to a private in-memory layer of $1 bytes over it.
LAYER = """
cd "$0" && mount -t tmpfs -o "size=$1" none /mnt && mkdir /mnt/over /mnt/work /mnt/root || exit
layers=lowerdir=.,upperdir=/mnt/over,workdir=/mnt/work,userxattr
mount -t overlay -o "$layers" none /mnt/root && shift && exec "$@"
"""
WORKS: list[bool] = []  # [True] once bubblewrap has isolated a process
# Matches problems that last: bubblewrap will not isolate a process a moment later either.
LASTS = re.compile("not on the path|util-linux|the kernel forbids|[Pp]ermission|not permitted")
PLACES: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
    weakref.WeakKeyDictionary()
)
KERNEL = {
    "/proc/sys/user/max_user_namespaces": ("0", "sysctl user.max_user_namespaces=15000"),
    "/proc/sys/kernel/unprivileged_userns_clone": (
        "0",
        "sysctl kernel.unprivileged_userns_clone=1",
    ),
    "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": (
        "1",
        "sysctl kernel.apparmor_restrict_unprivileged_userns=0, or a profile for bwrap",
    ),
}


def problem() -> str:
    """Returns why the sandbox cannot isolate a run, and how to fix it; "" if it can.

    Bubblewrap is tried on each call until it has worked once.
    """
    if current().sandbox == "http":
        return service.malformed(current().sandbox_url)
    if current().sandbox == "bubblewrap" and not WORKS:
        if why := problem_of_bubblewrap():
            return why
        WORKS.append(True)
    return ""


def problem_of_start() -> str:
    """Returns why no program can run; unlike `problem`, also asks the service if one is used."""
    if why := problem():
        return why
    if current().sandbox == "http":
        return service.problem(current().sandbox_url)
    return user_limit.problem(Limits())


def problem_of_checks() -> str:
    """Returns why checks that run answers as code cannot be isolated; "" if they can."""
    if current().sandbox == "http":
        return "services.sandbox is 'http', which runs programs but no checks: use bubblewrap"
    return problem()


def problem_of_bubblewrap() -> str:
    """Tries to isolate a process, and returns why bubblewrap could not; "" if it could."""
    if not shutil.which("bwrap"):
        return "bwrap is not on the path: apt install bubblewrap, or dnf install bubblewrap"
    code = "import os; os.waitpid(os.fork() or os._exit(0), 0)"
    try:
        done = told([*wrapped(Limits()), *python(), "-c", code])
    except FileNotFoundError as error:
        return f"bubblewrap needs setpriv and prlimit of util-linux: {error}"
    except OSError as error:
        return f"bubblewrap could not be started: {error}"
    complaint = " ".join(done.stderr.split())[-300:]
    for path, (bad, remedy) in KERNEL.items():
        with contextlib.suppress(OSError):
            if done.returncode and Path(path).read_text().strip() == bad:
                return f"the kernel forbids user namespaces ({path} is {bad}): {remedy}"
    return f"bubblewrap cannot isolate a process here: {complaint}" if done.returncode else ""


def told(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs a trusted command to its end. Raises OSError, and CheckerError if it takes too long."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=START, cwd="/")
    except subprocess.TimeoutExpired:
        raise CheckerError(f"the sandbox did not start a process in {START:g} s") from None


@functools.cache
def python() -> list[str]:
    """Returns the sandbox's Python: this one, or the machine's if the run's user cannot read it.

    Raises OSError or CheckerError if that could not be determined.
    """
    own = str(Path(sys.base_prefix, "bin", f"python3.{sys.version_info.minor}"))
    seen = told([*as_run_user(), "sh", "-c", 'test -x "$0" && echo yes || echo no', own])
    found = {"yes\n": own, "no\n": "/usr/bin/python3"}.get(seen.stdout)
    if not found:
        raise CheckerError(f"the sandbox cannot look for {own}: {seen.stderr[-300:]}")
    return [found, "-I", "-S"]


@functools.cache
def own_packages() -> str:
    """Returns the folder of this Python's packages if the sandbox's Python can use it, else "".

    Raises CheckerError if that could not be determined.
    """
    folder = sysconfig.get_path("purelib")
    code = f"import sys; sys.path.append({folder!r}); import numpy"
    try:
        tried = told([*as_run_user(), *python(), "-c", code])
    except OSError as error:
        raise CheckerError(f"the sandbox cannot start Python: {error}") from None
    if tried.returncode and "ModuleNotFoundError" not in tried.stderr:  # perhaps temporary
        raise CheckerError(
            f"the sandbox could not import numpy: code {tried.returncode}, {tried.stderr[-300:]!r}"
        )
    if tried.returncode:
        log.warning("programs in answers cannot import numpy: %s", tried.stderr[-300:])
    return "" if tried.returncode else folder


def wrapped(
    limits: Limits,
    root: str = "",
    files: Iterable[tuple[str, int]] = (),
    reads: Iterable[str] = (),
    rooms: bool = False,
    packages: str = "",
) -> list[str]:
    """Returns the prefix that isolates a command; `files` are pairs of a path and a descriptor.

    The command sees the folder `packages` as PACKAGES. Root becomes the user nobody first, since
    the kernel does not limit the number of root's processes. With an image as `root`, the run's
    user is the owner of its files. A command that creates `rooms` must itself forbid namespaces and
    limit the processor time in them.
    """
    command = [*as_run_user(root), *limited(limits, not rooms)]
    if root:
        own = ["unshare", "--user", "--map-root-user", "--mount"]
        command += [*own, "sh", "-c", LAYER, root, str(limits.disk)]
    command += ["bwrap", "--unshare-all", "--unshare-user", "--uid", "65534", "--gid", "65534"]
    command += ["--cap-drop", "ALL", "--die-with-parent", "--new-session", "--clearenv"]
    command += [] if rooms else ["--disable-userns"]
    if root:
        command += ["--bind", "/mnt/root", "/"]
    else:
        for folder in (*BOUND, *python_folders()):
            if os.path.islink(folder):
                command += ["--symlink", os.readlink(folder), folder]
            elif os.path.isdir(folder):
                command += ["--ro-bind", folder, folder]
    command += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
    command += read_only_kernel() if root else []
    for folder in (WORK, "/tmp"):
        command += ["--size", str(limits.disk), "--tmpfs", folder]
    for folder in reads:
        command += ["--ro-bind", folder, folder]
    command += ["--ro-bind", packages, PACKAGES] if packages else []
    for path, descriptor in files:
        command += ["--file", str(descriptor), f"{WORK}/{path}"]
    command += [] if root else ["--remount-ro", "/"]
    path = ":".join([str(Path(python()[0]).parent), "/usr/local/bin:/usr/bin:/bin"])
    for name, value in {"PATH": path, "HOME": WORK, "TMPDIR": "/tmp", "LANG": "C.UTF-8"}.items():
        command += ["--setenv", name, value]
    return [*command, "--chdir", WORK]


def around(reads: Iterable[str], executes: bool) -> list[str]:
    """Returns the prefix for checks that may read these files and folders, and no others.

    The prefix is empty if the configured sandbox is not bubblewrap. If bubblewrap is missing or
    forbidden here, checks that execute no answers run without it. Raises CheckerError for other
    checks, and if bubblewrap fails for another reason, which may be temporary.
    """
    if current().sandbox != "bubblewrap":
        return []
    if why := problem():
        if executes or not LASTS.search(why):
            raise CheckerError(f"checks cannot be isolated: {why}")
        log.warning("checks run with the rights of this user: %s", why)
        return []
    command = ["bwrap", "--unshare-all", "--unshare-user", "--uid", "65534", "--gid", "65534"]
    command += ["--cap-drop", "ALL", "--die-with-parent", "--new-session", "--tmpfs", "/tmp"]
    folders = [*BOUND, *reads]  # over the empty /tmp: this project may be under it
    bound: list[str] = []
    for folder in sorted({folder for folder in folders if os.path.exists(folder)}, key=len):
        if folder in BOUND and os.path.islink(folder):
            command += ["--symlink", os.readlink(folder), folder]
            continue
        # A link in a bound folder exists already, and nothing can be bound at its target.
        if any(folder.startswith(f"{above}/") for above in bound):
            folder = os.path.realpath(folder)
        command += ["--ro-bind", folder, folder]
        bound.append(folder)
    command += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev", *read_only_kernel()]
    return [*command, "--setenv", "TMPDIR", "/tmp", "--remount-ro", "/", "--chdir", "/"]


def as_run_user(root: str = "") -> list[str]:
    """Returns the prefix that makes a command run as a run's user, with that user's full limits."""
    becomes = ["setpriv", *NOBODY] if os.geteuid() == 0 and not root else []
    return [*user_limit.lifted(), *becomes]


def limited(limits: Limits, cpu: bool = True) -> list[str]:
    """Returns the prefix that limits a command."""
    command = ["prlimit", f"--as={limits.memory}", f"--fsize={limits.file_size}", "--core=0"]
    command += [f"--nofile={limits.open_files}"]
    command += [f"--cpu={math.ceil(limits.seconds) + 1}"] if cpu else []
    return command


def read_only_kernel() -> list[str]:
    """Returns bubblewrap arguments that make the kernel's settings in /proc read-only."""
    return [word for path in OF_ROOT for word in ("--ro-bind-try", path, path)]


def python_folders() -> list[str]:
    """Returns the folders outside /usr that the sandbox's Python uses."""
    home = Path(python()[0]).parent.parent
    return [] if str(home) == "/usr" else [str(home)]


class Clock:
    """Measures how long a process and its descendants ran or slept, without waits for a CPU."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.spent = 0.0
        self.began = self.before = time.monotonic()
        self.clocks: dict[int, tuple[int, int]] = {}
        self.used = math.nan  # seconds of processor time as of the last look
        self.memory = 0  # bytes that all of them use
        self.processes = 0  # number of processes; a look stops counting above its limit

    def look(self, most: int = sys.maxsize) -> None:
        """Adds the time since the last look, for at most `most` processes."""
        found: dict[int, tuple[int, int]] = {}
        pages = 0
        used = 0.0
        hungry = False  # the kernel counts a wait for a processor only once it is over
        alive = family(self.pid, most + 1)
        self.processes = len(alive)
        for pid in alive[:most]:
            with contextlib.suppress(OSError, IndexError):
                used += processor_time(pid)
                pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            for thread in glob.iglob(f"/proc/{pid}/task/*"):
                with contextlib.suppress(OSError, ValueError, IndexError):
                    running, waiting, _ = map(int, Path(thread, "schedstat").read_text().split())
                    found[int(thread.rpartition("/")[2])] = (running, waiting)
                    state = Path(thread, "stat").read_text().rpartition(")")[2].split()[0]
                    hungry |= state == "R"
        ran = queued = 0  # nanoseconds since the last look
        for thread_id, (ran_by_now, queued_by_now) in found.items():
            ran_before, queued_before = self.clocks.get(thread_id, (0, 0))
            ran += ran_by_now - ran_before
            queued += queued_by_now - queued_before
        now = time.monotonic()
        # Includes the time of threads and children that began and ended since the last look.
        gained = ran / 1e9 if math.isnan(self.used) else max(0.0, used - self.used)
        # A pause of this process, or of the whole machine, does not count as the run's sleep.
        elapsed = min(now - self.before, max(2 * TICK, gained))
        few = len(found) < HUNGRY
        waited = queued / (ran + queued) if few and ran + queued > 0 else 0.0
        busy = min(1.0, (ran + queued) / 1e9 / max(elapsed, 1e-9))
        if hungry and few:
            self.spent += min(elapsed, gained)
        else:
            self.spent += elapsed * (1 - waited * busy)
        self.before = now
        self.clocks = found
        self.used = used
        self.memory = pages * os.sysconf("SC_PAGESIZE")

    def verdict(self, limits: Limits) -> str:
        """Returns the limit that was exceeded, or "".

        A run that is starved of CPU has exceeded the limit "time" if it has used half of it.
        Raises CheckerError if it has not. Both are counted.
        """
        self.look(limits.processes + OWN)
        if self.processes > limits.processes + OWN:
            return "processes"
        if self.spent > limits.seconds:
            return "time"
        if self.before - self.began > PATIENCE * limits.seconds:
            if self.spent >= ENOUGH * limits.seconds:
                services.count_starved("timeout")
                return "time"
            services.count_starved("error")
            raise CheckerError(
                f"a run got a processor for only {self.spent:.1f} s in {PATIENCE} times "
                f"its deadline of {limits.seconds:g} s"
            )
        return "memory" if self.memory > limits.memory else ""


def processor_time(pid: int) -> float:
    """Returns the CPU seconds used by a process, its ended threads, and its reaped children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def family(pid: int, most: int = sys.maxsize) -> list[int]:
    """Returns a process and its descendants; stops looking at `most` of them."""
    found = [pid]
    for parent in found:
        if len(found) >= most:
            break
        for path in glob.iglob(f"/proc/{parent}/task/*/children"):  # each thread has its own
            with contextlib.suppress(OSError):
                found += map(int, Path(path).read_text().split())
    return found


async def run(
    argv: list[str],
    *,
    stdin: str = "",
    files: dict[str, str] | None = None,
    root: str = "",
    reads: Iterable[str] = (),
    limits: Limits | None = None,
) -> Ran:
    """Runs a command in a fresh sandbox, with `files` (path -> text) in its working folder.

    `root` is a folder that replaces the machine's files; changes there are lost. `reads` are
    further folders that the run sees. Raises CheckerError if there is no outcome.
    """
    limits = limits or Limits()
    backend = isolates()
    if root and backend != "bubblewrap":
        raise CheckerError(f"services.sandbox = {backend!r} runs no image, expected 'bubblewrap'")
    with contextlib.ExitStack() as stack:

        def opened(content: str | bytes) -> int:
            descriptor = memory_file(content)
            stack.callback(os.close, descriptor)
            return descriptor

        status = opened("")  # no process in the sandbox has it open
        given = opened(stdin)
        calls = opened(CALLS)
        contents = {path: opened(text) for path, text in (files or {}).items()}
        folder = "/"
        if backend == "bubblewrap":
            command = [*wrapped(limits, root, contents.items(), reads)]
            command += ["--json-status-fd", str(status)]
            command += ["--seccomp", str(calls)] if CALLS else []
            command += [] if root else ["prlimit", f"--nproc={limits.processes}"]
            command += argv
        else:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            for path, text in (files or {}).items():
                target = Path(folder, path)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(text, encoding="utf-8", errors="surrogatepass")
            command = [*user_limit.lifted(), *limited(limits), *argv]
        ours, theirs = map(stack.enter_context, socket.socketpair())
        ours.setblocking(False)
        guarded = [*python(), "-c", GUARD, str(theirs.fileno()), *command]
        async with place():
            passed = [status, calls, *contents.values(), theirs.fileno()]
            killed = oom_kills()
            refused = refusals()
            full = user_limit.full(limits, bool(root))
            process = await start(guarded, stdin=given, pass_fds=passed, cwd=folder)
            ran = await finish(process, limits)
        said = b""
        with contextlib.suppress(BlockingIOError):
            said = ours.recv(1000)
        if not ran.ended and said != b".":
            why = said.decode("utf-8", "replace") or ran.stderr
            raise CheckerError(f"the guard of a run did not start it: {why}")
        if oom_kills() > killed:  # the run, or a process that it started
            raise CheckerError(OOM)
        if refusals() > refused:
            raise CheckerError(REFUSED)
        if full or await user_limit.full_after(limits, bool(ran.ended), bool(root)):
            raise CheckerError(FULL)
        begun = ran.ended or b"exit-code" in os.pread(status, 1000, 0)
        if backend == "bubblewrap" and not begun:
            raise CheckerError(f"bubblewrap did not start a run: code {ran.code}: {ran.stderr}")
        return ran


def isolates() -> str:
    """Returns the backend for commands. Raises CheckerError if it cannot isolate them."""
    if why := problem():
        raise CheckerError(f"the sandbox: {why}")
    if current().sandbox == "http":
        raise CheckerError("services.sandbox = 'http' runs programs but no commands")
    if current().sandbox == "unsafe":
        log.warning("services.sandbox = 'unsafe': code runs with the rights of this user")
    return current().sandbox


def memory_file(content: str | bytes) -> int:
    """Returns the descriptor of a file in memory that has this content."""
    if isinstance(content, str):
        content = content.encode("utf-8", "surrogatepass")
    descriptor = os.memfd_create("given")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def path_alone() -> dict[str, str]:
    """Returns an environment that contains only the search path of this process."""
    return {"PATH": os.environ.get("PATH", os.defpath)}


def popen(command: list[str], channel: int, errors: int) -> subprocess.Popen:
    """Starts a process in a new session, with no environment variables except PATH."""
    try:
        return subprocess.Popen(
            command,
            stdin=channel,
            stdout=channel,
            stderr=errors,
            env=path_alone(),
            start_new_session=True,
            cwd="/",
        )
    except OSError as error:
        raise CheckerError(f"the sandbox cannot start {command[0]}: {error}") from None


async def start(
    command: list[str],
    *,
    stdin: int = PIPE,
    stderr: int = PIPE,
    pass_fds: Collection[int] = (),
    cwd: str = "/",
    limit: int = 1 << 16,
) -> asyncio.subprocess.Process:
    """Starts a process in a new session, with no environment variables except PATH.

    Its stdout is a pipe, whose lines may be up to `limit` bytes long.
    """

    async def begin() -> asyncio.subprocess.Process:
        keep_descriptors(pass_fds)
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=stdin,
            stdout=PIPE,
            stderr=stderr,
            limit=limit,
            pass_fds=pass_fds,
            env=path_alone(),
            start_new_session=True,
            cwd=cwd,
        )

    made = asyncio.ensure_future(begin())
    try:
        return await asyncio.shield(made)
    except asyncio.CancelledError:
        await kill(await made)  # asyncio would end only the first process
        raise
    except OSError as error:
        raise CheckerError(f"the sandbox cannot start {command[0]}: {error}") from None


def keep_descriptors(given: Iterable[int]) -> None:
    """Lets a child inherit only this process's streams and the given descriptors.

    uvloop, on which Ray runs this process, ignores close_fds: its children would inherit the
    descriptors of other runs, and could write to Ray's logs.
    """
    is_open = {int(name) for name in os.listdir("/proc/self/fd")}
    for descriptor in is_open - {0, 1, 2, *given}:
        with contextlib.suppress(OSError):  # it has been closed in the meantime
            os.set_inheritable(descriptor, False)


def place() -> asyncio.Semaphore:
    """Returns a place for one run; at most one run per processor runs at once."""
    loop = asyncio.get_running_loop()
    if loop not in PLACES:
        PLACES[loop] = asyncio.Semaphore(len(os.sched_getaffinity(0)))
    return PLACES[loop]


async def finish(process: asyncio.subprocess.Process, limits: Limits) -> Ran:
    """Waits until a process ends or exceeds a limit, and kills all processes that it started."""
    clock = Clock(process.pid)
    out = asyncio.create_task(beginning(process.stdout, limits.output))
    err = asyncio.create_task(end(process.stderr))
    waits = asyncio.create_task(process.wait())
    ended = ""
    try:
        while not ended and not waits.done():
            await asyncio.wait({waits, out}, timeout=TICK, return_when="FIRST_COMPLETED")
            if not waits.done():
                too_long = out.done() and len(out.result()) > limits.output
                ended = "output" if too_long else clock.verdict(limits)
    finally:
        # asyncio waits for a process until its pipes are read to the end.
        rest = asyncio.create_task(end(process.stdout)) if out.done() else out
        await kill(process)
        # Without isolation, a process that it left behind may keep the pipes open.
        for _ in range(10):  # a pause of this process costs at most one of these waits
            await asyncio.wait({out, rest, err}, timeout=TICK / 10)
        seconds = time.monotonic() - clock.began
    stdout = out.result() if out.done() else b""
    stderr = err.result() if err.done() else b""
    if len(stdout) > limits.output:
        ended = "output"
    out_text = stdout.decode("utf-8", "replace")
    err_text = stderr.decode("utf-8", "replace")
    code = None if ended else process.returncode
    return Ran(out_text[: limits.output], err_text, code, ended, seconds)


async def beginning(stream: asyncio.StreamReader | None, limit: int) -> bytes:
    """Reads a stream until it ends, or is longer than the limit."""
    text = bytearray()
    while stream and len(text) <= limit and (part := await stream.read(1 << 16)):
        text += part
    return bytes(text)


async def end(stream: asyncio.StreamReader | None) -> bytes:
    """Reads a stream to its end, and returns the last STDERR bytes."""
    text = b""
    while stream and (part := await stream.read(1 << 16)):
        text = (text + part)[-STDERR:]
    return text


async def kill(process: asyncio.subprocess.Process) -> None:
    """Ends a process, its group and its family: bubblewrap's child may not yet be tied to it."""
    alive = family(process.pid) if process.returncode is None else [process.pid]
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for pid in alive[1:]:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    await process.wait()


NEED = services.Need("sandbox", problem_of_start)
FOR_CHECKS = services.Need("checks", problem_of_checks, "a sandbox for answers that run as code")
