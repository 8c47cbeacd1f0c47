"""Finds the agents on NeMo-Gym's servers, and lets an agent try a row.

NeMo-Gym's head server (`gym env start`, formerly `ng_run`) lists the address of each agent. Rows go
to the agents directly. An agent that is unreachable costs only time: its rows wait, as they do for
a judge that is down (envs/judge/judge.py), and do not use up attempts. It may come back on a
different port.
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
from collections.abc import Callable, Mapping

import yaml

from core.http import directly
from envs import Json, services
from envs.judge.judge import Failed, Server, pause
from envs.services import Away, CheckerError, Report

SECONDS = 5.0  # seconds that a head server may take to list its agents
SHOWN = 300  # characters of an error
ABSENT: dict[str, Callable[[], str]] = {}  # need -> returns why its agent is down
SERVING: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, "Agent"]] = (
    weakref.WeakKeyDictionary()
)


def agents(head: str) -> dict[str, str]:
    """Returns the address of each agent that a head server lists.

    Raises OSError if it does not answer, ValueError if it is not a head server.
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
        raise ValueError(f"it is not an HTTP server: {error!r}"[:SHOWN]) from None
    except (urllib.error.HTTPError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"it is not a head server of NeMo-Gym: {error}"[:SHOWN]) from None
    except yaml.YAMLError as error:
        raise ValueError(f"its configuration is not YAML: {error}"[:SHOWN]) from None


def place(agent: str) -> str:
    """Returns an agent's address, from the first head server that lists the agent.

    Raises OSError if a server that does not answer may list it, ValueError if no server lists it.
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
    """Returns the Need for a server that runs an agent."""
    return services.Need(f"nemo_gym.{agent}", functools.partial(problem, agent))


def problem(agent: str) -> str:
    """Returns why an agent cannot try a row, and how to fix it; "" if it can."""
    return _problem(agent, services.current().nemo_gym)


@functools.cache  # called for every row
def _problem(agent: str, heads: tuple[str, ...]) -> str:
    try:
        place(agent)
    except OSError as error:
        return (
            f"services.nemo_gym = {heads!r}: {error}; "
            "expected a running head server (docs/environments.md)"
        )
    except ValueError as error:
        return f"services.nemo_gym = {heads!r}: {error}; expected a server that was started with it"
    return ""


async def run(
    agent: str, row: Mapping[str, Json], failed: asyncio.Future[None]
) -> Mapping[str, Json]:
    """Lets an agent try a row, and returns the result: the row, `response`, `reward` and more.

    Raises Away if the agent is down, CheckerError if the attempt failed, and the exception of
    `failed` once that is set.
    """
    known = SERVING.setdefault(asyncio.get_running_loop(), {})
    return await known.setdefault(agent, Agent(agent)).run(row, failed)


class Agent:
    """One agent, as this process sees it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.server: Server | None = None
        self.why = ""  # the reason why it is down
        self.away_since = 0.0
        self.keeper: asyncio.Task | None = None  # runs while it is down
        self.looking = asyncio.Lock()

    async def run(
        self, row: Mapping[str, Json], failed: asyncio.Future[None]
    ) -> Mapping[str, Json]:
        """Lets the agent try a row, and returns the result."""
        if not self.server:
            await self.returns("it has not been asked yet")
        server = self.server
        assert server
        call = asyncio.ensure_future(server.request("POST", "run", services.limits().seconds, row))
        try:
            while not call.done():
                await asyncio.wait(
                    [call, failed],
                    timeout=services.patience(),
                    return_when=asyncio.FIRST_COMPLETED,
                )
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
            raise Away(f"agent {self.name!r} was down: {failure}") from None
        finally:
            call.cancel()

    async def lives(self, server: Server, since: float) -> bool:
        """Returns whether a server has answered since the time `since`, or does so now."""
        async with self.looking:  # one call asks on behalf of all
            if server.answered < since:
                with contextlib.suppress(Failed, CheckerError):
                    await server.request("GET", "", services.patience())
            return server.answered >= since

    async def returns(self, why: str) -> None:
        """Waits until the agent is back. Raises Away if that takes longer than a call may take."""
        if self.keeper is None:
            self.why = why
            self.away_since = time.monotonic()
            self.keeper = asyncio.create_task(self.keep())
        try:
            await asyncio.wait_for(asyncio.shield(self.keeper), services.limits().seconds)
        except TimeoutError:
            raise Away(f"agent {self.name!r} is down, {self.state()}") from None

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
        """Returns the agent's server, as the head servers list it; None if they do not."""
        try:
            return Server(await asyncio.to_thread(place, self.name))
        except (OSError, ValueError) as error:
            self.why = str(error)
            return None

    def state(self) -> str:
        """Returns how long the agent has been down, and why."""
        return f"for {time.monotonic() - self.away_since:.0f} s: {self.why}"


def report() -> Report:
    """Returns the agents that are down."""
    return Report({need: state() for need, state in ABSENT.items()}, Counter())


services.REPORTS.append(report)
