"""Python sessions in the sandbox: code comes in pieces, and finds what the pieces before it made.

    Host --starts--> zygote in bubblewrap, numpy, sympy and rdkit imported as far as there
    each session:    zygote --forks--> room: namespaces, folders and a connection of its own

A session is one process (envs/sandbox/interpreter.py). Between two pieces it stands still, and what
they started beside it is dead. It ends with its `async with`, also where that is cancelled. As many
pieces run at once as there are processors. Where the kernel forbids rooms, each session has a
sandbox of its own; where services.sandbox is "http", it is one of that service.
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
    """A process in the sandbox that makes sessions. Raises CheckerError where it does not start."""

    shared: dict[Limits, "Host"] = {}
    rooms = True  # whether the kernel lets a sandbox make namespaces in it

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
        """The one for all sessions with these limits; a new one where each needs its own."""
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
        """A connection to a new session."""
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        ours.setblocking(False)
        with theirs, contextlib.suppress(OSError):  # where it has died, no greeting will come
            socket.send_fds(self.door, [b"."], [theirs.fileno()])
        return ours

    def close(self) -> str:
        """Ends it with all its sessions; returns the end of its stderr."""
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
    """One session, which starts with its first piece of code, inside an `async with`."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.host: Host | None = None
        self.connection: socket.socket | None = None
        self.pid = 0  # of its process, as this process's namespace counts
        self.handle = -1  # of the same process, even if its number is given to another
        self.name = ""  # its name at the service

    async def __aenter__(self) -> "Session":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def run(self, code: str) -> str:
        """The text that a piece of code prints, or why it was ended.

        That is at most `limits.output` characters. Raises CheckerError where it could not run.
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
        """Ends a broken session; returns why. Raises CheckerError unless its code broke it."""
        assert self.host
        with contextlib.suppress(subprocess.TimeoutExpired):
            await in_thread(self.host.process.wait, TICK / 10)
            raise CheckerError(f"the sandbox's Python ended: {self.host.close() or 'it is dead'}")
        await self.close()
        if ended == "time":
            return f"Timed out after {self.limits.seconds:g} s. {LOST}"
        return (
            f"Used too much: {ended}. {LOST}"
            if ended
            else f"The code ended the interpreter. {LOST}"
        )

    async def ask(self, code: str) -> str | None:
        """The text that the code has printed; None where the session died or broke the protocol."""
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
                    return (received + CUT if answer["cut"] else received).strip("\n").rstrip()
        return None

    async def start(self) -> None:
        """Connects to a new session. Raises CheckerError where none starts."""
        await in_thread(sandbox.own_packages)  # which asks a process, once
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
        why = "it did not greet"
        with contextlib.suppress(subprocess.TimeoutExpired):
            await in_thread(host.process.wait, TICK)
            why = host.close()
        raise CheckerError(f"the sandbox's Python did not start a session: {why or 'it is dead'}")

    async def greeting(self) -> bytes:
        """The first bytes of a new session, with its process; empty where none came in time."""
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
        """Sends a signal to the session's process, which stands still while nothing runs."""
        if self.host and self.host.contained:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self.handle, number)

    async def close(self) -> None:
        """Ends the session, and all that it began."""
        if self.name:
            name, self.name = self.name, ""
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
        """The text that the service's session prints. Raises CheckerError."""
        url = current().sandbox_url
        new = not self.name
        self.name = self.name or uuid.uuid4().hex
        reply = await service.execute(url, code, "ipython", "", self.limits, self.name)
        status, out, errors = (reply[name] for name in service.FIELDS)
        # "Session error" is what the service says where it, and not the code, failed.
        if status not in ("completed", "error", "timeout") or errors.startswith("Session error: "):
            raise CheckerError(f"the sandbox service at {url} answered {str(reply)[:200]}")
        received = (out + errors).rstrip()
        lost = reply.get("new_session_created") and not new
        return f"{received}\n{LOST}" if lost else received
