"""The policy behind OpenAI's protocol: requests of one episode, ids that go on, the router."""

import asyncio
import json
import socket

import aiohttp
import openai
import pytest
import ray
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.gym import endpoint
from envs.gym.endpoint import Asked, Router, invited, meant
from rollout.episode import stitch
from support.chats import CHATML, FORGETFUL, make_tokenizer, saying
from support.examples import tries
from support.verifiers import json_values

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
TOKENIZER = make_tokenizer(FORGETFUL, CHATML, "<|im_end|>")  # it drops earlier thoughts
CALL = '[["add", "{\\"a\\": 3}"]]'


def user(text: str) -> dict:
    return {"role": "user", "content": text}


async def post(url: str, body):
    async with aiohttp.ClientSession() as session:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with session.post(f"{url}/chat/completions", data=data) as answer:
            return answer.status, await answer.json()


async def ask(guest, *messages: dict, **more):
    """Status and JSON of the answer to a conversation."""
    return await post(guest.url, {"messages": list(messages or MESSAGES)} | more)


async def message(guest, *messages: dict) -> dict:
    """The message of the answer to a conversation."""
    _, told = await ask(guest, *messages)
    return told["choices"][0]["message"]


MESSAGES = [user("hm?")]


async def test_openais_own_client_talks_and_its_prompts_go_on_from_sampled_ids():
    left = ["<think>the the</think> an abane ", CALL, "the end"]
    sampler = saying(TOKENIZER, lambda prompt: left.pop(0))
    async with invited(sampler) as guest:
        client = openai.AsyncOpenAI(base_url=guest.url, api_key="none")
        (model,) = (await client.models.list()).data
        messages = [{"role": "system", "content": [{"type": "text", "text": "be"}]}, user("hm?")]
        for more in ([user("more")], [], []):
            last = await client.chat.completions.create(
                model=model.id, messages=messages, tools=[TOOL], temperature=0.3, max_tokens=99
            )
            said = last.choices[0].message
            messages += [said.model_dump(exclude_none=True), *more]
            for call in said.tool_calls or ():
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "7"})
    turns = guest.turns
    assert last.choices[0].finish_reason == "stop" and last.choices[0].message.content == "the end"
    assert last.usage.prompt_tokens == len(turns[-1].prompt_ids)
    # A thought stays in its message, where the program may drop it.
    assert messages[2]["reasoning_content"] == "the the"
    calls = messages[4]["tool_calls"]
    assert json.loads(calls[0]["function"]["arguments"]) == {"a": 3}
    (sample,) = stitch(turns)
    assert sample.tokens_T[sample.mask_T].tolist() == sum((t.token_ids for t in turns), [])
    text = TOKENIZER.decode(sample.tokens_T)
    assert "<think>the the</think> an abane <|im_end|>" in text and "tool\n7<|im_end|>" in text
    assert [request.max_tokens for request in sampler.engine.requests] == [99, 99, 99]


async def test_a_stream_says_what_an_answer_says():
    """As OpenAI's client reads it, calls and all; a prompt without room is refused as ever."""
    left = ["<think>the the</think> an abane ", CALL]
    async with invited(saying(TOKENIZER, lambda prompt: left.pop(0), limit=300)) as guest:
        client = openai.AsyncOpenAI(base_url=guest.url, api_key="none")
        asked = {"model": "policy", "messages": MESSAGES, "tools": [TOOL], "stream": True}
        found = []
        for _ in range(2):
            (chunk,) = [part async for part in await client.chat.completions.create(**asked)]
            found.append(chunk)
        asked["messages"] = [user("the " * 500)]
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            await client.chat.completions.create(**asked)
    (said, called), turns = found, guest.turns
    assert said.choices[0].delta.content == turns[0].message["content"]
    assert said.choices[0].finish_reason == "stop" and not said.choices[0].delta.tool_calls
    assert said.usage.completion_tokens == len(turns[0].token_ids)
    (call,) = called.choices[0].delta.tool_calls
    assert (call.index, call.function.name) == (0, "add")
    assert json.loads(call.function.arguments)["a"] == 3
    assert called.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("change", [
    lambda said: {k: v for k, v in said.items() if k != "reasoning_content"},
    lambda said: said | {"content": f"\n{said['content'].strip()}  "},
    lambda said: said | {"prompt_token_ids": [1], "reasoning": "x", "refusal": None},
    lambda said: said | {"content": [{"type": "text", "text": said["content"]}]},
])  # fmt: skip
async def test_what_was_said_is_known_again(change):
    left = ["<think>the</think> an abane", "the end"]
    async with invited(saying(TOKENIZER, lambda prompt: left.pop(0))) as guest:
        said = change(await message(guest))
        await ask(guest, user(" hm? "), said, user("and"))
    assert len(stitch(guest.turns)) == 1


