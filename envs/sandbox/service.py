"""The sandbox service of NeMo-Skills (nemo_skills/code_execution), as an HTTP client.

It says "completed" of a program that an OOM killer ended, gives no exit code, cuts long output, and
answers 500 where output is no UTF-8 (local_sandbox_server.py). So a program goes there as the input
of envs/sandbox/interpreter.py, which prints its outcome as JSON. No JSON means no outcome.
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
from typing import Any

from core.http import Broken, directly, whole
from envs.sandbox.interpreter import SENT, STDERR
from envs.sandbox.outcome import Limits, Ran, reported
from envs.services import CheckerError
from settings.environment_services import is_address

GRACE = 30.0  # seconds that an answer may be late
AWAY = 900.0  # seconds that the service may be away
# Seconds that it may take to answer before a run starts. A job has its image fetched first.
STARTS = 300.0 if "SLURM_JOB_ID" in os.environ else 60.0
START = 20.0  # seconds that a Python there may take to start
SHARE = 5  # seconds for one of processor time, where others have the processors
HEADER = "X-Session-ID"  # by which the service's workers are chosen, too
# Prints how many processes the kernel has ended for want of memory.
COUNT = "print(*(line for line in open('/proc/vmstat') if line.startswith('oom_kill ')))"
FIELDS = ("process_status", "stdout", "stderr")
TEXT = Path(__file__).with_name("interpreter.py").read_text(encoding="utf-8")


class Failed(Exception):
    """A request that may be made again."""


async def program(url: str, source: str, stdin: str, limits: Limits) -> Ran:
    """The outcome of a Python program there. Raises CheckerError where there is none.

    A program has killed its interpreter if that was seen twice, a harmless one has an outcome
    before and after it, and the kernel has ended nothing for want of memory in between. One that a
    signal in SENT has ended runs once more, and what ends so twice has ended itself.
    """
    counts, deaths = [], 0
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
    raise CheckerError(f"the sandbox service at {url} gave no outcome of a program")


async def attempt(url: str, source: str, stdin: str, limits: Limits) -> Ran | None:
    """The outcome of a program; None where it has none, or an OOM killer ended it.

    Raises CheckerError where it got too little processor time.
    """
    began = time.monotonic()
    settings = {"contained": False, "rooms": False, "watches": True, **limits._asdict()}
    # A file that another program left in the service's folder is no module.
    path = "sys.path[:] = [folder for folder in sys.path if folder]"
    code = f"import sys; {path}; sys.argv.append({json.dumps(settings)!r})\n{TEXT}"
    # As ASCII, in the input: an argument holds 128 KiB, and half a surrogate pair is no text.
    request = json.dumps({"source": source, "stdin": stdin}) + "\n"
    seconds = START + SHARE * limits.seconds
    longest = 6 * (limits.output + STDERR) + 1000  # a byte of output is six of JSON at most
    allowed = limits._replace(seconds=seconds, output=longest)
    reply = await execute(url, code, "python", request, allowed)
    if reply["process_status"] == "timeout":
        raise CheckerError(f"the sandbox service at {url} gave no outcome in {seconds:g} s")
    if "Traceback" in reply["stderr"]:  # of the interpreter: a program's is in its outcome
        shown = reply["stderr"][-300:]
        raise CheckerError(f"the interpreter at the sandbox service at {url} failed: {shown}")
    begun, _, line = reply["stdout"].partition("\n")
    with contextlib.suppress(ValueError, LookupError, TypeError):
        outcome = reported(json.loads(line), time.monotonic() - began)
        return outcome if begun == "ready" and outcome.ended != "oom" else None
    return None


async def execute(
    url: str, code: str, language: str, stdin: str, limits: Limits, session: str = ""
) -> dict[str, Any]:
    """The service's answer to POST /execute, whose FIELDS are text. While it is away, this waits.

    `session` names what remembers, for the language "ipython". Raises CheckerError after AWAY
    seconds, or where the service refuses the request.
    """
    request: dict[str, Any] = {"generated_code": code, "language": language, "std_input": stdin}
    request |= {"timeout": limits.seconds, "max_output_characters": limits.output}
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
            raise CheckerError(f"the sandbox service at {url} is away for {AWAY:g} s: {why}")
        await asyncio.sleep(pause)
        pause = min(2 * pause, 30.0)


async def post(
    url: str, request: dict, seconds: float, most: int, session: str = ""
) -> dict[str, Any]:
    """The JSON object that a POST is answered with, within these seconds and bytes.

    Raises Failed, and CheckerError where the service refuses the request.
    """
    import aiohttp  # takes longer than all else that the registry imports with this module

    headers = {"Content-Type": "application/json"} | ({HEADER: session} if session else {})
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
        reply = json.loads(raw)
        if all(isinstance(reply[name], str) for name in FIELDS):
            return reply
    except (ValueError, RecursionError, LookupError, TypeError):
        pass
    raise Failed(f"expected a JSON object with the texts {', '.join(FIELDS)}, got {shown}")


def forget(url: str, session: str) -> None:
    """Ends a session there, if the service is not away."""
    address = f"{url.rstrip('/')}/sessions/{session}"
    request = urllib.request.Request(address, headers={HEADER: session}, method="DELETE")
    gone = contextlib.suppress(OSError, http.client.HTTPException)
    with gone, directly(request, GRACE):
        pass


def malformed(url: str) -> str:
    """Why a URL is no address of a service; "" if it is one."""
    return "" if is_address(url) else f"services.sandbox_url = {url!r}, expected http://HOST:PORT"


@functools.cache  # it is asked for every row
def problem(url: str) -> str:
    """Why no program could run there; "" where it answers. A service may start beside this run."""
    address = f"{url.rstrip('/')}/health"
    until = time.monotonic() + STARTS
    why, waited = "", False
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
    return f"GET {address}: {why}, expected the sandbox service of NeMo-Skills"
