"""The sandbox service: its verdicts are those of bubblewrap, and no failure of it is a verdict."""

import asyncio
import itertools
import json
import os
import random
import subprocess
import time
from types import SimpleNamespace

import pytest

from envs import services
from envs.coding import code
from envs.sandbox import interpreter, programs, sandbox, service
from envs.sandbox.outcome import Limits, Ran
from envs.sandbox.sessions import Session
from envs.services import CheckerError
from settings.environment_services import Services
from support.skills import as_sandbox, executed, skills

LIMITS = Limits(seconds=1.0, memory=1 << 30, output=1000)
ROW = {"verifier_metadata": {"unit_tests": {"inputs": ["7\n"], "outputs": ["49"]}}}
SQUARE = "print(int(input()) ** 2)"
contained = pytest.mark.skipif(bool(sandbox.problem()), reason=sandbox.problem())


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(service, "AWAY", 3.0)
    yield
    service.problem.cache_clear()


async def outcome(source: str, stdin: str = "7\n") -> Ran:
    """The outcome of one program."""
    return [ran async for ran in programs.programs(source, [stdin], LIMITS)][0]


async def verdict(source: str) -> tuple:
    """The outcome without what it wrote to stderr, where a Python names its own lines."""
    ran = await outcome(source)
    return ran.stdout, ran.code, ran.ended


async def reward(text: str) -> float:
    """What the environment `code` pays for an answer."""
    return (await code.verify(ROW, f"```python\n{text}\n```")).value


# --- one verdict ----------------------------------------------------------------------------------

BEFORE = ("", "print('é\\u4e2d')\n", "import sys; sys.stderr.write('x' * 5000)\n", "x = input()\n")
MIDDLE = ("", "print(49)\n", "print(49, flush=True)\n", "import os; os.write(1, b'\\xff\\x00')\n")
ENDS = {
    "nothing": "",
    "an error": "1 / 0",
    "an exit code": "import os; os._exit(3)",
    "exit": "exit(3)",
    "segmentation fault": "import ctypes; ctypes.string_at(0)",
    "abort": "import os; os.abort()",
    "its own end": "import os; os.kill(os.getpid(), 9)",
    "too much memory": "x = bytearray(3 << 30)",
    "too much output": "print('x' * 2000)",
    "deep recursion": "f = lambda n: n and f(n - 1)\nf(20_000)",
    "half a surrogate pair": "print('\\ud800')",
    "no Python": "print(",
    "NUL": "print(49)\0",
    "a forged outcome": 'print(\'ready\\n{"stdout": "49", "stderr": "", "code": 0, "ended": ""}\')',
}
PROGRAMS = list(itertools.product(BEFORE, MIDDLE, BEFORE, MIDDLE, ENDS))  # 3,584
CHOSEN = random.Random(0).sample(PROGRAMS, int(os.environ.get("GRPO_PROGRAMS", "24")))


@contained
@pytest.mark.slow
async def test_verdicts_are_those_of_bubblewrap():
    """Of as many programs as GRPO_PROGRAMS says."""
    sources = ["".join([*parts, ENDS[end]]) for *parts, end in CHOSEN]
    expected = [await verdict(source) for source in sources]
    with as_sandbox():
        for source, ran in zip(sources, expected, strict=True):
            assert await verdict(source) == ran, source


async def test_the_streams_of_a_program_are_files_and_not_the_service_s_pipes():
    looks = "import sys\nsys.stderr.write('abc')\nprint(sys.stderr.seekable(), sys.stderr.tell())"
    with as_sandbox():
        assert (await outcome(looks)).stdout == "True 3\n"


@pytest.mark.slow
async def test_a_program_that_takes_too_long_is_ended_by_its_own_clock():
    with as_sandbox():
        for waits in ("while True: pass", "import time; time.sleep(100)"):
            assert (await outcome(f"print(49)\n{waits}")).ended == "time"
        long = f"text = {'y' * 200_000!r}\nprint(len(text), len(input()))"
        assert (await outcome(long, "z" * 200_000 + "\n")).stdout == "200000 200000\n"
        harms = "import os; print(49, flush=True); os.kill(os.getppid(), 11)"
        assert (await outcome(harms)).ended == "killed" and await reward(harms) == 0
        kills = "import os; print(49, flush=True); os.kill(os.getppid(), 9)"
        with pytest.raises(CheckerError, match="gave no outcome"):  # anybody there could
            await outcome(kills)
        assert await reward(SQUARE) == 1
        assert (await outcome("print(Counter(input()))", "aa")).stdout == "Counter({'a': 2})\n"
        with pytest.raises(CheckerError, match="runs programs but no commands"):
            await sandbox.run(["true"])


