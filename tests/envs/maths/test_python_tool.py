"""Python sessions: what they remember, what ends them, what they cannot reach; their episodes."""

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from envs import Reward
from envs.maths import python_tool
from envs.rollout import services
from envs.sandbox import programs, sandbox, sessions
from envs.sandbox.checkers import CheckerError
from envs.sandbox.sandbox import Limits
from envs.sandbox.sessions import Host, Session
from support.escapes import ESCAPES, OUT
from support.scripts import Script, calling
from support.verifiers import HOSTILE, gym_rows

contained = pytest.mark.skipif(bool(sandbox.problem()), reason=sandbox.problem())
QUICK = Limits(seconds=1.0, memory=1 << 30, output=1000, processes=32, disk=16 << 20)
TOOLS = [{"type": "function", "name": python_tool.TOOL}]
ROW = {
    "agent_ref": {"name": "ns_tools_simple_agent"},
    "responses_create_params": {"input": "12 * 12?", "tools": TOOLS},
    "expected_answer": "144",
}


@pytest.fixture
def backend(monkeypatch):
    """A function that chooses the sandbox of a test."""
    close_hosts()
    made = lambda name, url="": services.Services(sandbox=name, sandbox_url=url)  # noqa: E731
    yield lambda *args: monkeypatch.setattr(services, "_current", [made(*args)])
    close_hosts()


def close_hosts() -> None:
    while Host.shared:
        Host.shared.popitem()[1].close()


def children() -> set[int]:
    """The processes that came from this one, without those that make sessions."""
    close_hosts()
    return set(sandbox.family(os.getpid())) - {os.getpid()}


async def said(pieces: list[str], limits: Limits = QUICK) -> list[str]:
    async with Session(limits) as python:
        return [await python.run(code) for code in pieces]


def session(*pieces: str, limits: Limits = QUICK) -> list[str]:
    """What a session says to each piece of code."""
    return asyncio.run(said(list(pieces), limits))


def error(output: str) -> str:
    return output.splitlines()[-1]


@contained
def test_a_session_remembers_as_a_notebook_does():
    assert session(
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
def test_what_goes_wrong_is_the_output():
    zero, syntax, unknown, read = session("1 / 0", "x =", "def f():\n    g()\nf()", "input()")
    assert zero.splitlines()[1:3] == ['  File "<cell 1>", line 1, in <module>', "    1 / 0"]
    assert error(zero) == "ZeroDivisionError: division by zero"
    assert error(syntax) == "SyntaxError: invalid syntax" and "interpreter" not in syntax
    assert "    g()" in unknown and error(unknown) == "NameError: name 'g' is not defined"
    assert error(read) == "EOFError: EOF when reading a line"


@contained
def test_output_is_cut_and_comes_from_processes_too():
    long, system, surrogate = session(
        "print('a' * 5000)",
        "import os\nprint(1, flush=True)\nos.system('echo 2; echo 3 >&2');",
        "print('\\ud800')",
    )
    assert long == "a" * 1000 + sessions.CUT
    assert system == "1\n2\n3" and surrogate == "\\ud800"


@contained
def test_libraries_are_there():
    if not sandbox.own_packages():
        pytest.skip("nobody may read this Python's packages")
    code = "import numpy, sympy\nprint(sympy.factorint(120), numpy.arange(3).sum())"
    late = "import importlib, mpmath; importlib.import_module('sympy.physics.quantum').__name__"
    assert session(code, late) == ["{2: 3, 3: 1, 5: 1} 3", "'sympy.physics.quantum'"]


BABBLE = """
import os
for i in range(3, 99):
    try: os.write(i, b'x' * 10**5)
    except OSError: pass"""


@contained
@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("while True: pass", "Timed out after 1 s."),
        ("import time; time.sleep(100)", "Timed out after 1 s."),
        ("import os; os._exit(0)", "The code ended the interpreter."),
        ("import ctypes; ctypes.string_at(0)", "The code ended the interpreter."),
        (BABBLE, ""),
    ],
)
def test_a_session_that_cannot_go_on_is_begun_anew(code, why):
    _, output, new, after = session("x = 1", code, "y = 1", "'x' in globals(), y")
    assert output.startswith(why) and output.endswith(sessions.LOST)
    assert (new, after) == ("", "(False, 1)")


@contained
def test_a_call_has_a_limit_of_memory():
    code = "x = 1\na = [bytearray(10**8) for _ in range(99)]"
    output, after = session(code, "x", limits=QUICK._replace(seconds=10.0))
    assert error(output) == "MemoryError" and after == "1"


