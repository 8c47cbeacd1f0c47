"""Runs a shell in a terminal of its own, in the sandbox: types keys and returns the screen.

Each shell has a sandbox, whose first process (envs/sandbox/terminal_host.py) enforces the limits:
processor time and memory of all its processes together, their number, and the size of its working
folder. The shell ends with its `async with`, even if that is cancelled, and leaves nothing behind.
"""

import asyncio
import base64
import contextlib
import json
import os
import re
from collections.abc import AsyncIterator, Mapping
from pathlib import Path, PurePosixPath
from typing import TypedDict

from core.waits import in_thread
from envs import get, require, services
from envs.sandbox import sandbox, user_limit
from envs.sandbox.interpreter import SENT
from envs.sandbox.sandbox import Limits, memory_file
from envs.sandbox.user_limit import FULL
from envs.services import CheckerError

TEXT = Path(__file__).with_name("terminal_host.py").read_text(encoding="utf-8")
START = 60.0  # seconds for a terminal to start, or for an answer to be late
PRINTED = 1 << 20  # bytes that a check's command may print
READY = "the folder is unpacked\n"
# Errors from tar for a folder that cannot be unpacked anywhere, for example because a long path in
# it was created step by step.
OWN_FAULTS = ("No space left", "File name too long")
# Sequences that move the cursor, choose colours, or name the window.
ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*\x07?|[ -/]?[0-~])")

# Unpacks the working folder from stdin, copies the files in .given over it, and runs $1 in it.
CHECK = f"""
mkdir -p .given && mv .given /tmp/given && base64 -d | tar -x || exit
echo {READY.strip()}
cp -r --remove-destination /tmp/given/. . || exit
HOME=/tmp exec bash -c "$1" </dev/null
"""


class Reply(TypedDict, total=False):
    """A reply from envs/sandbox/terminal_host.py."""

    screen: str
    ended: str
    size: int


class Shell:
    """One shell, for use in `async with`; `files` (path -> text) are put in its working folder."""

    def __init__(self, limits: Limits, files: dict[str, str]) -> None:
        self.limits = limits
        self.files = files
        self.used = False  # True once anything has been typed
        self.ended = ""  # the limit that it has exceeded: "time" or "memory"
        self.full = False  # True if its user had no room for all its processes
        self.process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> "Shell":
        try:
            async with sandbox.place():
                await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Starts the terminal. Raises CheckerError if it does not start."""
        if sandbox.isolates() != "bubblewrap":
            raise CheckerError("a shell needs services.sandbox = 'bubblewrap'")
        limits = self.limits
        self.full = user_limit.full(limits)
        with contextlib.ExitStack() as stack:
            given = [(path, memory_file(text)) for path, text in self.files.items()]
            filter = memory_file(sandbox.CALLS)
            passed = [filter, *(descriptor for _, descriptor in given)]
            for descriptor in passed:
                stack.callback(os.close, descriptor)
            bounds = {"seconds": limits.seconds, "memory": limits.memory, "output": limits.output}
            command = [*sandbox.wrapped(limits, files=given), "--as-pid-1"]
            command += ["--seccomp", str(filter)] if sandbox.CALLS else []
            command += ["prlimit", f"--nproc={limits.processes}"]
            command += [*sandbox.python(), "-c", TEXT, json.dumps(bounds)]
            self.process = await sandbox.start(command, pass_fds=passed, limit=1 << 20)
        await self.answer(START)

    async def type(self, keys: str, seconds: float) -> str:
        """Types keys, and returns the text that the terminal shows within `seconds`.

        Returns early once the shell asks for another command. Raises CheckerError.
        """
        return await self.ask({"keys": keys, "seconds": seconds}, seconds)

    async def run(self, command: str, seconds: float) -> str:
        """Runs a command, and returns the text that the terminal shows within `seconds`.

        Raises CheckerError.
        """
        return await self.ask({"command": command, "seconds": seconds}, seconds)

    async def ask(self, request: Mapping[str, str | float], seconds: float) -> str:
        """Sends a request that takes `seconds`, and returns the text that the terminal shows."""
        if self.ended:
            return ""
        self.used = True
        self.send(request)
        reply = await self.answer(seconds + START)
        self.ended = reply["ended"]
        text = ESCAPES.sub("", reply["screen"])
        return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))

    def seen(self, shown: str) -> str:
        """Returns the part of the terminal's text that the policy sees."""
        shown = shortened(shown, self.limits.output)
        if self.ended:
            return f"{shown}\n[the terminal was ended: too much {self.ended}]"
        return shown

    async def pack(self) -> bytes | None:
        """Ends all processes; returns a tar of the working folder, or None if tar fails.

        Raises CheckerError if the terminal fails, or if a command may have been refused a process.
        """
        self.send({"pack": True})
        size = (await self.answer(START))["size"]
        if self.full or user_limit.full(self.limits):
            raise CheckerError(FULL)
        assert self.process and self.process.stdout
        async with self.late(START):
            return None if size < 0 else await self.process.stdout.readexactly(size)

    def send(self, request: Mapping[str, str | float]) -> None:
        """Sends a request, a line of JSON."""
        assert self.process and self.process.stdin
        self.process.stdin.write(json.dumps(request).encode() + b"\n")

    async def answer(self, seconds: float) -> Reply:
        """Returns the reply to a request. Raises CheckerError if it does not arrive in time."""
        assert self.process and self.process.stdout
        async with self.late(seconds):
            line = await self.process.stdout.readline()
            reply: Reply = json.loads(line)
            return reply

    @contextlib.asynccontextmanager
    async def late(self, seconds: float) -> AsyncIterator[None]:
        """Limits the block's time. Raises CheckerError if it takes longer, or fails."""
        try:
            async with asyncio.timeout(seconds):
                yield
        except (TimeoutError, ValueError, OSError, EOFError) as error:
            complaint = await self.close()
            raise CheckerError(f"a sandbox terminal: {error!r}: {complaint}") from None

    async def close(self) -> str:
        """Ends the terminal and its processes; returns the end of its sandbox's stderr."""
        if not self.process:
            return ""
        process = self.process
        self.process = None
        await sandbox.kill(process)
        errors = await sandbox.end(process.stderr)
        return errors.decode("utf-8", "replace").strip()[-500:]


