"""A simulated customer, simulated tools, and a judge of their conversation with the policy.

All of them are the judge "general", with prompts of their own. A reply that is of no use is asked
for again, three times in all. Then CheckerError is raised.
"""

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from core.waits import in_thread, together
from envs.following.schemas import validator
from envs.judge import judge
from envs.judge.prompts import apart, chosen, prompts
from envs.services import CheckerError

JUDGE = "general"
TRIES = 3
TEMPERATURE = 1.0
DONE, TRANSFERRED = "###STOP###", "###TRANSFER###"  # what a customer says at the end
OPENING = "(You have reached the representative, who waits for your first message.)"

PARTS = {"customer": "assistant", "representative": "user"}  # as the customer's model sees them

PROMPTS = prompts(__file__)


class Step(NamedTuple):
    """One message, call or result of the conversation."""

    who: str  # "customer", "representative", "call" or "result"
    content: str  # what was said or returned; of a call, its arguments
    name: str = ""  # of the tool
    call_id: str = ""

    def line(self) -> str:
        """The step as JSON, which no text in it can get out of."""
        if self.who == "call":
            told = {"representative calls": self.name, "arguments": self.content}
            return json.dumps(told | {"id": self.call_id}, ensure_ascii=False)
        if self.who == "result":
            return json.dumps({"returns": self.content, "id": self.call_id}, ensure_ascii=False)
        return json.dumps({f"{self.who} says": self.content}, ensure_ascii=False)


class Simulation:
    """A row's conversation so far, and the simulation of its customer and tools."""

    def __init__(self, row: dict, steps: list[Step]) -> None:
        self.steps = steps
        self.given = len(steps)  # of them, which the row brings along
        self.tools = {tool["name"]: tool for tool in row["tools"]}
        scenario = row["customer_scenario"]
        told = [f"{key.replace('_', ' ')}: {text}" for key, text in scenario.items() if text]
        outside = bool(scenario.get("outside_policy_scope"))
        self.words = {
            "policy": row["policy"],
            "scenario": "\n".join(line for line in told if not line.startswith("outside policy")),
            "tools": "\n".join(json.dumps(signature(tool)) for tool in row["tools"]),
            "done": DONE,
            "transferred": TRANSFERRED,
            "hand_over": "has to" if outside else "must not",
        }

    def transcript(self, end: int | None = None) -> str:
        """The steps before number `end`, a line each."""
        return "\n".join(step.line() for step in self.steps[:end]) or "(nothing yet)"

    async def customer(self) -> str:
        """The customer's next message, which becomes a step. Raises CheckerError."""
        first = not any(step.who == "customer" for step in self.steps)

        def read(text: str) -> str | None:
            said = re.sub(r"\A\s*customer:\s*", "", text, flags=re.IGNORECASE).strip()
            return said if said and not (first and ends(said)) else None

        said = [step for step in self.steps if step.who in PARTS]
        marks = (DONE, TRANSFERRED)
        messages = [
            {"role": PARTS[step.who], "content": apart(step.content, marks)} for step in said
        ]
        messages.insert(0, {"role": "user", "content": OPENING})
        text = await self.ask("customer", messages, read, "no message of the customer")
        self.steps.append(Step("customer", text))
        return text

    async def result(self, call: Step) -> str:
        """The result of a call, which becomes a step. Raises CheckerError."""
        schema = self.tools[call.name].get("returns")

        def read(text: str) -> str | None:
            return text if schema is None or fits(unfenced(text), schema) else None

        shown = f"{self.transcript()}\n\nThe call:\n{call.line()}"
        messages = [{"role": "user", "content": shown}]
        text = await self.ask("tool", messages, read, f"no result of the tool {call.name}")
        self.steps.append(Step("result", text, call.name, call.call_id))
        return text

    async def invalid(self, call: Step) -> bool:
        """Whether there is no such tool, or it does not take these arguments."""
        tool = self.tools.get(call.name)
        schema = tool and signature(tool)["parameters"]
        return schema is None or not await in_thread(fits, call.content, schema)

    async def verdict(self) -> str:
        """The failure of the representative: "a step", "the conversation", or "" for none.

        Raises CheckerError where customer or tools failed, or a verdict cannot be had.
        """
        new = range(self.given, len(self.steps))
        others = [i for i in new if self.steps[i].who in ("customer", "result")]
        for i, good in zip(others, await together(map(self.judge, others)), strict=True):
            if not good:
                raise CheckerError(f"the judge refused what was simulated: {self.steps[i].line()}")
        own = [i for i in new if i not in others]
        if not all(await together(map(self.judge, own))):
            return "a step"
        shown = [{"role": "user", "content": self.transcript()}]
        good = await self.ask("of_conversation", shown, success, "no verdict on the conversation")
        return "" if good else "the conversation"

    async def judge(self, i: int) -> bool:
        """Whether a step is a success. Raises CheckerError."""
        step = self.steps[i]
        name = f"of_{step.who}" if step.who in ("customer", "result") else "of_representative"
        shown = f"{self.transcript(i)}\n\nThe step to judge:\n{step.line()}"
        messages = [{"role": "user", "content": shown}]
        return await self.ask(name, messages, success, f"no verdict on a step of {step.who}")

    async def ask(
        self, prompt: str, messages: list[dict], read: Callable[[str], Any], what: str
    ) -> Any:
        """A reply as `read` parses it. Raises CheckerError where it cannot parse three."""
        system = {"role": "system", "content": chosen(JUDGE, PROMPTS[prompt]).format(**self.words)}
        made = await judge.ask(
            JUDGE, [system, *messages], read, tries=TRIES, temperature=TEMPERATURE
        )
        if made is None:
            raise CheckerError(f"judge {JUDGE!r} gave {what} in {TRIES} replies")
        return made


def ends(said: str) -> bool:
    """Whether a customer's message ends the conversation."""
    return DONE in said or TRANSFERRED in said


def signature(tool: dict) -> dict:
    """The signature of a row's tool; its fields have one of two names."""
    doc, params = tool.get("doc"), tool.get("params")
    return {
        "name": tool["name"],
        "description": tool.get("description") if doc is None else doc,
        "parameters": (tool.get("parameters") or {}) if params is None else params,
        "returns": tool.get("returns"),
    }


def unfenced(text: str) -> str:
    """A text without the fence of a block of JSON around it."""
    return text.strip().removeprefix("```json").removesuffix("```")


def fits(text: str, schema: dict) -> bool:
    """Whether a text is JSON that a schema allows."""
    try:
        return validator(schema).is_valid(json.loads(text))
    except (ValueError, RecursionError):
        return False


def success(text: str) -> bool | None:
    """The verdict in a judge's reply; None where it has none."""
    try:
        told = json.loads(unfenced(text))
    except (ValueError, RecursionError):
        return None
    good = told.get("success") if isinstance(told, dict) else None
    return good if isinstance(good, bool) else None
