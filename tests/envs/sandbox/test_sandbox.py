"""What the sandbox promises: nothing gets out, nothing stays, nothing is a silent 0."""

import asyncio
import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from envs import services
from envs.coding import code
from envs.sandbox import programs, sandbox, shell, user_limit
from envs.sandbox.checkers import Checkers
from envs.sandbox.programs import Interpreter
from envs.sandbox.sandbox import Limits, Ran
from envs.services import CheckerError
from settings.environment_services import Services
from support.box_images import make_image
from support.hostile_programs import ESCAPES
from support.loop import at_once
from support.program import ROOT

contained = pytest.mark.skipif(bool(sandbox.problem()), reason=sandbox.problem())
QUICK = Limits(seconds=1.0, memory=1 << 30)
ROW = {"verifier_metadata": {"unit_tests": {"inputs": ["7\n"], "outputs": ["49"]}}}


def run(argv: list[str], **options) -> Ran:
    return asyncio.run(sandbox.run(argv, **options))


async def outputs(source: str, inputs: list[str], limits: Limits = QUICK) -> list[Ran]:
    return [ran async for ran in programs.programs(source, inputs, limits)]


def program(source: str, stdin: str = "", limits: Limits = QUICK) -> Ran:
    (ran,) = asyncio.run(outputs(source, [stdin], limits))
    return ran


def children() -> set[int]:
    """The processes that came from this one, once no interpreter waits for a program."""
    at_once(python.close() for waiting in Interpreter.idle.values() for python in waiting)
    Interpreter.idle.clear()
    return set(sandbox.family(os.getpid())) - {os.getpid()}


@pytest.fixture(autouse=True)
def no_interpreter_waits():
    """A test's settings are for interpreters that it starts."""
    children()


@contained
def test_a_command_sees_its_files_and_nothing_of_this_machine():
    files = {"a.txt": "1\n", "deep/b.txt": "2\n"}
    ran = run(["cat", "a.txt", "deep/b.txt", "-"], stdin="3\n", files=files)
    assert ran[:4] == ("1\n2\n3\n", "", 0, "")
    python = Path(sandbox.python()[0]).parts[1]
    seen = {f"/{name}" for name in run(["ls", "/"]).stdout.split()}
    assert seen <= {*sandbox.BOUND, sandbox.WORK, "/proc", "/dev", "/tmp", f"/{python}"}
    assert run(["sh", "-c", "id -u; env | wc -l"]).stdout.split()[0] == "65534"
    assert run(["sh", "-c", "exit 3"]).code == 3
    assert "Read-only" in run(["touch", "/usr/x"]).stderr
    status = run(["cat", "/proc/self/status"]).stdout
    assert "NoNewPrivs:\t1" in status and "CapBnd:\t0000000000000000" in status


@contained
def test_a_folder_takes_the_place_of_the_machine_and_stays_as_it_is(tmp_path):
    """One run's changes are lost: neither the next run nor the folder has them."""
    linked = subprocess.check_output(["ldd", "/bin/bash"], text=True).split()
    for file in ["/bin/bash", *(word for word in linked if word.startswith("/"))]:
        inside = tmp_path / file[1:]
        inside.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, inside)
    for name in ("proc", "dev", "tmp"):
        (tmp_path / name).mkdir(exist_ok=True)
    (tmp_path / "old").write_text("1")
    before = sorted(tmp_path.rglob("*"))
    expected = {f"/{file.name}" for file in tmp_path.iterdir()} | {"/new", "/work"}
    script = "[ ! -e /new ] && echo 1 >/new && echo 2 >/old && echo $(</new) $(<a) /*"
    for _ in range(2):
        ran = run(["/bin/bash", "-c", script], root=str(tmp_path), files={"a": "given"})
        read, given, *listed = ran.stdout.split()
        assert (read, given) == ("1", "given") and set(listed) == expected, ran
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / "old").read_text() == "1"
    for root, why in ((tmp_path, "execvp /bin/none"), (tmp_path / "absent", "absent")):
        with pytest.raises(CheckerError, match=f"did not start a run: code [0-9]+: .*{why}"):
            run(["/bin/none"], root=str(root))


