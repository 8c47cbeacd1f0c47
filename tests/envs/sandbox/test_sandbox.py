"""What the sandbox promises: nothing gets out, nothing stays, nothing is a silent 0."""

import asyncio
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from envs.programs import code
from envs.rollout import services
from envs.sandbox import programs, sandbox, service
from envs.sandbox.checkers import CheckerError
from envs.sandbox.programs import Interpreter
from envs.sandbox.sandbox import Limits, Ran
from support.escapes import ESCAPES

contained = pytest.mark.skipif(bool(sandbox.problem()), reason=sandbox.problem())
QUICK = Limits(seconds=1.0, memory=1 << 30)
ROW = {"verifier_metadata": {"unit_tests": {"inputs": ["7\n"], "outputs": ["49"]}}}


@pytest.fixture
def backend():
    """A function that chooses the sandbox of a test."""
    before = services.current()
    yield lambda name, url="": services.configure(services.Services(sandbox=name, sandbox_url=url))
    services.configure(before)


def run(argv: list[str], **options) -> Ran:
    return asyncio.run(sandbox.run(argv, **options))


async def outputs(source: str, inputs: list[str], limits: Limits = QUICK) -> list[Ran]:
    return [ran async for ran in programs.programs(source, inputs, limits)]


def program(source: str, stdin: str = "", limits: Limits = QUICK) -> Ran:
    (ran,) = asyncio.run(outputs(source, [stdin], limits))
    return ran


def children() -> set[int]:
    """The processes that came from this one, once no interpreter waits for a program."""

    async def close() -> None:
        for waiting in Interpreter.idle.values():
            while waiting:
                await waiting.pop().close()

    asyncio.run(close())
    return set(sandbox.family(os.getpid())) - {os.getpid()}


@pytest.fixture(autouse=True)
def no_interpreter_waits():
    """A test's settings are for interpreters that it starts."""
    children()


@contained
def test_a_command_sees_its_files_and_nothing_of_this_machine():
    ran = run(
        ["cat", "a.txt", "deep/b.txt", "-"],
        stdin="3\n",
        files={"a.txt": "1\n", "deep/b.txt": "2\n"},
    )
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
def test_a_command_reads_the_folders_that_it_is_given():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        Path(folder, "a").write_text("given")
        assert run(["cat", f"{folder}/a"]).code
        assert run(["cat", f"{folder}/a"], reads=[folder]).stdout == "given"
        assert "Read-only" in run(["touch", f"{folder}/b"], reads=[folder]).stderr


def test_no_image_runs_uncontained(backend):
    backend("unsafe")
    with pytest.raises(CheckerError, match="'unsafe' runs no image, expected 'bubblewrap'"):
        run(["true"], root="/")


@contained
def test_endless_output_of_a_command_ends_it():
    ran = run(["yes"], limits=QUICK._replace(output=1000, seconds=10))
    assert (ran.ended, len(ran.stdout), ran.code) == ("output", 1000, None) and ran.seconds < 5


@contained
@pytest.mark.parametrize(
    ("source", "ended"),
    [
        ("while True: pass", "time"),
        ("import time; time.sleep(100)", "time"),
        ("while True: print('x' * 1000)", "output"),
        ("import os, resource\nresource.prlimit(1, resource.RLIMIT_AS, (0, 0))", "killed"),
        ("import os\nfor number in (9, 15, 19): os.kill(os.getppid(), number)", ""),
        ("import os\nfor _ in range(40): os.fork()\na = bytearray(10**8)", ""),
    ],
)
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
    here = Path(__file__).parent
    path = ":".join(map(str, (here, here.parents[1], here.parents[2])))
    env = os.environ | {"PYTHONPATH": path}
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

    async def judge() -> tuple[list, list]:
        attempts = (code.verify(ROW, f"```python\n{text}\n```") for text in ESCAPES.values())
        neighbours = (code.verify(ROW, right) for _ in ESCAPES)
        pairs = zip(attempts, neighbours, strict=True)
        answers = await asyncio.gather(*itertools.chain.from_iterable(pairs))
        return answers[::2], answers[1::2]

    attempts, neighbours = asyncio.run(judge())
    paid = [name for name, reward in zip(ESCAPES, attempts, strict=True) if reward.value]
    assert not paid
    assert all(reward.value == 1 for reward in neighbours)
    assert children() <= before
    assert not any(Path(path).exists() for path in ("/escaped", "/usr/escaped", "/etc/x"))


@contained
def test_waiting_for_a_place_is_no_run():
    """Forty runs of a quarter of a second on few processors, with half a second for each."""

    async def many() -> list[list[Ran]]:
        source = "import time; time.sleep(0.25); print(1)"
        limits = QUICK._replace(seconds=0.6)
        return await asyncio.gather(*(outputs(source, [""], limits) for _ in range(40)))

    assert [ran.stdout for (ran,) in asyncio.run(many())] == ["1\n"] * 40


