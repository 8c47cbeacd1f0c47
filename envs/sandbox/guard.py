"""Runs a command; kills it, with all processes that it started, when the worker is gone.

envs/sandbox/sandbox.py passes this text to `python -c`: it may import only the standard library.

    python -c TEXT SOCKET COMMAND ...

The worker holds the other end of SOCKET. The kernel closes it when the worker ends, even if the
command is still starting. Processes that lose their parent become children of this process, so none
of them is lost.
"""

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import time

IGNORED = (signal.SIGPIPE, signal.SIGXFSZ)  # signals that Python ignores, but a command must not
PAUSE = 0.01  # seconds between two checks of dying processes


def main(worker: int, command: list[str]) -> None:
    """Ends with the command's exit code or signal.

    Sends the worker "." once the command has started, or the reason why it could not.
    """
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    os.set_inheritable(worker, False)
    try:
        pid = os.posix_spawnp(command[0], command, os.environ, setsigdef=IGNORED)
        ended = os.pidfd_open(pid)
        os.write(worker, b".")
    except OSError as error:
        kill()
        with contextlib.suppress(OSError):  # the worker is gone
            os.write(worker, f"{command[0]}: {error}".encode())
        os._exit(1)
    events = select.poll()
    events.register(worker, select.POLLIN)
    events.register(ended, select.POLLIN)
    if ended not in dict(events.poll()):
        kill()
        os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    kill()
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL has no other action
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def kill() -> None:
    """Kills all descendants of this process, and waits until they are dead."""
    with contextlib.suppress(ChildProcessError):
        while True:
            with open(f"/proc/self/task/{os.getpid()}/children") as children:
                found = children.read().split()
            for pid in map(int, found):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            if not os.waitpid(-1, os.WNOHANG)[0]:
                time.sleep(PAUSE)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
