"""Runs Python programs in the sandbox, in interpreters that stay warm between programs.

    Interpreter --starts--> zygote in bubblewrap, the prelude imported
    each program:      zygote --forks--> room: namespaces and folders of its own
    each of its inputs:  room --forks--> process, in which the program runs

A room ends with its program, so that no program finds traces of an earlier one. The zygote lives on
for the next program. It is invisible to rooms: no process in a room can name, trace or stop it. If
the kernel forbids rooms, each program has an interpreter of its own, which costs 40 ms.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable

from core.waits import in_thread
from envs.sandbox import sandbox, service, user_limit
from envs.sandbox.interpreter import DIED, OTHER, SENT, oom_kills
from envs.sandbox.outcome import OOM, REFUSED, Limits, Ran, refusals, reported
from envs.sandbox.sandbox import TICK, Clock
from envs.sandbox.service import TEXT
from envs.sandbox.user_limit import FULL
from envs.services import CheckerError, current

START = 60.0  # seconds that an interpreter may take to start
EXIT = 5.0  # seconds that a dead interpreter's sandbox may take to end
READY, ALONE = b"ready\n", b"alone\n"
# Exit codes of an interpreter that was killed or refused a process, but not harmed by a program.
ENDED = (-9, -15, 128 + 9, 128 + 15, OTHER)


async def programs(
    source: str, inputs: Iterable[str], limits: Limits | None = None
) -> AsyncGenerator[Ran, None]:
    """Runs a Python program on each input in turn, in a process of its own, one at a time.

    The program finds the names of interpreter.PRELUDE. Its runs share a working folder with each
    other, and with no other program. If the program kills its interpreter twice, and a harmless
    program does not, `ended` is "killed". Raises CheckerError if there is no outcome, for example
    because something else killed the interpreter.
    """
    limits = limits or Limits()
    if current().sandbox == "http":
        for text in inputs:
            yield await service.program(current().sandbox_url, source, text, limits)
        return
    async with sandbox.place():
        idle = Interpreter.idle[limits]
        python = idle.pop() if idle else Interpreter(limits)
        try:
            for text in inputs:
                yield await python.judge(source, text)
        finally:
            await python.leave()


class Interpreter:
    """A connection to envs/sandbox/interpreter.py in a sandbox, which starts when it is needed."""

    idle: dict[Limits, list["Interpreter"]] = defaultdict(list)
    rooms = True  # False once the kernel has refused namespaces inside a sandbox

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.process: subprocess.Popen | None = None
        self.connection: socket.socket
        self.asked = False  # True while it owes an answer
        self.in_rooms = False
        self.deaths = 0  # deaths of interpreters through harm from a program

    async def judge(self, source: str, stdin: str) -> Ran:
        """Returns a program's outcome. Raises CheckerError if it has no outcome.

        A program ended by a signal that may have come from outside runs once more. If that happens
        again, it counts as the program's own end: a program can send each of these signals to
        itself, and must then earn 0.
        """
        killed = oom_kills()
        deaths = self.deaths
        refused = refusals()
        full = user_limit.full(self.limits)
        for tried in range(2):
            outcome = await self.run(source, stdin)
            if outcome and (outcome.code or outcome.ended):
                if refusals() > refused:
                    raise CheckerError(REFUSED)
                if full or await user_limit.full_after(self.limits, bool(outcome.ended)):
                    raise CheckerError(FULL)
            if outcome and (tried or outcome.code not in SENT):
                return outcome
        if oom_kills() > killed:
            raise CheckerError(OOM)
        if self.deaths < deaths + 2:
            raise CheckerError("the sandbox's Python was killed, or refused a process")
        if not await self.run("", ""):
            raise CheckerError("the sandbox's Python dies with any program")
        return Ran("", "", None, "killed", 0.0)

    async def run(self, source: str, stdin: str) -> Ran | None:
        """Returns a program's outcome; None if the interpreter died. Raises CheckerError."""
        process = self.process or await self.start()
        clock = Clock(process.pid)
        request = json.dumps({"source": source, "stdin": stdin}).encode()
        answer = asyncio.create_task(self.ask(request))
        ended = ""
        try:
            while not ended and not (await asyncio.wait({answer}, timeout=TICK))[0]:
                ended = clock.verdict(self.limits)
            if ended:  # if this process was starved, the answer may still be unread
                await asyncio.wait({answer}, timeout=TICK / 10)
        finally:
            answer.cancel()
            await asyncio.wait({answer})
        seconds = time.monotonic() - clock.began
        received = b"" if answer.cancelled() else answer.result()
        if not received and not ended:
            self.deaths += await self.died()
        if not received:
            await self.close()
            return Ran("", "", None, ended, seconds) if ended else None
        made = reported(json.loads(received), seconds)
        if made.ended == "oom":
            raise CheckerError(OOM)
        return made

    async def died(self) -> bool:
        """Returns whether an interpreter whose connection has ended was harmed by a program."""
        assert self.process
        try:
            code = await asyncio.to_thread(self.process.wait, EXIT)
        except subprocess.TimeoutExpired:
            return False
        return code == DIED if self.in_rooms else code not in ENDED

    async def leave(self) -> None:
        """Ends the room; the interpreter creates another, and waits for another program."""
        received = b""
        if self.process and not self.asked:
            with contextlib.suppress(TimeoutError):
                received = await asyncio.wait_for(self.ask(b""), START)
        if received == READY:
            Interpreter.idle[self.limits].append(self)
        else:
            await self.close()

    async def ask(self, request: bytes) -> bytes:
        """Sends a line, and returns the answer; empty if the interpreter died."""
        self.asked = True
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().sock_sendall(self.connection, request + b"\n")
            return await self.line()
        return b""

    async def line(self) -> bytes:
        """Returns the interpreter's next line; empty if it died."""
        loop = asyncio.get_running_loop()
        text = bytearray()
        while part := await loop.sock_recv(self.connection, 1 << 20):
            text += part
            if text.endswith(b"\n"):
                self.asked = False
                return bytes(text)
        return b""

    async def start(self) -> subprocess.Popen:
        """Starts an interpreter with a room. Raises CheckerError if it does not start."""
        contained = sandbox.isolates() == "bubblewrap"
        rooms = self.in_rooms = contained and Interpreter.rooms
        limits = self.limits
        packages = await in_thread(sandbox.own_packages)  # starts a process the first time
        command = [*user_limit.lifted(), *sandbox.limited(limits)]
        if contained:
            command = sandbox.wrapped(limits, rooms=rooms, packages=packages)
            packages = packages and sandbox.PACKAGES
        settings = {"contained": contained, "rooms": rooms, "packages": packages}
        settings |= limits._asdict()
        command += [*sandbox.python(), "-c", TEXT, json.dumps(settings)]
        self.connection, theirs = socket.socketpair()
        self.connection.setblocking(False)
        errors = sandbox.memory_file("")
        try:
            with theirs:
                self.process = sandbox.popen(command, theirs.fileno(), errors)
            self.asked = True
            received = b""
            with contextlib.suppress(TimeoutError, OSError):
                received = await asyncio.wait_for(self.line(), START)
            if received == READY:
                return self.process
            await self.close()
            if received == ALONE:
                Interpreter.rooms = False
                return await self.start()
            why = os.pread(errors, sandbox.STDERR, 0).decode("utf-8", "replace").strip()
        finally:
            os.close(errors)
        raise CheckerError(f"the sandbox's Python did not start: {why or 'it wrote nothing'}")

    async def close(self) -> None:
        """Ends the interpreter and its programs' processes; the next program starts a new one."""
        process = self.process
        self.process = None
        if process:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            self.connection.close()
            await asyncio.to_thread(process.wait)
