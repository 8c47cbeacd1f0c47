"""Rows that NeMo-Gym's agents try: turns and rewards, failures that are none, outages, routing.

The server is one that was written from NeMo-Gym's protocol (support/gym_servers.py). `python
tests/gym.py` asks the real one.
"""

import asyncio
import contextlib
import functools
import os
import re
import socket
import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray

import envs
from core import errors
from envs import check_rows, registry, services
from envs.gym import gym, nemo_gym
from envs.judge import judge
from envs.services import CheckerError
from rollout.chat import NoRoom
from rollout.episode import stitch
from settings.environment_services import Services
from support.chats import CHATML, FORGETFUL, Reader, make_tokenizer, saying
from support.gym_servers import AGENT, Gym
from support.program import ran

TOKENIZER = make_tokenizer(FORGETFUL, CHATML, "<|im_end|>")  # it drops earlier thoughts
CALL = '[["add", "{\\"a\\": 3}"]]'
PARAMS = {"input": [{"role": "user", "content": "3 + 4?"}]}
PARAMS["metadata"] = {"chat_template_kwargs": "{}"}
ROW = {"responses_create_params": PARAMS, "expected": "seven", "level": 2, "_line": 5}
ROW["agent_ref"] = {"type": "responses_api_agents", "name": AGENT}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    services.configure(Services(), services.Limits(10.0))
    monkeypatch.setattr(judge, "JUDGES", weakref.WeakKeyDictionary())  # not those of other tests
    monkeypatch.setattr(judge, "pause", lambda failures: 0.05)
    gym._problem.cache_clear()


@pytest.fixture
def server():
    """The server that rollouts ask."""
    with Gym() as server:
        services.configure(Services(nemo_gym=(server.url,)))
        yield server


sampler_of = functools.partial(saying, TOKENIZER, longest=512)


def calls(prompt: str) -> str:
    """Calls the tool once, and answers."""
    return CALL if "tool" not in prompt else "seven"


def attempt(gym_server, sampler, row=ROW):
    services.configure(Services(nemo_gym=(gym_server.url,)))
    return asyncio.run(nemo_gym.rollout(row, sampler))


# --- episodes -------------------------------------------------------------------------------------


def test_an_episode_is_one_sequence_of_the_ids_that_were_sampled():
    left = [CALL, CALL, "<think>the ban</think> an abane seven"]
    sampler = sampler_of(lambda prompt: left.pop(0))
    with Gym(output="7 <|im_end|>", accuracy=True, note="x", level=2) as server:
        episode = attempt(server, sampler)
        (sent,) = server.tried
    assert episode.reward == envs.Reward(1.0, {"length": 3, "accuracy": True})
    assert not episode.masked and len(episode.turns) == 3
    (sample,) = stitch(episode.turns)
    sampled = sum((turn.token_ids for turn in episode.turns), [])
    assert sample.tokens_T[sample.mask_T].tolist() == sampled
    text = TOKENIZER.decode(sample.tokens_T)
    assert text.count("<|im_start|>tool\n7 <|im_end|><|im_end|>\n") == 2
    metadata = sent["responses_create_params"]["metadata"]
    assert metadata.pop("policy").startswith("http://127.0.0.1:")
    assert metadata == {"chat_template_kwargs": "{}"}
    assert sent["_ng_task_index"] == 5 and "_line" not in sent and sent["expected"] == "seven"
    assert "policy" not in ROW["responses_create_params"]["metadata"]


def test_a_thought_that_the_agent_tells_again_stays_as_it_was_sampled(server):
    left = [f"<think>the the</think>{CALL}", CALL, "seven"]
    sampler = sampler_of(lambda prompt: left.pop(0))
    sampler.parse = lambda text: thinking(sampler, text)
    episode = attempt(server, sampler)
    second = server.asked[1]["messages"][1]
    assert second["reasoning_content"] == "the the" and second["content"] == ""
    assert len(stitch(episode.turns)) == 1
    assert "<think>the the</think>" in TOKENIZER.decode(episode.turns[2].prompt_ids)


