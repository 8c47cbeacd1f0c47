"""Runs inside the sandbox, as its first process: a shell in a terminal, and its limits.

envs/sandbox/shell.py passes this text to `python -c`: it may import only the standard library.

    {"keys", "seconds"}     --> {"screen", "ended"}: the text that the terminal showed
    {"command", "seconds"}  --> the same, for a whole command
    {"pack": true}          --> {"size"}, then `size` bytes: a tar of /work, once all
                                other processes have been killed

No process in the sandbox can kill, stop or trace the first one. A shell that ends is replaced by
another. If a limit is exceeded, all processes are ended, and `ended` names the limit.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from typing import TypedDict

TICK = 0.25  # seconds between two checks of the processes
SETTLE = 0.03  # seconds within which a prompt follows its notice
NOTICE = 9  # the shell's descriptor on which it announces a prompt
SHELL = ["bash", "--norc", "--noprofile", "--noediting", "-i"]
COMMAND = "/tmp/.command"
SIZE = struct.pack("HHHH", 40, 160, 0, 0)  # lines and columns of the terminal


class Request(TypedDict, total=False):
    """A request from envs/sandbox/shell.py."""

    keys: str
    command: str
    seconds: float
    pack: bool


def main(seconds: float, memory: int, output: int) -> None:
    """Serves requests until stdin ends; all processes share `seconds` of CPU and `memory`."""
    assert os.getpid() == 1, "kill(-1) must mean the sandbox"
    os.chdir("/")
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
    terminal = Terminal(seconds, memory, output)
    terminal.type(b"", 10.0)
    print(json.dumps({"screen": "", "ended": ""}), flush=True)
    while True:
        while not select.select([0], [], [], 4 * TICK)[0]:
            terminal.look()
        request: Request = json.loads(sys.stdin.readline() or "{}")
        if not request:
            return
        if "pack" in request:
            pack()
            continue
        keys = sourced(request["command"]) if "command" in request else request["keys"]
        screen = terminal.type(keys.encode("utf-8", "replace"), request["seconds"])
        text = screen.decode("utf-8", "replace")
        if "command" in request:
            text = text.partition("\n")[2]
        print(json.dumps({"screen": text, "ended": terminal.ended}), flush=True)


def sourced(command: str) -> str:
    """Returns the line that makes the shell run a multi-line command as one."""
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(COMMAND)
        with open(COMMAND, "x", encoding="utf-8", errors="replace") as file:
            file.write(command)
    except OSError:  # such as a full disk
        return f"{command}\n"
    return f". {COMMAND}\n"


class Terminal:
    """A terminal, its shell, and the limits on time and memory of all processes in the sandbox."""

    def __init__(self, seconds: float, memory: int, output: int) -> None:
        self.seconds = seconds
        self.memory = memory
        self.output = output
        self.ended = ""
        self.looked = 0.0
        self.notices, self.notice = os.pipe()
        os.set_blocking(self.notices, False)
        self.open()

    def open(self) -> None:
        """Starts a shell in a new terminal."""
        self.shell, self.tty = pty.fork()
        if not self.shell:
            os.chdir(os.environ["HOME"])
            os.dup2(self.notice, NOTICE)
            prompt = {"PS1": r"\w$ ", "PROMPT_COMMAND": f"printf . >&{NOTICE}", "TERM": "dumb"}
            os.execvpe(SHELL[0], SHELL, os.environ | prompt)
        fcntl.ioctl(self.tty, termios.TIOCSWINSZ, SIZE)
        os.set_blocking(self.tty, False)

    def type(self, keys: bytes, seconds: float) -> bytes:
        """Types keys, and returns the text shown until `seconds` pass or each line got a prompt.

        Long output is reduced to its beginning and its end.
        """
        with contextlib.suppress(BlockingIOError):
            os.read(self.notices, 1 << 16)
        prompts = max(1, keys.count(b"\n")) if keys[-1:] in (b"", b"\n") else sys.maxsize
        end = time.monotonic() + seconds
        shown = bytearray()
        while not self.ended and (left := end - time.monotonic()) > 0:
            keys = self.write(keys)
            select.select([self.tty, self.notices], [], [], min(left, TICK))
            prompts -= self.asked()
            if prompts <= 0 and not keys:
                end = min(end, time.monotonic() + SETTLE)
            shown += self.read()
            if len(shown) > 2 * self.output:
                middle = b"\n[... output cut ...]\n"
                shown[self.output // 2 : -self.output // 2] = middle
            self.look()
        return bytes(shown)

    def asked(self) -> int:
        """Returns the number of prompts since the last call."""
        with contextlib.suppress(BlockingIOError):
            return len(os.read(self.notices, 4096))
        return 0

    def write(self, keys: bytes) -> bytes:
        """Writes keys; returns the keys that a full terminal does not accept."""
        with contextlib.suppress(BlockingIOError, OSError):
            return keys[os.write(self.tty, keys[:512]) :] if keys else keys
        return keys

    def read(self) -> bytes:
        """Returns the terminal's new text; starts another shell if the old one is gone.

        It is gone if it exited or closed the terminal.
        """
        gone = self.gone()
        try:
            part = os.read(self.tty, 1 << 14)
        except BlockingIOError:
            part = b""
        except OSError:  # no process has it open
            part = b""
            gone = True
        if not gone:
            return part
        os.close(self.tty)
        kill()
        self.open()
        return part + b"\n[the shell has ended with all that it began, and another begins]\n"

    def gone(self) -> bool:
        """Returns whether the shell has ended; reaps all ended processes in the sandbox."""
        with contextlib.suppress(ChildProcessError):
            while pid := os.waitpid(-1, os.WNOHANG)[0]:
                if pid == self.shell:
                    self.shell = 0
        return not self.shell

    def look(self) -> None:
        """Ends all processes if they have used too much."""
        now = time.monotonic()
        if now - self.looked < TICK or self.ended:
            return
        self.looked = now
        self.gone()
        ran = 0.0
        used = 0
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError, IndexError, ValueError):
                with open(f"/proc/{pid}/stat") as file:
                    fields = file.read().rpartition(")")[2].split()
                ran += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
                used += int(fields[21]) * os.sysconf("SC_PAGESIZE")
        if ran > self.seconds:
            self.ended = "time"
        elif used > self.memory:
            self.ended = "memory"
        if self.ended:
            kill()


def kill() -> None:
    """Ends all processes in the sandbox except this one."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def pack() -> None:
    """Sends the size of the working folder's tar, then the tar; size -1 if tar fails."""
    kill()
    tar = os.memfd_create("tar")
    quiet = subprocess.DEVNULL
    subprocess.run(["chmod", "-R", "u+rwX", "/work"], stderr=quiet, check=False)
    made = subprocess.run(["tar", "-c", "-C", "/work", "."], stdout=tar, stderr=quiet, check=False)
    if made.returncode == -signal.SIGKILL:  # sent from outside, because nothing else runs here
        sys.exit("tar was killed")
    size = -1 if made.returncode else os.fstat(tar).st_size
    print(json.dumps({"size": size}), flush=True)
    at = 0
    while at < size:
        at += os.sendfile(1, tar, at, 1 << 20)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
