"""Asks models to judge answers, on servers that speak OpenAI's protocol, as vLLM does.

    ask --> Judge, one for each name --> the least busy Server that takes calls --> its model

A server that fails FAILURES times in a row takes no calls until it answers a probe; there is one
probe at a time. If no server of a judge takes calls, the judge is down: its calls wait. A failure
is never a verdict. A call that has waited for `timeouts.rollout` raises Away, and the dispatcher
tries the group again until the judge is back (runtime/rollouts/dispatch.py).

The addresses are in services.judges, or in the lines "NAME http://HOST:PORT/v1" of the file that
the environment variable JUDGES_FILE names. The file is read again during a run, so servers may
start late (launch/judges.sh). See docs/judges.md.
"""

import asyncio
import contextlib
import email.utils
import itertools
import json
import logging
import os
import random
import re
import time
import weakref
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, TypedDict, TypeVar

from core.http import Broken, whole
from core.waits import in_thread
from envs import Json, services
from envs.judge import endpoints
from envs.judge.prompts import inert
from envs.services import Away, CheckerError, Report, limits, patience

T = TypeVar("T")
log = logging.getLogger(__name__)
FAILURES = 3  # consecutive failures, after which a server takes no calls
UNREAD = 20  # consecutive replies without a verdict that show a broken judge, not bad answers
TICK = 0.5  # seconds between two checks for calls that can be served
REREAD = 10.0  # seconds between two reads of JUDGES_FILE
LONGEST_PAUSE = 5.0  # seconds between two probes, or before a call is retried
LONGEST_REST = 60.0  # maximum seconds for which a server's Retry-After is honoured
LONGEST = 32 << 20  # bytes of an answer
REFUSED = 300  # characters of a refusal that are shown
TOO_LONG = re.compile(r"maximum (?:context|model) length (?:is|of) (\d+)")  # as vLLM words it
LARGE = 1 << 16  # characters of messages; handling more is worth a thread


class Completion(TypedDict):
    """The part of a chat completion that is read."""

    choices: "list[Choice]"


class Choice(TypedDict, total=False):
    """One answer in a chat completion."""

    finish_reason: str | None
    message: "Message"


class Message(TypedDict):
    """The text of an answer in a chat completion."""

    content: str | None


class Models(TypedDict):
    """A server's list of models."""

    data: "list[Model]"


class Model(TypedDict):
    """One model in a server's list."""

    id: str


class Failed(Exception):
    """Raised if a call failed and may be retried."""

    def __init__(self, reason: str, message: str, rest: float = 0.0) -> None:
        super().__init__(message)
        self.reason = reason  # "429", "5xx", "timeout", "connection" or "garbled"
        self.rest = rest  # seconds for which the server wants no calls


class TooLong(CheckerError):
    """Raised if a conversation is longer than the judge's context."""


JUDGES: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, "Judge"]] = (
    weakref.WeakKeyDictionary()
)


def report() -> Report:
    """Returns the judges' outages and failures that this process has seen so far."""
    away: dict[str, str] = {}
    failures: Counter[str] = Counter()
    for judges in list(JUDGES.values()):
        for judge in judges.values():
            failures += judge.failures
            if judge.away_since is not None:
                away[f"judges.{judge.name}"] = judge.state()
    return Report(away, failures)


