"""Checks that may hang run in child processes, killed on a deadline and replaced.

They speak JSON lines on pipes. No environment by itself: envs/math.py and envs/reasoning_gym.py
use it.
"""

import contextlib
import json
import logging
import os
import pkgutil
import resource
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

DEADLINE = 10.0  # seconds of CPU of one check; thrice that where others have the CPUs
START_DEADLINE = 120.0  # seconds; a child needs about one second of CPU
CHILDREN = 2  # checks take milliseconds; two, so that a hanging one does not hold up the rest
CHILD_MEMORY = 4 << 30  # bytes of address space; a child uses 0.1 GB


class CheckerError(RuntimeError):
    """A check could not run: its process died, did not start, or was starved of CPU."""


class Checkers:
    """Child processes that run the function made by `factory`, "module:name", under a deadline.

    Tied to no event loop. Children start when first needed and end with this process. They are
    no sandbox: code that a check evaluates has this user's rights.
    """

    def __init__(self, factory: str) -> None:
        self.factory = factory
        self.own = threading.local()  # each thread has its own child
        self.threads = ThreadPoolExecutor(CHILDREN)

    async def run(self, deadline: float, **request: object) -> dict:
        """The function's answer to `request`; value 0.0 with reason "timeout" after `deadline`.

        In seconds of CPU, or of sleep; neither the wait for a free child nor that for a CPU
        counts. Raises CheckerError.
        """
        import asyncio  # takes longer than all else that the registry imports with this module

        return await asyncio.wrap_future(self.threads.submit(self._run, deadline, request))

    def _run(self, deadline: float, request: dict) -> dict:
        for _ in range(2):
            child = getattr(self.own, "child", None)
            if child is None or child.poll() is not None:
                child = self.own.child = self._start()
            began = Clock(child.pid)
            token = secrets.token_hex(8)
            reply = self._ask(child, json.dumps([token, deadline, request]) + "\n", deadline)
            if reply.startswith(token):
                return json.loads(reply.removeprefix(token))
            slept = child.poll() is None and Clock(child.pid).slept_since(began)
            child.kill()
            child.communicate()
            if reply:  # perhaps an earlier answer left it in the pipe
                continue
            if slept or child.returncode == -signal.SIGPROF:
                return {"value": 0.0, "reason": "timeout"}
            raise CheckerError(f"{self.factory}: code {child.returncode}, no verdict")
        # In a new child it is this answer's own.
        return {"value": 0.0, "reason": "forged a verdict"}

    def _start(self) -> subprocess.Popen:
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve()"
        # Address space for the stacks of 128 BLAS threads would alone exceed the memory limit.
        env = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        child = subprocess.Popen(
            [sys.executable, "-c", code, self.factory],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is meant for the parent
        )
        if not self._ask(child, "", START_DEADLINE):
            child.kill()
            child.communicate()
            raise CheckerError(f"{self.factory}: code {child.returncode} at its start")
        return child

    def _ask(self, child: subprocess.Popen, line: str, deadline: float) -> str:
        """The child's next line; "" if it died, or let `deadline` pass without work for a CPU.

        One that works ends itself after `deadline` seconds of CPU; where others have the CPUs it
        gets thrice that time.
        """
        assert child.stdin and child.stdout
        began = Clock(child.pid)
        speaks = False
        last = threading.Timer(4 * deadline, child.kill)  # an answer may write half a line
        last.start()
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(line)
            child.stdin.flush()
        for _ in range(3):
            speaks = bool(select.select([child.stdout], [], [], deadline)[0])
            if speaks or Clock(child.pid).slept_since(began):
                break
        reply = child.stdout.readline() if speaks else ""
        last.cancel()
        if speaks and not reply:  # it is ending: its exit code shows why
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(1)
        return reply


class Clock:
    """What a process did so far: seconds of work or of waiting for a CPU; is it held by others?"""

    def __init__(self, pid: int) -> None:
        folder = Path(f"/proc/{pid}")
        self.now = time.monotonic()
        ran, queued, _ = (folder / "schedstat").read_text().split()
        self.busy = (int(ran) + int(queued)) / 1e9
        state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        self.held = state in "TtD"  # stopped, or waiting for a disk

    def slept_since(self, began: "Clock") -> bool:
        """Whether it had nothing to do most of the time, by its own choice."""
        return not self.held and self.busy - began.busy < (self.now - began.now) / 2


def serve() -> None:
    """A child's life: answer requests until the parent closes the pipe."""
    requests = os.fdopen(os.dup(0))
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a check may print, read, and even close its stdin
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (CHILD_MEMORY, CHILD_MEMORY))
    function = pkgutil.resolve_name(sys.argv[1])()
    print("ready", file=replies, flush=True)
    for line in requests:
        token, deadline, request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, deadline)  # of CPU
        signal.alarm(int(3 * deadline) + 2)  # a sleeping check must not outlive a killed parent
        reply = function(**request)
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(token + json.dumps(reply), file=replies, flush=True)
