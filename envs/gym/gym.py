"""NeMo-Gym's servers: the agents that they have, and one try of a row by one of them.

Its head server (`gym env start`, once `ng_run`) knows where each agent is served. Rows go to those
themselves. An agent that has gone costs time: its rows wait, as those of a judge that is away
(envs/judge/judge.py), and use up no attempt. It may come back at another port.
"""

import asyncio
import contextlib
import functools
import http.client
import itertools
import json
import time
import urllib.error
import urllib.request
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import yaml

from core.http import directly
from envs import services
from envs.judge.judge import Failed, Server, pause
from envs.services import Away, CheckerError, Report

SECONDS = 5.0  # seconds that a head server may take to list its agents
SHOWN = 300  # characters of an error
ABSENT: dict[str, Callable[[], str]] = {}  # need -> why its agent is away
SERVING: weakref.WeakKeyDictionary[Any, dict[str, "Agent"]] = weakref.WeakKeyDictionary()


def agents(head: str) -> dict[str, str]:
    """The address of each agent that a head server knows.

    Raises OSError where it does not answer, ValueError where it is no head server.
    """
    try:
        with directly(f"{head}/global_config_dict_yaml", SECONDS) as answer:
            text = json.loads(answer.read())
        found = {}
        for name, kind in yaml.safe_load(text).items():
            if isinstance(kind, dict) and "responses_api_agents" in kind:
                for one in kind["responses_api_agents"].values():
                    found[name] = f"http://{one['host']}:{one['port']}"
        return found
    except (http.client.IncompleteRead, ConnectionError) as error:
        raise OSError(f"it ended in the middle of its answer: {error}"[:SHOWN]) from None
    except http.client.HTTPException as error:
        raise ValueError(f"it is no server of HTTP: {error!r}"[:SHOWN]) from None
    except (urllib.error.HTTPError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"it is no head server of NeMo-Gym: {error}"[:SHOWN]) from None
    except yaml.YAMLError as error:
        raise ValueError(f"its configuration is no YAML: {error}"[:SHOWN]) from None


def place(agent: str) -> str:
    """The address of an agent at the first head server that has it.

    Raises OSError where one without an answer may have it, ValueError where none has it.
    """
    found: dict[str, str] = {}
    silent: OSError | None = None
    for head in services.current().nemo_gym:
        try:
            found = agents(head) | found
        except OSError as error:
            silent = OSError(f"{head} does not answer: {error}")
    if agent not in found and silent:
        raise silent
    if agent not in found:
        raise ValueError(f"no agent {agent!r} there, but {', '.join(sorted(found)) or 'none'}")
    return found[agent]


def need(agent: str) -> services.Need:
    """The need for a server that has an agent."""
    return services.Need(f"nemo_gym.{agent}", functools.partial(problem, agent))


def problem(agent: str) -> str:
    """Why an agent could try no row, and how to mend it; "" if it could."""
    return _problem(agent, services.current().nemo_gym)


@functools.cache  # it is asked for every row
def _problem(agent: str, heads: tuple[str, ...]) -> str:
    shown = f"services.nemo_gym = {heads!r}"
    try:
        place(agent)
    except OSError as error:
        return f"{shown}: {error}; expected a head server that runs (docs/environments.md)"
    except ValueError as error:
        return f"{shown}: {error}; expected a server that was started with it"
    return ""


async def run(agent: str, row: dict[str, Any], failed: asyncio.Future[None]) -> dict[str, Any]:
    """The result of an agent's try of a row: the row, `response`, `reward` and more.

    Raises Away, CheckerError where the try failed, and at once what `failed` raises.
    """
    known = SERVING.setdefault(asyncio.get_running_loop(), {})
    return await known.setdefault(agent, Agent(agent)).run(row, failed)


class Agent:
    """One agent, as this process sees it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.server: Server | None = None
        self.why = ""  # it is away
        self.away_since = 0.0
        self.keeper: asyncio.Task | None = None  # while it is away
        self.looking = asyncio.Lock()

    async def run(self, row: dict[str, Any], failed: asyncio.Future[None]) -> dict[str, Any]:
        """The result of its try of a row."""
        if not self.server:
            await self.returns("it was not asked before")
        server = self.server
        assert server
        call = asyncio.ensure_future(server.request("POST", "run", services.limits().seconds, row))
        try:
            while not call.done():
                limits: dict[str, Any] = {"timeout": services.patience()}
                await asyncio.wait([call, failed], return_when=asyncio.FIRST_COMPLETED, **limits)
                if failed.done():
                    failed.result()
                if not await self.lives(server, time.monotonic() - services.patience()):
                    raise Failed("silence", f"{server.url}: no answer, not even to GET")
            return call.result()
        except Failed as failure:
            is_silent = failure.reason == "silence"
            if not is_silent and await self.lives(server, time.monotonic()):
                raise CheckerError(f"agent {self.name!r} failed: {failure}") from None
            await self.returns(str(failure))
            raise Away(f"agent {self.name!r} was away: {failure}") from None
        finally:
            call.cancel()

    async def lives(self, server: Server, since: float) -> bool:
        """Whether a server has answered since then, or does so now."""
        async with self.looking:  # one looks for all
            if server.answered < since:
                with contextlib.suppress(Failed, CheckerError):
                    await server.request("GET", "", services.patience())
            return server.answered >= since

    async def returns(self, why: str) -> None:
        """Waits until the agent is there. Raises Away when a call would have taken as long."""
        if self.keeper is None:
            self.why, self.away_since = why, time.monotonic()
            self.keeper = asyncio.create_task(self.keep())
        try:
            await asyncio.wait_for(asyncio.shield(self.keeper), services.limits().seconds)
        except TimeoutError:
            raise Away(f"agent {self.name!r} is away, {self.state()}") from None

    async def keep(self) -> None:
        """Looks for the agent until it answers."""
        need = f"nemo_gym.{self.name}"
        try:
            for failures in itertools.count():
                server = await self.found()
                if server and await self.lives(server, time.monotonic()):
                    self.server = server
                    return
                ABSENT[need] = self.state
                await asyncio.sleep(pause(failures))
        finally:
            ABSENT.pop(need, None)
            self.keeper = None

    async def found(self) -> Server | None:
        """The agent's address by the head servers; None where they have none."""
        try:
            return Server(await asyncio.to_thread(place, self.name))
        except (OSError, ValueError) as error:
            self.why = str(error)
            return None

    def state(self) -> str:
        """For how long it is away, and why."""
        return f"for {time.monotonic() - self.away_since:.0f} s: {self.why}"


def report() -> Report:
    """The agents that are away."""
    return Report({need: state() for need, state in ABSENT.items()}, Counter())


services.REPORTS.append(report)