@contained
def test_root_of_the_machine_changes_no_setting_of_the_kernel(tmp_path):
    """Its files in /proc belong to root, whose number a check or a process in an image keeps."""
    image = make_image(tmp_path / "image", {})
    script = "cd /proc/sys; find . -type f -perm -200 2>/dev/null | while read -r file; do "
    script += '(exec 3>>"$file") 2>/dev/null && echo "$file"; done; echo end'
    assert run(["bash", "-c", script], root=str(image)).stdout == "end\n"
    checks = [*sandbox.around([], True), "bash", "-c", script]
    assert subprocess.check_output(checks, text=True) == "end\n"


CALLS = """
import ctypes, os, socket
for what in (lambda: socket.socket(socket.AF_VSOCK), lambda: socket.socket(socket.AF_INET)):
    try: what().close(); print("made")
    except OSError as error: print(error.errno)
libc = ctypes.CDLL(None, use_errno=True)
numbers = {"x86_64": (323, 425, 319), "aarch64": (282, 425, 279)}[os.uname().machine]
for number in numbers:
    print(libc.syscall(number, b"x", 0, 0), ctypes.get_errno())
"""


@contained
async def test_no_command_or_terminal_reaches_the_host_or_the_kernel_behind_its_filter():
    """userfaultfd and io_uring do not exist; memory that a limit counts does, as a file."""
    refused = str(errno.ENOSYS)
    expected = [refused, "made", "-1", refused, "-1", refused]
    ran = await sandbox.run([*sandbox.python(), "-c", CALLS])
    assert ran.stdout.split()[:6] == expected and int(ran.stdout.split()[6]) > 0, ran
    async with shell.Shell(Limits(), {"calls.py": CALLS}) as terminal:
        shown = await terminal.run(f"{' '.join(sandbox.python())} calls.py", 20)
    assert " ".join(expected) in " ".join(shown.split()), shown


@contained
def test_a_command_reads_the_folders_that_it_is_given():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        Path(folder, "a").write_text("given")
        assert run(["cat", f"{folder}/a"]).code
        assert run(["cat", f"{folder}/a"], reads=[folder]).stdout == "given"
        assert "Read-only" in run(["touch", f"{folder}/b"], reads=[folder]).stderr


def test_no_image_runs_uncontained():
    services.configure(Services(sandbox="unsafe"))
    with pytest.raises(CheckerError, match="'unsafe' runs no image, expected 'bubblewrap'"):
        run(["true"], root="/")


@contained
def test_endless_output_of_a_command_ends_it():
    ran = run(["yes"], limits=QUICK._replace(output=1000, seconds=100))
    assert (ran.ended, len(ran.stdout), ran.code) == ("output", 1000, None) and ran.seconds < 60


@contained
@pytest.mark.parametrize(("source", "ended"), [
    ("while True: pass", "time"),
    ("import time; time.sleep(100)", "time"),
    ("while True: print('x' * 1000)", "output"),
    ("import os, resource\nresource.prlimit(1, resource.RLIMIT_AS, (0, 0))", "killed"),
    ("import os\nfor number in (9, 15, 19): os.kill(os.getppid(), number)", ""),
    ("import os\nfor _ in range(40): os.fork()\na = bytearray(10**8)", ""),
])  # fmt: skip
def test_limits_are_named(source, ended):
    ran = program(source)
    assert ran.ended == ended and (ran.code is None) == bool(ended), ran


@contained
def test_a_program_is_warm_and_alone():
    """Names of the prelude are there; nothing of the run before it is."""
    source = "print(Counter(input()), sqrt(4), len(sys.argv), 'mark' in globals())\nmark = 1"
    first, second = asyncio.run(outputs(source, ["aa", "b"]))
    assert first.stdout == "Counter({'a': 2}) 2.0 1 False\n"
    assert second.stdout == "Counter({'b': 1}) 2.0 1 False\n"


