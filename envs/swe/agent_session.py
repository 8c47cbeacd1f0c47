"""Runs an agent in an episode: samples its answers, opens its box, and keeps a journal.

This is not an environment itself: envs/swe/swe.py uses it.
"""

import asyncio
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, NamedTuple

from envs import Json, services
from envs.boxes import sif
from envs.boxes.box import Box, Size
from envs.swe import repository, swe_judge
from envs.swe.swe_judge import Verdict
from envs.swe.swe_tools import FINISH, Tools

if TYPE_CHECKING:
    from rollout.episode import Turn
    from rollout.sampler import Sampler

AGENT_SECONDS = 3600.0
SIZE = Size()
GIB = 1 << 30


class Over(Exception):
    """Raised to end the episode: "finish", "known", "time", or the reason why its box is gone."""


class Work(NamedTuple):
    """An agent's result, and the verdict on it once it is known."""

    ended: str  # as in Talk, or "finish", "time", or why its box is gone
    patch: str | None
    info: dict[str, float]
    verdict: Verdict | None = None
    summaries: tuple["Turn", ...] = ()  # the last turn's summaries, which a copy of the turn lacks


class Desk:
    """One agent's session: samples the answers, opens the box, and keeps the journal.

    The journal consists of each turn's `heard`, which an attempt's drafts keep for the next one:
    the result shown for each call and, after the last call, the Work. A result in the journal is
    shown again at once; its command is run again only before a call that is not in the journal.
    """

    def __init__(self, row: dict, harness: str, sampler: "Sampler", stack: AsyncExitStack) -> None:
        self.row = row
        self.harness = harness
        self.sampler = sampler
        self.stack = stack  # exit stack on which the box is opened
        self.turns: list[Turn] = []
        self.known: Work | None = None  # the result of an earlier attempt
        self.tools: Tools | None = None
        self.seen: tuple[str, ...] = ()  # results in the last turn's journal, not shown yet
        self.later: list[tuple[str, dict[str, Json]]] = []  # calls answered from the journal only
        self.commands = 0
        self.end = time.monotonic() + min(AGENT_SECONDS, services.limits().seconds / 2)

    async def chat(self, messages: list[dict], tools: list[dict] | None = None) -> "Turn":
        """Returns the next answer. Raises Over if the time is up, or at the end of the journal.

        The first answer has no time limit: without it there is no episode.
        """
        clock = asyncio.timeout(self.end - time.monotonic() if self.turns else None)
        try:
            async with clock:
                turn = await self.sampler.chat(messages, tools)
        except TimeoutError:
            if not clock.expired():
                raise
            raise Over("time") from None
        self.turns.append(turn)
        self.seen = turn.heard
        if turn.heard and isinstance(turn.heard[-1], Work):
            self.known = turn.heard[-1]
            turn.summaries = self.known.summaries
            raise Over("known")
        return turn

    async def call(self, name: str, given: dict[str, Json]) -> str:
        """Returns a call's result for the policy. Raises Over if the episode ends with it."""
        if name == FINISH:
            raise Over(FINISH)
        self.commands += 1
        if self.seen:
            self.later.append((name, given))
            output, *rest = self.seen
            self.seen = tuple(rest)
            return output
        await self.catch_up()
        output = await self.run(name, given)
        self.turns[-1].heard += (output,)
        return output

    async def catch_up(self) -> None:
        """Runs the calls whose results were shown from the journal."""
        while self.later:
            await self.run(*self.later.pop(0))

    async def run(self, name: str, given: dict[str, Json]) -> str:
        """Runs a call in the box, which the first call opens."""
        tools = self.tools or await self.open()
        left = self.end - time.monotonic()
        if left <= 0:
            raise Over("time")
        output = await tools.call(name, given, left)
        if tools.box.gone:
            raise Over(tools.box.gone)
        return output

    async def open(self) -> Tools:
        """Opens the box, which does not use up the agent's time. Raises CheckerError."""
        began = time.monotonic()
        image = sif.find(self.row["image"])
        box = await self.stack.enter_async_context(Box(image, self.row["workdir"], SIZE))
        await repository.prepare(box, self.row)
        self.end += time.monotonic() - began
        self.tools = Tools(self.harness, box, self.row["workdir"])
        return self.tools

    async def work(self, ended: str) -> Work:
        """Reads the agent's patch from the box, and ends the journal. Raises CheckerError."""
        patch = None
        try:
            await self.catch_up()
            if self.tools and not self.tools.box.gone:
                patch = await repository.patch_of(self.tools.box, self.row)
        except Over as over:
            ended = str(over)
        info = {"turns": float(len(self.turns)), "commands": float(self.commands)}
        if self.tools:
            ended = self.tools.box.gone or ended
            info |= {"start": self.tools.box.started, "agent_peak": self.tools.box.peak / GIB}
        work = Work(ended, patch, info, summaries=self.turns[-1].summaries)
        self.turns[-1].heard += (work,)
        return work

    async def verdict(self, work: Work) -> Verdict:
        """Returns the verdict on the agent's patch. Raises CheckerError."""
        if work.patch is None:
            verdict = Verdict(False, "no patch", False, {})
        else:
            verdict = await swe_judge.judge(sif.find(self.row["image"]), self.row, work.patch, SIZE)
        last = self.turns[-1]
        last.heard = (*last.heard[:-1], work._replace(verdict=verdict))
        return verdict
