"""Python sessions: what they remember, what ends them, what they cannot reach; their episodes."""

import asyncio
import json
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from envs import Reward, services
from envs.maths import python_tool
from envs.sandbox import programs, sandbox, sessions
from envs.sandbox.sandbox import Limits
from envs.sandbox.sessions import Host, Session
from settings.environment_services import Services
from support.data import in_both
from support.hostile_programs import ESCAPES, OUT
from support.loop import at_once
from support.scripts import Script, calling
from support.skills import Handler, as_sandbox
from support.tables import refused
from support.verifiers import HOSTILE, rows_of

contained = pytest.mark.skipif(bool(sandbox.problem()), reason=sandbox.problem())
QUICK = Limits(seconds=1.0, memory=1 << 30, output=1000, processes=32, disk=16 << 20)
TOOLS = [{"type": "function", "name": python_tool.TOOL}]
ROW = {"agent_ref": {"name": "ns_tools_simple_agent"}}
ROW |= {"responses_create_params": {"input": "12 * 12?", "tools": TOOLS}, "expected_answer": "144"}


def close_hosts() -> None:
    while Host.shared:
        Host.shared.popitem()[1].close()


def children() -> set[int]:
    """The processes that came from this one, without those that make sessions."""
    close_hosts()
    return set(sandbox.family(os.getpid())) - {os.getpid()}


async def session(*pieces: str, limits: Limits = QUICK) -> list[str]:
    """What a session says to each piece of code."""
    async with Session(limits) as python:
        return [await python.run(code) for code in pieces]


def error(output: str) -> str:
    return output.splitlines()[-1]


@contained
async def test_a_session_remembers_as_a_notebook_does():
    assert await session(
        "x = 3\nprint('hi')\nx * 2",
        "x + 1;",
        "_ + x",
        "def f(n):\n    return n * x\n\nf(2)",
        "None",
        "import os; os.getcwd()",
        "exit()",
        "x",
        "",
        "open('a', 'w').write('kept');",
        "open('a').read()",
        "for i in range(2): print(i)",
    ) == ["hi\n6", "", "9", "6", "", "'/work'", "", "3", "", "", "'kept'", "0\n1"]


@contained
async def test_what_goes_wrong_is_the_output():
    zero, syntax, unknown, read = await session("1 / 0", "x =", "def f():\n    g()\nf()", "input()")
    assert zero.splitlines()[1:3] == ['  File "<cell 1>", line 1, in <module>', "    1 / 0"]
    assert error(zero) == "ZeroDivisionError: division by zero"
    assert error(syntax) == "SyntaxError: invalid syntax" and "interpreter" not in syntax
    assert "    g()" in unknown and error(unknown) == "NameError: name 'g' is not defined"
    assert error(read) == "EOFError: EOF when reading a line"


@contained
async def test_output_is_cut_and_comes_from_processes_too():
    long, system, surrogate = await session(
        "print('a' * 5000)",
        "import os\nprint(1, flush=True)\nos.system('echo 2; echo 3 >&2');",
        "print('\\ud800')",
    )
    assert long == "a" * 1000 + sessions.CUT
    assert system == "1\n2\n3" and surrogate == "\\ud800"


@contained
async def test_libraries_are_there():
    if not sandbox.own_packages():
        pytest.skip("nobody may read this Python's packages")
    code = "import numpy, sympy\nprint(sympy.factorint(120), numpy.arange(3).sum())"
    late = "import importlib, mpmath; importlib.import_module('sympy.physics.quantum').__name__"
    assert await session(code, late) == ["{2: 3, 3: 1, 5: 1} 3", "'sympy.physics.quantum'"]


BABBLE = """
import os
for i in range(3, 99):
    try: os.write(i, b'x' * 10**5)
    except OSError: pass"""


@contained
@pytest.mark.parametrize(("code", "why"), [
    ("while True: pass", "Timed out after 1 s."),
    ("import time; time.sleep(100)", "Timed out after 1 s."),
    ("import os; os._exit(0)", "The code ended the interpreter."),
    ("import ctypes; ctypes.string_at(0)", "The code ended the interpreter."),
    (BABBLE, ""),
])  # fmt: skip
async def test_a_session_that_cannot_go_on_is_begun_anew(code, why):
    _, output, new, after = await session("x = 1", code, "y = 1", "'x' in globals(), y")
    assert output.startswith(why) and output.endswith(sessions.LOST)
    assert (new, after) == ("", "(False, 1)")


