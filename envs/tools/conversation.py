"""A conversation with a simulated customer and tools: 1.0 if a judge approves, else 0.0.

Row, as in NeMo-Gym's resources_servers/conversational_tool_use_simulation: `policy` (a text),
`tools` (each with name, description or doc, parameters or params, and returns), `customer_scenario`
(texts, and `outside_policy_scope`: whether the customer must be handed over). The prompt contains
the policy, and perhaps a conversation to continue; `initial_user_message` opens a new one.
If `parallel_tool_calls` is false, only the first of several calls in an answer is made.

The judge "general" plays the customer and the tools (envs/tools/simulation.py), and judges:
    the conversation ends when the customer ends it, within 50 answers by the policy
    each message from the customer and each result must be a success, else CheckerError is raised
    each of the policy's messages and calls must be a success, and then all of them together
The reward is 1.0 if all are successes. It is 0.0, with a `reason`, if an answer is cut off or
empty, calls an unknown tool or has arguments that do not fit, or is the 50th and does not end the
conversation; `answers` counts the answers.

A failing simulator or judge never decides a reward: CheckerError is raised, and the episode
restarts. NeMo-Gym masks such samples, and those in which the judge rejects the customer or the
tools.

Deliberate deviations. The prompts are in our own words. The row's own part of the conversation is
not judged. The steps are judged concurrently, not one after the other. A call that is not made gets
a result that says so.
Known leaks: the judge's taste. Conversations differ, because the simulators are sampled.
"""

import json
from typing import TYPE_CHECKING

from envs import Reward, final_text, get, require, unfinished
from envs.following.schemas import problem
from envs.judge import judge
from envs.services import TOOL_PARSER, Need
from envs.tools.simulation import JUDGE, Simulation, Step, ends, signature
from rollout.chat import NoRoom
from rollout.messages import chat

if TYPE_CHECKING:
    from rollout.episode import Episode, Turn
    from rollout.sampler import Sampler

AGENTS = (
    "conversational_tool_use_agent",
    "conversational_tool_use_simulation_agent",
    "conversational_tool_use_simulation",
)
ALLOWS_EMPTY_INPUT = True
MAX_ANSWERS = 50
ONE_CALL = json.dumps({"error": "one call at a time: this one was not made"})


def needs(row: dict) -> tuple[Need, ...]:
    """The judge `general`, and a tool-call parser."""
    return judge.need(JUDGE), TOOL_PARSER


def check(row: dict) -> None:
    """Raises ValueError unless the row has a policy, a customer scenario, and tools."""
    get(row, "policy", str, "the representative's policy")
    wanted = get(row, "customer_scenario.reason_for_contact", str, "what the customer wants")
    require(wanted.strip(), "customer_scenario.reason_for_contact", wanted, "a text")
    outside = get(row, "customer_scenario", dict, "a scenario").get("outside_policy_scope")
    good = isinstance(outside, bool | None)
    require(good, "customer_scenario.outside_policy_scope", outside, "true, false or null")
    get(row, "initial_user_message", str | None, "a text or null")
    for i, tool in enumerate(get(row, "tools", list, "a list of tools")):
        get(tool, "name", str, "the name of a tool", f"tools[{i}].")
        for field in ("parameters", "returns"):
            schema = signature(tool)[field]
            why = "not an object"
            if isinstance(schema, dict | None):
                why = problem(schema or {})
            require(not why, f"tools[{i}].{field}", schema, f"a JSON schema: {why}")
    messages = chat(row["responses_create_params"]["input"])
    last = messages[-1] if messages else {}
    is_whole = not last.get("tool_calls")
    at = "responses_create_params.input"
    require(is_whole, at, last, "no call without its output at the end")


async def rollout(row: dict, sampler: "Sampler") -> "Episode":
    """Plays one conversation.

    Raises CheckerError if the judge fails, and NoRoom if the first prompt leaves no room.
    """
    from rollout.episode import Episode

    messages = chat(row["responses_create_params"]["input"])
    asked = any(message["role"] == "user" for message in messages)
    if (first := row.get("initial_user_message")) and not asked:
        messages.append({"role": "user", "content": first})
    simulation = Simulation(row, steps_of(messages))
    if not messages or messages[-1]["role"] not in ("user", "tool"):
        messages.append({"role": "user", "content": await simulation.customer()})
    tools = row["responses_create_params"].get("tools")
    turns: list[Turn] = []
    reason = None
    while reason is None:
        try:
            turn = await sampler.chat(messages, tools)
        except NoRoom:
            if not turns:
                raise
            reason = "room"
            break
        turns.append(turn)
        messages.append(turn.message)
        reason = await follow(row, simulation, turn, messages, len(turns) == MAX_ANSWERS)
    reason = reason or await simulation.verdict()
    info: dict[str, int | str] = {"answers": len(turns)}
    if reason:
        info["reason"] = reason
    return Episode(turns, Reward(float(not reason), info))


async def follow(
    row: dict, simulation: Simulation, turn: "Turn", messages: list[dict], last: bool
) -> str | None:
    """Continues the conversation after one of the policy's answers.

    Returns None if it continues, "" if the customer ended it, else why the episode earns nothing.
    """
    text = final_text(turn.judged)
    made = turn.message.get("tool_calls", [])
    if turn.finish_reason == "length":
        return "length"
    if not made and (reason := unfinished(text)):
        return reason
    if text:
        simulation.steps.append(Step("representative", text))
    if not made:
        reply = await simulation.customer()
        messages.append({"role": "user", "content": reply})
        if ends(reply):
            return ""
        return "too many answers" if last else None
    several = row["responses_create_params"].get("parallel_tool_calls", True) is not False
    calls = [
        Step("call", given["arguments"], given["name"], known["id"])
        for known, given in zip(made, turn.judged.tool_calls, strict=True)
    ]
    for call in calls if several else calls[:1]:
        simulation.steps.append(call)
        if await simulation.invalid(call):
            return "an invalid call"
    if last:
        return "too many answers"
    for i, call in enumerate(calls):
        output = ONE_CALL
        if several or i == 0:
            output = await simulation.result(call)
        message = {"role": "tool", "tool_call_id": call.call_id, "name": call.name}
        messages.append(message | {"content": output})
    return None


def steps_of(messages: list[dict]) -> list[Step]:
    """Returns the steps in a row's own part of the conversation."""
    steps = []
    for message in messages:
        text = message.get("content", "")
        if message["role"] in ("user", "assistant") and text:
            who = "customer" if message["role"] == "user" else "representative"
            steps.append(Step(who, text))
        elif message["role"] == "tool":
            steps.append(Step("result", text, call_id=message["tool_call_id"]))
        for call in message.get("tool_calls") or []:
            given = json.dumps(call["function"]["arguments"])
            steps.append(Step("call", given, call["function"]["name"], str(call["id"])))
    return steps
