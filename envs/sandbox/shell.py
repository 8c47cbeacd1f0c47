"""A shell in a terminal of its own, in the sandbox: types keys and returns the screen.

Each has a sandbox. Its first process (envs/sandbox/terminal_host.py) keeps the limits: processor
time and memory of all its processes together, their number, and the size of its working folder. It
ends with its `async with`, also where that is cancelled, and nothing of it is left.
"""

import asyncio
import base64
import contextlib
import json
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path, PurePosixPath
from typing import Any

from core.waits import in_thread
from envs import get, require, services
from envs.sandbox import sandbox, user_limit
from envs.sandbox.interpreter import SENT
from envs.sandbox.sandbox import Limits, memory_file
from envs.sandbox.user_limit import FULL
from envs.services import CheckerError

TEXT = Path(__file__).with_name("terminal_host.py").read_text(encoding="utf-8")
START = 60.0  # seconds that a terminal may take to start, or to answer late
PRINTED = 1 << 20  # bytes that the command of a check may print
READY = "the folder is unpacked\n"
# What tar says of a folder that cannot be unpacked anywhere: one made step by step can be so.
OWN_FAULTS = ("No space left", "File name too long")
# Sequences that move the cursor, choose colours, or name the window.
ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*\x07?|[ -/]?[0-~])")

# $1 is run in the working folder, which stdin holds; what is in .given goes over it.
CHECK = f"""
mkdir -p .given && mv .given /tmp/given && base64 -d | tar -x || exit
echo {READY.strip()}
cp -r --remove-destination /tmp/given/. . || exit
HOME=/tmp exec bash -c "$1" </dev/null
"""


class Shell:
    """One shell, inside an `async with`; `files` (path -> text) are in its working folder."""

    def __init__(self, limits: Limits, files: dict[str, str]) -> None:
        self.limits = limits
        self.files = files
        self.used = False  # whether anything was typed
        self.ended = ""  # the limit that it has passed: "time" or "memory"
        self.full = False  # whether its user had no room for all its processes
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
        """Starts the terminal. Raises CheckerError where there is none."""
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
            command += ["prlimit"]
            command += [f"--nproc={limits.processes}", *sandbox.python(), "-c", TEXT]
            options: dict[str, Any] = {"pass_fds": passed, "limit": 1 << 20}
            self.process = await sandbox.start([*command, json.dumps(bounds)], **options)
        await self.answer(START)

    async def type(self, keys: str, seconds: float) -> str:
        """The text that the terminal shows after these keys, within at most this many seconds.

        It shows no more once the shell asks for another command. Raises CheckerError.
        """
        return await self.ask({"keys": keys, "seconds": seconds})

    async def run(self, command: str, seconds: float) -> str:
        """The text that the terminal shows of a command within `seconds`. Raises CheckerError."""
        return await self.ask({"command": command, "seconds": seconds})

    async def ask(self, request: dict[str, Any]) -> str:
        """The text that the terminal shows."""
        if self.ended:
            return ""
        self.used = True
        self.send(request)
        reply = await self.answer(request["seconds"] + START)
        self.ended = reply["ended"]
        text = ESCAPES.sub("", reply["screen"])
        return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))

    def seen(self, shown: str) -> str:
        """The part of the terminal's text that the policy sees."""
        shown = shortened(shown, self.limits.output)
        return f"{shown}\n[the terminal was ended: too much {self.ended}]" if self.ended else shown

    async def pack(self) -> bytes | None:
        """Ends all processes; returns a tar of the working folder, None if none could be made.

        Raises CheckerError, also where a command may have been refused a process.
        """
        self.send({"pack": True})
        size = (await self.answer(START))["size"]
        if self.full or user_limit.full(self.limits):
            raise CheckerError(FULL)
        assert self.process and self.process.stdout
        async with self.late(START):
            return None if size < 0 else await self.process.stdout.readexactly(size)

    def send(self, request: dict[str, Any]) -> None:
        """Sends a request, a line of JSON."""
        assert self.process and self.process.stdin
        self.process.stdin.write(json.dumps(request).encode() + b"\n")

    async def answer(self, seconds: float) -> dict[str, Any]:
        """The answer to a request. Raises CheckerError where it does not come."""
        assert self.process and self.process.stdout
        async with self.late(seconds):
            line = await self.process.stdout.readline()
            reply: dict[str, Any] = json.loads(line)
            return reply

    @contextlib.asynccontextmanager
    async def late(self, seconds: float) -> AsyncIterator[None]:
        """Awaits; raises CheckerError where that takes longer, or fails."""
        try:
            async with asyncio.timeout(seconds):
                yield
        except (TimeoutError, ValueError, OSError, EOFError) as error:
            complaint = await self.close()
            raise CheckerError(f"a terminal of the sandbox: {error!r}: {complaint}") from None

    async def close(self) -> str:
        """Ends the terminal with all that it began; returns the end of its sandbox's stderr."""
        if not self.process:
            return ""
        process, self.process = self.process, None
        await sandbox.kill(process)
        return (await sandbox.end(process.stderr)).decode("utf-8", "replace").strip()[-500:]


async def said_after(
    folder: bytes, files: dict[str, str], command: str, limits: Limits
) -> str | None:
    """The output of a command in a fresh sandbox, in a packed folder with `files` over its own.

    None where it passes a limit, or the folder is one that cannot be unpacked anywhere. Raises
    CheckerError, also where unpacking fails for another reason. A command that a signal in SENT
    has ended runs once more; where it ends so again, it is the folder's fault.
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
    if begun or ran.ended or any(fault in ran.stderr for fault in OWN_FAULTS):
        return None if ran.ended or not begun else output
    raise CheckerError(f"a folder cannot be unpacked: code {ran.code}: {ran.stderr[-300:]}")


def shortened(text: str, most: int) -> str:
    """The beginning and the end of a text."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half]}\n[... output cut ...]\n{text[-half:]}"


def check_files(holder: dict, at: str) -> None:
    """Raises ValueError unless `files` are texts below the working folder."""
    files = get(holder, "files", dict | None, "an object: path -> text, or null", at) or {}
    for path, text in files.items():
        require(isinstance(text, str), f"{at}files.{path}", text, "the text of a file")
        parts = PurePosixPath(path).parts
        inside = parts and parts[0] != "/" and ".." not in parts and "\0" not in path
        require(inside, f"{at}files", path, "paths inside the working folder")


def problem() -> str:
    """Why no shell can be had, and how to mend it; "" for nothing."""
    backend = services.current().sandbox
    if backend != "bubblewrap":
        return f"services.sandbox = {backend!r}, expected 'bubblewrap'"
    return sandbox.problem() or user_limit.problem(Limits())


NEED = services.Need("shell", problem)