@contained
async def test_a_call_has_a_limit_of_memory():
    code = "x = 1\na = [bytearray(10**8) for _ in range(99)]"
    output, after = await session(code, "x", limits=QUICK._replace(seconds=10.0))
    assert error(output) == "MemoryError" and after == "1"


@contained
async def test_nothing_runs_between_two_calls():
    """Processes are dead, threads stand still, and a fork is not a second session."""
    began, forked, alone, counted, later = await session(
        "import os, subprocess, threading, time\n"
        "subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        "n = 0\n"
        "def count():\n"
        "    global n\n"
        "    while True: n += 1; time.sleep(0.001)\n"
        "threading.Thread(target=count, daemon=True).start();",
        "os.fork();",
        "[name for name in os.listdir('/proc') if name.isdigit()]",
        "before = n, time.time()",
        "n - before[0] < 200",
    )
    assert (began, forked, counted) == ("", "", "") and alone == "['1']" and later == "True"


@contained
async def test_a_session_stands_still_while_its_policy_thinks():
    """A thread that would spin uses no processor between two calls."""

    def clock(pid: int) -> float:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9

    async with Session(QUICK) as python:
        await python.run("import threading\ndef f():\n    while True: pass")
        await python.run("threading.Thread(target=f, daemon=True).start()")
        before = clock(python.pid)
        await asyncio.sleep(0.5)
        assert clock(python.pid) - before < 0.05


@contained
@pytest.mark.parametrize("rooms", [True, False])
async def test_sessions_find_nothing_of_each_other(monkeypatch, rooms):
    """Those of one host, if the kernel allows rooms; else each has a sandbox of its own."""
    before = children()
    close_hosts()
    if not rooms:
        text = programs.TEXT.replace("libc.unshare, NAMESPACES", "libc.unshare, -1")
        monkeypatch.setattr(sessions, "TEXT", text)
        monkeypatch.setattr(Host, "rooms", True)
    async with Session(QUICK) as one, Session(QUICK) as other:
        await one.run("open('/tmp/mark', 'w').write('1'); open('mark', 'w').write('1')")
        await one.run("import socket; s = socket.create_server(('127.0.0.1', 8000))")
        seen = await other.run(
            "import os, socket\n"
            "socket.create_server(('127.0.0.1', 8000)).close()\n"
            "os.listdir('/tmp'), os.listdir('.'), 'socket' in globals()"
        )
        processes = await other.run("sum(name.isdigit() for name in os.listdir('/proc'))")
    assert seen == "([], [], True)"
    assert Host.rooms == rooms and (processes == "1") == rooms
    assert len(Host.shared) == rooms
    monkeypatch.undo()
    assert children() <= before


NOTHING = "print(sum(map(int, '7' * 7)))"


@contained
@pytest.mark.slow
def test_nothing_gets_out_and_nothing_stays(monkeypatch):
    """No attempt reaches its end, each ends in time, and its neighbours do not notice it."""
    before = children()

    async def attempt(code: str) -> list[str]:
        async with Session(QUICK) as python:
            return [await python.run(code), await python.run(NOTHING)]

    pieces = (piece for code in ESCAPES.values() for piece in (code, NOTHING))
    outputs = at_once(attempt(piece) for piece in pieces)
    out = dict(zip(ESCAPES, outputs[::2], strict=True))
    assert [name for name in OUT if error(out[name][0] or "-") == "49"] == []
    assert {tuple(pair) for pair in outputs[1::2]} == {("49", "49")}
    # What an attempt has ended is begun anew. Two have changed what they are told with.
    assert [n for n, pair in out.items() if pair[1] != "49"] == ["replace print", "trace functions"]
    assert children() <= before
    assert not any(Path(path).exists() for path in ("/escaped", "/usr/escaped", "/etc/x"))