async def said_after(
    folder: bytes, files: dict[str, str], command: str, limits: Limits
) -> str | None:
    """Unpacks a folder in a fresh sandbox, replaces its copies of `files` and runs a command there.

    Returns the command's output, or None if the command exceeds a limit or the folder cannot be
    unpacked anywhere. Raises CheckerError if the sandbox fails, or if unpacking fails for another
    reason. A command ended by a signal in SENT runs once more; if that happens again, the folder is
    at fault.
    """
    given = {f".given/{path}": text for path, text in files.items()}
    argv = ["bash", "-c", CHECK, "check", command]
    stdin = await in_thread(lambda: base64.b64encode(folder).decode())
    limits = limits._replace(output=PRINTED + len(READY))
    for _ in range(2):
        ran = await sandbox.run(argv, stdin=stdin, files=given, limits=limits)
        if 128 - (ran.code or 0) not in SENT:
            break
    _, begun, output = ran.stdout.partition(READY)
    if ran.ended:
        return None
    if begun:
        return output
    if any(fault in ran.stderr for fault in OWN_FAULTS):
        return None
    raise CheckerError(f"a folder cannot be unpacked: code {ran.code}: {ran.stderr[-300:]}")


def shortened(text: str, most: int) -> str:
    """Returns the beginning and the end of a long text."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half]}\n[... output cut ...]\n{text[-half:]}"


def check_files(holder: dict, at: str) -> None:
    """Raises ValueError unless the holder's `files` are texts below the working folder."""
    files = get(holder, "files", dict | None, "an object: path -> text, or null", at) or {}
    for path, text in files.items():
        require(isinstance(text, str), f"{at}files.{path}", text, "the text of a file")
        parts = PurePosixPath(path).parts
        inside = parts and parts[0] != "/" and ".." not in parts and "\0" not in path
        require(inside, f"{at}files", path, "paths inside the working folder")


def problem() -> str:
    """Returns why no shell can be started, and how to fix it; "" if nothing prevents it."""
    backend = services.current().sandbox
    if backend != "bubblewrap":
        return f"services.sandbox = {backend!r}, expected 'bubblewrap'"
    return sandbox.problem() or user_limit.problem(Limits())


NEED = services.Need("shell", problem)
