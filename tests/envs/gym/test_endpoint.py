"""The policy behind OpenAI's protocol: requests of one episode, ids that go on, the router."""

import asyncio
import json
import random

import aiohttp
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.gym import endpoint
from envs.gym.endpoint import Asked, Router, invited, meant
from envs.rollout import sampler as sampler_module
from envs.rollout.episode import stitch
from settings.run import Sampling
from support.chats import CHATML, FORGETFUL, Reader, Scripted, make_tokenizer, spell

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '[["add", "{\\"a\\": 3}"]]'


@pytest.fixture(scope="module")
def tokenizer():
    """Of a model whose template drops earlier thoughts."""
    return make_tokenizer(FORGETFUL, CHATML, "<|im_end|>")


def guest_of(tokenizer, say, limit=4096, longest=4096):
    """A sampler whose engine answers with what `say` makes of the prompt's text, oddly spelled."""
    dice = random.Random(0)

    def answer(request):
        said = say(tokenizer.decode(request.prompt_ids))
        if isinstance(said, Exception):
            raise said
        end = [tokenizer.eos_token_id] * (not said.endswith("..."))
        return spell(tokenizer, said, dice) + end, "stop" if end else "length"

    engine = Scripted(answer)
    options = {"max_model_len": limit, "max_response_tokens": longest, "chat_template_kwargs": {}}
    return Reader(engine, tokenizer, Sampling(**options), 0, [], validation=False), engine


def user(text: str) -> dict:
    return {"role": "user", "content": text}


async def post(url: str, body, path: str = "chat/completions"):
    """Status and JSON of an answer."""
    async with aiohttp.ClientSession() as session:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with session.post(f"{url}/{path}", data=data) as answer:
            return answer.status, await answer.json()


def in_episode(sampler, talk):
    """What `talk(guest)` returns, and the turns of the episode."""

    async def run():
        async with invited(sampler) as guest:
            return await talk(guest), guest.turns

    return asyncio.run(run())


def test_openais_own_client_talks_and_its_prompts_go_on_from_sampled_ids(tokenizer):
    left = ["<think>the the</think> an abane ", CALL, "the end"]
    sampler, engine = guest_of(tokenizer, lambda prompt: left.pop(0))

    async def talk(guest):
        client = openai.AsyncOpenAI(base_url=guest.url, api_key="none")
        (model,) = (await client.models.list()).data
        messages = [{"role": "system", "content": [{"type": "text", "text": "be"}]}, user("hm?")]
        for more in ([user("more")], [], []):
            made = await client.chat.completions.create(
                model=model.id, messages=messages, tools=[TOOL], temperature=0.3, max_tokens=99
            )
            said = made.choices[0].message
            messages += [said.model_dump(exclude_none=True), *more]
            for call in said.tool_calls or ():
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "7"})
        return made, messages

    (last, messages), turns = in_episode(sampler, talk)
    assert last.choices[0].finish_reason == "stop" and last.choices[0].message.content == "the end"
    assert last.usage.prompt_tokens == len(turns[-1].prompt_ids)
    # A thought stays in its message, where the program may drop it.
    assert messages[2]["reasoning_content"] == "the the"
    calls = messages[4]["tool_calls"]
    assert json.loads(calls[0]["function"]["arguments"]) == {"a": 3}
    (sample,) = stitch(turns)
    assert sample.tokens_T[sample.mask_T].tolist() == sum((t.token_ids for t in turns), [])
    text = tokenizer.decode(sample.tokens_T)
    assert "<think>the the</think> an abane <|im_end|>" in text and "tool\n7<|im_end|>" in text
    assert [request.max_tokens for request in engine.requests] == [99, 99, 99]


