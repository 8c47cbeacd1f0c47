"""Checks that hang, crash, forge, or run code; their processes; a good verdict beside bad ones."""

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from envs import Reward, registry, services
from envs.maths import math
from envs.sandbox import checkers, sandbox
from envs.sandbox.checkers import Checkers
from rollout.response import Response
from settings.environment_services import Services
from support.loop import at_once

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[3]
HANGS = "\\boxed{9^{9^{9^9}}}"
ALSO_HANGS = "\\boxed{\\sin(99346 y)+e^{55125 z}}"


@pytest.fixture(scope="module", params=["bubblewrap", "unsafe"], autouse=True)
def home(request):
    """Where the checks run: in bubblewrap, or beside everything else."""
    services.configure(Services(sandbox=request.param))
    if sandbox.problem():
        pytest.skip(sandbox.problem())
    yield request.param
    services.configure(Services())


@pytest.fixture(scope="module")
def maths(home):
    """A pool of one math check at a time."""
    return Checkers("envs.maths.math:make_check", children=1)


@pytest.fixture(scope="module")
def evaluating(home):
    """Of a pool of one check that evaluates its answer: the verdict on a text."""
    pool = Checkers("support.evaluating:make_check", children=1)

    def verdict(text: str, deadline: float = 1.0) -> dict:
        return asyncio.run(pool.run(deadline, text=text))

    verdict.pool = pool
    return verdict


def code(*lines: str) -> str:
    """An answer that runs the lines, and is then worth their last `value`, or 0.25."""
    return f"(names := dict(value=0.25), exec({chr(10).join(lines)!r}, names), names['value'])[-1]"