@pytest.mark.parametrize("first", ["", "<think>the</think>"])
async def test_an_answer_without_words_is_told_again_as_null(first):
    left = [first, "the end"]
    async with invited(saying(TOKENIZER, lambda prompt: left.pop(0))) as guest:
        said = await message(guest) | {"content": None, "tool_calls": None}
        question = user("and") | {"tool_calls": None, "name": None}
        status, _ = await ask(guest, *MESSAGES, said, question)
    assert status == 200 and len(guest.turns) == 2 and len(stitch(guest.turns)) == 1


async def test_other_words_start_a_sequence_of_their_own():
    async with invited(saying(TOKENIZER, lambda prompt: f"an {len(prompt)}")) as guest:
        said = await message(guest)
        for content in (said["content"] + "!", "another"):
            changed = said | {"content": content}
            assert (await ask(guest, *MESSAGES, changed, user("and")))[0] == 200
        await ask(guest)
    samples = stitch(guest.turns)
    assert [sample.continues for sample in samples] == [False, True, True, True]
    assert len(guest.turns) == 4


async def test_conversations_side_by_side_and_branches_go_on_from_their_own_ids():
    """As a program has them that asks another agent, or that goes back to an earlier answer."""
    async with invited(saying(TOKENIZER, lambda prompt: f"the {len(prompt)} abane")) as guest:
        talks = {name: [user(name)] for name in "ab"}
        for name in "abba":
            talks[name] += [await message(guest, *talks[name]), user("and")]
        await ask(guest, *talks["a"][:2], user("or"))
    a, b, b2, a2, branch = guest.turns
    for earlier, later in ((a, a2), (b, b2), (a, branch)):
        known = earlier.prompt_ids + earlier.token_ids
        assert later.prompt_ids[: len(known)] == known
    samples = stitch([a, b, b2, a2, branch])
    sampled = [sample.tokens_T[sample.mask_T].tolist() for sample in samples]
    assert sum(sampled, []) == sum((t.token_ids for t in (a, b, b2, a2, branch)), [])


async def test_of_two_answers_that_read_the_same_the_later_one_goes_on():
    async with invited(saying(TOKENIZER, lambda prompt: "the abane the ban the end an")) as guest:
        await ask(guest)
        await ask(guest, *MESSAGES, await message(guest), user("and"))
    first, second, last = guest.turns
    assert first.token_ids != second.token_ids and len(stitch([first, second, last])) == 2