@contained
async def test_an_episode_that_is_given_up_leaves_nothing():
    before = children()

    class Thinks(Script):
        async def chat(self, messages: list, tools: list | None = None):
            if self.length:
                await asyncio.sleep(1000)
            return await Script.chat(self, messages, tools)

    async def given_up(code: str, seconds: float) -> set[int]:
        script = Thinks([calling(python_tool.TOOL, code=code)])
        task = asyncio.create_task(python_tool.rollout(ROW, script))
        await asyncio.sleep(seconds)
        (host,) = Host.shared.values()
        during = len(sandbox.family(host.process.pid))
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        for _ in range(100):  # the kernel takes its time to end a room
            if len(after := sandbox.family(host.process.pid)) < during:
                break
            await asyncio.sleep(0.02)
        return set(after)

    assert await given_up("1", 2.5) == await given_up("while True: pass", 1)
    assert children() <= before


@contained
def test_a_process_that_is_killed_leaves_nothing():
    code = """
import asyncio
from test_python_tool import *
async def stay():
    async with Session(QUICK) as python:
        await python.run("1")
        print(*sandbox.family(os.getpid())[1:], flush=True)
        await asyncio.sleep(1000)
asyncio.run(stay())"""
    env = os.environ | {"PYTHONPATH": ":".join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE) as process:
        began = set(map(int, process.stdout.readline().split()))
        process.kill()
    until = time.monotonic() + 60
    while left := {pid for pid in began if Path(f"/proc/{pid}").exists()}:
        assert time.monotonic() < until, left
        time.sleep(0.05)
    assert len(began) >= 3


@contained
async def test_a_host_that_died_is_no_output():
    async with Session(QUICK) as python:
        await python.run("x = 1")
        python.host.process.kill()
        python.host.process.wait()
        with pytest.raises(services.CheckerError, match="the sandbox's Python ended"):
            while True:  # the kernel takes its time to end what is in the sandbox
                assert await python.run("x") == "1"
    assert await session("2") == ["2"]


@contained
async def test_a_session_that_does_not_start_is_no_output(monkeypatch):
    before = children()
    close_hosts()
    monkeypatch.setattr(sessions, "TEXT", "raise SystemExit('broken on purpose')")
    with pytest.raises(services.CheckerError, match="did not start a session: broken on purpose"):
        await session("1")
    monkeypatch.setattr(sessions, "TEXT", "import time; time.sleep(100)")
    monkeypatch.setattr(sessions, "START", 0.3)
    with pytest.raises(services.CheckerError, match="it sent no greeting"):
        await session("1")
    assert children() <= before


async def test_without_isolation_each_host_says_so(caplog):
    before = children()
    services.configure(Services(sandbox="unsafe"))
    late = f"Timed out after 1 s. {sessions.LOST}"
    assert (await session("x = 2", "x * 2", "while True: pass"))[1:] == ["4", late]
    assert any("services.sandbox = 'unsafe'" in line.getMessage() for line in caplog.records)
    assert children() <= before


async def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(sandbox, "WORKS", [])
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None)
    with pytest.raises(services.CheckerError, match="bwrap is not on the path"):
        close_hosts()
        await session("1")


REPEATS = """
import sys
names = {}
for line in sys.stdin:
    exec(eval(line), names)
    print('.', flush=True)"""


async def test_the_service_has_sessions_too():
    """Each is a process of this machine's Python."""
    known: dict[str, subprocess.Popen] = {}

    def answer(asked: Handler, request: dict) -> dict:
        name = asked.headers["X-Session-ID"]
        if asked.command == "DELETE":
            assert asked.path == f"/sessions/{name}"
            process = known.pop(name)
            process.kill()
            process.communicate()
            return {}
        assert request["language"] == "ipython" and request["max_output_characters"] == 1000
        told = {"new_session_created": name not in known, "stderr": ""}
        if name not in known:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            known[name] = subprocess.Popen([sys.executable, "-c", REPEATS], **pipes)
        process = known[name]
        print(repr(request["generated_code"]), file=process.stdin, flush=True)
        said = "".join(iter(process.stdout.readline, ".\n"))
        return told | {"stdout": said, "process_status": "completed"}

    with as_sandbox(answer):
        async with Session(QUICK) as python, Session(QUICK) as other:
            assert [await python.run("x = 1"), await python.run("print(x)")] == ["", "1"]
            await other.run("y = 1")
            assert len(known) == 2
            known.pop(python.name).kill()
            assert await python.run("print(2)") == f"2\n{sessions.LOST}"
        assert not known


