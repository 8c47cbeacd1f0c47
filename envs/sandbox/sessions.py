"""Runs Python sessions in the sandbox: pieces of code, which see the names from earlier pieces.

    Host --starts--> zygote in bubblewrap, with numpy, sympy and rdkit if they are installed
    each session:    zygote --forks--> room: namespaces, folders and a connection of its own

A session is one process (envs/sandbox/interpreter.py). Between pieces it is stopped, and any other
processes that the code started have been killed. It ends with its `async with`, even if that is
cancelled. At most one piece per processor runs at once. If the kernel forbids rooms, each session
has a sandbox of its own; if services.sandbox is "http", it is a session of that service.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import uuid

from core.waits import in_thread
from envs.sandbox import sandbox, service
from envs.sandbox.checkers import PEER
from envs.sandbox.programs import ALONE, READY, TEXT
from envs.sandbox.sandbox import TICK, Clock, Limits
from envs.services import CheckerError, current

START = 60.0  # seconds that a session may take to start
CUT = "<output cut>"
LOST = "The interpreter was restarted: what it knew is lost."


class Host:
    """A process in the sandbox that creates sessions. Raises CheckerError if it does not start."""

    shared: dict[Limits, "Host"] = {}
    rooms = True  # False once the kernel has refused namespaces inside a sandbox

    def __init__(self, limits: Limits) -> None:
        self.contained = sandbox.isolates() == "bubblewrap"
        self.in_rooms = self.contained and Host.rooms
        packages = sandbox.own_packages()
        command = sandbox.limited(limits, cpu=False)
        if self.contained:
            command = sandbox.wrapped(limits, rooms=True, packages=packages)
            packages = packages and sandbox.PACKAGES
        settings = {"contained": self.contained, "rooms": self.in_rooms, "sessions": True}
        settings |= limits._asdict() | {"packages": packages}
        command += [*sandbox.python(), "-c", TEXT, json.dumps(settings)]
        self.errors = sandbox.memory_file("")
        self.door, theirs = socket.socketpair()
        with theirs:
            self.process: subprocess.Popen = sandbox.popen(command, theirs.fileno(), self.errors)

    @classmethod
    def of(cls, limits: Limits) -> "Host":
        """Returns the host of sessions with these limits; a new one if each needs its own host."""
        host = cls.shared.get(limits)
        if host and host.process.poll() is None:
            return host
        if host:
            host.close()
        host = cls(limits)
        if host.in_rooms or not host.contained:
            cls.shared[limits] = host
        return host

    def connect(self) -> socket.socket:
        """Returns a connection to a new session."""
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        ours.setblocking(False)
        with theirs, contextlib.suppress(OSError):  # if it has died, no greeting will come
            socket.send_fds(self.door, [b"."], [theirs.fileno()])
        return ours

    def close(self) -> str:
        """Ends the process and all its sessions; returns the end of its stderr."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.door.fileno() < 0:
            return ""
        self.door.close()
        received = os.pread(self.errors, sandbox.STDERR, 0).decode("utf-8", "replace")
        os.close(self.errors)
        return received.strip()


