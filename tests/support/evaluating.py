"""Checks that evaluate what they are given, as some of reasoning-gym's do."""

import errno
import os
import signal
import sys
import time
from types import SimpleNamespace

from envs.maths import math
from envs.sandbox import checkers


def make_check():
    def check(text: str) -> dict:
        try:
            return {"value": float(eval(text or "0"))}
        except Exception as error:
            return {"value": 0.0, "reason": type(error).__name__}

    return check


def make_broken_check():
    def check(text: str) -> dict:
        raise RuntimeError("no memory")

    return check


def make_long_check():
    return lambda text: {"value": 1.0, "text": "x" * int(text or 0)}


def make_counting_check():
    """How many answers this process has judged; it may hang, die, raise or fill up instead."""
    judged: list = []

    def check(text: str) -> dict:
        judged.append(bytearray(600 << 20) if text == "grow" else text)
        while text == "hang":
            pass
        if text == "die":
            os._exit(3)
        if text == "fill":
            judged.append(bytearray(1 << 40))
        if text == "raise":
            raise RuntimeError
        return {"value": float(len(judged))}

    return check


def make_refused_check():
    """A check that the machine has no room for, but for that of an empty text."""
    forks, refused = os.fork, []

    def fork() -> int:
        frame = sys._getframe()
        while frame and frame.f_code.co_name != "attend":
            frame = frame.f_back
        if frame and frame.f_locals["request"]["text"]:
            refused.append(1)
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return forks()

    os.fork = fork
    time.sleep = lambda seconds: None
    return make_check()


def make_crowded_check():
    """A check whose server finds no room for a warden: often, where it has one already."""
    forks, asked = os.fork, []

    def fork() -> int:
        asked.append(sys._getframe(2).f_code.co_name == "serve")
        if asked == [True] or 2 < sum(asked) < 200:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return forks()

    os.fork = fork
    time.sleep = lambda seconds: None
    return make_check()


def starve(percent: int) -> None:
    """From now on a second passes at each look at a check, which gets a share of the processor."""
    now = [0.0]

    def clock(pid: int) -> tuple[float, float, bool]:
        now[0] += 1.0
        return now[0] * percent / 100, now[0], False

    checkers.clock = clock
    checkers.TICK = 0.01
    checkers.time = SimpleNamespace(monotonic=lambda: now[0], process_time=time.process_time)


def make_late_check():
    """Maths that gets 6 of its 10 seconds of CPU in the 30 that it may take."""
    starve(20)
    return math.make_check()


def make_starved_check():
    """Maths that gets 3 of its 10 seconds."""
    starve(10)
    return math.make_check()


def make_orphaned_check():
    """A check whose warden is killed as soon as it has forked it for a text that is not empty."""
    begin = checkers.begin

    def begun(*given) -> int:
        pid = begin(*given)
        if sys._getframe(2).f_locals["request"]["text"]:
            os.kill(os.getpid(), signal.SIGKILL)
        return pid

    checkers.begin = begun
    return make_check()
