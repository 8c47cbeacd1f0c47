"""Runs an agent with tools: answers and calls in turn, as in NeMo-Gym's simple_agent."""

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from envs import Json
from envs.tools.calls import arguments
from rollout.chat import NoRoom
from rollout.episode import Turn
from rollout.messages import functions
from rollout.response import Response

# Makes a call, by its name and arguments; returns the result that the policy sees.
Call = Callable[[str, dict[str, Json]], Awaitable[str]]


@dataclass
class Talk:
    """A finished conversation with tools."""

    messages: list[dict]  # as chat templates expect them
    turns: list[Turn] = field(default_factory=list)
    calls: list[dict[str, str]] = field(default_factory=list)  # as in Response, with a call_id
    # "answer": the last answer had no call; "length": it was cut off; "room": there was no room for
    # another; "steps": there were `max_steps` answers.
    ended: str = "steps"

    @property
    def response(self) -> Response:
        """The last answer, with the calls of all answers, as a verifier judges it."""
        last = self.turns[-1].judged
        return Response(last, last.reasoning, last.content, self.calls, last.malformed)


class Speaker(Protocol):
    """Samples answers: a Sampler, or an environment's wrapper around it."""

    async def chat(self, messages: list[dict], tools: list | None = None) -> Turn:
        """Returns the answer to a conversation."""


async def converse(
    sampler: Speaker, messages: list[dict], tools: list[dict] | None, call: Call, max_steps: int
) -> Talk:
    """Lets the policy answer and call tools, for at most `max_steps` answers.

    An answer without a call ends the talk, even if it contains only reasoning, as in Super's
    configuration.

    `call` may return an error as text; an exception that it raises ends the rollout. It is not
    called for a name that is not in `tools`, nor with arguments that are not a JSON object: then
    the policy sees an `error`. The calls in an answer that was cut off are not made. Raises NoRoom
    if the first prompt leaves no room.
    """
    talk = Talk(list(messages))
    names = {tool["function"]["name"] for tool in functions(tools) or ()}
    for _ in range(max_steps):
        try:
            turn = await sampler.chat(talk.messages, tools)
        except NoRoom:
            if not talk.turns:
                raise
            talk.ended = "room"
            break
        talk.turns.append(turn)
        talk.messages.append(turn.message)
        made = turn.message.get("tool_calls", ())
        calls = []
        for known, parsed in zip(made, turn.judged.tool_calls, strict=True):
            calls.append(parsed | {"call_id": known["id"]})
        talk.calls += calls
        if turn.finish_reason == "length":
            talk.ended = "length"
            break
        if not calls:
            talk.ended = "answer"
            break
        for parsed in calls:
            output = await answered(call, parsed, names)
            message = {"role": "tool", "tool_call_id": parsed["call_id"], "name": parsed["name"]}
            talk.messages.append(message | {"content": output})
    return talk


async def answered(call: Call, parsed: dict[str, str], names: set[str]) -> str:
    """Returns a call's result, or the error in the call."""
    if parsed["name"] not in names:
        return json.dumps({"error": f"there is no tool {parsed['name'][:100]!r}"})
    given = arguments(parsed)
    if not isinstance(given, dict):
        return json.dumps({"error": "the arguments are not a JSON object"})
    return await call(parsed["name"], given)