def test_a_pause_of_the_machine_is_no_time_of_a_program(monkeypatch):
    jumps = iter([0.0, 0.0, 60.0])
    past = [0.0]

    def monotonic() -> float:
        past[0] += next(jumps, 0.0)
        return time.monotonic() + past[0]

    clock = SimpleNamespace(monotonic=monotonic, sleep=time.sleep)
    monkeypatch.setattr(interpreter, "time", clock)
    with subprocess.Popen(["sleep", "0.5"]) as process:
        assert interpreter.watch(process.pid, 5.0) == ""
    with subprocess.Popen(["sleep", "60"]) as process:
        assert interpreter.watch(process.pid, 0.3) == "time"


def test_a_thread_that_waited_and_ended_costs_a_program_no_time(monkeypatch):
    """It had waited for a processor for 100 s, and the others never."""
    found = iter([{"first": 0.0, "second": 0.0}, {"first": 0.0, "second": 100.0}])
    monkeypatch.setattr(interpreter, "queues", lambda _: next(found, {"first": 0.0}))
    with subprocess.Popen(["sleep", "0.5"]) as process:
        assert interpreter.watch(process.pid, 5.0) == ""


@pytest.mark.parametrize(("percent", "ended", "looks"), [(50, "time", 20), (15, "late", 50)])
def test_a_program_that_starves_is_late_once_half_of_its_deadline_is_used(
    monkeypatch, percent, ended, looks
):
    """Its clock gains a tenth of a second at each look, of which it gets a share."""
    past = itertools.count()
    queued = itertools.count()
    seconds = SimpleNamespace(monotonic=lambda: next(past) / 10, sleep=lambda _: None)
    monkeypatch.setattr(interpreter, "time", seconds)
    waits = (100 - percent) / 1000
    monkeypatch.setattr(interpreter, "queues", lambda _: {"first": next(queued) * waits})
    with subprocess.Popen(["sleep", "60"]) as process:
        assert interpreter.watch(process.pid, 1.0) == ended
    assert next(past) == pytest.approx(looks, abs=3)


async def test_a_program_that_starves_at_the_service_is_counted(monkeypatch):
    reply = {"process_status": "completed", "stderr": ""}

    async def execute(*_) -> dict:
        return reply

    monkeypatch.setattr(service, "execute", execute)
    before = services.report().starved
    late = {"stdout": "", "stderr": "", "code": -9, "ended": "late"}
    reply["stdout"] = f"ready\n{json.dumps(late)}\n"
    assert (await service.program("http://h:1", "", "", LIMITS)).ended == "time"
    reply["process_status"] = "timeout"
    with pytest.raises(CheckerError, match="gave no outcome in"):
        await service.program("http://h:1", "", "", LIMITS)
    assert services.report().starved - before == {"none/timeout": 1, "none/error": 1}


