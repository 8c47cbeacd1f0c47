"""The sandbox service of NeMo-Skills (nemo_skills/code_execution), as an HTTP client."""

import asyncio
import contextlib
import http.client
import json
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

from envs.sandbox.checkers import CheckerError

if TYPE_CHECKING:
    from envs.sandbox.sandbox import Limits, Ran

GRACE = 30.0  # seconds that an answer may be late
AWAY = 900.0  # seconds that the service may be away
HEADER = "X-Session-ID"  # by which the service's workers are chosen, too


async def program(url: str, source: str, stdin: str, limits: "Limits") -> "Ran":
    """Runs a Python program there. Raises CheckerError where the service stays away."""
    from envs.sandbox.interpreter import PRELUDE
    from envs.sandbox.sandbox import Ran

    names = PRELUDE.split()
    lines = [f"from {name} import *" for name in names] + [f"import {name}" for name in names]
    lines += ["sys.setrecursionlimit(50_000)", "sys.set_int_max_str_digits(50_000)"]
    code = "\n".join([*lines, source])
    began = time.monotonic()
    told = await execute(url, code, "python", stdin, limits)
    status = told.get("process_status")
    if status not in ("completed", "error", "timeout"):
        raise CheckerError(f"the sandbox service at {url} answered {str(told)[:200]}")
    ended = "time" if status == "timeout" else ""
    code_of = None if ended else int(status == "error")
    out, err = str(told.get("stdout", "")), str(told.get("stderr", ""))
    return Ran(out, err[-2000:], code_of, ended, time.monotonic() - began)


async def execute(
    url: str, code: str, language: str, stdin: str, limits: "Limits", session: str = ""
) -> dict[str, Any]:
    """The service's answer to POST /execute. While it is away, this waits.

    `session` names what remembers, for the language "ipython". Raises CheckerError after AWAY
    seconds, or where the service refuses the request.
    """
    request = {
        "generated_code": code,
        "language": language,
        "std_input": stdin,
        "timeout": limits.seconds,
        "max_output_characters": limits.output,
    }
    began = time.monotonic()
    pause = 1.0
    while True:
        try:
            return await asyncio.to_thread(
                post, f"{url.rstrip('/')}/execute", request, limits.seconds, session
            )
        except urllib.error.HTTPError as error:
            if error.code < 500 and error.code != 429:
                raise CheckerError(f"the sandbox service at {url} refused: {error}") from None
            why = str(error)
        except (OSError, ValueError, http.client.HTTPException) as error:
            why = str(error)
        if time.monotonic() - began > AWAY:
            raise CheckerError(f"the sandbox service at {url} is away for {AWAY:g} s: {why}")
        await asyncio.sleep(pause)
        pause = min(2 * pause, 30.0)


def forget(url: str, session: str) -> None:
    """Ends a session there, if the service is not away."""
    address = f"{url.rstrip('/')}/sessions/{session}"
    request = urllib.request.Request(address, headers={HEADER: session}, method="DELETE")
    gone = contextlib.suppress(OSError, http.client.HTTPException)
    with gone, urllib.request.urlopen(request, timeout=GRACE):
        pass


def post(url: str, request: dict, seconds: float, session: str = "") -> dict[str, Any]:
    """The JSON object that a POST of a JSON object is answered with."""
    headers = {"Content-Type": "application/json"} | ({HEADER: session} if session else {})
    body = json.dumps(request).encode()
    asked = urllib.request.Request(url, body, headers)
    with urllib.request.urlopen(asked, timeout=seconds + GRACE) as answer:
        told = json.loads(answer.read())
    if not isinstance(told, dict):
        raise ValueError(f"expected a JSON object, got {str(told)[:100]}")
    return told
