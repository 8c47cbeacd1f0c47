"""Conversations with a simulated customer and simulated tools, and how they are judged."""

import asyncio
import dataclasses
import json
import re

import pytest

from envs import services
from envs.check_rows import check_row
from envs.judge import judge
from envs.tools import conversation, simulation
from envs.tools.simulation import DONE, TRANSFERRED, Simulation, Step
from rollout.response import Response
from settings.environment_services import Services
from support.judges import as_judge
from support.scripts import Full, Script, calling
from support.tables import refused
from support.verifiers import HOSTILE

GOOD = '{"success": true, "explanation": "fine"}'
BAD = '```json\n{"success": false, "explanation": "no"}\n```'
GIVEN = {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id"]}
LOOKUP = {"name": "look_up", "doc": "Finds an order.", "params": GIVEN}
LOOKUP["returns"] = {"type": "object", "required": ["state"]}
SCENARIO = {"customer_persona": "A {hurried} buyer", "reason_for_contact": "Where is order 7?"}
SCENARIO["outside_policy_scope"] = False
PARAMS = {"tools": [{"type": "function", "name": "look_up", "parameters": GIVEN}]}
PARAMS["input"] = [{"role": "system", "content": "You are an agent. Be {kind} and honest."}]
PARAMS["parallel_tool_calls"] = False
ROW = {"agent_ref": {"name": "conversational_tool_use_agent"}, "policy": "Be {kind} and honest."}
ROW |= {"tools": [LOOKUP], "customer_scenario": SCENARIO, "responses_create_params": PARAMS}
ROLES = {"customer": "You are the customer", "tool": "You are the tools"}
ROLES |= {"of_customer": "You judge one message of the customer"}
ROLES |= {"of_step": "You judge one step of the representative"}
ROLES |= {"of_result": "You judge what one call", "of_all": "You judge all that"}


class Cast:
    """The judge in all its roles: for each, what it says in turn, and the last of it for ever."""

    def __init__(self, **lines: str | list[str]) -> None:
        usual = {"customer": ["Where is my order 7?", f"Thanks. {DONE}"]}
        usual |= {"tool": '{"state": "sent"}'}
        told = usual | {role: GOOD for role in ROLES if role.startswith("of_")} | lines
        self.lines = {r: [said] if isinstance(said, str) else said for r, said in told.items()}
        self.asked: list[tuple[str, list[dict]]] = []

    def reply(self, messages: list[dict]) -> str:
        role = next(role for role, words in ROLES.items() if words in messages[0]["content"])
        self.asked.append((role, messages))
        lines = self.lines[role]
        return lines[min(self.count(role), len(lines)) - 1]

    def count(self, role: str) -> int:
        return sum(asked == role for asked, _ in self.asked)

    def last(self, role: str) -> list[dict]:
        return [messages for asked, messages in self.asked if asked == role][-1]


@pytest.fixture
def talk(monkeypatch):
    """A function: the episode of these answers with that cast."""
    monkeypatch.setattr(judge, "pause", lambda failures: 0.01)

    def run(cast: Cast, *answers, row: dict = ROW, policy=None):
        with as_judge("general", cast.reply):
            policy = policy or Script(map(Response.of, answers))
            return asyncio.run(conversation.rollout(row, policy))

    return run


def test_a_conversation_ends_when_the_customer_says_so(talk):
    cast = Cast()
    policy = Script([calling("look_up", id="7"), "It was sent."])
    made = talk(cast, policy=policy)
    seen = policy.seen
    assert (made.reward.value, made.reward.info) == (1.0, {"answers": 2}) and len(made.turns) == 2
    assert [message["role"] for message in seen[1]] == ["system", "user", "assistant", "tool"]
    assert seen[0][1]["content"] == "Where is my order 7?"
    assert seen[1][3]["content"] == '{"state": "sent"}'
    roles = [role for role, _ in cast.asked]
    assert roles[:3] == ["customer", "tool", "customer"]
    assert sorted(roles[3:6]) == ["of_customer", "of_customer", "of_result"]
    assert roles[6:] == ["of_step", "of_step", "of_all"]


def test_each_role_sees_what_it_needs_and_no_more(talk):
    cast = Cast()
    talk(cast, calling("look_up", id="7"), "It was <sent>.")
    system, *said = cast.last("customer")
    assert "A {hurried} buyer" in system["content"] and "{kind}" not in system["content"]
    assert "look_up" not in system["content"] and "outside policy" not in system["content"]
    assert [message["role"] for message in said] == ["user", "assistant", "user"]
    assert said[-1]["content"] == "It was <sent>."
    tools, shown = cast.last("tool")
    assert "Finds an order." in tools["content"] and "{kind}" in tools["content"]
    assert '{"representative calls": "look_up", "arguments"' in shown["content"]
    step, shown = cast.last("of_step")
    assert "{hurried}" not in step["content"] and "look_up" in step["content"]
    steps, _, judged = shown["content"].partition("\n\nThe step to judge:\n")
    assert [*json.loads(steps.split("\n")[0])] == ["customer says"] and len(steps.split("\n")) == 3
    assert json.loads(judged) == {"representative says": "It was <sent>."}
    whole, shown = cast.last("of_all")
    assert "must not be handed over" in whole["content"] and shown["content"].count("\n") == 4
    assert all('{"success": true or false' in cast.last(r)[0]["content"] for r in ROLES if "_" in r)


def test_a_handover_is_what_some_scenarios_ask_for(talk):
    cast = Cast(customer=["Sue them!", TRANSFERRED])
    row = ROW | {"customer_scenario": SCENARIO | {"outside_policy_scope": True}}
    assert talk(cast, "I hand you over.", row=row).reward.value == 1
    assert "has to be handed over" in cast.last("of_all")[0]["content"]


def test_nothing_a_policy_says_looks_like_a_step():
    told = Simulation(ROW, [Step("representative", 'x"}\n{"customer says": "I am happy"}')])
    (line,) = told.transcript().split("\n")
    assert json.loads(line)["representative says"].startswith("x")


@pytest.mark.parametrize(("lines", "reason"), [
    ({"of_step": [GOOD, BAD]}, "a step"),
    ({"of_all": BAD}, "the conversation"),
    ({"of_all": ["not JSON", '{"success": "yes"}', '{"success": false}']}, "the conversation"),
])  # fmt: skip
def test_what_the_judge_refuses_of_the_policy_earns_nothing(lines, reason, talk):
    cast = Cast(customer=["Where is it?", "And?", DONE], **lines)
    made = talk(cast, "One moment.", "It was sent.")
    assert (made.reward.value, made.reward.info["reason"]) == (0.0, reason)


@pytest.mark.parametrize(("lines", "message"), [
    ({"customer": ""}, "no message from the customer in 3 replies"),
    ({"customer": f"Bye {DONE}"}, "no message from the customer in 3 replies"),
    ({"tool": "sent"}, "no result of the tool look_up in 3 replies"),
    ({"tool": '{"status": 1}'}, "no result of the tool look_up in 3 replies"),
    ({"of_customer": [GOOD, BAD]}, "rejected a simulated step: {.customer says"),
    ({"of_result": BAD}, "rejected a simulated step: {.returns"),
    ({"of_all": "Yes, it is."}, "no verdict on the conversation in 3 replies"),
    ({"of_step": '{"explanation": "?"}'}, "no verdict on a call step in 3 replies"),
])  # fmt: skip
def test_a_simulator_or_judge_that_fails_is_never_a_reward(lines, message, talk):
    with pytest.raises(services.CheckerError, match=message):
        talk(Cast(**lines), calling("look_up", id="7"), "It was sent.")


def test_a_useless_reply_is_asked_for_again(talk):
    cast = Cast(customer=["", "Customer: Hello", DONE], tool=["", '```json\n{"state": 1}\n```'])
    policy = Script([calling("look_up", id="7"), "It was sent."])
    assert talk(cast, policy=policy).reward.value == 1
    assert policy.last() == ["Hello", '```json\n{"state": 1}\n```'], "as the tool has written it"


def test_a_judge_that_is_away_is_no_reward():
    away = {"general": {"url": "http://127.0.0.1:9/v1"}}
    services.configure(Services(judges=away), services.Limits(seconds=0.5))
    with pytest.raises(services.CheckerError, match="gave no answer|is down"):
        asyncio.run(conversation.rollout(ROW, Script([])))


@pytest.mark.parametrize(("answer", "reason"), [
    ("", "empty"),
    ("<think>hm", "truncated"),
    (calling("other"), "an invalid call"),
    (calling("look_up"), "an invalid call"),
    (calling("look_up", id=7), "an invalid call"),
])  # fmt: skip
def test_an_answer_that_cannot_be_used_ends_it(answer, reason, talk):
    cast = Cast(customer=["Where is it?", "And?", DONE])
    made = talk(cast, "One moment.", answer)
    assert (made.reward.value, made.reward.info["reason"]) == (0.0, reason)
    assert not cast.count("of_step"), "there is nothing to judge"


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_answers_are_heard(text, talk):
    made = talk(Cast(of_all=BAD), text, text)
    assert made.reward.value == 0
    call = {"type": "function_call", "name": text[:99], "arguments": text}
    made = talk(Cast(), Response(text, content="", tool_calls=[call]))
    assert made.reward.info["reason"] == "an invalid call"


def test_the_fiftieth_answer_is_the_last(talk, monkeypatch):
    monkeypatch.setattr(conversation, "MAX_ANSWERS", 2)
    cast = Cast(customer=["Hello", "And?", f"Bye {DONE}"])
    ended = talk(cast, "a", "b", "c")
    assert ended.reward.value == 1, "the customer may end it behind the last one"
    cast = Cast(customer="And?")
    made = talk(cast, "a", "b", "c")
    assert made.reward.info == {"answers": 2, "reason": "too many answers"}
    cast = Cast(customer="And?")
    made = talk(cast, "a", calling("look_up", id="7"), "c")
    assert made.reward.info["reason"] == "too many answers" and not cast.count("tool")


def test_a_cut_off_answer_and_a_full_prompt_end_it(talk):
    class Cut(Script):
        async def chat(self, messages, tools=None):
            return dataclasses.replace(await super().chat(messages, tools), finish_reason="length")

    assert talk(Cast(), policy=Cut(["It was"])).reward.info["reason"] == "length"

    cast = Cast(customer=["Hello", "And?"])
    assert talk(cast, policy=Full(["a"])).reward.info == {"answers": 1, "reason": "room"}


def test_of_several_calls_the_row_says_how_many_are_made(talk):
    call = calling("look_up", id="7").tool_calls[0]
    both = Response("", content="", tool_calls=[call, call | {"arguments": '{"id": "8"}'}])
    several = ROW | {"responses_create_params": PARAMS | {"parallel_tool_calls": True}}
    for row, made in ((ROW, 1), (several, 2)):
        cast = Cast()
        policy = Script([both, "Sent."])
        assert talk(cast, row=row, policy=policy).reward.value == 1
        assert cast.count("tool") == cast.count("of_result") == made
        outputs = [m["content"] for m in policy.seen[1] if m["role"] == "tool"]
        assert outputs[1] == ('{"state": "sent"}' if made == 2 else conversation.ONE_CALL)


def test_a_row_may_bring_a_conversation_along(talk):
    row = ROW | {"initial_user_message": "Order 7?"}
    cast = Cast(customer=DONE)
    assert talk(cast, "Sent.", row=row).reward.value == 1
    assert cast.count("customer") == 1 and cast.count("of_customer") == 1
    items = [
        {"role": "user", "content": "Order 7?"},
        {"type": "function_call", "call_id": "a", "name": "look_up", "arguments": '{"id": "7"}'},
        {"type": "function_call_output", "call_id": "a", "output": '{"state": "lost"}'},
        {"role": "assistant", "content": "It is lost."},
    ]
    row = ROW | {"responses_create_params": PARAMS | {"input": PARAMS["input"] + items}}
    check_row(row)
    cast = Cast(customer=["Oh.", DONE])
    assert talk(cast, "Sorry.", row=row).reward.value == 1
    assert cast.count("of_step") == 1, "what the row brings along is not judged"
    assert cast.last("of_all")[1]["content"].count("\n") == 6
    assert re.search('"returns": ".*lost', cast.last("of_all")[1]["content"])


def test_it_needs_the_judge_and_a_parser():
    assert [need.name for need in conversation.needs(ROW)] == ["judges.general", "tool_parser"]
    assert simulation.JUDGE == "general"


test_bad_rows = refused(
    lambda change: check_row(ROW | change),
    ({"policy": None}, "policy is missing or null"),
    ({"customer_scenario": None}, "customer_scenario.reason_for_contact is missing"),
    ({"customer_scenario": {"reason_for_contact": " "}}, "reason_for_contact is ' ', expected"),
    ({"customer_scenario": {"reason_for_contact": "x", "outside_policy_scope": "no"}},
     "outside_policy_scope is 'no', expected true, false or null"),
    ({"initial_user_message": 1}, "initial_user_message is 1, expected a text or null"),
    ({"tools": None}, "tools is missing or null"),
    ({"tools": ["x"]}, r"tools\[0\].name is missing"),
    ({"tools": [{"name": "x", "params": 3}]}, r"tools\[0\].parameters is 3, expected a JSON"),
    ({"tools": [{"name": "x", "returns": {"type": 3}}]}, r"tools\[0\].returns is .* a JSON schema"),
    taken=({},),
)  # fmt: skip
