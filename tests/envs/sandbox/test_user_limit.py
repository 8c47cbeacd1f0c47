"""The limit of a user's processes (ulimit -u): what it refuses is no fault of a run."""

import asyncio
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from test_from_outside import fresh, outcome  # noqa: F401

from envs.sandbox import sandbox, shell, user_limit
from envs.sandbox.outcome import Limits
from envs.services import CheckerError

OTHERS = 30
THREAD = "import threading\nthreading.Thread(target=print, args=(49,)).start()"
COMMAND = "import subprocess\nprint(subprocess.check_output(['echo', '49'], text=True))"
THREADS = """
import threading, time
for _ in range(40): threading.Thread(target=time.sleep, args=(0.5,)).start()"""
COMMANDS = "import subprocess\nfor _ in range(40): subprocess.Popen(['sleep', '1'])"
contained = pytest.mark.skipif(bool(sandbox.problem()), reason=sandbox.problem())
rooted = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act for another user")


@pytest.fixture
def others() -> Iterator[None]:
    """The user nobody has processes elsewhere."""
    command = ["setpriv", *sandbox.NOBODY, "sleep", "100"]
    sleeping = [subprocess.Popen(command) for _ in range(OTHERS)]
    while user_limit.of_user(user_limit.NOBODY) < OTHERS:
        time.sleep(0.05)
    yield
    for process in sleeping:
        process.kill()
        process.wait()


@contained
@rooted
@pytest.mark.parametrize("source", [THREAD, COMMAND])
def test_a_limit_that_may_be_raised_is(others, fresh, source):  # noqa: F811
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    for looked in (sandbox.python, sandbox.own_packages):
        looked.cache_clear()
    try:
        resource.setrlimit(resource.RLIMIT_NPROC, (OTHERS - 6, hard))
        assert outcome(source).stdout.strip() == "49"
    finally:
        resource.setrlimit(resource.RLIMIT_NPROC, (soft, hard))


@contained
@rooted
@pytest.mark.parametrize("source", [THREADS, COMMANDS])
def test_a_limit_that_may_not_be_raised_gives_no_verdict(others, source):
    code = f"from test_user_limit import *; print(outcome({source!r}))"
    most = user_limit.of_user(user_limit.NOBODY) + 25
    limit = ["prlimit", f"--nproc={most}:{most}"]
    forbidden = ["setpriv", "--bounding-set=-sys_resource"]
    command = [*limit, *forbidden, sys.executable, "-c", code]
    env = os.environ | {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert f"CheckerError: {user_limit.FULL}" in done.stderr, done


@pytest.fixture
def full(monkeypatch):
    """There is no room for what a run is promised."""
    monkeypatch.setattr(user_limit, "full", lambda *_: True)


@contained
def test_only_what_fails_is_tried_again(fresh, full):  # noqa: F811
    assert outcome("print(49)").stdout == "49\n"
    for source in ("1 / 0", "print('x' * (2 << 20))"):
        with pytest.raises(CheckerError, match="ulimit -u"):
            outcome(source)
    with pytest.raises(CheckerError, match="ulimit -u"):
        asyncio.run(sandbox.run(["true"]))


@contained
@pytest.mark.parametrize("looks", [[True, False], [False, True]])
async def test_a_terminal_that_was_refused_a_process_has_no_verdict(monkeypatch, looks):
    """When it began, or at its end."""
    monkeypatch.setattr(user_limit, "full", lambda *_: looks.pop(0))
    async with shell.Shell(Limits(), {}) as terminal:
        with pytest.raises(CheckerError, match="ulimit -u"):
            await terminal.pack()


@contained
def test_what_an_answer_began_leaves_no_room_for_a_moment_only(fresh, monkeypatch):  # noqa: F811
    """Its own processes, that die with it, are no excuse."""
    looks = [False, True, True]
    monkeypatch.setattr(user_limit, "full", lambda *_: looks.pop(0) if looks else False)
    assert outcome("print('x' * (2 << 20))").ended == "output"
    assert not looks


@rooted
def test_who_is_counted(others, monkeypatch):
    assert user_limit.user(image=False) == user_limit.NOBODY and user_limit.user(image=True) == 0
    assert user_limit.of_machine() >= user_limit.of_user(user_limit.NOBODY) >= OTHERS
    promised = Limits().processes + user_limit.OWN
    taken = user_limit.of_user(user_limit.NOBODY)
    for most, room in ((taken + promised + 20, True), (taken + promised - 20, False)):
        monkeypatch.setattr(user_limit.resource, "getrlimit", lambda _, most=most: (1, most))
        assert user_limit.full(Limits()) is not room
        assert not user_limit.full(Limits(), image=True)


def test_too_low_a_limit_is_named_before_a_run_starts(monkeypatch):
    monkeypatch.setattr(user_limit.resource, "getrlimit", lambda _: (9, 60))
    monkeypatch.setattr(sandbox, "problem", lambda: "")
    for found in (sandbox.problem_of_start(), shell.problem()):
        assert found.startswith("a user may have 60 processes (ulimit -Hu), but one run needs 72")
