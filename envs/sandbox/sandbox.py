"""The one place that runs untrusted code: in bubblewrap, in a service, or unprotected if asked to.

    bubblewrap   new user, pid, net, ipc, uts and mount namespaces; no capabilities; the machine's
                 /usr and Python, read-only; a sized tmpfs as working folder; a cleared environment
    http         the sandbox service of NeMo-Skills at services.sandbox_url (SANDBOX_CONTAINER)
    unsafe       a process of this user, with limits and a deadline. It can read and write all that
                 this user can. Every line that it logs repeats this

A run has limits on processor time, memory, processes, file sizes, open files and output, and a
deadline after which all that it started is killed. Waiting for a free place, or for a processor
that others have, does not count against the deadline.

Known fault: bubblewrap ends with this process from some milliseconds after its start on. Where this
one is killed before that, the run goes on without a deadline: 7 of 40 runs did whose worker was
killed in their first 30 ms. A command in a box (envs/boxes/box.py) has no such moment.
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
import subprocess
import sys
import sysconfig
import tempfile
import time
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from envs import services
from envs.sandbox import service, user_limit
from envs.sandbox.interpreter import oom_kills, seccomp_filter
from envs.sandbox.outcome import OOM, REFUSED, Limits, Ran, refusals
from envs.sandbox.user_limit import FULL, OWN
from envs.services import CheckerError, current

log = logging.getLogger(__name__)
TICK = 0.5  # seconds between two looks at a run
NOBODY = ["--reuid", "65534", "--regid", "65534", "--clear-groups"]
CALLS = seccomp_filter(memory=False)  # which a command may not make
WORK = "/work"  # the working folder of a run
PACKAGES = "/packages"  # libraries of sessions
PATIENCE = 5  # times its deadline that a run may take where others have the processors
HUNGRY = 8  # threads of a run that can only wait for each other
START = 60.0  # seconds that an interpreter may take to start
STDERR = 2000  # characters of it that are kept
BOUND = ("/usr", "/lib", "/lib64", "/lib32", "/bin", "/sbin")
# What root on the machine owns, and may write where no file of the machine's is bound over it.
OF_ROOT = ("/proc/sys", "/proc/sysrq-trigger", "/proc/fs", "/proc/acpi", "/proc/scsi")
# A layer in memory above the folder $0, of $1 bytes, takes its changes; others do not see it.
LAYER = """
cd "$0" && mount -t tmpfs -o "size=$1" none /mnt && mkdir /mnt/over /mnt/work /mnt/root || exit
layers=lowerdir=.,upperdir=/mnt/over,workdir=/mnt/work,userxattr
mount -t overlay -o "$layers" none /mnt/root && shift && exec "$@"
"""
WORKS: list[bool] = []  # [True] once bubblewrap has isolated a process
# Why bubblewrap will not isolate a process a moment later either.
LASTS = re.compile("not on the path|util-linux|the kernel forbids|[Pp]ermission|not permitted")
PLACES: weakref.WeakKeyDictionary[Any, asyncio.Semaphore] = weakref.WeakKeyDictionary()
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
    """Why the sandbox cannot isolate a run, and how to mend it; "" if it can.

    Bubblewrap is tried once where that works, and again each time where it did not.
    """
    if current().sandbox == "http":
        return service.malformed(current().sandbox_url)
    if current().sandbox == "bubblewrap" and not WORKS:
        if why := problem_of_bubblewrap():
            return why
        WORKS.append(True)
    return ""


def problem_of_start() -> str:
    """Why no program could run, before a run starts; a service is asked as well."""
    asks = current().sandbox == "http"
    why = problem() or (service.problem(current().sandbox_url) if asks else "")
    return why or ("" if asks else user_limit.problem(Limits()))


def problem_of_checks() -> str:
    """Why checks that run answers as code cannot be isolated; "" if they can."""
    if current().sandbox == "http":
        return "services.sandbox is 'http', which runs programs and no checks: use bubblewrap"
    return problem()


def problem_of_bubblewrap() -> str:
    """Why bubblewrap has not isolated a process just now; "" if it has."""
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
    """The end of a command of our own. Raises OSError, and CheckerError where it does not end."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=START, cwd="/")
    except subprocess.TimeoutExpired:
        raise CheckerError(f"the sandbox did not start a process in {START:g} s") from None