LEAVES = """
import ctypes, os, resource, socket, subprocess
for folder in ("/work", "/tmp") + SHARED:
    assert os.listdir(folder) == [], os.listdir(folder)
    open(folder + "/mark", "w").write("1")
assert sorted(filter(str.isdigit, os.listdir("/proc"))) == ["1", str(os.getpid())]
assert ctypes.CDLL(None).shmget(7, 4096, 0o3600) == -1, "memory that no limit counts"
served = socket.create_server(("127.0.0.1", 8000))
client = socket.create_connection(("127.0.0.1", 8000))
served.accept()[0].close()
if not os.fork():
    os.setsid()
    os.execvp("sleep", ["sleep", "1000"])
assert os.getpriority(os.PRIO_PROCESS, 1) == PRIORITY, "priority"
os.setpriority(os.PRIO_PROCESS, 1, 19)
resource.prlimit(1, resource.RLIMIT_NOFILE, (64, 64))
assert subprocess.call(["unshare", "--user", "true"], stderr=subprocess.DEVNULL) == 1
status = open("/proc/self/status").read()
assert "CapEff:\\t0000000000000000" in status and "NoNewPrivs:\\t1" in status
print("alone")
"""


@contained
@pytest.mark.parametrize("rooms", [True, False])
def test_a_program_finds_nothing_of_another(monkeypatch, rooms):
    """The same interpreter serves them, if the kernel allows rooms; else each has its own."""
    if not rooms:
        text = programs.TEXT.replace("libc.unshare, NAMESPACES", "libc.unshare, -1")
        monkeypatch.setattr(programs, "TEXT", text)
        monkeypatch.setattr(Interpreter, "rooms", True)
    source = LEAVES.replace("PRIORITY", str(os.getpriority(os.PRIO_PROCESS, 0)))
    source = source.replace("SHARED", "('/dev/shm',)" if rooms else "()")
    source = source if rooms else source.replace('== ["1", str(os.getpid())]', "")
    seen = set()
    for _ in range(3):
        ran = program(source)
        assert ran.stdout == "alone\n", ran.stderr
        seen |= {python.process.pid for python in Interpreter.idle[QUICK]}
    assert len(seen) == rooms and Interpreter.rooms == rooms


@contained
def test_a_user_may_have_less_than_a_program():
    """Where this user may start fewer processes than a program, no program fails for that."""
    many = "limits=QUICK._replace(processes=100_000)"  # other tests' programs count too
    code = f"from test_sandbox import *; print(program('print(1)', {many}))"
    command = ["prlimit", "--nproc=50000", "--cpu=1000", sys.executable, "-c", code]
    env = os.environ | {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert "stdout='1\\n'" in done.stdout, done.stdout + done.stderr


@contained
def test_a_program_may_share_work_among_processes():
    ran = program("import multiprocessing\nprint(multiprocessing.Pool(2).map(abs, [-1, 2]))")
    assert ran.stdout == "[1, 2]\n", ran


@contained
def test_an_interpreter_that_died_while_it_waited_is_no_verdict():
    assert program("print(1)").stdout == "1\n"
    (python,) = Interpreter.idle[QUICK]
    python.process.kill()
    python.process.wait()
    assert program("print(2)").stdout == "2\n"


@contained
@pytest.mark.slow
def test_nothing_gets_out_and_nothing_stays(monkeypatch):
    """Every attempt earns 0, ends in time, and its neighbours are as right as without it."""
    monkeypatch.setattr(code, "LIMITS", QUICK)
    assert len(ESCAPES) >= 60
    before = children()
    right = "```python\nprint(int(input()) ** 2)\n```"
    attempts = [f"```python\n{text}\n```" for text in ESCAPES.values()]
    answers = (answer for attempt in attempts for answer in (attempt, right))
    rewards = at_once(code.verify(ROW, answer) for answer in answers)
    paid = [name for name, reward in zip(ESCAPES, rewards[::2], strict=True) if reward.value]
    assert not paid
    assert all(reward.value == 1 for reward in rewards[1::2])
    assert children() <= before
    assert not any(Path(path).exists() for path in ("/escaped", "/usr/escaped", "/etc/x"))


@contained
def test_waiting_for_a_place_is_no_run():
    """Forty runs of a quarter of a second on few processors, with half a second for each."""
    source = "import time; time.sleep(0.25); print(1)"
    limits = QUICK._replace(seconds=0.6)
    many = at_once(outputs(source, [""], limits) for _ in range(40))
    assert [ran.stdout for (ran,) in many] == ["1\n"] * 40


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(sandbox, "WORKS", [])
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None)
    assert "apt install bubblewrap" in sandbox.problem()
    with pytest.raises(CheckerError, match="bwrap is not on the path"):
        run(["true"])
    with pytest.raises(CheckerError, match="bwrap is not on the path"):
        program("print(1)")
    services.configure(Services(sandbox="http"))
    assert "services.sandbox_url = ''" in sandbox.problem()
    services.configure(Services(sandbox="unsafe"))
    assert not sandbox.problem()