class Session:
    """One session, for use in `async with`; it starts with its first piece of code."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.host: Host | None = None
        self.connection: socket.socket | None = None
        self.pid = 0  # pid of its process, in this process's namespace
        self.handle = -1  # pidfd of that process, valid even if its pid is reused
        self.name = ""  # name of the session at the service

    async def __aenter__(self) -> "Session":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def run(self, code: str) -> str:
        """Runs a piece of code; returns the text that it prints, or why it was ended.

        The text has at most `limits.output` characters. Raises CheckerError if it could not run.
        """
        if current().sandbox == "http":
            return await self.served(code)
        async with sandbox.place():
            if not self.connection:
                await self.start()
            clock = Clock(self.pid)
            clock.look()
            self.send(signal.SIGCONT)
            asked = asyncio.create_task(self.ask(code))
            ended = ""
            try:
                while not ended and not (await asyncio.wait({asked}, timeout=TICK))[0]:
                    ended = clock.verdict(self.limits)
            finally:
                asked.cancel()
                await asyncio.wait({asked})
            answer = None if asked.cancelled() else asked.result()
            if answer is not None and len(sandbox.family(self.pid, 2)) == 1:
                self.send(signal.SIGSTOP)
                return answer
            return await self.restarted(ended)

    async def restarted(self, ended: str) -> str:
        """Ends a broken session; returns why. Raises CheckerError unless its own code broke it."""
        assert self.host
        with contextlib.suppress(subprocess.TimeoutExpired):
            await in_thread(self.host.process.wait, TICK / 10)
            raise CheckerError(f"the sandbox's Python ended: {self.host.close() or 'it is dead'}")
        await self.close()
        if ended == "time":
            return f"Timed out after {self.limits.seconds:g} s. {LOST}"
        if ended:
            return f"Used too much: {ended}. {LOST}"
        return f"The code ended the interpreter. {LOST}"

    async def ask(self, code: str) -> str | None:
        """Returns what the code prints, or None if the session dies or its reply is malformed."""
        assert self.connection
        loop = asyncio.get_running_loop()
        text = bytearray()
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            await loop.sock_sendall(self.connection, json.dumps(code).encode() + b"\n")
            while part := await loop.sock_recv(self.connection, 1 << 16):
                text += part
                if len(text) > 16 * self.limits.output + 1000:
                    break
                if text.endswith(b"\n"):
                    answer = json.loads(text)
                    received = str(answer["output"])[: self.limits.output]
                    if answer["cut"]:
                        received += CUT
                    return received.strip("\n").rstrip()
        return None

    async def start(self) -> None:
        """Connects to a new session. Raises CheckerError if none starts."""
        await in_thread(sandbox.own_packages)  # starts a process the first time
        host = self.host = Host.of(self.limits)
        self.connection = host.connect()
        received = await self.greeting()
        if received == READY:
            self.handle = os.pidfd_open(self.pid)
            return None
        if received == ALONE and Host.rooms:
            Host.rooms = False
            Host.shared.pop(self.limits, None)
        await self.close()
        if host.in_rooms and not Host.rooms:
            return await self.start()
        why = "it sent no greeting"
        with contextlib.suppress(subprocess.TimeoutExpired):
            await in_thread(host.process.wait, TICK)
            why = host.close()
        raise CheckerError(f"the sandbox's Python did not start a session: {why or 'it is dead'}")

    async def greeting(self) -> bytes:
        """Returns a new session's first bytes, or none if they are late; records its pid."""
        assert self.connection
        loop = asyncio.get_running_loop()
        came = asyncio.Event()
        loop.add_reader(self.connection, came.set)
        try:
            await asyncio.wait_for(came.wait(), START)
            size = socket.CMSG_SPACE(PEER.size)
            received, sent, _, _ = self.connection.recvmsg(len(READY), size)
        except OSError:
            return b""
        finally:
            loop.remove_reader(self.connection)
        if sent:
            self.pid = PEER.unpack(sent[0][2])[0]
        return received

    def send(self, number: int) -> None:
        """Sends a signal to the session's process, which is stopped while nothing runs."""
        if self.host and self.host.contained:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self.handle, number)

    async def close(self) -> None:
        """Ends the session, and all processes that it started."""
        if self.name:
            name = self.name
            self.name = ""
            await in_thread(service.forget, current().sandbox_url, name)
        if not self.host or not self.connection:
            return
        self.connection.close()
        self.connection = None
        if self.handle >= 0:
            with contextlib.suppress(OSError):
                if not self.host.contained:
                    os.killpg(self.pid, signal.SIGKILL)
                signal.pidfd_send_signal(self.handle, signal.SIGKILL)
            os.close(self.handle)
            self.handle = -1
        if self.host is not Host.shared.get(self.limits):
            await in_thread(self.host.close)

    async def served(self, code: str) -> str:
        """Returns the text that the service's session prints. Raises CheckerError."""
        url = current().sandbox_url
        new = not self.name
        self.name = self.name or uuid.uuid4().hex
        reply = await service.execute(url, code, "ipython", "", self.limits, self.name)
        known = reply["process_status"] in ("completed", "error", "timeout")
        # The service reports its own failures, not the code's, as "Session error".
        if not known or reply["stderr"].startswith("Session error: "):
            raise CheckerError(f"the sandbox service at {url} answered {str(reply)[:200]}")
        received = (reply["stdout"] + reply["stderr"]).rstrip()
        lost = reply.get("new_session_created") and not new
        return f"{received}\n{LOST}" if lost else received
