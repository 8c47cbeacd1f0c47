"""What is killed, stopped or refused from outside, as often as it may be, has no verdict."""

import asyncio
import itertools
import json
import os
import signal
import time

import pytest
from test_checkers import home, processes  # noqa: F401

from envs.sandbox import checkers, programs, sandbox
from envs.sandbox import outcome as outcomes
from envs.sandbox.checkers import Checkers, Warden
from envs.sandbox.programs import Interpreter
from envs.services import CheckerError
from support.loop import at_once

pytestmark = pytest.mark.slow


def verdict(pool: Checkers, text: str, deadline: float = 5.0) -> dict:
    return asyncio.run(pool.run(deadline, text=text))


@pytest.fixture
def hit(monkeypatch):
    """Calls a function with each warden that is asked about a text that is not empty."""

    def each(function) -> list[str]:
        ask, asked = Warden.ask, []

        def asks(warden: Warden, line: str, timeout: float) -> dict:
            if text := json.loads(line)[1]["text"]:
                asked.append(text)
                function(warden)
            return ask(warden, line, timeout)

        monkeypatch.setattr(Warden, "ask", asks)
        return asked

    return each


def test_a_warden_that_is_killed_each_time(hit):
    """Though a harmless text is answered in between."""
    pool = Checkers("support.evaluating:make_check", children=1)
    asked = hit(lambda warden: os.kill(warden.pid, signal.SIGKILL))
    with pytest.raises(CheckerError, match="the warden died, no verdict"):
        verdict(pool, "1")
    assert len(asked) == checkers.TRIES and verdict(pool, "") == {"value": 0.0}


def test_a_warden_that_is_killed_once(hit):
    pool = Checkers("support.evaluating:make_check", children=1)
    alive = iter([False])
    asked = hit(lambda w: next(alive, True) or os.kill(w.pid, signal.SIGKILL))
    assert verdict(pool, "1") == {"value": 1.0} and len(asked) == 2


def test_a_check_that_is_killed_before_it_is_asked(hit):
    """It has not seen the answer, so it has not died of it."""
    pool = Checkers("support.evaluating:make_counting_check", children=1, answers=9)

    def kill(warden: Warden) -> None:
        (pid,) = sandbox.family(warden.pid)[1:]
        os.kill(pid, signal.SIGKILL)
        while pid in processes():
            time.sleep(0.01)

    assert verdict(pool, "") == {"value": 1.0}
    asked = hit(kill)
    assert verdict(pool, "1") == {"value": 1.0} == verdict(pool, "1")
    assert len(asked) >= 2  # once more if a busy machine starves the next child


def test_a_check_that_is_stopped_and_runs_no_answer(hit):
    """It cannot have stopped itself."""
    pool = Checkers("support.evaluating:make_counting_check", children=1, answers=9)

    def stop(warden: Warden) -> None:
        for pid in sandbox.family(warden.pid)[1:]:
            os.kill(pid, signal.SIGSTOP)

    assert verdict(pool, "") == {"value": 1.0}
    hit(stop)
    with pytest.raises(CheckerError, match="starved of CPU"):
        verdict(pool, "1", 0.5)


def test_a_check_that_cannot_be_forked():
    pool = Checkers("support.evaluating:make_refused_check", children=1)
    with pytest.raises(CheckerError, match="a check could not be started: .*unavailable"):
        verdict(pool, "1")
    assert verdict(pool, "") == {"value": 0.0}


def test_a_warden_that_cannot_be_forked(monkeypatch):
    """For a moment, it is forked a moment later; for long, the server and its wardens live on."""
    monkeypatch.setattr(checkers, "GRACE", 1.0)
    pool = Checkers("support.evaluating:make_crowded_check", children=1)
    assert verdict(pool, "1") == {"value": 1.0}
    server, _ = pool.server
    warden = pool.quick.submit(lambda: pool.own.__dict__.pop("warden")).result()
    with pytest.raises(CheckerError, match="no warden could be forked"):
        verdict(pool, "1")
    assert warden.ask(json.dumps([5.0, {"text": "0.5"}]), 60.0) == {"value": 0.5}
    assert pool.server[0] is server and server.poll() is None


def test_a_check_whose_warden_is_killed_before_it_begins():
    """It ends as well, and keeps nobody waiting."""
    pool = Checkers("support.evaluating:make_orphaned_check", children=1)

    def alive() -> int:
        return sum("make_orphaned_check" in line for line in processes().values())

    assert verdict(pool, "") == {"value": 0.0}
    before, began = alive(), time.monotonic()
    with pytest.raises(CheckerError, match="the warden died"):
        verdict(pool, "1")
    assert time.monotonic() - began < 10
    while alive() > before:
        assert time.monotonic() - began < 20, "a check is left"
        time.sleep(0.1)