@functools.cache
def python() -> list[str]:
    """The sandbox's Python: this one; the machine's where the user nobody may not read this one.

    Raises OSError, and CheckerError, where that could not be seen.
    """
    own = str(Path(sys.base_prefix, "bin", f"python3.{sys.version_info.minor}"))
    seen = told([*as_run_user(), "sh", "-c", 'test -x "$0" && echo yes || echo no', own])
    found = {"yes\n": own, "no\n": "/usr/bin/python3"}.get(seen.stdout)
    if not found:
        raise CheckerError(f"the sandbox cannot look for {own}: {seen.stderr[-300:]}")
    return [found, "-I", "-S"]


@functools.cache
def own_packages() -> str:
    """The folder of this Python's packages, where the sandbox's Python can import them; else "".

    Raises CheckerError where that could not be seen.
    """
    folder = sysconfig.get_path("purelib")
    code = f"import sys; sys.path.append({folder!r}); import numpy"
    try:
        tried = told([*as_run_user(), *python(), "-c", code])
    except OSError as error:
        raise CheckerError(f"the sandbox cannot start Python: {error}") from None
    if tried.returncode and "ModuleNotFoundError" not in tried.stderr:  # it may be for a moment
        said = f"code {tried.returncode}, {tried.stderr[-300:]!r}"
        raise CheckerError(f"a Python could not import numpy: {said}")
    if tried.returncode:
        log.warning("programs of answers cannot import numpy: %s", tried.stderr[-300:])
    return "" if tried.returncode else folder


def wrapped(
    limits: Limits,
    root: str = "",
    files: Iterable[tuple[str, int]] = (),
    reads: Iterable[str] = (),
    rooms: bool = False,
    packages: str = "",
) -> list[str]:
    """The command in front of a command that isolates it; `files`: path and descriptor of each.

    `packages` is a folder that it sees as PACKAGES.

    Root becomes the user nobody first, since the kernel bounds no processes of root. Of an image as
    `root` only the owner of its files can be used. A command that makes `rooms` forbids namespaces
    in them, and limits the processor time in them, itself.
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
    """The command in front of checks that may read these files and folders, and no others.

    Empty where the configured sandbox is another. Where it is bubblewrap and does not work, checks
    that execute nothing of answers need none if it is missing here. Raises CheckerError for others,
    and where it fails otherwise, as it may for a moment.
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
    folders = [*BOUND, *reads]  # over the empty /tmp, as this project may lie there
    bound: list[str] = []
    for folder in sorted({folder for folder in folders if os.path.exists(folder)}, key=len):
        if folder in BOUND and os.path.islink(folder):
            command += ["--symlink", os.readlink(folder), folder]
            continue
        # A link in a bound folder is there already, and nothing can be bound where it points.
        if any(folder.startswith(f"{above}/") for above in bound):
            folder = os.path.realpath(folder)
        command += ["--ro-bind", folder, folder]
        bound.append(folder)
    command += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev", *read_only_kernel()]
    return [*command, "--setenv", "TMPDIR", "/tmp", "--remount-ro", "/", "--chdir", "/"]


def as_run_user(root: str = "") -> list[str]:
    """The command in front of one that makes it a process of a run's user, with all of its room."""
    becomes = ["setpriv", *NOBODY] if os.geteuid() == 0 and not root else []
    return [*user_limit.lifted(), *becomes]


def limited(limits: Limits, cpu: bool = True) -> list[str]:
    """The command in front of a command that gives it limits."""
    bounds = {"as": limits.memory, "fsize": limits.file_size, "core": 0}
    bounds |= {"nofile": limits.open_files}
    bounds |= {"cpu": math.ceil(limits.seconds) + 1} if cpu else {}
    return ["prlimit", *(f"--{name}={value}" for name, value in bounds.items())]


def read_only_kernel() -> list[str]:
    """Arguments of bubblewrap after which no process changes the kernel's settings in /proc."""
    return [word for path in OF_ROOT for word in ("--ro-bind-try", path, path)]


def python_folders() -> list[str]:
    """The folders of the sandbox's Python beside /usr."""
    home = Path(python()[0]).parent.parent
    return [] if str(home) == "/usr" else [str(home)]