async def ask(
    name: str,
    messages: list[dict[str, str]],
    read: Callable[[str], T | None],
    tries: int = 1,
    **sampling: Json,
) -> T | None:
    """Asks a judge, and returns the verdict that `read` finds in its reply; None if `tries` fail.

    A space is inserted into chat-template control tokens in the messages (envs/judge/prompts.py).
    `read` gets the text after the judge's reasoning. `sampling` contains chat-completion parameters
    (temperature, top_p, max_tokens); services.judges[name]["sampling"] overrides them. A reply that
    was cut off has no verdict, and a conversation that is longer than the judge's context gets
    none. Raises Away if the judge is down for too long, and CheckerError if it refuses any other
    request, or if UNREAD consecutive replies have no verdict.
    """
    if sum(len(message["content"]) for message in messages) > LARGE:
        messages = await in_thread(inert, messages)
    else:
        messages = inert(messages)
    judges = JUDGES.setdefault(asyncio.get_running_loop(), {})
    judge = judges.setdefault(name, Judge(name))
    said_nothing = 0
    while said_nothing < tries:
        try:
            verdict = read(await judge.say(messages, sampling))
        except TooLong:
            verdict = None
            said_nothing = tries  # because another try would be refused as well
        judge.unread = 0 if verdict is not None else judge.unread + 1
        if verdict is not None:
            return verdict
        said_nothing += 1
        judge.failures[f"{name}/malformed"] += 1
        if judge.unread >= UNREAD:
            raise CheckerError(f"judge {name!r} gave no verdict in {judge.unread} replies in a row")
    return None


class Server:
    """One address of a judge."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.busy = 0  # calls under way
        self.failures = 0  # consecutive failures
        self.outages = 0  # outages since a call succeeded
        self.rests_until = 0.0
        self.answered = 0.0  # time of its last answer
        self.model = ""  # the model that it serves, once known
        self.probing: asyncio.Task | None = None  # runs while it takes no calls
        self.asking = asyncio.Lock()

    async def complete(self, body: Mapping[str, Json], seconds: float) -> str:
        """Returns the model's answer, without its reasoning. Raises Failed and CheckerError."""
        if not body["model"] and not self.model:
            await self.lives()
        body = {**body, "model": body["model"] or self.model}
        call = asyncio.ensure_future(self.request("POST", "chat/completions", seconds, body))
        try:
            while not (await asyncio.wait([call], timeout=patience()))[0]:
                async with self.asking:  # one of its calls asks on behalf of all
                    await self.wake()
        finally:
            call.cancel()
        return said(self.url, call.result())

    async def wake(self) -> None:
        """Raises Failed if the server has stopped answering requests."""
        if not self.probing and time.monotonic() - self.answered > patience():
            with contextlib.suppress(Failed, CheckerError):
                await self.lives()
        if self.probing or time.monotonic() - self.answered > patience():
            self.failures = FAILURES
            raise Failed("timeout", f"{self.url}: no answer, not even to GET models")

    async def lives(self) -> None:
        """Asks the server which model it serves. Raises Failed and CheckerError."""
        models: Models = await self.request("GET", "models", patience())
        try:
            self.model = str(models["data"][0]["id"])
        except (TypeError, LookupError):
            raise Failed("garbled", f"GET {self.url}/models: got {str(models)[:REFUSED]}") from None

    async def request(
        self, method: str, path: str, seconds: float, body: Mapping[str, Json] | None = None
    ) -> Any:
        """Returns the JSON value of the server's answer. Raises Failed and CheckerError."""
        import aiohttp  # slower to import than everything else that this module imports

        what = f"{method} {self.url}/{path}"
        # A lone surrogate is not a character, and servers refuse requests that contain one.
        data = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace") if body else None
        timeout = aiohttp.ClientTimeout(seconds, sock_connect=patience())
        headers = {"Content-Type": "application/json"}
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
                session.request(
                    method, f"{self.url}/{path}", data=data, allow_redirects=False
                ) as answer,
            ):
                raw = await whole(answer, LONGEST)
        except Broken as error:
            raise Failed("garbled", f"{what}: {error}") from None
        except (aiohttp.ClientError, OSError) as error:
            reason = "timeout" if isinstance(error, TimeoutError) else "connection"
            raise Failed(reason, f"{what}: {type(error).__name__}: {error}") from None
        self.answered = time.monotonic()
        received = f"{what}: status {answer.status}: {raw[:REFUSED].decode('utf-8', 'replace')}"
        if answer.status == 429 or answer.status == 408 or answer.status >= 500:
            reason = "429" if answer.status == 429 else "5xx"
            raise Failed(reason, received, rest(answer.headers.get("Retry-After", "")))
        if answer.status != 200:
            raise refusal(received, characters_of(body))
        try:
            return json.loads(raw)
        except (ValueError, RecursionError):
            raise Failed("garbled", received) from None