async def thinking(sampler, text):
    """What a parser of thoughts and calls makes of an answer."""
    thought, _, rest = text.rpartition("</think>")
    read = await Reader.parse(sampler, rest)
    read.reasoning = thought.removeprefix("<think>")
    return read


def test_many_episodes_at_once_keep_apart(server):
    """A group's rows are the same; each rollout's requests reach its own sampler."""

    def say(seed):
        return lambda prompt: CALL if "tool" not in prompt else f"seven {seed}"

    samplers = [sampler_of(say(seed), seed) for seed in range(50)]
    episodes = asyncio.run(registry.rollouts(ROW, samplers))
    for seed, episode in enumerate(episodes):
        assert [turn.text for turn in episode.turns] == [CALL, f"seven {seed}"]
        assert episode.reward.value == 1.0


def test_a_masked_episode_counts_and_is_not_trained_on():
    with Gym(mask_sample=True) as server:
        episode = attempt(server, sampler_of(calls))
    (sample,) = episode.samples(ROW)
    assert episode.masked and not sample.mask_T.any() and sample.score == 1.0
    assert sample.info().trained_tokens == 0 and sample.info().response_tokens > 0


def test_a_first_prompt_without_room_has_no_answer_and_a_later_one_ends_the_episode():
    with Gym(output="the ban " * 200) as server:
        episode = attempt(server, sampler_of(lambda prompt: CALL, limit=500))
        assert len(episode.turns) == 1 and episode.reward.value == 0.0
        with pytest.raises(NoRoom):
            attempt(server, sampler_of(calls, limit=20))


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("verdict", "expected"), [
    ({"_ng_failure_class": "judge_failed", "reward": 0.0}, "judge_failed"),
    ({"_ng_failure_class": "", "reward": 0.0}, "no verdict"),
    ({"reward": None}, "reward is None"),
    ({"reward": 10**400}, "reward is 1000"),
    ({"reward": float("nan")}, "reward is nan"),
    ({"reward": "1"}, "reward is '1'"),
    ({"reward": True}, "reward is True"),
    ({"reward": 0, "response": {"status": "failed", "error": "no disk"}}, "failed: no disk"),
])  # fmt: skip
def test_a_try_without_a_verdict_is_no_reward(verdict, expected):
    with Gym(**verdict) as server, pytest.raises(CheckerError, match=expected):
        attempt(server, sampler_of(calls))


def test_a_refused_request_is_no_reward_though_the_agent_bears_it(server):
    ask, first = server._ask, [True]

    async def odd(body):
        if first:
            first.pop()
            return await ask(body)
        with contextlib.suppress(RuntimeError):
            await ask(body | {"stop": ["x"]})
        return {"message": {"content": "nothing"}, "finish_reason": "stop"}

    server._ask = odd
    with pytest.raises(CheckerError, match=r"a request that was refused: stop is \['x'\]"):
        attempt(server, sampler_of(calls))


@pytest.mark.parametrize(("waits", "masked"), [(False, False), (False, True), (True, False)])
def test_a_slow_engine_is_no_reward_though_the_agent_gives_up(monkeypatch, waits, masked):
    monkeypatch.setattr(ray, "cancel", lambda answer: None)
    sampler = sampler_of(calls)
    respond, requests = sampler.engine.generate.remote, []

    def slow(request):
        requests.append(request)
        is_slow = len(requests) == 2
        return asyncio.get_running_loop().create_future() if is_slow else respond(request)

    sampler.engine.generate.remote = slow
    with Gym(mask_sample=masked) as server:
        ask = server._ask

        async def impatient(body):
            asked = asyncio.create_task(ask(body))
            while not asked.done() and len(requests) != 2:
                await asyncio.sleep(0.01)
            if len(requests) != 2:
                return await asked
            asked.cancel()
            await asyncio.wait([asked])
            if waits:
                return await ask(body)
            return {"message": {"content": "nothing"}, "finish_reason": "stop"}

        server._ask = impatient
        if waits or masked:
            episode = attempt(server, sampler)
            assert episode.masked == masked and episode.reward.value == float(waits)
        else:
            with pytest.raises(CheckerError, match="did not wait for the policy's last answer"):
                attempt(server, sampler)