class Clock:
    """The seconds that a process and all that it began ran or slept; not those in a queue."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.spent = 0.0
        self.began = self.before = time.monotonic()
        self.clocks: dict[int, tuple[int, int]] = {}
        self.used = math.nan  # seconds of processor time at the last look
        self.memory = 0  # bytes that all of them use
        self.processes = 0  # of them; of more than may be, some

    def look(self, most: int = sys.maxsize) -> None:
        """Adds the time since the last look, for at most this many processes."""
        found = {}
        pages, used = 0, 0.0
        hungry = False  # the kernel counts a wait for a processor when it is over
        alive = family(self.pid, most + 1)
        self.processes = len(alive)
        for pid in alive[:most]:
            with contextlib.suppress(OSError, IndexError):
                used += processor_time(pid)
                pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            for thread in glob.iglob(f"/proc/{pid}/task/*"):
                with contextlib.suppress(OSError, ValueError, IndexError):
                    ran, queued, _ = map(int, Path(thread, "schedstat").read_text().split())
                    found[int(thread.rpartition("/")[2])] = (ran, queued)
                    state = Path(thread, "stat").read_text().rpartition(")")[2].split()[0]
                    hungry |= state == "R"
        ran, queued = (
            sum(clocks[i] - self.clocks.get(pid, (0, 0))[i] for pid, clocks in found.items())
            for i in range(2)
        )
        now = time.monotonic()
        # With that of threads and children which began and ended since the last look.
        gained = ran / 1e9 if math.isnan(self.used) else max(0.0, used - self.used)
        # A pause of this process, or of the whole machine, is no sleep of the run.
        elapsed = min(now - self.before, max(2 * TICK, gained))
        waited = queued / (ran + queued) if len(found) < HUNGRY and ran + queued > 0 else 0.0
        busy = min(1.0, (ran + queued) / 1e9 / max(elapsed, 1e-9))
        waits = hungry and len(found) < HUNGRY
        self.spent += min(elapsed, gained) if waits else elapsed * (1 - waited * busy)
        self.before, self.clocks, self.used = now, found, used
        self.memory = pages * os.sysconf("SC_PAGESIZE")

    def verdict(self, limits: Limits) -> str:
        """The limit that was passed, "" for none. Raises CheckerError where it had no processor."""
        self.look(limits.processes + OWN)
        if self.processes > limits.processes + OWN:
            return "processes"
        if self.spent > limits.seconds:
            return "time"
        if self.before - self.began > PATIENCE * limits.seconds:
            raise CheckerError(
                f"a run got a processor for {self.spent:.1f} s of {PATIENCE} times "
                f"its deadline of {limits.seconds:g} s"
            )
        return "memory" if self.memory > limits.memory else ""


def processor_time(pid: int) -> float:
    """Seconds of processor time of a process, its ended threads, and children it has waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def family(pid: int, most: int = sys.maxsize) -> list[int]:
    """A process and all that came from it; of more than `most`, some."""
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

    `root` is a folder that takes the place of the machine's files; what the run changes there is
    lost. `reads` are folders that it sees beside them. Raises CheckerError where there is no
    outcome.
    """
    limits = limits or Limits()
    backend = isolates()
    if root and backend != "bubblewrap":
        raise CheckerError(f"services.sandbox = {backend!r} runs no image, expected 'bubblewrap'")
    with contextlib.ExitStack() as stack:
        texts: list[str | bytes] = ["", stdin, CALLS, *(files or {}).values()]
        given = [memory_file(text) for text in texts]
        for descriptor in given:
            stack.callback(os.close, descriptor)
        folder = "/"
        if backend == "bubblewrap":
            named = zip(files or (), given[3:], strict=True)
            bounds = [] if root else ["prlimit", f"--nproc={limits.processes}"]
            status = ["--json-status-fd", str(given[0])]  # nothing in the sandbox has it
            status += ["--seccomp", str(given[2])] if CALLS else []
            command = [*wrapped(limits, root, named, reads), *status, *bounds, *argv]
        else:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            for path, text in (files or {}).items():
                target = Path(folder, path)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(text, encoding="utf-8", errors="surrogatepass")
            command = [*user_limit.lifted(), *limited(limits), *argv]
        async with place():
            passed = [given[0], *given[2:]]
            options: dict[str, Any] = {"stdin": given[1], "pass_fds": passed, "cwd": folder}
            killed, refused = oom_kills(), refusals()
            full = user_limit.full(limits, bool(root))
            ran = await finish(await start(command, **options), limits)
        if oom_kills() > killed:  # it, or a process that it began
            raise CheckerError(OOM)
        if refusals() > refused:
            raise CheckerError(REFUSED)
        if full or await user_limit.full_after(limits, bool(ran.ended), bool(root)):
            raise CheckerError(FULL)
        begun = ran.ended or b"exit-code" in os.pread(given[0], 1000, 0)
        if backend == "bubblewrap" and not begun:
            raise CheckerError(f"bubblewrap did not start a run: code {ran.code}: {ran.stderr}")
        return ran


def isolates() -> str:
    """The backend for commands. Raises CheckerError where it cannot isolate them."""
    if why := problem():
        raise CheckerError(f"the sandbox: {why}")
    if current().sandbox == "http":
        raise CheckerError("services.sandbox = 'http' runs programs and no commands")
    if current().sandbox == "unsafe":
        log.warning("services.sandbox = 'unsafe': code runs with the rights of this user")
    return current().sandbox


def memory_file(content: str | bytes) -> int:
    """The descriptor of a file that has this content and is in no folder."""
    if isinstance(content, str):
        content = content.encode("utf-8", "surrogatepass")
    descriptor = os.memfd_create("given")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def alone() -> dict[str, Any]:
    """Options of a process in a session of its own, which sees nothing here but the path."""
    env = {"PATH": os.environ.get("PATH", os.defpath)}
    return {"env": env, "start_new_session": True, "cwd": "/"}


def popen(command: list[str], channel: int, errors: int) -> subprocess.Popen:
    """A process in a session of its own, which sees nothing of this environment but the path."""
    try:
        return subprocess.Popen(command, stdin=channel, stdout=channel, stderr=errors, **alone())
    except OSError as error:
        raise CheckerError(f"the sandbox cannot start {command[0]}: {error}") from None


async def start(command: list[str], **options: Any) -> asyncio.subprocess.Process:
    """A process in a session of its own, which sees nothing of this environment but the path."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)

    async def begin() -> asyncio.subprocess.Process:
        keep_descriptors(options.get("pass_fds", ()))
        return await asyncio.create_subprocess_exec(*command, **alone() | pipes | options)

    made = asyncio.ensure_future(begin())
    try:
        return await asyncio.shield(made)
    except asyncio.CancelledError:
        await kill(await made)  # asyncio would end the first process alone
        raise
    except OSError as error:
        raise CheckerError(f"the sandbox cannot start {command[0]}: {error}") from None


