"""The sandbox service of NeMo-Skills as its local_sandbox_server.py answers, and with faults."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from envs import services
from settings.environment_services import Services

Reply = dict | bytes | int  # JSON, the bytes of a whole answer, or a status


def executed(request: dict) -> Reply:
    """What the service's `execute_python` says: no exit code, and 500 for what is no UTF-8."""
    limit = request["max_output_characters"]
    command = [sys.executable, "-c", request["generated_code"]]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    try:
        made = subprocess.Popen(command, **pipes, encoding="utf-8", start_new_session=True)
    except (OSError, ValueError):  # an argument that is too long, or holds a NUL
        return 500
    try:
        texts = made.communicate(request["std_input"], timeout=request["timeout"])
    except (subprocess.TimeoutExpired, UnicodeError) as error:
        os.killpg(made.pid, signal.SIGKILL)
        made.wait()
        late = {"process_status": "timeout", "stdout": "", "stderr": "Execution timed out\n"}
        return 500 if isinstance(error, UnicodeError) else late
    cut = [text if len(text) <= limit else text[:limit] + "<output cut>" for text in texts]
    return {"process_status": "completed", "stdout": cut[0], "stderr": cut[1]}


class Handler(BaseHTTPRequestHandler):
    """Answers POST and DELETE as `answer` says, and GET with 200."""

    answer: Callable[["Handler", dict], Reply]

    def do_POST(self) -> None:
        """A reply of bytes is sent as it is, status line included."""
        given = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        reply = self.answer(json.loads(given or b"{}"))
        if isinstance(reply, bytes):
            self.wfile.write(reply)
            self.close_connection = True
            return
        self.send(reply if isinstance(reply, int) else 200, json.dumps(reply).encode())

    do_DELETE = do_POST

    def do_GET(self) -> None:
        """What a redirected POST would become."""
        self.send(200, b'{"process_status": "completed", "stdout": "49\\n", "stderr": ""}')

    def send(self, status: int, body: bytes) -> None:
        """One whole answer."""
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def drip(self, seconds: float) -> bytes:
        """Sends a byte of an answer a moment, until the client is gone."""
        self.send_response(200)
        self.send_header("Content-Length", "1000000")
        self.end_headers()
        with contextlib.suppress(OSError):
            while True:
                self.wfile.write(b" ")
                time.sleep(seconds)
        return b""

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@contextlib.contextmanager
def skills(answer: Callable[[Handler, dict], Reply] = lambda _, given: executed(given)) -> Iterator:
    """The address of such a service."""
    kind = type("Skills", (Handler,), {"answer": answer})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


@contextlib.contextmanager
def as_sandbox(*answer: Callable[[Handler, dict], Reply]) -> Iterator:
    """The address of such a service that is this process's sandbox, also when it is gone."""
    with skills(*answer) as url:
        services.configure(Services(sandbox="http", sandbox_url=url))
        yield url