# --- episodes -------------------------------------------------------------------------------------


def episode(answers: list, row: dict = ROW) -> tuple:
    """The reward of an episode, and what its policy has read before each answer."""
    script = Script(answers)
    return asyncio.run(python_tool.rollout(row, script)), script.last()


@contained
def test_an_episode_calculates_and_is_judged_by_its_last_answer():
    run = lambda code: calling(python_tool.TOOL, code=code)  # noqa: E731
    done, read = episode([run("x = 12"), run("x * x"), "It is \\boxed{144}."])
    assert done.reward.value == 1 and len(done.turns) == 3
    assert read == ["12 * 12?", "", "144"]
    done, read = episode([run("144"), calling(python_tool.TOOL, code=5), "\\boxed{12}"])
    assert done.reward.value == 0 and json.loads(read[2]).keys() == {"error"}
    done, _ = episode([run("print('\\\\boxed{144}')")] * 60)
    assert len(done.turns) == python_tool.MAX_STEPS and done.reward.value == 0


@contained
def test_many_episodes_at_once():
    async def one(number: int) -> Reward:
        name = uuid.uuid4().hex
        pieces = [f"{'x' + name} = {number}", f"print({'x' + name} ** 2)"]
        answers = [calling(python_tool.TOOL, code=code) for code in pieces]
        row = ROW | {"expected_answer": str(number**2)}
        script = Script([*answers, f"\\boxed{{{number**2}}}"])
        return (await python_tool.rollout(row, script)).reward

    assert [reward.value for reward in at_once(map(one, range(40)))] == [1.0] * 40
    (host,) = [h for limits, h in Host.shared.items() if limits == python_tool.LIMITS]
    until = time.monotonic() + 60
    while len(left := sandbox.family(host.process.pid)) > 3 and time.monotonic() < until:
        time.sleep(0.05)
    assert len(left) <= 3, "bubblewrap, and the process that makes sessions"


@in_both
def test_rows_load_and_are_judged_as_mathematics(place):
    for row in rows_of("ns_tools_simple_agent", "ns_tools", place):
        python_tool.check(row)
        assert {need.name for need in python_tool.needs(row)} >= {"sandbox", "tool_parser"}
        gold = f"\\boxed{{{row['expected_answer']}}}"
        assert asyncio.run(python_tool.verify(row, gold)).value == 1
        assert asyncio.run(python_tool.verify(row, "")).info == {"reason": "empty"}
        assert asyncio.run(python_tool.verify(row, f"<think>{gold}")).value == 0


@pytest.mark.parametrize("text", HOSTILE[:4], ids=lambda text: repr(text[:8]))
def test_no_answer_is_paid_for_what_it_is_not(text):
    assert asyncio.run(python_tool.verify(ROW, text)).value == 0


@contained
async def test_hostile_code_is_answered(monkeypatch):
    """Whatever it is: a text comes back, and the session or its follower goes on."""
    outputs = await session(*HOSTILE, "1")
    assert outputs[-1] == "1" and all(len(output) < 1200 for output in outputs)


test_bad_rows_are_named = refused(
    lambda change: python_tool.check(ROW | change),
    ({"verifier_type": "mcqa"}, "verifier_type is 'mcqa', expected one of: math_with_judge"),
    ({"verifier_type": 5}, "verifier_type is 5"),
    ({"expected_answer": " "}, "expected_answer is ' '"),
    ({"responses_create_params": {"tools": None}}, "tools is missing"),
    ({"responses_create_params": {"tools": []}}, r"tools is \[\]"),
    ({"responses_create_params": {"tools": [{"type": "function", "name": "sh"}]}},
     "expected the tool stateful_python_code_exec"),
)  # fmt: skip