async def test_an_endpoint_that_could_not_listen_is_tried_again(monkeypatch):
    sampler = saying(TOKENIZER, lambda prompt: "the")

    async def full(app, host, port):
        raise OSError("too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(endpoint, "listen", full)
        with pytest.raises(OSError, match="open files"):
            async with invited(sampler):
                pass
    async with invited(sampler) as guest:
        assert (await ask(guest))[0] == 200


async def test_calls_at_once_are_answered_one_after_the_other():
    async with invited(saying(TOKENIZER, lambda prompt: prompt[-40:-30])) as guest:
        texts = [f"{i} the ban the abane" for i in range(20)]
        told = await asyncio.gather(*(message(guest, user(text)) for text in texts))
    said = sorted(answer["content"] for answer in told)
    assert said == sorted(turn.text for turn in guest.turns) and len(said) == 20


async def test_ids_logprobs_and_versions_come_where_they_are_asked_for():
    async with invited(saying(TOKENIZER, lambda prompt: "the ban")) as guest:
        _, plain = await ask(guest)
        _, whole = await ask(guest, logprobs=True, return_tokens_as_token_ids=True)
    bare = plain["choices"][0]
    assert bare.keys() == {"index", "message", "finish_reason"}
    assert bare["message"] == {"role": "assistant", "content": "the ban"}
    choice, turn = whole["choices"][0], guest.turns[1]
    ids = [f"token_id:{token}" for token in turn.token_ids]
    assert [one["token"] for one in choice["logprobs"]["content"]] == ids
    assert [one["logprob"] for one in choice["logprobs"]["content"]] == turn.logps
    assert choice["message"]["prompt_token_ids"] == turn.prompt_ids
    assert choice["message"]["generation_token_ids"] == turn.token_ids
    assert choice["message"]["generation_log_probs"] == turn.logps
    assert choice["versions"] == turn.versions


@pytest.mark.parametrize(
    ("asked", "expected"), [({}, 50), ({"max_tokens": 7}, 7), ({"max_completion_tokens": 60}, 50)]
)
async def test_a_shorter_answer_may_be_asked_for(asked, expected):
    sampler = saying(TOKENIZER, lambda prompt: "the...", longest=50)
    async with invited(sampler) as guest:
        status, told = await ask(guest, **asked)
    assert status == 200 and told["choices"][0]["finish_reason"] == "length"
    assert sampler.engine.requests[0].max_tokens == expected


@pytest.mark.parametrize(("body", "expected"), [
    (b"{", "Expecting"),
    (b"[" * 100_000, "recursion"),
    ([], "the request is []"),
    ({}, "messages is missing"),
    ({"messages": []}, "messages is []"),
    ({"messages": "hm"}, "messages is 'hm'"),
    ({"messages": [{"role": "cat", "content": ""}]}, "messages[0].role is 'cat'"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content[0].text"),
    ({"messages": [{"role": "assistant", "content": "", "reasoning_content": 5}]}, "0].reason"),
    ({"messages": MESSAGES, "n": 2}, "n is 2, expected 1"),
    ({"messages": MESSAGES, "stop": ["x"]}, "stop is ['x']"),
    ({"messages": MESSAGES, "tools": [{}]}, "tools[0].type"),
    ({"messages": MESSAGES, "tools": 5}, "tools is 5"),
    ({"messages": MESSAGES, "max_tokens": "x"}, "max_tokens is 'x'"),
    ({"messages": MESSAGES, "max_tokens": -1}, "max_tokens is -1"),
])  # fmt: skip
async def test_a_malformed_request_is_refused_and_ends_nothing(body, expected):
    async with invited(saying(TOKENIZER, lambda prompt: "the")) as guest:
        status, told = await post(guest.url, body)
        again, _ = await ask(guest)
        assert not guest.failed.done()
    assert status == 400 and expected in told["error"]["message"]
    assert again == 200 and len(guest.turns) == 1


JSON = json_values(st.sampled_from(["role", "content", "text", "tool_calls", "x"]), leaves=8)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool"]), "content": JSON | st.text(max_size=3)},
    optional=dict.fromkeys(("tool_calls", "reasoning_content", "tool_call_id", "type"), JSON),
)
KEYS = ["messages", "tools", "n", "stream", "stop", "max_tokens"]


@settings(max_examples=tries(300), deadline=None)
@given(
    st.dictionaries(st.sampled_from(KEYS), JSON)
    | JSON
    | st.builds(dict, messages=st.lists(MESSAGE, min_size=1, max_size=3))
)
def test_any_json_is_a_request_or_a_value_error(body):
    try:
        asked = Asked.of(body)
    except ValueError:
        return
    assert asked.messages and list(map(meant, asked.messages))


async def test_a_prompt_without_room_is_said_in_vllms_words():
    """NeMo-Gym looks for `context length` and ends the episode as one that was cut off."""
    async with invited(saying(TOKENIZER, lambda prompt: "the", limit=60)) as guest:
        status, told = await ask(guest, user("the ban " * 40))
        assert status == 400 and "context length" in told["error"]["message"] and guest.full
        assert (await ask(guest))[0] == 200 and len(guest.turns) == 1


async def test_an_engine_that_dies_ends_the_episode_with_its_own_error():
    sampler = saying(TOKENIZER, lambda prompt: ConnectionError("the engine is lost"))
    async with invited(sampler) as guest:
        status, told = await ask(guest)
        with pytest.raises(ConnectionError, match="the engine is lost"):
            await guest.failed
    assert status == 410 and "ConnectionError" in told["error"]["message"] and not guest.turns


@pytest.fixture
def cancelled(monkeypatch):
    told: list = []
    monkeypatch.setattr(ray, "cancel", told.append)
    return told


def hangs(engine):
    """Lets an engine answer nothing until it is mended.

    Returns what mends it, and what waits until it is asked.
    """
    respond = engine.generate.remote
    requests: list = []

    def never(request):
        requests.append(request)
        return asyncio.get_running_loop().create_future()

    engine.generate.remote = never

    def mend():
        engine.generate.remote = respond

    async def asked():
        async with asyncio.timeout(20):
            while not requests:
                await asyncio.sleep(0.01)

    return mend, asked


async def test_nobody_is_answered_when_the_episode_is_over(cancelled):
    sampler = saying(TOKENIZER, lambda prompt: "the")
    _, asked = hangs(sampler.engine)
    async with invited(sampler) as guest:
        late = asyncio.create_task(ask(guest))
        await asked()
    with pytest.raises(aiohttp.ClientError):
        await late
    status, told = await ask(guest)
    assert status == 410 and "over" in told["error"]["message"] and len(cancelled) == 1


async def test_an_answer_that_nobody_waits_for_is_given_up(cancelled):
    sampler = saying(TOKENIZER, lambda prompt: "the")
    mend, asked = hangs(sampler.engine)
    async with invited(sampler) as guest:
        left = asyncio.create_task(ask(guest))
        await asked()
        left.cancel()
        mend()
        status, _ = await ask(guest)
    assert status == 200 and len(guest.turns) == 1 and len(cancelled) == 1


async def test_the_router_passes_requests_on_to_their_episodes():
    samplers = [saying(TOKENIZER, lambda prompt, name=name: name) for name in "ab"]
    router = Router()
    url = await router.start("127.0.0.1", 0)
    async with invited(samplers[0]) as a, invited(samplers[1]) as b:
        asked = [{"messages": MESSAGES, "metadata": {"policy": g.url}} for g in (a, b)] * 5
        told = await asyncio.gather(*(post(url, body) for body in asked))
        refused = await post(url, asked[0] | {"n": 2})
    over = await post(url, asked[0])
    gone = {"policy": f"http://127.0.0.1:9/{'0' * 32}/v1"}
    lost = await post(url, {"messages": MESSAGES, "metadata": gone})
    odd = ({}, {"policy": "http://h:1/x"}, {"policy": 5}, None, "x")
    bodies = [{"messages": MESSAGES, "metadata": metadata} for metadata in odd]
    nowhere = [await post(url, body) for body in [*bodies, b"\xff"]]
    await router.session.close()
    said = [answer["choices"][0]["message"]["content"] for _, answer in told]
    assert said == ["a", "b"] * 5 and [len(g.turns) for g in (a, b)] == [5, 5]
    assert refused[0] == 400 and "n is 2" in refused[1]["error"]["message"]
    assert over[0] == 410 and lost[0] == 410 and "gone" in lost[1]["error"]["message"]
    assert {status for status, _ in nowhere} == {400}
    assert all("metadata" in told["error"]["message"] for _, told in nowhere)


def test_a_worker_listens_where_servers_on_other_machines_reach_it():
    """Ray's address is loopback on one machine; of no server there is none to choose."""
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.77", 1))
        except OSError:
            pytest.skip("this machine has no route to others")
        own = probe.getsockname()[0]
    assert endpoint.address_towards("http://192.0.2.77:11000") == own
    assert endpoint.address_towards("http://127.0.0.1:11000") == ""
    assert endpoint.address_towards("http://nobody.invalid:11000") == ""