@contained
def test_a_kernel_that_forbids_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(sandbox, "WORKS", [])
    switch = tmp_path / "max_user_namespaces"
    switch.write_text("0\n")
    monkeypatch.setattr(sandbox, "KERNEL", {str(switch): ("0", "sysctl user.max=1")})
    monkeypatch.setattr(sandbox, "wrapped", lambda limits: ["false"])
    assert sandbox.problem().startswith("the kernel forbids user namespaces")
    assert "sysctl user.max=1" in sandbox.problem()


@contained
def test_an_interpreter_that_does_not_start_is_no_verdict(monkeypatch):
    monkeypatch.setattr(programs, "TEXT", "raise SystemExit('broken on purpose')")
    with pytest.raises(CheckerError, match="did not start: broken on purpose"):
        program("print(1)")
    monkeypatch.setattr(programs, "TEXT", "print('ready', flush=True); input(); exit()")
    with pytest.raises(CheckerError, match="was killed, or refused a process"):
        program("print(1)")


@pytest.mark.parametrize("name", [pytest.param("bubblewrap", marks=contained), "unsafe"])
def test_programs_find_numpy_as_in_gyms_image(name):
    services.configure(Services(sandbox=name))
    ran = program("import numpy as np\nprint((np.eye(200) @ np.ones(200)).sum(), input())", "7\n")
    assert ran.stdout == "200.0 7\n", ran
    assert "No module" in program("import torch_that_is_not_there").stderr


def test_without_isolation_each_line_says_so(caplog):
    services.configure(Services(sandbox="unsafe"))
    assert run(["cat", "a"], files={"a": "1"}).stdout == "1"
    assert program("print(int(input()) * 2)", "4").stdout == "8\n"
    assert program("while True: pass").ended == "time"
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) >= 3 and all("services.sandbox = 'unsafe'" in line for line in lines)


ONE_BY_ONE = {
    "children": """
import os, time
def spin():
    end = time.thread_time() + 0.02
    while time.thread_time() < end: pass
while 1:
    if not os.fork(): os._exit(spin() or 0)
    os.wait()""",
    "threads": """
import threading, time
def spin():
    end = time.thread_time() + 0.02
    while time.thread_time() < end: pass
while 1:
    thread = threading.Thread(target=spin)
    thread.start()
    thread.join()""",
}


@contained
@pytest.mark.parametrize("kind", ONE_BY_ONE)
def test_what_has_ended_has_used_the_time_of_a_program(kind):
    """It is no program that got no processor: that one would be tried again, and earn no 0."""
    ran = program(ONE_BY_ONE[kind])
    assert ran.ended == "time", ran


SPINS = {
    "its first thread": "while 1: pass",
    "its children, one by one": ONE_BY_ONE["children"],
    "another thread": """
import threading
def spin():
    while 1: pass
threading.Thread(target=spin).start()""",
}