def test_a_stream_says_what_an_answer_says(tokenizer):
    """As OpenAI's client reads it, calls and all; a prompt without room is refused as ever."""
    left = ["<think>the the</think> an abane ", CALL]
    sampler, _ = guest_of(tokenizer, lambda prompt: left.pop(0), limit=300)

    async def talk(guest):
        client = openai.AsyncOpenAI(base_url=guest.url, api_key="none")
        asked = {"model": "policy", "messages": [user("hm?")], "tools": [TOOL], "stream": True}
        found = []
        for _ in range(2):
            (chunk,) = [part async for part in await client.chat.completions.create(**asked)]
            found.append(chunk)
        asked["messages"] = [user("the " * 500)]
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            await client.chat.completions.create(**asked)
        return found

    (said, called), turns = in_episode(sampler, talk)
    assert said.choices[0].delta.content == turns[0].message["content"]
    assert said.choices[0].finish_reason == "stop" and not said.choices[0].delta.tool_calls
    assert said.usage.completion_tokens == len(turns[0].token_ids)
    (call,) = called.choices[0].delta.tool_calls
    assert (call.index, call.function.name, json.loads(call.function.arguments)["a"]) == (
        0,
        "add",
        3,
    )
    assert called.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    "change",
    [
        lambda said: {k: v for k, v in said.items() if k != "reasoning_content"},
        lambda said: said | {"content": f"\n{said['content'].strip()}  "},
        lambda said: said | {"prompt_token_ids": [1], "reasoning": "x", "refusal": None},
        lambda said: said | {"content": [{"type": "text", "text": said["content"]}]},
    ],
)
def test_what_was_said_is_known_again(tokenizer, change):
    left = ["<think>the</think> an abane", "the end"]
    sampler, _ = guest_of(tokenizer, lambda prompt: left.pop(0))

    async def talk(guest):
        _, told = await post(guest.url, {"messages": [user("hm?")]})
        said = change(told["choices"][0]["message"])
        await post(guest.url, {"messages": [user(" hm? "), said, user("and")]})

    _, turns = in_episode(sampler, talk)
    assert len(stitch(turns)) == 1


@pytest.mark.parametrize("left", [["", "the end"], ["<think>the</think>", "the end"]])
def test_an_answer_without_words_is_told_again_as_null(tokenizer, left):
    sampler, _ = guest_of(tokenizer, lambda prompt, left=list(left): left.pop(0))

    async def talk(guest):
        _, told = await post(guest.url, {"messages": MESSAGES})
        said = told["choices"][0]["message"] | {"content": None, "tool_calls": None}
        question = user("and") | {"tool_calls": None, "name": None}
        return await post(guest.url, {"messages": [*MESSAGES, said, question]})

    (status, _), turns = in_episode(sampler, talk)
    assert status == 200 and len(turns) == 2 and len(stitch(turns)) == 1


def test_other_words_start_a_sequence_of_their_own(tokenizer):
    sampler, _ = guest_of(tokenizer, lambda prompt: f"an {len(prompt)}")

    async def talk(guest):
        _, told = await post(guest.url, {"messages": [user("hm?")]})
        said = told["choices"][0]["message"]
        for content in (said["content"] + "!", "another"):
            messages = [user("hm?"), said | {"content": content}, user("and")]
            assert (await post(guest.url, {"messages": messages}))[0] == 200
        await post(guest.url, {"messages": [user("hm?")]})

    _, turns = in_episode(sampler, talk)
    samples = stitch(turns)
    assert len(turns) == 4 and [sample.continues for sample in samples] == [False, True, True, True]


def test_conversations_side_by_side_and_branches_go_on_from_their_own_ids(tokenizer):
    """As a program has them that asks another agent, or that goes back to an earlier answer."""
    sampler, _ = guest_of(tokenizer, lambda prompt: f"the {len(prompt)} abane")

    async def talk(guest):
        talks = {name: [user(name)] for name in "ab"}
        for name in "abba":
            _, told = await post(guest.url, {"messages": talks[name]})
            talks[name] += [told["choices"][0]["message"], user("and")]
        await post(guest.url, {"messages": [*talks["a"][:2], user("or")]})

    _, (a, b, b2, a2, branch) = in_episode(sampler, talk)
    for earlier, later in ((a, a2), (b, b2), (a, branch)):
        known = earlier.prompt_ids + earlier.token_ids
        assert later.prompt_ids[: len(known)] == known
    samples = stitch([a, b, b2, a2, branch])
    sampled = [sample.tokens_T[sample.mask_T].tolist() for sample in samples]
    assert sum(sampled, []) == sum((t.token_ids for t in (a, b, b2, a2, branch)), [])


