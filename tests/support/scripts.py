"""A policy that says what it is told to, for environments of many turns."""

import json
from collections.abc import Callable, Iterable

from envs.rollout.episode import Turn
from envs.rollout.response import Response


def calling(name: str, **given: object) -> Response:
    """An answer that calls a tool."""
    call = {"type": "function_call", "name": name, "arguments": json.dumps(given)}
    return Response(f"<tool_call>{name}</tool_call>", content="", tool_calls=[call])


class Script:
    """A sampler whose answers are given; `read` sees the messages before each of them."""

    def __init__(
        self, answers: Iterable[str], read: Callable[[list[dict]], None] = lambda messages: None
    ) -> None:
        self.answers = iter(answers)
        self.read = read
        self.length = 0

    async def chat(self, messages: list[dict], tools: list | None = None) -> Turn:
        """The next answer, one token long, behind all that was said before."""
        self.read(messages)
        said = Response.of(next(self.answers))
        self.length += 2
        ids = list(range(self.length))
        return Turn(ids[:-1], ids[-1:], [-1.0], [0], "stop", text=str(said), parsed=said)