# --- interpreters of programs ---------------------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch):
    """No interpreter waits for a program, before or after."""
    close_all()
    monkeypatch.setattr(Interpreter, "rooms", True)
    yield monkeypatch
    close_all()


def close_all() -> None:
    at_once(python.close() for waiting in Interpreter.idle.values() for python in waiting)
    Interpreter.idle.clear()


def outcome(source: str) -> sandbox.Ran:
    async def ran() -> sandbox.Ran:
        return [ran async for ran in programs.programs(source, ["7\n"])][0]

    return asyncio.run(ran())


@pytest.mark.parametrize("victim", [0, -1])
@pytest.mark.parametrize("often", [1, 9])
def test_an_interpreter_that_is_killed(fresh, victim, often):
    """Bubblewrap or the room of a program, or the one process where there is no bubblewrap."""
    ask, left = Interpreter.ask, [often]

    async def asks(python: Interpreter, request: bytes) -> bytes:
        if b"49" in request and left[0]:
            left[0] -= 1
            os.kill(sandbox.family(python.process.pid)[victim], signal.SIGKILL)
        return await ask(python, request)

    fresh.setattr(Interpreter, "ask", asks)
    if often == 1:
        assert outcome("print(49)").stdout == "49\n"
        return
    with pytest.raises(CheckerError, match="the sandbox's Python was killed"):
        outcome("print(49)")
    assert outcome("print(7)").stdout == "7\n"


@pytest.mark.parametrize("number", ["HUP", "INT", "QUIT", "KILL", "TERM"])
def test_a_program_that_a_signal_ends(default_signals, fresh, number):
    """Once, it runs again; each time, it may have been the program."""
    number = getattr(signal, f"SIG{number}")
    text = f"import os; os.kill(os.getpid(), {number:d}); import time; time.sleep(60)"
    assert outcome(text)[2:4] == (-number, "")  # twice
    run, left = Interpreter.run, [text]

    async def runs(python: Interpreter, source: str, stdin: str) -> sandbox.Ran | None:
        return await run(python, left.pop() if left else source, stdin)

    fresh.setattr(Interpreter, "run", runs)
    assert outcome("print(49)").stdout == "49\n"


def test_a_program_that_kills_its_interpreter_has_no_verdict(fresh, request):
    if request.getfixturevalue("home") == "bubblewrap":
        pytest.skip("there it cannot")
    with pytest.raises(CheckerError, match="the sandbox's Python was killed"):
        outcome("import os; os.kill(os.getppid(), 9)")


@pytest.mark.parametrize("place", ["files = [os.memfd_create", "pid = fork()"])
def test_a_program_for_which_there_is_no_room(fresh, place):
    refusal = 'if request["source"]: raise BlockingIOError(11, "refused")'
    text = programs.TEXT.replace(
        f"            {place}", f"            {refusal}\n            {place}"
    )
    assert text != programs.TEXT
    fresh.setattr(programs, "TEXT", text)
    with pytest.raises(CheckerError, match="killed, or refused a process"):
        outcome("print(49)")


def test_a_room_that_is_refused_for_a_moment(fresh, request):
    """Remembered, each later program would start an interpreter of its own."""
    if request.getfixturevalue("home") != "bubblewrap":
        pytest.skip("elsewhere there are no rooms")
    refusal = "raise OSError(errno.ENOMEM, 'no memory')"
    with fresh.context() as crowded:
        text = programs.TEXT.replace("call(libc.unshare, NAMESPACES)", refusal)
        crowded.setattr(programs, "TEXT", text)
        with pytest.raises(CheckerError, match="(?s)did not start: .*no memory"):
            outcome("print(49)")
    assert Interpreter.rooms and outcome("print(49)").stdout == "49\n"


def test_a_thread_that_a_cgroup_refuses_is_no_fault_of_a_program(fresh):
    rising = itertools.count()
    for module in (programs, sandbox):
        fresh.setattr(module, "refusals", lambda: next(rising))
    assert outcome("print(49)").stdout == "49\n"
    with pytest.raises(CheckerError, match="refused a process or thread by .*pids.max"):
        outcome("raise RuntimeError('cannot start new thread')")
    with pytest.raises(CheckerError, match="refused a process or thread by .*pids.max"):
        asyncio.run(sandbox.run(["true"]))


def test_refusals_are_those_of_the_cgroups_above(tmp_path, monkeypatch):
    """In either version of cgroups."""
    monkeypatch.setattr(outcomes, "CGROUPS", tmp_path)
    assert outcomes.refusals() == 0
    with open("/proc/self/cgroup") as lines:
        places = [line.rstrip("\n").split(":", 2)[1:] for line in lines]
    (kinds, path) = next(place for place in places if place[0] in ("", "pids"))
    folder = tmp_path / kinds / path.lstrip("/")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pids.events").write_text("max 3\n")
    assert outcomes.refusals() == 3