def test_of_two_answers_that_read_the_same_the_later_one_goes_on(tokenizer):
    sampler, _ = guest_of(tokenizer, lambda prompt: "the abane the ban the end an")

    async def talk(guest):
        for _ in range(2):
            _, told = await post(guest.url, {"messages": MESSAGES})
        said = told["choices"][0]["message"]
        await post(guest.url, {"messages": [*MESSAGES, said, user("and")]})

    _, (first, second, last) = in_episode(sampler, talk)
    assert first.token_ids != second.token_ids and len(stitch([first, second, last])) == 2


def test_an_endpoint_that_could_not_listen_is_tried_again(tokenizer, monkeypatch):
    sampler, _ = guest_of(tokenizer, lambda prompt: "the")

    async def full(app, host, port):
        raise OSError("too many open files")

    async def run():
        with monkeypatch.context() as patch:
            patch.setattr(endpoint, "listen", full)
            with pytest.raises(OSError, match="open files"):
                async with invited(sampler):
                    pass
        async with invited(sampler) as guest:
            return await post(guest.url, {"messages": MESSAGES})

    assert asyncio.run(run())[0] == 200


def test_calls_at_once_are_answered_one_after_the_other(tokenizer):
    sampler, _ = guest_of(tokenizer, lambda prompt: prompt[-40:-30])

    async def talk(guest):
        texts = [f"{i} the ban the abane" for i in range(20)]
        asked = [post(guest.url, {"messages": [user(text)]}) for text in texts]
        return [
            told["choices"][0]["message"]["content"] for _, told in await asyncio.gather(*asked)
        ]

    said, turns = in_episode(sampler, talk)
    assert sorted(said) == sorted(turn.text for turn in turns) and len(turns) == 20


def test_ids_logprobs_and_versions_come_where_they_are_asked_for(tokenizer):
    sampler, _ = guest_of(tokenizer, lambda prompt: "the ban")

    async def talk(guest):
        asked = {"messages": [user("hm?")]}
        more = {"logprobs": True, "return_tokens_as_token_ids": True}
        return [await post(guest.url, asked), await post(guest.url, asked | more)]

    (plain, whole), turns = in_episode(sampler, talk)
    bare = plain[1]["choices"][0]
    assert bare.keys() == {"index", "message", "finish_reason"}
    assert bare["message"] == {"role": "assistant", "content": "the ban"}
    choice, turn = whole[1]["choices"][0], turns[1]
    assert [one["token"] for one in choice["logprobs"]["content"]] == [
        f"token_id:{token}" for token in turn.token_ids
    ]
    assert [one["logprob"] for one in choice["logprobs"]["content"]] == turn.logps
    assert choice["message"]["prompt_token_ids"] == turn.prompt_ids
    assert choice["message"]["generation_token_ids"] == turn.token_ids
    assert choice["message"]["generation_log_probs"] == turn.logps
    assert choice["versions"] == turn.versions


@pytest.mark.parametrize(
    ("asked", "expected"), [({}, 50), ({"max_tokens": 7}, 7), ({"max_completion_tokens": 60}, 50)]
)
def test_a_shorter_answer_may_be_asked_for(tokenizer, asked, expected):
    sampler, engine = guest_of(tokenizer, lambda prompt: "the...", longest=50)

    async def talk(guest):
        return await post(guest.url, {"messages": [user("hm?")]} | asked)

    (status, told), _ = in_episode(sampler, talk)
    assert status == 200 and told["choices"][0]["finish_reason"] == "length"
    assert engine.requests[0].max_tokens == expected


MESSAGES = [user("hm?")]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
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
    ],
)
def test_a_malformed_request_is_refused_and_ends_nothing(tokenizer, body, expected):
    sampler, _ = guest_of(tokenizer, lambda prompt: "the")

    async def talk(guest):
        refused = await post(guest.url, body)
        return refused, await post(guest.url, {"messages": MESSAGES}), guest.failed.done()

    ((status, told), (again, _), failed), turns = in_episode(sampler, talk)
    assert status == 400 and expected in told["error"]["message"]
    assert again == 200 and not failed and len(turns) == 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "text", "tool_calls", "x"]), inner)
    ),
    max_leaves=8,
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool"]), "content": JSON | st.text(max_size=3)},
    optional=dict.fromkeys(("tool_calls", "reasoning_content", "tool_call_id", "type"), JSON),
)
KEYS = ["messages", "tools", "n", "stream", "stop", "max_tokens"]