def processes() -> dict[int, str]:
    """The command line of each process that is no zombie."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
    return {pid: line for pid, line in found.items() if line}


@contextlib.contextmanager
def burning(core: int, count: int):
    """So many others that want all of one core, in sessions of their own, which share it evenly."""
    program = "print(flush=True)\nwhile True: pass"
    command = ["taskset", "-c", str(core), sys.executable, "-c", program]
    start = {"stdout": subprocess.PIPE, "start_new_session": True}
    others = [subprocess.Popen(command, **start) for _ in range(count)]
    try:
        assert all(other.stdout.readline() for other in others)
        yield
    finally:
        for other in others:
            other.kill()
            other.communicate()


def test_the_deadline_does_not_count_the_queue(maths):
    texts = [HANGS, HANGS, "2", "2"]
    verdicts = at_once(maths.run(1.0, expected="2", text=text) for text in texts)
    assert [verdict["value"] for verdict in verdicts] == [0, 0, 1, 1]


async def test_hanging_answers_do_not_delay_good_ones():
    """The two that hang keep the only quick check for half a second each, not for two."""
    pool = Checkers("envs.maths.math:make_check", children=1)

    async def timed(text):
        verdict = await pool.run(2.0, expected="2", text=text)
        return verdict.get("reason", verdict["value"]), time.monotonic() - began

    await pool.run(2.0, expected="2", text="2")
    began = time.monotonic()
    verdicts = await asyncio.gather(*map(timed, [HANGS, ALSO_HANGS, *["\\boxed{2}"] * 8]))
    (first, at_first), (second, _), *good = verdicts
    assert (first, second) == ("timeout", "timeout")
    assert {value for value, _ in good} == {1.0}
    assert sorted(seconds for _, seconds in good)[4] < at_first


def test_a_long_verdict_is_heard_whole_and_an_endless_one_is_none(home):
    """The socket between a check and its warden holds 0.2 MB."""
    pool = Checkers("support.evaluating:make_long_check", children=1)
    verdict = asyncio.run(pool.run(60.0, text="5000000"))
    assert verdict == {"value": 1.0, "text": "x" * 5_000_000}
    assert asyncio.run(pool.run(2.0, text="99000000"))["reason"] == "timeout"


def test_an_answer_that_waits_or_hangs_is_wrong_and_no_failure(evaluating):
    for text, reason in (
        ("input()", "EOFError"),
        ("__import__('time').sleep(60)", "timeout"),
        (code("while True: pass"), "timeout"),
        (code("import signal", "signal.setitimer(signal.ITIMER_PROF, 0)", "while 1: 0"), "timeout"),
    ):
        assert evaluating(text, 0.5) == {"value": 0.0, "reason": reason}, text
    assert evaluating("1") == {"value": 1.0}


def test_a_check_judges_as_many_answers_as_it_may_and_none_after_a_failure(home):
    """ "raise", "die" and "hang" end it; what is asked next has another one."""
    pool = Checkers("support.evaluating:make_counting_check", children=1, answers=3)

    def judged(text: str) -> float | str:
        verdict = asyncio.run(pool.run(4.0, text=text))
        return verdict.get("reason", verdict["value"])

    assert [judged(str(i)) for i in range(7)] == [1, 2, 3, 1, 2, 3, 1]
    assert judged("hang") == "timeout" and [judged("a"), judged("a")] == [1, 2]
    assert judged("die") == "crashed the checker" and judged("a") == 2  # after a harmless one
    assert judged("raise") == "crashed the checker" and judged("a") == 2
    assert judged("fill") == "memory" and judged("a") == 2
    assert judged("x" * 1_000_000) == 3
    assert [judged("grow"), judged("a")] == [1, 1]  # what it had kept is gone


def test_a_right_answer_is_not_wrong_because_its_check_was_killed_twice(monkeypatch):
    """From outside, as for want of memory: then what is harmless fails as well."""
    asked = []

    def ask(checkers, deadline, request):
        asked.append(request["text"])
        return {"failed": "code -9"} if len(asked) < 4 else {"value": 1.0}

    monkeypatch.setattr(Checkers, "_ask", ask)
    with pytest.raises(services.CheckerError, match="code -9"):
        asyncio.run(Checkers("a:b", 1).run(1.0, text="right"))
    assert asked == ["right", ""]


@pytest.mark.parametrize("line", [
    "import os; os._exit(3)",
    "import ctypes; ctypes.string_at(0)",
    "raise BaseException('x' * 10_000)",
])  # fmt: skip
def test_an_answer_that_kills_its_check_twice_is_wrong_and_no_failure(evaluating, line):
    assert evaluating(code(line)) == {"value": 0.0, "reason": "crashed the checker"}
    assert evaluating("0.5") == {"value": 0.5}


def test_an_answer_that_stops_or_kills_others_harms_itself_at_most(evaluating, home):
    """In bubblewrap it sees none. Elsewhere it is stopped, or has no verdict, as its warden."""
    stops = code("import os, signal", "os.kill(os.getpid(), signal.SIGSTOP)")
    kills = code("import os, signal", "os.kill(os.getppid() or os.getpid(), signal.SIGKILL)")
    if home == "bubblewrap":
        assert evaluating(stops) == evaluating(kills) == {"value": 0.25}
        return
    assert evaluating(stops) == {"value": 0.0, "reason": "timeout"}
    began = time.monotonic()
    with pytest.raises(services.CheckerError, match="the warden died, no verdict"):
        evaluating(kills)
    assert time.monotonic() - began < 30 and evaluating("1") == {"value": 1.0}


def test_in_bubblewrap_no_answer_reaches_its_neighbours(home):
    if home != "bubblewrap":
        pytest.skip("elsewhere an answer has this user's rights")
    pool = Checkers("support.evaluating:make_check", children=2)
    signals = (
        "import os\nfor pid in [-1, *range(2, 999)]:\n try: os.kill(pid, %d)\n except OSError: 0"
    )
    texts = [code(signals % 9), "0.5", code(signals % 19), "0.5", "0.5"] * 4
    verdicts = at_once(pool.run(1.0, text=text) for text in texts)
    assert [verdict["value"] for verdict in verdicts] == [0.25, 0.5, 0.25, 0.5, 0.5] * 4


def test_checks_that_die_of_every_answer_are_an_error():
    pool = Checkers("support.evaluating:make_broken_check", children=1)
    with pytest.raises(services.CheckerError, match="RuntimeError: no memory, no verdict"):
        asyncio.run(pool.run(1.0, text="1"))


SPRAY = "for fd in range(3, 99):\n try: os.write(fd, b'%s')\n except OSError: 0"


@pytest.mark.parametrize("line", ['{"value": 9}\\n', "half", '["", 9]'])
@pytest.mark.parametrize("then", ["", "os._exit(0)", "os.close(3)"])
def test_a_forged_verdict_is_none_and_harms_no_later_answer(evaluating, line, then):
    """The answer writes to whatever file the verdicts may go to."""
    verdict = evaluating(code("import os", SPRAY % line, then))
    assert verdict == {"value": 0.0, "reason": "forged a verdict"}
    assert [evaluating(text)["value"] for text in ("0.5", "0.25")] == [0.5, 0.25]


def test_no_frame_holds_the_token(evaluating):
    """Nor does an object that a frame names: 16 bytes, or as many hexadecimal digits."""
    text = code(
        "import gc, re, sys",
        "frame, found = sys._getframe(), []",
        "while frame:",
        " found += frame.f_locals.values()",
        " frame = frame.f_back",
        "found += [one for thing in found for one in gc.get_referents(thing)]",
        "value = sum(isinstance(one, bytes) and len(one) == 16 for one in found)",
        "value += len([one for one in map(str, found) if re.fullmatch('[0-9a-f]{16}', one)])",
    )
    assert evaluating(text) == {"value": 0.0}


def test_nothing_of_one_answer_is_left_for_the_next(evaluating):
    assert evaluating(code("import builtins", "builtins.float = lambda text: 1"))["value"] == 0.25
    assert evaluating("0.5") == {"value": 0.5}
    shares = code("import ctypes", "value = ctypes.CDLL(None).shmget(7, 1 << 30, 0o3600)")
    assert evaluating(shares) == {"value": -1.0}


def test_in_bubblewrap_a_check_leaves_no_name(evaluating, home):
    """An empty file has one, which the next answer could read."""
    name = f"/tmp/{os.getpid()}"
    text = code("import os", f"os.mkdir({name!r})", f"os.rmdir({name!r})", "value = 7")
    assert evaluating(text)["value"] == 7 * (home != "bubblewrap")


def test_a_check_has_no_secret_of_the_parent_and_no_file_but_its_own(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    text = code(
        "import os",
        "links = [f'/proc/self/fd/{fd}' for fd in range(99)]",
        "files = [os.readlink(link) for link in links if os.path.islink(link)]",
        "value = 10 * len([name for name in files if name != '/dev/null'])",
        "value += b'secret' in open('/proc/self/environ', 'rb').read()",
    )
    pool = Checkers("support.evaluating:make_check", children=1)
    assert asyncio.run(pool.run(1.0, text=text)) == {"value": 10.0}


def test_a_check_writes_no_file(evaluating, tmp_path, home):
    text = code(f"open({str(tmp_path / 'file')!r}, 'w').write('x' * 10_000)")
    if home == "bubblewrap":
        assert evaluating(text) == {"value": 0.0, "reason": "FileNotFoundError"}
        assert not (tmp_path / "file").exists()
    else:
        assert evaluating(text) == {"value": 0.0, "reason": "OSError"}
        assert (tmp_path / "file").read_text() == ""


@pytest.mark.parametrize("lines", [
    [f"open({str(ROOT / 'README.md')!r})", "value = 7"],
    ["import os", "value = 7 if os.path.exists('/etc/passwd') else 0"],
    ["import os", "value = 7 if 'TOKEN' in os.environ else 0"],
    ["import socket", "socket.create_connection(('127.0.0.1', PORT), 2)", "value = 7"],
    ["import os", "os.kill(PARENT, 0)", "value = 7"],
])  # fmt: skip
def test_in_bubblewrap_a_check_sees_only_the_code(evaluating, home, lines):
    """Data, passwords, hosts and processes are not there; beside everything else some are."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        words = {"PORT": str(server.getsockname()[1]), "PARENT": str(os.getpid())}
        lines = [re.sub("|".join(words), lambda m: words[m[0]], line) for line in lines]
        value = evaluating(code(*lines))["value"]
    assert value == 0 if home == "bubblewrap" or "TOKEN" in lines[-1] else value == 7


