"""How environments sample: requests, text, thoughts that the prompt opened, drafts, cancelling."""

import asyncio
from types import SimpleNamespace

import pytest
import ray
from conftest import save_tokenizer, spelling_rows

from envs.check_rows import render
from rollout import sampler as module
from rollout.episode import Request, Turn
from rollout.sampler import Sampler, answer_text
from settings.config import Sampling
from support.chats import Scripted, sampled

EOS = 1


def says(tokenizer, text: str) -> Scripted:
    """An engine that answers every request with the same words."""
    return Scripted(lambda request: ([*tokenizer.encode(text), EOS], "stop"))


async def test_requests_name_prompt_count_and_seed(tokenizer):
    engine = says(tokenizer, "hello")
    settings = Sampling(validation={"temperature": 0.6})
    sampler = Sampler(engine, tokenizer, settings, 7, [], validation=False)
    turns = await sampler.generate([5, 6]) + await sampler.generate([5, 6, 8], n=2)
    assert [(t.text, t.opening, t.judged) for t in turns] == [("hello", "", "hello")] * 3
    first, second = engine.requests
    assert first == Request(first.name, [5, 6], 1, 7, [], 65536)
    assert second == Request(second.name, [5, 6, 8], 2, 1007, [], 65536)
    assert first.name != second.name and first.priority == 0
    assert not first.sampling, "training samples as the run does"


def test_validation_has_sampling_of_its_own(tokenizer):
    engine = says(tokenizer, "hello")
    settings = Sampling(validation={"temperature": 0.6, "top_p": 0.95})
    asyncio.run(Sampler(engine, tokenizer, settings, 7, [], validation=True).generate([5]))
    assert engine.requests[0].sampling == {"temperature": 0.6, "top_p": 0.95}


def test_a_conversation_is_rendered_as_a_row_is(tokenizer):
    sampler = Sampler(None, tokenizer, Sampling(), 0, [], validation=False)
    row = spelling_rows(1)[0]
    messages = row["responses_create_params"]["input"]
    assert sampler.render(messages) == render(tokenizer, row, {})


def test_room_is_what_the_prompt_leaves():
    sampler = Sampler(None, None, Sampling(max_model_len=10), 0, [], validation=False)
    assert [sampler.room([0] * n) for n in (0, 9, 10, 11)] == [10, 1, 0, 0]


@pytest.mark.parametrize(("prompt", "opening"), [
    ("go<think>", "<think>"),
    ("go<think>\n", "<think>"),
    ("go", ""),
    ("<think>a</think>", ""),
    ("<think>go", ""),
])  # fmt: skip
def test_a_thought_that_the_prompt_opened_is_judged_with_the_answer(tokenizer, prompt, opening):
    """Templates of reasoning models end with `<think>`."""
    sampler = Sampler(says(tokenizer, "4"), tokenizer, Sampling(), 0, [], validation=False)
    (answer,) = asyncio.run(sampler.generate(tokenizer.encode(prompt)))
    assert (answer.text, answer.judged) == ("4", opening + "4")


@pytest.fixture(scope="module")
def thinker(tmp_path_factory):
    """A tokenizer that declares its think tags and a second stop token special."""
    made = save_tokenizer(tmp_path_factory.mktemp("thinker"))
    made.add_special_tokens(
        {"additional_special_tokens": ["<think>", "</think>", "<tool_call>", "<|im_end|>"]}
    )
    assert made.decode(made.encode("a</think>b"), skip_special_tokens=True) == "ab"
    return made


@pytest.mark.parametrize(("written", "reason", "text"), [
    ("<think>a</think>b<eos>", "stop", "<think>a</think>b"),
    ("<think>a</think>b<|im_end|>", "stop", "<think>a</think>b"),
    ("<think>a</think><eos>", "stop", "<think>a</think>"),
    ("<think>a</think>", "length", "<think>a</think>"),
    ("a<tool_call>", "length", "a<tool_call>"),
    ("hello <eos>", "stop", "hello "),
    ("hello<eos><pad><pad>", "stop", "hello"),
    ("<eos>", "stop", ""),
    ("", "length", ""),
])  # fmt: skip
def test_only_the_end_and_padding_are_left_out_of_the_text(thinker, written, reason, text):
    assert answer_text(thinker, sampled([], thinker.encode(written), reason)) == text


async def test_an_answer_that_nobody_waits_for_is_cancelled(monkeypatch):
    cancelled = []
    monkeypatch.setattr(ray, "cancel", cancelled.append)
    answer = asyncio.get_running_loop().create_future()
    engine = SimpleNamespace(generate=SimpleNamespace(remote=lambda request: answer))
    sampler = Sampler(engine, None, Sampling(), 0, [], validation=False)
    task = asyncio.ensure_future(sampler.generate([1, 2]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cancelled == [answer]


class Mortal:
    """An engine that is lost during the first request, and answers all later ones."""

    def __init__(self):
        self.requests: list[Request] = []
        self.known: list[list[int | None]] = []
        self.generate = SimpleNamespace(remote=self.respond)
        self.drafts = SimpleNamespace(remote=self.since)

    async def since(self, name: str, known: list[int | None]) -> list[Turn | None]:
        """One more token of the first answer each time; the second is whole."""
        self.known.append(known)
        return [sampled([], [6], ""), None] if known else [sampled([], [5], ""), sampled([], [7])]

    async def respond(self, request: Request) -> list[Turn]:
        self.requests.append(request)
        while len(self.requests) == 1:
            if len(self.known) == 3:
                raise RuntimeError("lost")
            await asyncio.sleep(0.01)
        return [sampled(request.prompt_ids, [5, 6, EOS]) for _ in range(request.n)]


async def test_a_retry_starts_from_what_was_written(monkeypatch, tokenizer):
    """The retry hands the engine the first one's drafts where prompt and count are the same."""
    monkeypatch.setattr(module.drafts, "DRAFT_SECONDS", 0.01)
    engine = Mortal()
    drafts = []

    def attempt(prompt: list[int], n: int):
        return Sampler(engine, tokenizer, Sampling(), 0, drafts, False).generate(prompt, n)

    with pytest.raises(RuntimeError, match="lost"):
        await attempt([1, 2], 2)
    kept = list(drafts)
    for prompt, n in (([1, 2], 2), ([9], 2), ([1, 2], 3)):
        drafts[:] = kept
        await attempt(prompt, n)
    first, again, other_prompt, other_count = (request.drafts for request in engine.requests)
    assert first == other_prompt == other_count == []
    found = [(draft.prompt_ids, draft.token_ids, draft.finish_reason) for draft in again]
    assert found == [([1, 2], [5, 6, 6], ""), ([1, 2], [7], "stop")]
    assert engine.known == [[], [1, None], [2, None]], "no token travels twice"