@pytest.mark.parametrize("where", SPINS)
def test_a_process_that_no_processor_takes_up_is_not_slow(where):
    """Twenty that want the same one: most looks at them fall into a wait that still lasts."""
    one = "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])"
    code = f"{one}\n{SPINS[where]}"
    spinning = [subprocess.Popen(["nice", sys.executable, "-c", code]) for _ in range(20)]
    try:
        time.sleep(2)
        clocks = [sandbox.Clock(process.pid) for process in spinning]
        for clock in clocks:
            clock.look()
        before = [clock.spent for clock in clocks]
        for _ in range(50):
            time.sleep(0.02)
            for clock in clocks:
                clock.look()
        spent = sum(clock.spent for clock in clocks) - sum(before)
        assert spent < 2 * (clocks[0].before - clocks[0].began)
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def test_a_pause_of_this_process_is_no_sleep_of_a_run():
    with subprocess.Popen(["sleep", "10"]) as sleeping:
        clock = sandbox.Clock(sleeping.pid)
        time.sleep(0.5)
        clock.look()
        assert clock.spent > 0.4  # a run that sleeps spends its time
        time.sleep(2)  # and nobody looks
        assert not clock.verdict(Limits(seconds=2))
        sleeping.kill()


@pytest.mark.parametrize("spent", [1.0, 0.9])
def test_a_run_that_starves_is_too_slow_once_half_of_its_deadline_is_used(monkeypatch, spent):
    clock = sandbox.Clock(os.getpid())
    monkeypatch.setattr(clock, "look", lambda most: None)
    clock.spent = spent
    clock.before = clock.began + 5 * 2
    assert not clock.verdict(Limits(seconds=2))
    clock.before += 1
    before = services.report().starved
    if spent == 1:
        assert clock.verdict(Limits(seconds=2)) == "time"
    else:
        with pytest.raises(CheckerError, match="only 0.9 s in 5 times its deadline of 2"):
            clock.verdict(Limits(seconds=2))
    outcome = "timeout" if spent == 1 else "error"
    assert services.report().starved - before == {f"none/{outcome}": 1}


WORKER = """
import asyncio, os, signal, sys, time
from envs import services
from envs.sandbox import sandbox
from settings.environment_services import Services

services.configure(Services(sandbox=sys.argv[1]))
start = sandbox.start

async def killed(*given, **options):
    await start(*given, **options)
    time.sleep(float(sys.argv[2]) / 1000)
    os.kill(os.getpid(), signal.SIGKILL)

sandbox.start = killed
asyncio.run(sandbox.run(["sleep", sys.argv[3]]))
"""