def test_what_an_answer_starts_ends_with_it(evaluating):
    """A grandchild in a session of its own, whose parent is gone."""
    seconds = f"90000{os.getpid()}"
    text = code(
        "import os, time",
        "if not os.fork():",
        " os.setsid()",
        " if os.fork(): os._exit(0)",
        f" os.execvp('sleep', ['sleep', '{seconds}'])",
        "time.sleep(0.2)",
    )
    assert evaluating(text)["value"] in (0, 0.25)  # without root's rights it cannot fork
    assert not [line for line in processes().values() if seconds in line]


def test_a_check_that_others_keep_from_a_cpu_gets_more_time(evaluating):
    """With half of a core 0.6 s of CPU take longer than the deadline of 1 s."""
    core = min(os.sched_getaffinity(0))
    text = code(
        "import os, time",
        f"os.sched_setaffinity(0, [{core}])",
        "began = time.process_time()",
        "while time.process_time() - began < 0.6: pass",
    )
    with burning(core, 1):
        assert evaluating(text) == {"value": 0.25}


@pytest.mark.parametrize(
    ("factory", "outcome"), [("make_late_check", "timeout"), ("make_starved_check", "error")]
)
def test_a_check_that_starves_is_a_timeout_once_half_of_its_deadline_is_used(
    monkeypatch, factory, outcome
):
    """Both are counted for the environment."""
    pool = Checkers(f"support.evaluating:{factory}", children=1)
    monkeypatch.setattr(math, "checkers", pool)
    before = services.report().starved
    row = {"agent_ref": {"name": "math"}, "expected_answer": "2"}
    bomb = registry.verify(row, Response.of(HANGS))
    if outcome == "timeout":
        assert asyncio.run(bomb) == Reward(0.0, {"reason": "timeout"})
    else:
        with pytest.raises(services.CheckerError, match="starved of CPU"):
            asyncio.run(bomb)
    assert services.report().starved - before == {f"math/{outcome}": 1}