def characters_of(body: Mapping[str, Json] | None) -> int:
    """Returns the number of characters in the messages of a request; 0 if it has no messages."""
    messages = (body or {}).get("messages")
    if not isinstance(messages, list):
        return 0
    return sum(len(message["content"]) for message in messages)


def refusal(received: str, characters: int) -> CheckerError:
    """Returns the error for a refused request whose conversation has `characters` characters.

    If the conversation has fewer characters than half of the context's tokens, it is not too long:
    the context of the judge's server is too short for the number of tokens to generate.
    """
    context = TOO_LONG.search(received)
    if context and characters > int(context[1]) / 2:
        return TooLong(f"a server refused a conversation of {characters} characters: {received}")
    return CheckerError(f"a server refused a request: {received}")


def said(url: str, completion: Completion) -> str:
    """Returns a chat completion's text after the reasoning; "" if it was cut off.

    Raises Failed if it is not a chat completion, or the server has aborted it.
    """
    try:
        choice = completion["choices"][0]
        ended = choice.get("finish_reason")
        if ended in ("abort", "error"):
            raise Failed("garbled", f"{url}/chat/completions was aborted by the server")
        if ended == "length":  # a label in it may be one that the judge was still weighing
            return ""
        text = choice["message"]["content"] or ""
        text = text.rpartition("</think>")[2]
        return "" if "<think>" in text else text.strip()
    except (TypeError, LookupError, AttributeError):
        raise Failed(
            "garbled",
            f"{url}/chat/completions returned no completion: {str(completion)[:REFUSED]}",
        ) from None


def rest(retry_after: str) -> float:
    """Returns the seconds in a Retry-After header, a number or a date; 0 if it is neither."""
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time()
        except (ValueError, OverflowError):
            return 0.0
    return min(max(0.0, seconds), LONGEST_REST)


def pause(failures: int) -> float:
    """Returns the seconds before another try, doubled after each failure, with random jitter."""
    return random.uniform(0.5, 1.0) * min(2.0 ** min(failures, 10), LONGEST_PAUSE)