def test_only_numbers_that_means_can_be_made_of_are_logged():
    with Gym(a=float("nan"), b=float("inf"), c=10**400, d=0.5) as server:
        episode = attempt(server, sampler_of(calls))
    assert episode.reward.info == {"length": 3, "d": 0.5}


@pytest.mark.parametrize(("fault", "expected"), [
    ("500", "failed: .*status 500.*a tool broke"),
    ("no metadata", "failed: .*the agent does not pass on the metadata of its row"),
    ("reset", "failed: .*Disconnected"),
])  # fmt: skip
def test_a_failed_try_says_why_and_is_no_outage(server, fault, expected):
    server.fault = fault
    with pytest.raises(CheckerError, match=expected) as raised:
        attempt(server, sampler_of(calls))
    assert not isinstance(raised.value, services.Away) and not gym.ABSENT


def test_an_agent_that_asks_somebody_else_is_told_of(server):
    server.policy = "http://127.0.0.1:9/v1"
    with pytest.raises(CheckerError, match="failed"):
        attempt(server, sampler_of(calls))
    server._episode = lambda row: asyncio.sleep(0, "seven")
    with pytest.raises(CheckerError, match="never called the policy: NeMo-Gym's policy_base_url"):
        attempt(server, sampler_of(calls))


def test_an_engine_that_dies_is_no_fault_of_the_agent(server):
    """The error is the engine's, at once, and the answers before it wait for the next try."""
    lost = ConnectionError("the engine is lost")
    sampler = sampler_of(lambda prompt: lost if "tool" in prompt else CALL)
    began = time.monotonic()
    with pytest.raises(ConnectionError, match="the engine is lost"):
        attempt(server, sampler)
    assert time.monotonic() - began < 30
    again = sampler_of(lambda prompt: "seven")
    again.drafts = sampler.drafts
    episode = attempt(server, again)
    assert [turn.text for turn in episode.turns] == [CALL, "seven"]
    assert len(again.engine.requests) == 1, "the first answer was played again"


async def test_a_rollout_that_is_given_up_leaves_no_request(monkeypatch, server):
    cancelled: list = []
    monkeypatch.setattr(ray, "cancel", cancelled.append)
    sampler = sampler_of(calls)
    sampler.engine.generate.remote = lambda request: asyncio.get_running_loop().create_future()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(nemo_gym.rollout(ROW, sampler), 0.5)
    await asyncio.sleep(0.1)
    assert len(cancelled) == 1


# --- outages --------------------------------------------------------------------------------------


async def test_a_server_that_is_away_is_waited_for_and_may_come_back_at_another_port(server):
    server.down()
    rollout = asyncio.create_task(nemo_gym.rollout(ROW, sampler_of(calls)))
    await asyncio.sleep(0.3)
    away = services.report().away
    server.up()
    assert (await rollout).reward.value == 1.0
    text = away.pop(f"nemo_gym.{AGENT}")
    assert re.match(rf"for 0 s: {re.escape(server.url)} does not answer: .*refused", text)
    assert away == {} and not gym.ABSENT and server.agent


@pytest.mark.parametrize("fault", ["", "hang"])
async def test_a_try_that_an_outage_ends_is_no_attempt(server, fault):
    """Nor where nothing but silence says that the server is gone."""
    server.fault = "hang"
    rollout = asyncio.create_task(nemo_gym.rollout(ROW, sampler_of(calls)))
    while not server.tried:
        await asyncio.sleep(0.01)
    if fault:
        server.wait(silence(server))
    else:
        server.down()
    await asyncio.sleep(3 if fault else 1)
    assert list(services.report().away) == [f"nemo_gym.{AGENT}"]
    server.down()
    server.up()
    server.fault = ""
    with pytest.raises(services.Away, match="was down"):
        await rollout
    assert (await nemo_gym.rollout(ROW, sampler_of(calls))).reward.value == 1.0
    assert not gym.ABSENT


async def silence(server):
    """Lets the agent take connections and say nothing."""
    for runner in server.runners:
        for site in runner.sites:
            site._server.close()
    server.dumb = await asyncio.start_server(lambda r, w: None, "127.0.0.1", server.agent)


