"""One client for the models that judge answers: servers that speak OpenAI's protocol, as vLLM does.

    ask --> Judge, one for each name --> the least busy Server that takes calls --> its model

A server that fails FAILURES times in a row takes no calls until it answers a probe; there is one
probe at a time. Where that is so for all servers of a judge, the judge is away: its calls wait. No
failure is a verdict. A call that has waited for `timeouts.rollout` raises Away, and the dispatcher
has the group tried again for as long as that takes (runtime/rollouts/dispatch.py).

The addresses are those of services.judges, or the lines "NAME http://HOST:PORT/v1" of the file
that the environment variable JUDGES_FILE names. It is read again while a run goes on, so servers
may come late (launch/judges.sh). docs/judges.md has more.
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
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from core.http import Broken, whole
from core.waits import in_thread
from envs import services
from envs.judge import endpoints
from envs.judge.prompts import inert
from envs.services import Away, CheckerError, Report, limits, patience

T = TypeVar("T")
log = logging.getLogger(__name__)
FAILURES = 3  # in a row that keep calls from a server
UNREAD = 20  # replies in a row without a verdict: such a judge is broken, and no answer is wrong
TICK = 0.5  # seconds between two looks at which calls may be served
REREAD = 10.0  # seconds between two looks at JUDGES_FILE
LONGEST_PAUSE = 5.0  # seconds between two probes, or before a call is made again
LONGEST_REST = 60.0  # seconds for which a server's Retry-After is believed
LONGEST = 32 << 20  # bytes of an answer
REFUSED = 300  # characters of a refusal that are shown
TOO_LONG = re.compile(r"maximum (?:context|model) length (?:is|of) (\d+)")  # as vLLM says it
LARGE = 1 << 16  # characters of messages that are not worth a thread


class Failed(Exception):
    """A call that may be made again."""

    def __init__(self, reason: str, message: str, rest: float = 0.0) -> None:
        super().__init__(message)
        self.reason = reason  # "429", "5xx", "timeout", "connection" or "garbled"
        self.rest = rest  # seconds for which the server wants no calls


class TooLong(CheckerError):
    """A conversation is longer than the judge's context."""


JUDGES: weakref.WeakKeyDictionary[Any, dict[str, "Judge"]] = weakref.WeakKeyDictionary()


def report() -> Report:
    """What this process has seen of the judges so far."""
    every = [judge for judges in list(JUDGES.values()) for judge in judges.values()]
    away = {f"judges.{one.name}": one.state() for one in every if one.away_since is not None}
    return Report(away, sum((judge.failures for judge in every), Counter()))


