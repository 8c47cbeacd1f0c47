"""Simulates a customer and tools, and judges their conversation with the policy.

The judge "general" plays all of these parts, each with its own prompts. It is asked up to three
times for a reply that can be used; then CheckerError is raised.
"""

import json
import re
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from core.waits import in_thread, together
from envs.following.schemas import validator
from envs.judge import judge
from envs.judge.prompts import apart, chosen, prompts
from envs.services import CheckerError

JUDGE = "general"
TRIES = 3
TEMPERATURE = 1.0
DONE, TRANSFERRED = "###STOP###", "###TRANSFER###"  # the end of a customer's last message
OPENING = "(You have reached the representative, who waits for your first message.)"

PARTS = {"customer": "assistant", "representative": "user"}  # as the customer's model sees them

PROMPTS = prompts(__file__)
T = TypeVar("T")


class Step(NamedTuple):
    """One message, call or result of the conversation."""

    who: str  # "customer", "representative", "call" or "result"
    content: str  # the message or result; for a call, its arguments
    name: str = ""  # name of the tool
    call_id: str = ""

    def line(self) -> str:
        """Returns the step as one line of JSON, in which no text can start a new line."""
        if self.who == "call":
            shown = {
                "representative calls": self.name,
                "arguments": self.content,
                "id": self.call_id,
            }
        elif self.who == "result":
            shown = {"returns": self.content, "id": self.call_id}
        else:
            shown = {f"{self.who} says": self.content}
        return json.dumps(shown, ensure_ascii=False)


class Simulation:
    """A row's conversation so far, and the simulation of its customer and tools."""

    def __init__(self, row: dict, steps: list[Step]) -> None:
        self.steps = steps
        self.given = len(steps)  # how many of them come from the row
        self.tools = {tool["name"]: tool for tool in row["tools"]}
        scenario = row["customer_scenario"]
        lines = [f"{key.replace('_', ' ')}: {text}" for key, text in scenario.items() if text]
        shown = [line for line in lines if not line.startswith("outside policy")]
        outside = bool(scenario.get("outside_policy_scope"))
        self.words = {
            "policy": row["policy"],
            "scenario": "\n".join(shown),
            "tools": "\n".join(json.dumps(signature(tool)) for tool in row["tools"]),
            "done": DONE,
            "transferred": TRANSFERRED,
            "hand_over": "has to" if outside else "must not",
        }

    def transcript(self, end: int | None = None) -> str:
        """Returns the steps before number `end`, one per line."""
        return "\n".join(step.line() for step in self.steps[:end]) or "(nothing yet)"

    async def customer(self) -> str:
        """Returns the customer's next message, which becomes a step. Raises CheckerError."""
        is_first = not any(step.who == "customer" for step in self.steps)

        def read(text: str) -> str | None:
            message = re.sub(r"\A\s*customer:\s*", "", text, flags=re.IGNORECASE).strip()
            if not message or (is_first and ends(message)):
                return None
            return message

        messages = [{"role": "user", "content": OPENING}]
        for step in self.steps:
            if step.who in PARTS:
                content = apart(step.content, (DONE, TRANSFERRED))
                messages.append({"role": PARTS[step.who], "content": content})
        text = await self.ask("customer", messages, read, "no message from the customer")
        self.steps.append(Step("customer", text))
        return text

    async def result(self, call: Step) -> str:
        """Returns the result of a call, which becomes a step. Raises CheckerError."""
        schema = self.tools[call.name].get("returns")

        def read(text: str) -> str | None:
            return text if schema is None or fits(unfenced(text), schema) else None

        shown = f"{self.transcript()}\n\nThe call:\n{call.line()}"
        messages = [{"role": "user", "content": shown}]
        text = await self.ask("tool", messages, read, f"no result of the tool {call.name}")
        self.steps.append(Step("result", text, call.name, call.call_id))
        return text

    async def invalid(self, call: Step) -> bool:
        """Returns whether a call's tool does not exist, or its arguments do not fit."""
        tool = self.tools.get(call.name)
        if tool is None:
            return True
        return not await in_thread(fits, call.content, signature(tool)["parameters"])

    async def verdict(self) -> str:
        """Returns where the representative failed: "a step" or "the conversation"; "" if nowhere.

        Raises CheckerError if the customer or a tool failed, or the judge gives no verdict.
        """
        new = range(self.given, len(self.steps))
        others = [i for i in new if self.steps[i].who in ("customer", "result")]
        verdicts = await together(map(self.judge, others))
        for i, good in zip(others, verdicts, strict=True):
            if not good:
                raise CheckerError(f"the judge rejected a simulated step: {self.steps[i].line()}")
        own = [i for i in new if i not in others]
        if not all(await together(map(self.judge, own))):
            return "a step"
        shown = [{"role": "user", "content": self.transcript()}]
        good = await self.ask("of_conversation", shown, success, "no verdict on the conversation")
        return "" if good else "the conversation"

    async def judge(self, i: int) -> bool:
        """Returns whether a step is a success. Raises CheckerError."""
        step = self.steps[i]
        name = f"of_{step.who}" if step.who in ("customer", "result") else "of_representative"
        shown = f"{self.transcript(i)}\n\nThe step to judge:\n{step.line()}"
        messages = [{"role": "user", "content": shown}]
        return await self.ask(name, messages, success, f"no verdict on a {step.who} step")

    async def ask(
        self, prompt: str, messages: list[dict], read: Callable[[str], T | None], what: str
    ) -> T:
        """Returns a reply as parsed by `read`. Raises CheckerError if three cannot be parsed."""
        system = {"role": "system", "content": chosen(JUDGE, PROMPTS[prompt]).format(**self.words)}
        made = await judge.ask(
            JUDGE, [system, *messages], read, tries=TRIES, temperature=TEMPERATURE
        )
        if made is None:
            raise CheckerError(f"judge {JUDGE!r} gave {what} in {TRIES} replies")
        return made


def ends(said: str) -> bool:
    """Returns whether a customer's message ends the conversation."""
    return DONE in said or TRANSFERRED in said


def signature(tool: dict) -> dict:
    """Returns the signature of a row's tool, whose fields may have either of two names."""
    doc, params = tool.get("doc"), tool.get("params")
    return {
        "name": tool["name"],
        "description": tool.get("description") if doc is None else doc,
        "parameters": (tool.get("parameters") or {}) if params is None else params,
        "returns": tool.get("returns"),
    }


def unfenced(text: str) -> str:
    """Returns a text without the fence of a JSON block around it."""
    return text.strip().removeprefix("```json").removesuffix("```")


def fits(text: str, schema: dict) -> bool:
    """Returns whether a text is JSON that a schema allows."""
    try:
        return validator(schema).is_valid(json.loads(text))
    except (ValueError, RecursionError):
        return False


def success(text: str) -> bool | None:
    """Returns the verdict in a judge's reply; None if it has none."""
    try:
        reply = json.loads(unfenced(text))
    except (ValueError, RecursionError):
        return None
    good = reply.get("success") if isinstance(reply, dict) else None
    return good if isinstance(good, bool) else None