def test_what_is_missing_is_named(monkeypatch, backend):
    sandbox._problem.cache_clear()
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None)
    assert "apt install bubblewrap" in sandbox.problem()
    with pytest.raises(CheckerError, match="bwrap is not on the path"):
        run(["true"])
    with pytest.raises(CheckerError, match="bwrap is not on the path"):
        program("print(1)")
    backend("http")
    assert "services.sandbox_url is empty" in sandbox.problem()
    backend("unsafe")
    assert not sandbox.problem()
    sandbox._problem.cache_clear()


@contained
def test_a_kernel_that_forbids_is_named(monkeypatch, tmp_path):
    sandbox._problem.cache_clear()
    switch = tmp_path / "max_user_namespaces"
    switch.write_text("0\n")
    monkeypatch.setattr(sandbox, "KERNEL", {str(switch): ("0", "sysctl user.max=1")})
    monkeypatch.setattr(sandbox, "wrapped", lambda limits: ["false"])
    assert sandbox.problem().startswith("the kernel forbids user namespaces")
    assert "sysctl user.max=1" in sandbox.problem()
    sandbox._problem.cache_clear()


@contained
def test_an_interpreter_that_does_not_start_is_no_verdict(monkeypatch):
    monkeypatch.setattr(programs, "TEXT", "raise SystemExit('broken on purpose')")
    with pytest.raises(CheckerError, match="did not start: broken on purpose"):
        program("print(1)")
    monkeypatch.setattr(programs, "TEXT", "print('ready', flush=True); input(); exit()")
    with pytest.raises(CheckerError, match="dies of any program"):
        program("print(1)")


def test_without_isolation_each_line_says_so(backend, caplog):
    backend("unsafe")
    assert run(["cat", "a"], files={"a": "1"}).stdout == "1"
    assert program("print(int(input()) * 2)", "4").stdout == "8\n"
    assert program("while True: pass").ended == "time"
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) >= 3 and all("services.sandbox = 'unsafe'" in line for line in lines)


class Service(BaseHTTPRequestHandler):
    """The sandbox service's /execute, with this machine's Python behind it."""

    away = 0  # requests that are refused first
    cut = 0  # answers that end too early, then

    def do_POST(self) -> None:
        """Runs generated_code as `language` says."""
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if Service.away:
            Service.away -= 1
            self.send_error(503)
            return
        assert self.path == "/execute" and request["language"] == "python"
        try:
            done = subprocess.run(
                [*sandbox.python(), "-c", request["generated_code"]],
                input=request["std_input"],
                capture_output=True,
                text=True,
                timeout=request["timeout"],
            )
            told = {"process_status": "error" if done.returncode else "completed"}
            told |= {"stdout": done.stdout, "stderr": done.stderr}
        except subprocess.TimeoutExpired:
            told = {"process_status": "timeout", "stdout": "", "stderr": "Timed out"}
        body = json.dumps(told).encode()
        self.send_response(200)
        if Service.cut:
            Service.cut -= 1
            self.send_header("Content-Length", str(len(body) + 1))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


def test_the_service_runs_programs_and_may_be_away_for_a_while(backend, monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        backend("http", f"http://127.0.0.1:{server.server_port}/")
        Service.away = 1
        assert program("print(Counter(input()))", "aa").stdout == "Counter({'a': 2})\n"
        Service.cut = 1
        assert program("print(1)").stdout == "1\n" and not Service.cut
        assert program("1 / 0").code == 1 and program("while True: pass").ended == "time"
        assert asyncio.run(code.verify(ROW, "```\nprint(49)\n```")).value == 1
        with pytest.raises(CheckerError, match="runs programs and no commands"):
            run(["true"])
    finally:
        server.shutdown()
    server.server_close()
    monkeypatch.setattr(service, "AWAY", 0.5)
    with pytest.raises(CheckerError, match="is away for 0.5 s: .*refused"):
        program("print(1)")


def test_a_process_that_no_processor_takes_up_is_not_slow():
    """Twenty that want the same one: most looks at them fall into a wait that still lasts."""
    code = "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\nwhile 1: pass"
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
    sleeping = subprocess.Popen(["sleep", "60"])
    try:
        clock = sandbox.Clock(sleeping.pid)
        time.sleep(0.5)
        clock.look()
        assert clock.spent > 0.4  # a run that sleeps spends its time
        time.sleep(2)  # and nobody looks
        assert not clock.verdict(Limits(seconds=2))
    finally:
        sleeping.kill()
        sleeping.wait()


@contained
def test_a_run_that_is_given_up_leaves_nothing():
    before = children()

    async def given_up() -> None:
        task = asyncio.create_task(outputs("while True: pass", [""], Limits()))
        await asyncio.sleep(0.5)
        task.cancel()
        await asyncio.wait([task])

    began = time.monotonic()
    asyncio.run(given_up())
    assert time.monotonic() - began < 5 and children() <= before