def test_a_warden_that_stands_still_is_an_error_and_no_reward(evaluating, monkeypatch):
    monkeypatch.setattr(checkers, "GRACE", 0.5)
    evaluating("1")
    pool = evaluating.pool
    warden = pool.quick.submit(lambda: pool.own.warden).result()
    os.kill(warden.pid, signal.SIGSTOP)
    with pytest.raises(services.CheckerError, match="starved of CPU"):
        evaluating("1", 0.1)
    assert evaluating("1") == {"value": 1.0}
    assert warden.pid not in processes()


@pytest.mark.parametrize("factory", ["os:abort", "envs.maths.math:no_such_function"])
def test_a_server_that_cannot_start_is_an_error(factory):
    with pytest.raises(services.CheckerError, match="at its start"):
        asyncio.run(Checkers(factory).run(1.0))


def test_a_folder_of_libraries_may_be_a_link_in_another(tmp_path, monkeypatch):
    """As .venv is one in a checkout that shares it."""
    (tmp_path / "elsewhere").mkdir()
    text = "def make_check():\n    return lambda text: {'value': 1.0}\n"
    (tmp_path / "elsewhere/linked.py").write_text(text)
    (tmp_path / "bound").mkdir()
    (tmp_path / "bound/link").symlink_to(tmp_path / "elsewhere")
    for folder in ("bound", "bound/link"):
        monkeypatch.syspath_prepend(tmp_path / folder)
    linked = Checkers("linked:make_check", children=1)
    assert asyncio.run(linked.run(5.0, text="")) == {"value": 1.0}


def test_a_server_that_died_is_replaced(evaluating):
    evaluating("1")
    pool = evaluating.pool
    process, _ = pool.server
    process.kill()
    process.wait()
    pool.quick.submit(lambda: delattr(pool.own, "warden")).result()
    assert evaluating("1") == {"value": 1.0}
    assert pool.server[0] is not process


def test_hanging_checks_do_not_outlive_a_killed_parent(home):
    program = f"""
import asyncio, envs.maths.math as m
from envs.rollout import services
from settings.environment_services import Services
services.configure(Services(sandbox={home!r}))
async def main():
    await m.checkers.run(1.0, expected="2", text="2")
    print(flush=True)
    await asyncio.gather(*(m.checkers.run(9.0, expected="2", text={HANGS!r}) for _ in range(4)))
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE)
    parent.stdout.readline()
    time.sleep(0.5)
    family = set(sandbox.family(parent.pid))
    assert len(family) > 4, "the parent, the server, wardens and checks"
    parent.kill()
    parent.communicate()
    until = time.monotonic() + 60
    while family & processes().keys():
        assert time.monotonic() < until, "a check is still running"
        time.sleep(0.1)
