"""A policy that says what it is told to, for environments of many turns."""

import json
from collections.abc import Iterable

from rollout.chat import NoRoom
from rollout.episode import Turn
from rollout.response import Response


def call(name: str, given: object) -> dict:
    """A call of a tool."""
    return {"type": "function_call", "name": name, "arguments": json.dumps(given)}


def calling(name: str, **given: object) -> Response:
    """An answer that calls a tool."""
    return Response(f"<tool_call>{name}</tool_call>", content="", tool_calls=[call(name, given)])


class Script:
    """A sampler whose answers are given; `seen` are the messages before each of them."""

    def __init__(self, answers: Iterable[str]) -> None:
        self.answers = iter(answers)
        self.seen: list[list[dict]] = []
        self.length = 0

    def last(self) -> list[str]:
        """What the last message said before each answer."""
        return [messages[-1]["content"] for messages in self.seen]

    async def chat(self, messages: list[dict], tools: list | None = None) -> Turn:
        """The next answer, one token long, behind all that was said before."""
        self.seen.append(list(messages))
        said = Response.of(next(self.answers))
        self.length += 2
        ids = list(range(self.length))
        return Turn(ids[:-1], ids[-1:], [-1.0], [0], "stop", text=str(said), parsed=said)


class Full(Script):
    """One that has no room for a second prompt."""

    async def chat(self, messages: list[dict], tools: list | None = None) -> Turn:
        if self.seen:
            raise NoRoom("full")
        return await super().chat(messages, tools)
