"""What the kernel ends for want of memory has no verdict, in each kind of sandbox."""

import asyncio
import itertools
import json
import multiprocessing
import os
import socket
from concurrent.futures import ProcessPoolExecutor

import pytest
from test_service import SQUARE, contained, reward

from envs import services
from envs.sandbox import checkers, programs, sandbox, service
from envs.sandbox.outcome import Ran
from envs.sandbox.programs import Interpreter
from envs.services import CheckerError
from settings.environment_services import Services
from support.skills import Handler, as_sandbox, executed

KILLED = "import os; os.kill(os.getpid(), 9)"
COUNTS = '    with contextlib.suppress(OSError), open("/proc/vmstat")'
OUT = "the kernel was out of memory and ended a run"


@pytest.fixture
def starved(monkeypatch):
    """Each look at the kernel's counter finds that it has risen."""
    rising = itertools.count()
    for module in (checkers, programs, sandbox):
        monkeypatch.setattr(module, "oom_kills", lambda: next(rising))
    assert COUNTS in service.TEXT
    text = service.TEXT.replace(COUNTS, f"    return time.monotonic_ns()\n{COUNTS}")
    monkeypatch.setattr(programs, "TEXT", text)
    Interpreter.idle.clear()
    yield
    Interpreter.idle.clear()


@contained
def test_a_command_that_is_killed(monkeypatch):
    """The command, or a process that it began."""
    killed = ["sh", "-c", "kill -9 $$"]
    assert asyncio.run(sandbox.run(killed)).code == 137
    rising = itertools.count()
    monkeypatch.setattr(sandbox, "oom_kills", lambda: next(rising))
    for command in (killed, ["sh", "-c", "sh -c 'kill -9 $$'; exit 1"]):
        with pytest.raises(CheckerError, match=OUT):
            asyncio.run(sandbox.run(command))


@contained
@pytest.mark.parametrize("backend", ["bubblewrap", "unsafe"])
async def test_a_program_that_is_killed(starved, backend):
    services.configure(Services(sandbox=backend))
    with pytest.raises(CheckerError, match=OUT):
        await reward(KILLED)
    with pytest.raises(CheckerError, match=OUT):
        await reward("import subprocess; subprocess.run(['sh', '-c', 'kill -9 $$'], check=True)")
    assert await reward(SQUARE) == 1


@contained
async def test_a_program_that_kills_itself_is_wrong():
    assert await reward(KILLED) == 0


def test_an_interpreter_that_is_killed_with_its_program(starved, monkeypatch):
    async def dies(self: Interpreter, source: str, stdin: str) -> None:
        return None

    monkeypatch.setattr(Interpreter, "run", dies)
    with pytest.raises(CheckerError, match=OUT):
        asyncio.run(Interpreter(sandbox.Limits()).judge(SQUARE, "7\n"))


@pytest.mark.parametrize("number", [1, 2, 3, 9, 15])
@pytest.mark.parametrize("last", [Ran("49\n", "", 0, "", 0.1), Ran("", "", -9, "", 0.1)])
def test_a_program_that_is_killed_once_runs_again(monkeypatch, last, number):
    """By what the kernel does not count; what is killed twice has killed itself."""
    outcomes = [Ran("", "", -number, "", 0.1), last]

    async def run(self: Interpreter, source: str, stdin: str) -> Ran:
        return outcomes.pop(0)

    monkeypatch.setattr(Interpreter, "run", run)
    assert asyncio.run(Interpreter(sandbox.Limits()).judge(SQUARE, "7\n")) == last


@pytest.mark.parametrize("number", [1, 2, 3, 9, 15])
def test_a_program_that_is_killed_once_at_a_service_runs_again(monkeypatch, number):
    last = Ran("49\n", "", 0, "", 0.1)
    counted = Ran("oom_kill 0\n", "", 0, "", 0.1)
    outcomes = [Ran("", "", -number, "", 0.1), counted, last]

    async def attempt(*_: object) -> Ran:
        return outcomes.pop(0)

    monkeypatch.setattr(service, "attempt", attempt)
    assert asyncio.run(service.program("", SQUARE, "7\n", sandbox.Limits())) == last


def verdict_of_one_killed_while_it_sends() -> dict:
    """Of a warden, which kills and reaps all children of its process: it must have its own."""

    def begin(function: object, channel: socket.socket, left: int) -> int:
        if pid := os.fork():
            return pid
        channel.recv(1)
        (size,) = checkers.SIZE.unpack(checkers.exactly(channel, checkers.SIZE.size))
        checkers.exactly(channel, size)
        token = checkers.exactly(channel, checkers.TOKEN)
        channel.sendall(token + checkers.SIZE.pack(1000) + b'{"value": 1')
        os._exit(0)

    checkers.begin = begin
    ours, theirs = socket.socketpair()
    with ours, theirs:
        return checkers.Check(lambda: {}, 1).judge({"text": "2"}, 5.0, ours)


def test_a_check_that_is_killed_while_it_sends_has_no_verdict():
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as own:
        verdict = own.submit(verdict_of_one_killed_while_it_sends).result(60)
    assert verdict == {"failed": "code 0 in the middle of a verdict"}


def test_a_check_that_is_killed(starved):
    dies = checkers.Checkers("support.evaluating:make_check", children=1)
    with pytest.raises(CheckerError, match=OUT):
        asyncio.run(dies.run(5.0, text="__import__('os')._exit(3)"))


@pytest.mark.parametrize("victim", ["pid", "os.getpid()"])
async def test_a_program_that_is_killed_at_a_service(tmp_path, victim):
    """Alone, or with its interpreter. The kernel counts it."""
    counter = tmp_path / "vmstat"
    kills = itertools.count()
    forked = '        ended = watch(pid, limits["seconds"])'
    slow = f"import time; time.sleep(5); {SQUARE}"  # or it may have ended before it is killed
    assert forked in service.TEXT

    def starved(_: Handler, given: dict) -> dict | int:
        counter.write_text(f"oom_kill {next(kills)}\n")
        code, program = (
            given[name].replace("/proc/vmstat", str(counter))
            for name in ("generated_code", "std_input")
        )
        if json.dumps(slow) in program:
            counts = f"write({str(counter)!r}, 'oom_kill {next(kills)}\\n')"
            code = code.replace(forked, f"        {counts}; os.kill({victim}, 9)\n{forked}")
        return executed(given | {"generated_code": code, "std_input": program})

    with as_sandbox(starved):
        with pytest.raises(CheckerError, match="gave no outcome for a program"):
            await reward(slow)
        assert await reward("print(1)") == 0 and await reward("print(49)") == 1