@contained
def test_nothing_runs_between_two_calls():
    """Processes are dead, threads stand still, and a fork is not a second session."""
    began, forked, alone, counted, later = session(
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


def test_a_session_stands_still_while_its_policy_thinks():
    """A thread that would spin uses no processor between two calls."""
    if why := sandbox.problem():
        pytest.skip(why)

    async def used() -> float:
        async with Session(QUICK) as python:
            await python.run("import threading\ndef f():\n    while True: pass")
            await python.run("threading.Thread(target=f, daemon=True).start()")
            spent = [await asyncio.sleep(0.5, clock(python.pid)) or clock(python.pid)]
            return clock(python.pid) - spent[0]

    def clock(pid: int) -> float:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9

    assert asyncio.run(used()) < 0.05


@contained
@pytest.mark.parametrize("rooms", [True, False])
def test_sessions_find_nothing_of_each_other(monkeypatch, rooms):
    """Those of one host, if the kernel allows rooms; else each has a sandbox of its own."""
    before = children()
    close_hosts()
    if not rooms:
        text = programs.TEXT.replace("libc.unshare, NAMESPACES", "libc.unshare, -1")
        monkeypatch.setattr(sessions, "TEXT", text)
        monkeypatch.setattr(Host, "rooms", True)

    async def both() -> list[str]:
        async with Session(QUICK) as one, Session(QUICK) as other:
            await one.run("open('/tmp/mark', 'w').write('1'); open('mark', 'w').write('1')")
            await one.run("import socket; s = socket.create_server(('127.0.0.1', 8000))")
            seen = await other.run(
                "import os, socket\n"
                "socket.create_server(('127.0.0.1', 8000)).close()\n"
                "os.listdir('/tmp'), os.listdir('.'), 'socket' in globals()"
            )
            return [seen, await other.run("sum(name.isdigit() for name in os.listdir('/proc'))")]

    seen, processes = asyncio.run(both())
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

    async def all_of_them() -> list[list[str]]:
        pairs = [(attempt(code), attempt(NOTHING)) for code in ESCAPES.values()]
        return await asyncio.gather(*(task for pair in pairs for task in pair))

    outputs = asyncio.run(all_of_them())
    out = dict(zip(ESCAPES, outputs[::2], strict=True))
    assert [name for name in OUT if error(out[name][0] or "-") == "49"] == []
    assert {tuple(pair) for pair in outputs[1::2]} == {("49", "49")}
    # What an attempt has ended is begun anew. Two have changed what they are told with.
    assert [n for n, pair in out.items() if pair[1] != "49"] == ["replace print", "trace functions"]
    assert children() <= before
    assert not any(Path(path).exists() for path in ("/escaped", "/usr/escaped", "/etc/x"))


@contained
def test_an_episode_that_is_given_up_leaves_nothing():
    before = children()

    class Thinks(Script):
        async def chat(self, messages: list, tools: list | None = None):
            """Never says a second thing."""
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

    async def both() -> None:
        left = await given_up("1", 2.5)
        assert left == await given_up("while True: pass", 1)

    asyncio.run(both())
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
    here = Path(__file__).parent
    env = os.environ | {"PYTHONPATH": ":".join(map(str, (here, here.parents[1], here.parents[2])))}
    with subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE) as process:
        began = set(map(int, process.stdout.readline().split()))
        process.kill()
    until = time.monotonic() + 10
    while left := {pid for pid in began if Path(f"/proc/{pid}").exists()}:
        assert time.monotonic() < until, left
        time.sleep(0.05)
    assert len(began) >= 3


@contained
def test_a_host_that_died_is_no_output():
    async def killed() -> str:
        async with Session(QUICK) as python:
            await python.run("x = 1")
            python.host.process.kill()
            python.host.process.wait()
            with pytest.raises(CheckerError, match="the sandbox's Python ended"):
                while True:  # the kernel takes its time to end what is in the sandbox
                    assert await python.run("x") == "1"
        return (await said(["2"]))[0]

    assert asyncio.run(killed()) == "2"


@contained
def test_a_session_that_does_not_start_is_no_output(monkeypatch):
    before = children()
    close_hosts()
    monkeypatch.setattr(sessions, "TEXT", "raise SystemExit('broken on purpose')")
    with pytest.raises(CheckerError, match="did not start a session: broken on purpose"):
        session("1")
    monkeypatch.setattr(sessions, "TEXT", "import time; time.sleep(100)")
    monkeypatch.setattr(sessions, "START", 0.3)
    with pytest.raises(CheckerError, match="it did not greet"):
        session("1")
    assert children() <= before


def test_without_isolation_each_host_says_so(backend, caplog):
    before = children()
    backend("unsafe")
    assert session("x = 2", "x * 2", "while True: pass")[1:] == [
        "4",
        f"Timed out after 1 s. {sessions.LOST}",
    ]
    assert any("services.sandbox = 'unsafe'" in line.getMessage() for line in caplog.records)
    assert children() <= before


def test_what_is_missing_is_named(monkeypatch):
    sandbox._problem.cache_clear()
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None)
    with pytest.raises(CheckerError, match="bwrap is not on the path"):
        close_hosts()
        session("1")
    sandbox._problem.cache_clear()