async def test_after_the_time_of_a_rollout_the_call_says_that_the_server_is_away(server):
    services.configure(services.current(), services.Limits(0.5))
    server.down()
    with pytest.raises(services.Away, match=f"agent '{AGENT}' is down, for . s: .*answer"):
        await nemo_gym.rollout(ROW, sampler_of(calls))
    assert list(services.report().away) == [f"nemo_gym.{AGENT}"], "it is still looked for"
    server.up()
    while services.report().away:
        await asyncio.sleep(0.01)


# --- who serves what ------------------------------------------------------------------------------


def test_agents_that_no_module_declares_are_nemo_gyms():
    with pytest.raises(ValueError, match=f"agent_ref.name is '{AGENT}', expected one of"):
        check_rows.check_row(ROW)
    with Gym() as server:
        services.configure(Services(nemo_gym=(server.url,)))
        check_rows.check_row(ROW)
        assert registry.environment(AGENT) is nemo_gym and not registry.only_compares(AGENT)
        assert registry.environment("math").__name__ == "envs.maths.math"
        check_rows.check_services(ROW)
        (episode,) = asyncio.run(registry.rollouts(ROW, [sampler_of(calls)]))
        assert episode.samples(ROW)[0].env == AGENT
        other = ROW | {"agent_ref": {"name": "nobody"}}
        expected = rf"lacks nemo_gym.nobody: .* no agent 'nobody' there, but {AGENT}; expected a"
        with pytest.raises(errors.ModuleError, match=expected):
            check_rows.check_services(other)


def test_a_head_server_that_does_not_answer_or_is_none_is_told_of():
    with Gym() as server:
        url = server.url
        services.configure(Services(nemo_gym=(url, "http://127.0.0.1:9")))
        check_rows.check_services(ROW)
        services.configure(Services(nemo_gym=(server.policy.removesuffix("/v1"),)))
        told = "it is not a head server of NeMo-Gym: HTTP Error"
        with pytest.raises(errors.ModuleError, match=told):
            check_rows.check_services(ROW)
    services.configure(Services(nemo_gym=(url,)))
    gym._problem.cache_clear()
    expected = rf"\('{url}',\): {url} does not answer: .*; expected a running head server"
    with pytest.raises(errors.ModuleError, match=expected):
        check_rows.check_services(ROW)


@pytest.mark.parametrize(("said", "error", "expected"), [
    (b"SSH-2.0-OpenSSH_9\r\n", ValueError, "not an HTTP server: BadStatusLine"),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{", OSError, "in the middle of its answer"),
    (b"", OSError, "middle of its answer: Remote end closed"),
])  # fmt: skip
def test_a_head_server_that_goes_away_while_it_speaks_is_silent(said, error, expected):
    with socket.create_server(("127.0.0.1", 0)) as door, ThreadPoolExecutor(1) as thread:

        def speak():
            connection, _ = door.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(said)

        speaking = thread.submit(speak)
        with pytest.raises(error, match=expected):
            gym.agents(f"http://127.0.0.1:{door.getsockname()[1]}")
        speaking.result(10)


@pytest.mark.parametrize("urls", [("h:1",), ("http://h:1/",), ("",), ("http://h:1", 5)])
def test_addresses_are_checked(urls):
    with pytest.raises(ValueError, match=r"services.nemo_gym = .*, expected addresses such as"):
        Services(nemo_gym=urls)


def test_gym_does_not_start_where_another_program_has_the_routers_port(tmp_path):
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/ng_run"
    program.write_text('#!/bin/sh\necho "started $*"\n')
    program.chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = str(door.getsockname()[1])
        variables = {"GYM": str(tmp_path), "GRPO_PYTHON": sys.executable, "ROUTER_PORT": port}
        told = [start_gym(variables)]
    told.append(start_gym(variables))
    assert told[0].returncode == 1 and f"ROUTER_PORT = {port} taken?" in told[0].stderr
    assert "started" not in told[0].stdout
    assert told[1].returncode == 0 and f"+policy_base_url=http://127.0.0.1:{port}" in told[1].stdout
    with socket.create_server(("127.0.0.1", int(port))):
        pass  # the router has ended


def start_gym(variables):
    return ran("bash", "launch/gym.sh", "a.yaml", env=os.environ | variables)