async def test_a_file_that_a_program_left_is_no_module_of_the_next(monkeypatch, tmp_path):
    """The service's programs have one folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fcntl.py").write_text("raise SystemExit")
    with as_sandbox():
        assert await reward(SQUARE) == 1


def test_a_fork_is_tried_again_where_there_is_no_room_for_it(monkeypatch):
    left = [OSError(11, "no"), OSError(12, "no"), 7]

    def fork() -> int:
        if isinstance(made := left.pop(0), OSError):
            raise made
        return made

    monkeypatch.setattr(interpreter.os, "fork", fork)
    assert interpreter.fork() == 7


# --- no failure is a verdict ----------------------------------------------------------------------


FAULTS = {
    "no text": {"process_status": "completed", "stdout": None, "stderr": ""},
    "no field": {"process_status": "completed", "stdout": "49\n"},
    "a list": [1],
    "no JSON": b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n49\n",
    "a cut answer": b'HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"process_status": "comp',
    "two answers": b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n{}{}",
    "no HTTP": b"49\n",
    "nothing": b"",
    "an error": 500,
    "too much": b"HTTP/1.1 200 OK\r\nContent-Length: 9000000\r\n\r\n" + b" " * 9_000_000,
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_an_answer_that_is_none_is_asked_for_again(fault):
    left = [FAULTS[fault]]
    with as_sandbox(lambda _, given: left.pop() if left else executed(given)):
        assert (await outcome(SQUARE)).stdout == "49\n" and not left


@pytest.mark.parametrize(("said", "why"), [
    ({"process_status": "completed", "stdout": "49\n", "stderr": ""}, "gave no outcome"),
    ({"process_status": "completed", "stdout": "ready\n", "stderr": "Killed"}, "no outcome"),
    ({"process_status": "completed", "stdout": 'ready\n{"stdout": "4', "stderr": ""}, "gave no"),
    *[({"process_status": "completed", "stdout": f"ready\n{line}", "stderr": ""}, "gave no outcome")
      for line in ('{"stdout": null, "stderr": "", "code": 0, "ended": ""}',
                   '{"stdout": "", "stderr": "", "code": 0, "ended": null}',
                   '{"stdout": "", "stderr": "", "code": Infinity, "ended": ""}',
                   '{"stdout": "", "stderr": "", "code": true, "ended": ""}')],
    ({"process_status": "error", "stdout": "", "stderr": ""}, "gave no outcome"),
    ({"process_status": "timeout", "stdout": "", "stderr": ""}, "gave no outcome in 25 s"),
    (403, "refused a request: status 403"),
    (b"HTTP/1.1 302 Found\r\nLocation: /x\r\nContent-Length: 0\r\n\r\n", "status 302"),
    (b"HTTP/1.1 307 Found\r\nLocation: /x\r\nContent-Length: 0\r\n\r\n", "status 307"),
])  # fmt: skip
async def test_a_service_that_fails_gives_no_verdict(said, why):
    with as_sandbox(lambda _, given: said), pytest.raises(CheckerError, match=why):
        await outcome(SQUARE)


async def test_a_service_may_be_away_for_a_limited_time():
    left = [503, 429]
    with as_sandbox(lambda _, given: left.pop() if left else executed(given)):
        assert (await outcome(SQUARE)).stdout == "49\n" and not left
    with pytest.raises(CheckerError, match="has been down for 3 s: .*Cannot connect"):
        await outcome(SQUARE)


async def test_a_session_that_fails_shows_the_model_nothing():
    """The service says "error" both of code that raises and of a session that it cannot make."""
    said = {"process_status": "error", "stdout": "", "stderr": "NameError: name 'x'\n"}
    with as_sandbox(lambda *_: said):
        assert await Session(LIMITS).run("x") == "NameError: name 'x'"
        said["stderr"] = "Session error: [Errno 12] Cannot allocate memory\n"
        with pytest.raises(CheckerError, match="answered .*Cannot allocate memory"):
            await Session(LIMITS).run("x")


async def test_slow_answers_end_at_the_deadline_and_delay_no_other(monkeypatch):
    """Sixteen of them, a byte a moment each."""
    monkeypatch.setattr(service, "GRACE", 1.0)
    monkeypatch.setattr(service, "START", 0.0)
    monkeypatch.setattr(service, "AWAY", 0.0)
    with skills(lambda handler, _: handler.drip(0.2)) as slow, skills() as healthy:
        began = time.monotonic()
        drips = [service.program(slow, SQUARE, "7\n", LIMITS) for _ in range(16)]
        waiting = asyncio.gather(*drips, return_exceptions=True)
        await asyncio.sleep(0.3)
        ran = await service.program(healthy, SQUARE, "7\n", LIMITS)
        assert ran.stdout == "49\n"
        quick = time.monotonic() - began
        errors = await waiting
        whole = time.monotonic() - began
    assert all("has been down for 0 s: TimeoutError" in str(error) for error in errors)
    assert quick < whole and whole >= 6.0  # seconds: five of the deadline's one, and the grace


# --- before a run starts --------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["localhost:6000", "http://", "ftp://127.0.0.1:6000"])
def test_an_address_that_is_none_is_refused_where_it_is_read(url):
    with pytest.raises(ValueError, match=f"services.sandbox_url = '{url}', expected an address"):
        Services(sandbox_url=url)


def test_a_service_needs_an_address():
    services.configure(Services(sandbox="http"))
    assert sandbox.NEED.problem() == "services.sandbox_url = '', expected http://HOST:PORT"


def test_a_service_is_asked_before_a_run_starts(monkeypatch):
    monkeypatch.setattr(service, "STARTS", 0.5)
    with as_sandbox() as url:
        assert sandbox.NEED.problem() == ""
    service.problem.cache_clear()
    assert f"GET {url}/health: " in sandbox.NEED.problem()
    assert "refused" in sandbox.NEED.problem()