class Service(BaseHTTPRequestHandler):
    """The sandbox service's sessions, each a process of this machine's Python."""

    known: dict[str, subprocess.Popen] = {}
    CODE = """
import sys
names = {}
for line in sys.stdin:
    exec(eval(line), names)
    print('.', flush=True)"""

    def do_POST(self) -> None:
        """Runs generated_code in the session of the header."""
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        name = self.headers["X-Session-ID"]
        assert request["language"] == "ipython" and request["max_output_characters"] == 1000
        told = {"new_session_created": name not in Service.known, "stderr": ""}
        if name not in Service.known:
            command = [sys.executable, "-c", Service.CODE]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            Service.known[name] = subprocess.Popen(command, **pipes)
        process = Service.known[name]
        print(repr(request["generated_code"]), file=process.stdin, flush=True)
        told["stdout"] = "".join(iter(process.stdout.readline, ".\n"))
        status = {"broken": "odd"}.get(request["generated_code"], "completed")
        self.answer(told | {"process_status": status})

    def do_DELETE(self) -> None:
        """Ends a session."""
        name = self.path.removeprefix("/sessions/")
        assert name == self.headers["X-Session-ID"]
        process = Service.known.pop(name)
        process.kill()
        process.communicate()
        self.answer({})

    def answer(self, told: dict) -> None:
        """Sends JSON."""
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(told).encode())

    def log_message(self, *_: object) -> None:
        """Says nothing."""


def test_the_service_has_sessions_too(backend):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    async def restarts() -> list[str]:
        async with Session(QUICK) as python, Session(QUICK) as other:
            outputs = [await python.run("x = 1"), await python.run("print(x)")]
            await other.run("y = 1")
            assert len(Service.known) == 2
            Service.known.pop(python.name).kill()
            outputs.append(await python.run("print(2)"))
            return outputs

    try:
        backend("http", f"http://127.0.0.1:{server.server_port}/")
        assert asyncio.run(restarts()) == ["", "1", f"2\n{sessions.LOST}"]
        assert not Service.known
    finally:
        server.shutdown()
        server.server_close()


# --- episodes -------------------------------------------------------------------------------------


def episode(answers: list, row: dict = ROW) -> tuple:
    """The reward of an episode, and what its policy has read before each answer."""
    read: list[str] = []
    script = Script(answers, lambda messages: read.append(messages[-1]["content"]))
    return asyncio.run(python_tool.rollout(row, script)), read


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

    async def many() -> list[Reward]:
        return await asyncio.gather(*(one(number) for number in range(40)))

    assert [reward.value for reward in asyncio.run(many())] == [1.0] * 40
    (host,) = [h for limits, h in Host.shared.items() if limits == python_tool.LIMITS]
    until = time.monotonic() + 5
    while len(left := sandbox.family(host.process.pid)) > 3 and time.monotonic() < until:
        time.sleep(0.05)
    assert len(left) <= 3, "bubblewrap, and the process that makes sessions"


def test_real_rows_load_and_are_judged_as_mathematics():
    rows = gym_rows("ns_tools", "ns_tools_simple_agent")
    assert rows
    for row in rows:
        python_tool.check(row)
        assert set(python_tool.needs(row)) >= {"sandbox", "tool_parser"}
        gold = f"\\boxed{{{row['expected_answer']}}}"
        assert asyncio.run(python_tool.verify(row, gold)).value == 1
        assert asyncio.run(python_tool.verify(row, "")).info == {"reason": "empty"}
        assert asyncio.run(python_tool.verify(row, f"<think>{gold}")).value == 0


@pytest.mark.parametrize("text", HOSTILE[:4], ids=lambda text: repr(text[:8]))
def test_no_answer_is_paid_for_what_it_is_not(text):
    assert asyncio.run(python_tool.verify(ROW, text)).value == 0


@contained
def test_hostile_code_is_answered(monkeypatch):
    """Whatever it is: a text comes back, and the session or its follower goes on."""
    outputs = session(*HOSTILE, "1")
    assert outputs[-1] == "1" and all(len(output) < 1200 for output in outputs)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"verifier_type": "mcqa"}, "verifier_type is 'mcqa', expected one of: math_with_judge"),
        ({"verifier_type": 5}, "verifier_type is 5"),
        ({"expected_answer": " "}, "expected_answer is ' '"),
        ({"responses_create_params": {"tools": None}}, "tools is missing"),
        ({"responses_create_params": {"tools": []}}, r"tools is \[\]"),
        (
            {"responses_create_params": {"tools": [{"type": "function", "name": "sh"}]}},
            "expected the tool stateful_python_code_exec",
        ),
    ],
)
def test_bad_rows_are_named(change, field):
    with pytest.raises(ValueError, match=field):
        python_tool.check(ROW | change)