def having(word: str) -> list[int]:
    """The processes with this word in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if word in path.read_text().split("\0"):
                found.append(int(path.parent.name))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["bubblewrap", "unsafe"])
def test_a_run_does_not_outlive_a_worker_that_is_killed_while_it_starts(mode):
    """After so many milliseconds."""
    services.configure(Services(sandbox=mode))
    if problem := sandbox.problem():
        pytest.skip(problem)
    seconds = str(10_000_000 + os.getpid())  # no other process sleeps for as long
    try:
        for after in (0, 1, 2, 4, 8, 15, 22, 30):
            worker = [sys.executable, "-c", WORKER, mode, str(after), seconds]
            assert subprocess.run(worker, cwd=ROOT, check=False).returncode == -signal.SIGKILL
        until = time.monotonic() + 60
        while having(seconds) and time.monotonic() < until:
            time.sleep(0.1)
        assert having(seconds) == []
    finally:
        services.configure(Services())
        for pid in having(seconds):
            os.kill(pid, signal.SIGKILL)


@contained
@pytest.mark.parametrize("backend", ["bubblewrap", "unsafe"])
def test_a_run_that_its_guard_cannot_start_has_no_outcome(monkeypatch, backend):
    monkeypatch.setattr(sandbox, "isolates", lambda: backend)
    with monkeypatch.context() as absent:
        absent.setattr(user_limit, "lifted", lambda: ["no-such-program"])
        with pytest.raises(CheckerError, match="did not start it: no-such-program: .*No such"):
            run(["true"])
    monkeypatch.setattr(sandbox, "GUARD", "import no_such_module")
    with pytest.raises(CheckerError, match="(?s)did not start it: .*no_such_module"):
        run(["true"])


@contained
@pytest.mark.parametrize("backend", ["bubblewrap", "unsafe"])
def test_a_run_ends_as_its_command_does(monkeypatch, backend):
    """By its code or its signal, with the default reaction to signals that Python ignores."""
    monkeypatch.setattr(sandbox, "isolates", lambda: backend)
    assert run(["sh", "-c", "exit 3"]).code == 3
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGPIPE):
        ended = 128 + number if backend == "bubblewrap" else -number
        assert run(["sh", "-c", f"kill -{number:d} $$"]).code == ended


@contained
def test_a_run_that_is_given_up_leaves_nothing():
    before = children()
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(outputs("while True: pass", [""], Limits()), 0.5))
    assert time.monotonic() - began < 60 and children() <= before


def test_a_look_at_numpy_that_fails_for_a_moment_is_taken_again(monkeypatch):
    """Remembered, each right program that needs it would earn 0 until the run ends."""
    sandbox.own_packages.cache_clear()
    ran = subprocess.CompletedProcess([], 1, "", "ImportError: libopenblas: Cannot allocate memory")
    with monkeypatch.context() as starved:
        starved.setattr(sandbox.subprocess, "run", lambda *_, **__: ran)
        starved.setattr(sandbox, "python", lambda: [sys.executable])
        with pytest.raises(CheckerError, match="could not import numpy: code 1, .*allocate"):
            sandbox.own_packages()
    assert sandbox.own_packages()


@contextlib.contextmanager
def no_room(monkeypatch):
    """No process starts, except by what runs already; all that was seen before is forgotten."""
    sandbox.python.cache_clear()
    monkeypatch.setattr(sandbox, "WORKS", [])
    said = "setpriv: failed to execute bwrap: Resource temporarily unavailable"
    refused = subprocess.CompletedProcess([], 126, "", said)
    with monkeypatch.context() as crowded:
        crowded.setattr(sandbox.subprocess, "run", lambda *_, **__: refused)
        yield


def test_a_look_at_python_that_fails_for_a_moment_is_taken_again(monkeypatch):
    """Remembered, programs would have another Python, perhaps without numpy."""
    own = sandbox.python()
    with no_room(monkeypatch), pytest.raises(CheckerError, match="look for .*unavailable"):
        sandbox.python()
    assert sandbox.python() == own


@contained
@pytest.mark.slow
@pytest.mark.parametrize("answers", [1, 9])
def test_a_probe_of_bubblewrap_that_fails_for_a_moment_switches_nothing_off(monkeypatch, answers):
    pool = Checkers("support.evaluating:make_check", children=1, answers=answers)
    python = sandbox.python()
    with no_room(monkeypatch):
        monkeypatch.setattr(sandbox, "python", lambda: python)
        assert "unavailable" in sandbox.problem()
        with pytest.raises(CheckerError, match="checks cannot be isolated: .*unavailable"):
            asyncio.run(pool.run(5.0, text="1"))
    assert not sandbox.problem()
    looks = "float(__import__('os').path.exists('/etc/passwd'))"
    assert asyncio.run(pool.run(5.0, text=looks)) == {"value": 0.0}


def test_without_bubblewrap_only_checks_that_execute_nothing_run(monkeypatch, caplog):
    monkeypatch.setattr(sandbox, "WORKS", [])
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None)
    assert sandbox.around([], False) == []
    (line,) = (record.getMessage() for record in caplog.records)
    assert "rights of this user: bwrap is not on the path" in line
    with pytest.raises(CheckerError, match="cannot be isolated: bwrap is not on the path"):
        sandbox.around([], True)


def test_a_run_inherits_no_file_of_its_worker_on_the_loop_of_ray(tmp_path):
    """Nor what another run is given: both start at once."""
    uvloop = pytest.importorskip("uvloop")
    look = ["bash", "-c", "readlink /proc/$$/fd/*; cat a"]

    async def two() -> list[sandbox.Ran]:
        runs = (sandbox.run(look, files={"a": name}) for name in ("one", "two"))
        return await asyncio.gather(*runs)

    with open(tmp_path / "worker.log", "w") as log:
        os.set_inheritable(log.fileno(), True)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runs = runner.run(two())
    assert [ran.stdout.split("\n")[-1] for ran in runs] == ["one", "two"]
    assert not any("worker.log" in ran.stdout for ran in runs)