@settings(max_examples=300, deadline=None)
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


def test_a_prompt_without_room_is_said_in_vllms_words(tokenizer):
    """NeMo-Gym looks for `context length` and ends the episode as one that was cut off."""
    sampler, _ = guest_of(tokenizer, lambda prompt: "the", limit=60)

    async def talk(guest):
        refused = await post(guest.url, {"messages": [user("the ban " * 40)]})
        return refused, guest.full, await post(guest.url, {"messages": MESSAGES})

    ((status, told), full, (again, _)), turns = in_episode(sampler, talk)
    assert status == 400 and "context length" in told["error"]["message"] and full
    assert again == 200 and len(turns) == 1


def test_an_engine_that_dies_ends_the_episode_with_its_own_error(tokenizer):
    sampler, _ = guest_of(tokenizer, lambda prompt: ConnectionError("the engine is lost"))

    async def talk(guest):
        status, told = await post(guest.url, {"messages": MESSAGES})
        with pytest.raises(ConnectionError, match="the engine is lost"):
            await guest.failed
        return status, told

    (status, told), turns = in_episode(sampler, talk)
    assert status == 410 and "ConnectionError" in told["error"]["message"] and not turns


@pytest.fixture
def cancelled(monkeypatch):
    """What engines were told to give up."""
    told: list = []
    monkeypatch.setattr(sampler_module.ray, "cancel", told.append)
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


def test_nobody_is_answered_when_the_episode_is_over(tokenizer, cancelled):
    sampler, engine = guest_of(tokenizer, lambda prompt: "the")
    _, asked = hangs(engine)

    async def run():
        async with invited(sampler) as guest:
            late = asyncio.create_task(post(guest.url, {"messages": MESSAGES}))
            await asked()
        with pytest.raises(aiohttp.ClientError):
            await late
        return await post(guest.url, {"messages": MESSAGES})

    status, told = asyncio.run(run())
    assert status == 410 and "over" in told["error"]["message"] and len(cancelled) == 1


def test_an_answer_that_nobody_waits_for_is_given_up(tokenizer, cancelled):
    sampler, engine = guest_of(tokenizer, lambda prompt: "the")
    mend, asked = hangs(engine)

    async def talk(guest):
        left = asyncio.create_task(post(guest.url, {"messages": MESSAGES}))
        await asked()
        left.cancel()
        mend()
        return await post(guest.url, {"messages": MESSAGES})

    (status, _), turns = in_episode(sampler, talk)
    assert status == 200 and len(turns) == 1 and len(cancelled) == 1


def test_the_router_passes_requests_on_to_their_episodes(tokenizer):
    samplers = [guest_of(tokenizer, lambda prompt, name=name: name)[0] for name in "ab"]

    async def run():
        router = Router()
        url = await router.start("127.0.0.1", 0)
        async with invited(samplers[0]) as a, invited(samplers[1]) as b:
            asked = [{"messages": MESSAGES, "metadata": {"policy": g.url}} for g in (a, b)] * 5
            told = await asyncio.gather(*(post(url, body) for body in asked))
            said = [answer["choices"][0]["message"]["content"] for _, answer in told]
            refused = await post(url, asked[0] | {"n": 2})
        over = await post(url, asked[0])
        gone = {"policy": f"http://127.0.0.1:9/{'0' * 32}/v1"}
        lost = await post(url, {"messages": MESSAGES, "metadata": gone})
        nowhere = []
        for metadata in ({}, {"policy": "http://h:1/x"}, {"policy": 5}, None, "x"):
            nowhere.append(await post(url, {"messages": MESSAGES, "metadata": metadata}))
        nowhere.append(await post(url, b"\xff"))
        await router.session.close()
        return said, [len(g.turns) for g in (a, b)], refused, over, lost, nowhere

    said, turns, refused, over, lost, nowhere = asyncio.run(run())
    assert said == ["a", "b"] * 5 and turns == [5, 5]
    assert refused[0] == 400 and "n is 2" in refused[1]["error"]["message"]
    assert over[0] == 410 and lost[0] == 410 and "gone" in lost[1]["error"]["message"]
    assert {status for status, _ in nowhere} == {400}
    assert all("metadata" in told["error"]["message"] for _, told in nowhere)
