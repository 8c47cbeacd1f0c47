"""A Python whose libraries are imported already: each command of a test is a fork of it.

Five of the six seconds of a dry run are the import of torch and transformers. No file of the
project is imported ahead, so a command reads the project from where it stands.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

LIBRARIES = ("torch", "transformers.models.auto.auto_factory", "ray", "reasoning_gym", "tyro")
CLIENT = """#!{python} -SI
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
asked = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode()
socket.send_fds(server, [len(asked).to_bytes(8, "big")], [0, 1, 2])
server.sendall(asked)
sys.exit(int(server.recv(8) or b"120"))
"""


@contextlib.contextmanager
def python(
    path: Path, env: Mapping[str, str], libraries: Sequence[str] = LIBRARIES
) -> Iterator[None]:
    """Writes a program to `path` that is a Python as long as the context is open.

    Libraries have read their environment variables already, those of `env`.
    """
    address = f"{path}.socket"  # at most 107 bytes
    command = [sys.executable, str(Path(__file__).resolve()), address, *libraries]
    server = subprocess.Popen(command, env=env)
    try:
        while not os.path.exists(address):
            assert server.poll() is None, "the server of warm Pythons has ended"
            time.sleep(0.05)
        path.write_text(CLIENT.format(python=sys.executable, address=address))
        path.chmod(0o755)
        yield
    finally:
        server.kill()
        server.wait()


def received(client: socket.socket) -> list:
    """A command's words, environment and folder; its files become those of this process."""
    size, files, *_ = socket.recv_fds(client, 8, 3)
    asked = client.makefile("rb").read(int.from_bytes(size, "big"))
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    return json.loads(asked)


def run(words: list[str]) -> None:
    """What `python WORDS` does."""
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path.insert(0, "")
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    elif words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, "")
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
        runpy.run_path(words[0], run_name="__main__")


def status_of(words: list[str]) -> int:
    """Runs a command; its exit status."""
    try:
        run(words)
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def serve(address: str, libraries: Sequence[str]) -> None:
    """Forks for each client: one that runs the command, and one that waits for it."""
    sys.path.remove(os.path.dirname(__file__))
    own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    for name in libraries:
        importlib.import_module(name)
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{address}.unready")
    listener.listen(100)
    os.rename(f"{address}.unready", address)
    while True:
        client, _ = listener.accept()
        if os.fork():
            client.close()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            continue
        listener.close()
        words, env, folder = received(client)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(env)
        asked = env.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:] = [*filter(None, asked), *(folder for folder in sys.path if folder not in own)]
        command = os.fork()
        if command:
            client.sendall(str(os.waitstatus_to_exitcode(os.waitpid(command, 0)[1]) % 256).encode())
            os._exit(0)
        client.close()
        sys.exit(status_of(words))


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2:])