async def ask(
    name: str,
    messages: list[dict[str, Any]],
    read: Callable[[str], T | None],
    tries: int = 1,
    **sampling: Any,
) -> T | None:
    """The verdict that `read` finds in what the judge says; None where it finds none `tries` times.

    Control tokens of chat templates in the messages get a space (envs/judge/prompts.py). `read`
    gets the text behind the judge's thought. `sampling` are parameters of a chat completion
    (temperature, top_p, max_tokens); services.judges[name]["sampling"] overrides them. A reply that
    was cut off has no verdict, and a conversation that is longer than the judge's context gets
    none. Raises Away, and CheckerError where the judge refuses any other request, or where UNREAD
    replies in a row have no verdict.
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
            verdict, said_nothing = None, tries  # the next one would be refused as well
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
        self.failures = 0  # in a row
        self.outages = 0  # since a call succeeded
        self.rests_until = 0.0
        self.answered = 0.0  # when it last said anything
        self.model = ""  # that it serves, once it was asked
        self.probing: asyncio.Task | None = None  # while it takes no calls
        self.asking = asyncio.Lock()

    async def complete(self, body: dict[str, Any], seconds: float) -> str:
        """What the model says, without its thought. Raises Failed and CheckerError."""
        if not body["model"] and not self.model:
            await self.lives()
        body = body | {"model": body["model"] or self.model}
        call = asyncio.ensure_future(self.request("POST", "chat/completions", seconds, body))
        try:
            while not (await asyncio.wait([call], timeout=patience()))[0]:
                async with self.asking:  # one of its calls does so for all
                    await self.wake()
        finally:
            call.cancel()
        return said(self.url, call.result())

    async def wake(self) -> None:
        """Raises Failed where the server has fallen silent, whatever it is asked."""
        if not self.probing and time.monotonic() - self.answered > patience():
            with contextlib.suppress(Failed, CheckerError):
                await self.lives()
        if self.probing or time.monotonic() - self.answered > patience():
            self.failures = FAILURES
            raise Failed("timeout", f"{self.url}: no answer, not even to GET models")

    async def lives(self) -> None:
        """Asks the server which model it serves. Raises Failed and CheckerError."""
        told = await self.request("GET", "models", patience())
        try:
            self.model = str(told["data"][0]["id"])
        except (TypeError, LookupError):
            raise Failed("garbled", f"GET {self.url}/models gave {str(told)[:REFUSED]}") from None

    async def request(
        self, method: str, path: str, seconds: float, body: dict[str, Any] | None = None
    ) -> Any:
        """The JSON value that the server answers with. Raises Failed and CheckerError."""
        import aiohttp  # takes longer than all else that environments import with this module

        what = f"{method} {self.url}/{path}"
        # Half a surrogate pair is no character, and servers refuse a request that has one.
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
        told = f"{what}: status {answer.status}: {raw[:REFUSED].decode('utf-8', 'replace')}"
        if answer.status == 429 or answer.status == 408 or answer.status >= 500:
            reason = "429" if answer.status == 429 else "5xx"
            raise Failed(reason, told, rest(answer.headers.get("Retry-After", "")))
        if answer.status != 200:
            raise refusal(
                told, sum(len(one["content"]) for one in (body or {}).get("messages", []))
            )
        try:
            return json.loads(raw)
        except (ValueError, RecursionError):
            raise Failed("garbled", told) from None


def refusal(told: str, characters: int) -> CheckerError:
    """The error for a request that a server refuses; `characters` are those of the conversation.

    A conversation with fewer characters than half of the context's tokens is not too long: the
    judge is served with too short a context for the tokens that it is asked for.
    """
    context = TOO_LONG.search(told)
    if context and characters > int(context[1]) / 2:
        return TooLong(f"a server refused a conversation of {characters} characters: {told}")
    return CheckerError(f"a server refused a request: {told}")


def said(url: str, told: Any) -> str:
    """The text of a chat completion behind the thought; "" for what was cut off.

    Raises Failed where it is no chat completion, or the server has given it up.
    """
    try:
        ended = told["choices"][0].get("finish_reason")
        if ended in ("abort", "error"):
            raise Failed("garbled", f"{url}/chat/completions was given up by the server")
        if ended == "length":  # a label in it may be one of those that the judge weighs
            return ""
        text = told["choices"][0]["message"]["content"] or ""
        text = text.rpartition("</think>")[2]
        return "" if "<think>" in text else text.strip()
    except (TypeError, LookupError, AttributeError):
        shown = str(told)[:REFUSED]
        raise Failed("garbled", f"{url}/chat/completions gave no completion: {shown}") from None


def rest(retry_after: str) -> float:
    """The seconds of a header Retry-After, which is a number or a date; 0 where it is neither."""
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time()
        except (ValueError, OverflowError):
            return 0.0
    return min(max(0.0, seconds), LONGEST_REST)


def pause(failures: int) -> float:
    """Seconds before another try, twice as long after each failure. No two are the same."""
    return random.uniform(0.5, 1.0) * min(2.0 ** min(failures, 10), LONGEST_PAUSE)


class Judge:
    """The servers of one judge, and the calls that wait for them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.servers: dict[str, Server] = {}  # by address
        self.waiting: deque[asyncio.Future[Server]] = deque()
        self.calls = 0  # that wait or are under way
        self.failures: Counter[str] = Counter()  # by "NAME/REASON"
        self.unread = 0  # replies without a verdict since the last verdict
        self.last = ""  # failure
        self.away_since: float | None = None
        self.back_at = 0.0
        self.keeper: asyncio.Task | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """What the configuration says of this judge."""
        return services.current().judges.get(self.name, {})

    async def say(self, messages: list[dict[str, Any]], sampling: dict[str, Any]) -> str:
        """What the judge says. Raises Away and CheckerError."""
        settings = self.settings
        seconds = limits().seconds
        began = time.monotonic()
        body = {"model": settings.get("model", ""), "messages": messages}
        body |= sampling | settings.get("sampling", {})
        self.calls += 1
        if self.keeper is None or self.keeper.done():
            self.keeper = asyncio.create_task(self.keep())
        try:
            async with asyncio.timeout(seconds):
                return await self.until_said(body)
        except TimeoutError:
            if self.away_since is not None or self.back_at > began:
                raise Away(f"judge {self.name!r} is away: {self.state()}") from None
            message = f"judge {self.name!r} gave no answer in {seconds:g} s: {self.last}"
            raise CheckerError(message) from None
        finally:
            self.calls -= 1

    async def until_said(self, body: dict[str, Any]) -> str:
        """What the first server says that does not fail."""
        failures = 0
        while True:
            async with self.place() as server:
                text = await self.of(server, body)
            if text is not None:
                return text
            await asyncio.sleep(pause(failures))
            failures += 1

    async def of(self, server: Server, body: dict[str, Any]) -> str | None:
        """What one server says; None where it fails. Raises CheckerError."""
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
            server.model = ""  # it may serve another one by now
            raise
        server.failures = server.outages = 0
        return text

    async def probe(self, server: Server) -> None:
        """Asks a server that failed until it answers; then calls are tried again."""
        log.warning("judge %s: %s fails: %s", self.name, server.url, self.last)
        for failures in itertools.count(server.outages):  # calls may fail though probes do not
            await asyncio.sleep(pause(failures))
            try:
                await server.lives()
                break
            except CheckerError:  # it answers, and will refuse calls as well
                break
            except Failed as failure:
                self.last = str(failure)
        log.warning("judge %s: %s answers again", self.name, server.url)
        server.outages += 1
        server.failures = FAILURES - 1  # another one, and it is asked again
        server.probing = None
        self.look()
        self.serve()

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[Server]:
        """A server for one call, in the order of coming."""
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
        """Gives waiting calls the servers that take calls, the least busy one first."""
        most = max(1, self.settings.get("concurrency", 64) // limits().processes)
        now = time.monotonic()
        while self.waiting:
            if self.waiting[0].done():
                self.waiting.popleft()
                continue
            every = self.servers.values()
            able = [s for s in every if not s.probing and s.busy < most and s.rests_until <= now]
            if not able:
                return
            server = min(able, key=lambda server: server.busy)
            server.busy += 1
            self.waiting.popleft().set_result(server)

    async def keep(self) -> None:
        """Reads addresses and serves, as long as there are calls or the judge is away."""
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
        """Notes whether any server takes calls."""
        lives = any(not server.probing for server in self.servers.values())
        if lives and self.away_since is not None:
            self.away_since, self.back_at = None, time.monotonic()
        elif not lives and self.away_since is None:
            self.away_since = time.monotonic()

    def state(self) -> str:
        """Its addresses, for how long it is away, and the last failure."""
        since = time.monotonic() - (self.away_since or time.monotonic())
        nowhere = f"no address in JUDGES_FILE = {os.environ.get('JUDGES_FILE')!r}"
        why = self.last or "no server has announced it"
        return f"{', '.join(self.servers) or nowhere}, for {since:.0f} s: {why}"


def need(name: str) -> services.Need:
    """The need for the judge `name`: an address, or a job that brings one."""

    def check() -> str:
        return endpoints.problem(name, services.current().judges.get(name, {}))

    return services.Need(f"judges.{name}", check, of_node=False)


services.REPORTS.append(report)