class Judge:
    """The servers of one judge, and the calls that wait for them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.servers: dict[str, Server] = {}  # by address
        self.waiting: deque[asyncio.Future[Server]] = deque()
        self.calls = 0  # calls waiting or under way
        self.failures: Counter[str] = Counter()  # by "NAME/REASON"
        self.unread = 0  # replies without a verdict since the last verdict
        self.last = ""  # message of the last failure
        self.away_since: float | None = None
        self.back_at = 0.0
        self.keeper: asyncio.Task | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """The judge's entry in services.judges."""
        return services.current().judges.get(self.name, {})

    async def say(self, messages: list[dict[str, str]], sampling: Mapping[str, Json]) -> str:
        """Returns the judge's reply. Raises Away and CheckerError."""
        settings = self.settings
        seconds = limits().seconds
        began = time.monotonic()
        body: dict[str, Json] = {
            "model": settings.get("model", ""),
            "messages": messages,
            **sampling,
            **settings.get("sampling", {}),
        }
        self.calls += 1
        if self.keeper is None or self.keeper.done():
            self.keeper = asyncio.create_task(self.keep())
        try:
            async with asyncio.timeout(seconds):
                return await self.until_said(body)
        except TimeoutError:
            if self.away_since is not None or self.back_at > began:
                raise Away(f"judge {self.name!r} is down: {self.state()}") from None
            raise CheckerError(
                f"judge {self.name!r} gave no answer in {seconds:g} s: {self.last}"
            ) from None
        finally:
            self.calls -= 1

    async def until_said(self, body: Mapping[str, Json]) -> str:
        """Returns the reply from the first server that does not fail."""
        failures = 0
        while True:
            async with self.place() as server:
                text = await self.of(server, body)
            if text is not None:
                return text
            await asyncio.sleep(pause(failures))
            failures += 1

    async def of(self, server: Server, body: Mapping[str, Json]) -> str | None:
        """Returns one server's reply; None if it fails. Raises CheckerError."""
        try:
            text = await server.complete(body, limits().seconds / 2)
        except Failed as failure:
            self.failures[f"{self.name}/{failure.reason}"] += 1
            self.last = str(failure)
            server.failures += 1
            server.rests_until = time.monotonic() + failure.rest
            if server.failures >= FAILURES and not server.probing:
                server.probing = asyncio.create_task(self.probe(server))
                self.look()
            return None
        except CheckerError:
            server.model = ""  # it may serve a different model by now
            raise
        server.failures = 0
        server.outages = 0
        return text

    async def probe(self, server: Server) -> None:
        """Probes a failed server until it answers; then its calls are retried."""
        log.warning("judge %s: %s fails: %s", self.name, server.url, self.last)
        for failures in itertools.count(server.outages):  # calls may fail even if probes do not
            await asyncio.sleep(pause(failures))
            try:
                await server.lives()
                break
            except CheckerError:  # it answers, if only to refuse
                break
            except Failed as failure:
                self.last = str(failure)
        log.warning("judge %s: %s answers again", self.name, server.url)
        server.outages += 1
        server.failures = FAILURES - 1  # one more failure, and it is probed again
        server.probing = None
        self.look()
        self.serve()

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[Server]:
        """Reserves a server for one call, first come, first served."""
        turn = asyncio.get_running_loop().create_future()
        self.waiting.append(turn)
        self.serve()
        try:
            yield await turn
        finally:
            if turn.done() and not turn.cancelled():
                turn.result().busy -= 1
            self.serve()

    def serve(self) -> None:
        """Assigns the waiting calls to the servers that take calls, least busy server first."""
        most = max(1, self.settings.get("concurrency", 64) // limits().processes)
        now = time.monotonic()
        while self.waiting:
            if self.waiting[0].done():
                self.waiting.popleft()
                continue
            able = [
                server
                for server in self.servers.values()
                if not server.probing and server.busy < most and server.rests_until <= now
            ]
            if not able:
                return
            server = min(able, key=lambda server: server.busy)
            server.busy += 1
            self.waiting.popleft().set_result(server)

    async def keep(self) -> None:
        """Reads addresses and serves waiting calls while there are calls or the judge is down."""
        read_at = -REREAD
        while self.calls or self.away_since is not None:
            if time.monotonic() - read_at >= REREAD:
                read_at = time.monotonic()
                for url in await asyncio.to_thread(endpoints.addresses, self.name, self.settings):
                    self.servers.setdefault(url, Server(url))
                self.look()
            self.serve()
            await asyncio.sleep(TICK)

    def look(self) -> None:
        """Records whether any server takes calls."""
        lives = any(not server.probing for server in self.servers.values())
        if lives and self.away_since is not None:
            self.away_since = None
            self.back_at = time.monotonic()
        elif not lives and self.away_since is None:
            self.away_since = time.monotonic()

    def state(self) -> str:
        """Returns the judge's addresses, how long it has been down, and the last failure."""
        since = time.monotonic() - (self.away_since or time.monotonic())
        nowhere = f"no address in JUDGES_FILE = {os.environ.get('JUDGES_FILE')!r}"
        why = self.last or "no server has announced it"
        return f"{', '.join(self.servers) or nowhere}, for {since:.0f} s: {why}"


def need(name: str) -> services.Need:
    """Returns the Need for the judge `name`: an address, or a job that provides one."""

    def check() -> str:
        return endpoints.problem(name, services.current().judges.get(name, {}))

    return services.Need(f"judges.{name}", check, of_node=False)


services.REPORTS.append(report)