def keep_descriptors(given: Iterable[int]) -> None:
    """Lets a child inherit the streams of this process and what is given, no other descriptor.

    uvloop, on which Ray runs this process, ignores close_fds: its children would get what other
    runs were given, and Ray's logs to write to.
    """
    for descriptor in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, *given}:
        with contextlib.suppress(OSError):  # it is closed meanwhile
            os.set_inheritable(descriptor, False)


def place() -> asyncio.Semaphore:
    """A place for one run; as many run at once as there are processors."""
    loop = asyncio.get_running_loop()
    if loop not in PLACES:
        PLACES[loop] = asyncio.Semaphore(len(os.sched_getaffinity(0)))
    return PLACES[loop]


async def finish(process: asyncio.subprocess.Process, limits: Limits) -> Ran:
    """Waits for a process, or for the limit that it passes, and kills all that it began."""
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
        # Where nothing isolates it, a process that it left behind may hold the pipes.
        for _ in range(10):  # a pause of this process costs one of them at most
            await asyncio.wait({out, rest, err}, timeout=TICK / 10)
        seconds = time.monotonic() - clock.began
    texts = [task.result() if task.done() else b"" for task in (out, err)]
    if len(texts[0]) > limits.output:
        ended = "output"
    out_text, err_text = (text.decode("utf-8", "replace") for text in texts)
    code = None if ended else process.returncode
    return Ran(out_text[: limits.output], err_text, code, ended, seconds)


async def beginning(stream: asyncio.StreamReader | None, limit: int) -> bytes:
    """The bytes of a stream until it ends, or is longer than the limit."""
    text = bytearray()
    while stream and len(text) <= limit and (part := await stream.read(1 << 16)):
        text += part
    return bytes(text)


async def end(stream: asyncio.StreamReader | None) -> bytes:
    """The last characters of a stream."""
    text = b""
    while stream and (part := await stream.read(1 << 16)):
        text = (text + part)[-STDERR:]
    return text


async def kill(process: asyncio.subprocess.Process) -> None:
    """Ends a process, its group and its family: bubblewrap's child may not yet end with it."""
    alive = family(process.pid) if process.returncode is None else [process.pid]
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for pid in alive[1:]:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    await process.wait()


NEED = services.Need("sandbox", problem_of_start)
FOR_CHECKS = services.Need("checks", problem_of_checks, "a sandbox for answers that run as code")
