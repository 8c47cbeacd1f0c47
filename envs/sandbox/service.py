"""Calls NeMo-Skills' sandbox service (nemo_skills/code_execution) over HTTP.

The service reports "completed" for a program that an OOM killer ended, returns no exit code, cuts
long output, and replies with status 500 if output is not UTF-8 (local_sandbox_server.py). So a
program is sent as input to envs/sandbox/interpreter.py, which prints its outcome as JSON. No JSON
means no outcome.
"""

import asyncio
import contextlib
import functools
import http.client
import json
import os
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Literal, NotRequired, TypedDict

from core.http import Broken, directly, whole
from envs.sandbox.interpreter import SENT, SHARE, STDERR
from envs.sandbox.outcome import Limits, Ran, reported
from envs.services import CheckerError, count_starved
from settings.environment_services import is_address

GRACE = 30.0  # seconds that an answer may be late
AWAY = 900.0  # seconds that the service may be down
# Seconds that it may take to answer before a run starts. A job fetches the service's image first.
STARTS = 300.0 if "SLURM_JOB_ID" in os.environ else 60.0
START = 20.0  # seconds that a Python there may take to start
HEADER = "X-Session-ID"  # also selects the service's worker
# Prints how many processes the kernel has killed for lack of memory.
COUNT = "print(*(line for line in open('/proc/vmstat') if line.startswith('oom_kill ')))"
Field = Literal["process_status", "stdout", "stderr"]
FIELDS: tuple[Field, Field, Field] = ("process_status", "stdout", "stderr")
TEXT = Path(__file__).with_name("interpreter.py").read_text(encoding="utf-8")


class Failed(Exception):
    """Raised if a request failed and may be retried."""


class Reply(TypedDict):
    """The service's answer to POST /execute."""

    process_status: str
    stdout: str
    stderr: str
    new_session_created: NotRequired[bool]


async def program(url: str, source: str, stdin: str, limits: Limits) -> Ran:
    """Runs a Python program at the service. Raises CheckerError if it has no outcome.

    The program itself counts as having killed its interpreter if the interpreter died twice, a
    harmless program had an outcome after each death, and the kernel killed no process for lack of
    memory in between. A program ended by a signal in SENT runs once more; if that happens again, it
    counts as the program's own end.
    """
    counts: list[Ran | None] = []
    deaths = 0
    for tried in range(2):
        outcome = await attempt(url, source, stdin, limits)
        died = outcome is not None and outcome.ended == "killed"
        if outcome and not died and (tried or outcome.code not in SENT):
            return outcome
        deaths += died
        counts.append(await attempt(url, COUNT, "", limits))
    first, second = counts
    lives = first and second and first.stdout == second.stdout and first.code == second.code == 0
    if lives and deaths == 2:
        return Ran("", "", None, "killed", 0.0)
    raise CheckerError(f"the sandbox service at {url} gave no outcome for a program")


async def attempt(url: str, source: str, stdin: str, limits: Limits) -> Ran | None:
    """Returns a program's outcome; None if it has none, or an OOM killer ended it.

    Raises CheckerError if it got too little processor time.
    """
    began = time.monotonic()
    settings = {"contained": False, "rooms": False, "watches": True, **limits._asdict()}
    # Files that another program left in the service's folder must not be imported.
    path = "sys.path[:] = [folder for folder in sys.path if folder]"
    code = f"import sys; {path}; sys.argv.append({json.dumps(settings)!r})\n{TEXT}"
    # Sent as ASCII, in the input: an argument is limited to 128 KiB, and a lone surrogate is not
    # text.
    request = json.dumps({"source": source, "stdin": stdin}) + "\n"
    seconds = START + SHARE * limits.seconds
    longest = 6 * (limits.output + STDERR) + 1000  # JSON escapes a byte with six at most
    allowed = limits._replace(seconds=seconds, output=longest)
    reply = await execute(url, code, "python", request, allowed)
    if reply["process_status"] == "timeout":
        count_starved("error")
        raise CheckerError(f"the sandbox service at {url} gave no outcome in {seconds:g} s")
    if "Traceback" in reply["stderr"]:  # of the interpreter: a program's is in its outcome
        raise CheckerError(
            f"the interpreter at the sandbox service at {url} failed: {reply['stderr'][-300:]}"
        )
    begun, _, line = reply["stdout"].partition("\n")
    with contextlib.suppress(ValueError, LookupError, TypeError):
        outcome = reported(json.loads(line), time.monotonic() - began)
        if begun != "ready" or outcome.ended == "oom":
            return None
        if outcome.ended == "late":
            count_starved("timeout")
            return outcome._replace(ended="time")
        return outcome
    return None


async def execute(
    url: str, code: str, language: str, stdin: str, limits: Limits, session: str = ""
) -> Reply:
    """Returns the service's answer to POST /execute; waits while the service is down.

    `session` names the session for the language "ipython". Raises CheckerError after AWAY seconds,
    or if the service refuses the request.
    """
    request: dict[str, str | float] = {
        "generated_code": code,
        "language": language,
        "std_input": stdin,
        "timeout": limits.seconds,
        "max_output_characters": limits.output,
    }
    address = f"{url.rstrip('/')}/execute"
    most = 12 * limits.output + (1 << 20)
    began = time.monotonic()
    pause = 1.0
    while True:
        try:
            return await post(address, request, limits.seconds + GRACE, most, session)
        except Failed as failure:
            why = str(failure)
        if time.monotonic() - began > AWAY:
            raise CheckerError(f"the sandbox service at {url} has been down for {AWAY:g} s: {why}")
        await asyncio.sleep(pause)
        pause = min(2 * pause, 30.0)


async def post(
    url: str, request: dict[str, str | float], seconds: float, most: int, session: str = ""
) -> Reply:
    """Posts a request, and returns the JSON object that answers it within these limits.

    Raises Failed, and CheckerError if the service refuses the request.
    """
    import aiohttp  # slower to import than everything else that the registry imports

    headers = {"Content-Type": "application/json"}
    if session:
        headers[HEADER] = session
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(seconds)) as client,
            client.post(
                url, data=json.dumps(request), headers=headers, allow_redirects=False
            ) as answer,
        ):
            raw = await whole(answer, most)
    except (Broken, aiohttp.ClientError, OSError) as error:
        raise Failed(f"{type(error).__name__}: {error}") from None
    shown = f"status {answer.status}: {raw[:200].decode('utf-8', 'replace')}"
    if answer.status in (408, 429) or answer.status >= 500:
        raise Failed(shown)
    if answer.status != 200:
        raise CheckerError(f"the sandbox service at {url} refused a request: {shown}")
    try:
        reply: Reply = json.loads(raw)
        if all(isinstance(reply[name], str) for name in FIELDS):
            return reply
    except (ValueError, RecursionError, LookupError, TypeError):
        pass
    raise Failed(f"expected a JSON object with the string fields {', '.join(FIELDS)}, got {shown}")


def forget(url: str, session: str) -> None:
    """Ends a session at the service, unless the service is down."""
    address = f"{url.rstrip('/')}/sessions/{session}"
    request = urllib.request.Request(address, headers={HEADER: session}, method="DELETE")
    with contextlib.suppress(OSError, http.client.HTTPException), directly(request, GRACE):
        pass


def malformed(url: str) -> str:
    """Returns why a URL is not a service's address; "" if it is one."""
    return "" if is_address(url) else f"services.sandbox_url = {url!r}, expected http://HOST:PORT"


@functools.cache  # called for every row
def problem(url: str) -> str:
    """Returns why no program could run at the service; "" if it answers in time.

    Waits up to STARTS seconds, because the service may be starting along with this run.
    """
    address = f"{url.rstrip('/')}/health"
    until = time.monotonic() + STARTS
    why = ""
    waited = False
    while time.monotonic() < until:
        try:
            with directly(address, GRACE / 3):
                return ""
        except urllib.error.HTTPError as error:
            why = str(error)
            if error.code < 500 and error.code not in (408, 429):
                break
        except (OSError, ValueError, http.client.HTTPException) as error:
            why = str(error)
        if not waited:
            print(f"waiting {STARTS:g} s for the sandbox service at {url}: {why}", flush=True)
        waited = True
        time.sleep(2.0)
    return f"GET {address}: {why}, expected NeMo-Skills' sandbox service"
