"""Conversations of many turns: prompts go on from sampled ids, and tools are called in turn."""

import asyncio
import copy
import json
from types import SimpleNamespace

import pytest

from envs.tools.tools import converse
from rollout import sampler as sampler_module
from rollout.chat import MARK, NoRoom, Said, Template
from rollout.drafts import DraftBook
from rollout.episode import Turn, stitch
from support.chats import CHATML, FORGETFUL, Reader, make_tokenizer, talker
from support.tables import gives

TOOLS = [{"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}]


@pytest.fixture(scope="module")
def tokenizer():
    """Of a model whose template drops earlier thoughts."""
    return make_tokenizer(FORGETFUL, CHATML, "<|im_end|>")


def user(text: str) -> dict:
    return {"role": "user", "content": text}


async def twice(sampler, question: str) -> list[Turn]:
    first = await sampler.chat([user("the?")])
    return [first, await sampler.chat([user("the?"), first.message, user(question)])]


def test_a_prompt_goes_on_from_the_sampled_ids_and_keeps_their_thoughts(tokenizer):
    sampler, _ = talker(tokenizer, ["<think>the the ban</think>an abane", "the end"])
    first, second = asyncio.run(twice(sampler, "and <|im_end|>?"))
    thought = {"reasoning_content": "the the ban"}
    assert first.message == {"role": "assistant", "content": "an abane"} | thought
    assert first.message is first.message
    added = "\n<|im_start|>user\nand <|im_end|>?<|im_end|>\n<|im_start|>assistant\n"
    known = first.prompt_ids + first.token_ids
    assert second.prompt_ids == known + tokenizer.encode(added, add_special_tokens=False)
    assert tokenizer.encode(tokenizer.decode(known), add_special_tokens=False) != known
    (sample,) = stitch([first, second])
    assert sample.tokens_T[sample.mask_T].tolist() == first.token_ids + second.token_ids


async def test_what_was_said_before_may_be_changed_which_starts_a_new_sequence(tokenizer):
    sampler, _ = talker(tokenizer, ["<think>a</think>b"] * 4)
    messages = [user("the?")]
    turns = [await sampler.chat(messages)]
    messages.extend((turns[0].message, user("?")))
    del messages[1]["reasoning_content"]
    turns.append(await sampler.chat(messages))
    for question in ("!", f"say {MARK}"):
        messages.extend((turns[-1].message, user(question)))
        turns.append(await sampler.chat(messages, TOOLS))
    assert [sample.continues for sample in stitch(turns)] == [False, True, True, True]
    for turn, said in zip(turns[1:], (2, 4, 6), strict=True):
        tools = sampler.tools if turn is not turns[1] else None
        assert turn.prompt_ids == sampler.render(messages[: said + 1], tools)


def test_a_template_that_hides_the_answer_forces_a_new_sequence(tokenizer):
    """One that shows the last message alone; `stitch` counts it."""
    sampler, _ = talker(tokenizer, ["the", "ban"])
    sampler.tokenizer = copy.deepcopy(tokenizer)
    alone = FORGETFUL.replace("m in messages %}<|", "m in messages[-1:] %}<|")
    sampler.tokenizer.chat_template = alone
    turns = asyncio.run(twice(sampler, "and?"))
    assert tokenizer.decode(turns[1].prompt_ids).count("<|im_start|>") == 2
    samples = stitch(turns)
    assert [sample.info().continues for sample in samples] == [False, True]
    trained = [sample.tokens_T[sample.mask_T].tolist() for sample in samples]
    assert trained == [turn.token_ids for turn in turns]


async def test_what_earlier_answers_hold_does_not_matter(tokenizer):
    """Neither arguments that no template can write as JSON, nor the word that marks answers."""
    nested: dict = {}
    for _ in range(5000):
        nested = {"a": nested}
    sampler, _ = talker(tokenizer, [MARK, "the", "ban"])
    messages = [user("the?")]
    turns = []
    for _ in range(3):
        turns.append(await sampler.chat(messages))
        call = {"tool_calls": [{"function": {"name": "add", "arguments": nested}}]}
        turns[-1].message.update(call)
        sampler.said.messages[-1].update(call)  # as if it had said so
        messages.extend((turns[-1].message, user("and?")))
    assert len(stitch(turns)) == 1
    with pytest.raises(RecursionError):
        sampler.render(messages)


def rule(template: str, contents: str, sampled: list[int], reason: str) -> list[int]:
    """The prompt after an answer between two messages, of a tokenizer whose token 2 ends one."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {"end" if i == 2 else str(i): i for i in range(100)}
    words = Tokenizer(models.WordLevel(vocab, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="end")
    tokenizer.chat_template = template
    pairs = zip(("user", "assistant", "user"), contents.split(", "), strict=True)
    messages = [{"role": role, "content": content} for role, content in pairs]
    turn = Turn([], sampled, [-1.0] * len(sampled), [0] * len(sampled), reason)
    said = Said(messages[:-1], None, turn)
    return Template(tokenizer, {}).prompt(messages, None, said, 1000)


PLAIN = (
    "{% for m in messages %}{{ m.content }}{{ ' end ' if m.role == 'assistant' else ' ' }}"
    "{% endfor %}{% if add_generation_prompt %}40 41{% endif %}"
)
QWEN3 = (
    "{% for m in messages %}{% if loop.last and m.role == 'assistant' %}88 88 88 {% endif %}"
    "{{ m.content }}{{ ' end ' if m.role == 'assistant' else ' ' }}"
    "{% endfor %}{% if add_generation_prompt %}40 41{% endif %}"
)


# What an answer is in the template does not matter; a cut-off one is ended by the template.
test_the_prefix_rule_has_the_outcome_of_nemo_rl = gives(
    rule,
    (PLAIN, "9 end, 9, 77 88", [100, 2], "stop", [100, 2, 77, 88, 40, 41]),
    (PLAIN, "9 end, 9, 77", [100, 101], "length", [100, 101, 2, 77, 40, 41]),
    (QWEN3, "11 12, 56, 70 71 end", [11, 12, 99, 99, 99, 55, 2], "stop",
     [11, 12, 99, 99, 99, 55, 2, 70, 71, 2, 40, 41]),
    (PLAIN, "11 12 13 40 41, 1001, 21 22", [11, 12, 13, 40, 41, 220, 17, 2], "stop",
     [11, 12, 13, 40, 41, 220, 17, 2, 21, 22, 40, 41]),
)  # fmt: skip


def talk_with_tools(tokenizer, texts, max_steps=9, limit=4096, reasons=(), output="7"):
    """What `converse` makes of these answers, and what tools were asked."""
    asked = []

    async def call(name: str, given: dict) -> str:
        asked.append((name, given))
        return output

    sampler, engine = talker(tokenizer, texts, limit=limit, reasons=reasons)
    sampler.__class__ = Reader
    talk = asyncio.run(converse(sampler, [user("3 + 4?")], TOOLS, call, max_steps))
    return talk, asked, engine


ADD = '["add", "{\\"a\\": 3}"]'


def test_calls_are_made_in_turn_and_their_outputs_read(tokenizer):
    talk, asked, engine = talk_with_tools(tokenizer, [f"[{ADD}, {ADD}]", f"[{ADD}]", "seven"])
    assert (talk.ended, len(talk.turns), asked) == ("answer", 3, [("add", {"a": 3})] * 3)
    roles = [message["role"] for message in talk.messages]
    assert roles == ["user", "assistant", "tool", "tool", "assistant", "tool", "assistant"]
    ids = [call["call_id"] for call in talk.calls]
    assert len(set(ids)) == 3 and all(len(name) == 9 for name in ids)
    assert [m["tool_call_id"] for m in talk.messages if m["role"] == "tool"] == ids
    assert talk.response == "seven" and talk.response.tool_calls == talk.calls
    (sample,) = stitch(talk.turns)
    assert sample.tokens_T[sample.mask_T].tolist() == sum((t.token_ids for t in talk.turns), [])
    assert tokenizer.decode(sample.tokens_T).count("<|im_start|>tool\n7<|im_end|>\n") == 3


def test_a_template_may_refuse_outputs_without_their_calls_and_several_calls(tokenizer):
    """As those of gpt-oss and Llama 3 do: what stands in for an answer has one call."""
    strict = copy.deepcopy(tokenizer)
    before = "messages[loop.index0 - 1]"
    strict.chat_template = FORGETFUL.replace(
        "m in messages %}<|",
        "m in messages %}{% if m.tool_calls and m.tool_calls | length > 1 or m.role == 'tool' and "
        f"not ({before}.tool_calls or {before}.role == 'tool') %}}"
        "{{ raise_exception('refused') }}{% endif %}<|",
    )
    talk, asked, _ = talk_with_tools(strict, [f"[{ADD}, {ADD}]", f"[{ADD}]", "seven"])
    assert len(asked) == 3 and len(stitch(talk.turns)) == 1
    with pytest.raises(Exception, match="refused"):
        Template(strict, {}).text(talk.messages, TOOLS)


@pytest.mark.parametrize(("call", "error"), [
    ('["sub", "{}"]', "there is no tool 'sub'"),
    ('["add", "{"]', "the arguments are not a JSON object"),
    ('["add", "[3]"]', "the arguments are not a JSON object"),
    ('["add", ""]', "the arguments are not a JSON object"),
    (f'["add", "{"[" * 100_000}"]', "the arguments are not a JSON object"),
])  # fmt: skip
def test_a_bad_call_is_told_so(tokenizer, call, error):
    talk, asked, _ = talk_with_tools(tokenizer, [f"[{call}]", "ok"], limit=1 << 20)
    assert not asked and json.loads(talk.messages[2]["content"]) == {"error": error}
    assert talk.calls[0]["name"] in ("add", "sub") and talk.ended == "answer"


def test_a_conversation_ends(tokenizer):
    """By its steps, with the last calls made; by a cut-off answer, whose calls are not made."""
    talk, asked, _ = talk_with_tools(tokenizer, [f"[{ADD}]"] * 3, max_steps=2)
    assert (talk.ended, len(talk.turns), len(asked)) == ("steps", 2, 2)
    talk, asked, _ = talk_with_tools(tokenizer, [f"[{ADD}]"], reasons=["length"])
    assert (talk.ended, len(talk.turns), asked, len(talk.calls)) == ("length", 1, [], 1)
    talk, asked, _ = talk_with_tools(tokenizer, [f"[{ADD}]"], limit=400, output="x" * 500)
    assert (talk.ended, len(talk.turns), len(asked)) == ("room", 1, 1)
    talk, *_ = talk_with_tools(tokenizer, [f"[{ADD}]"], limit=100, output="\ud800" * (1 << 20))
    assert talk.ended == "room", "a huge output is not even tokenised"
    with pytest.raises(NoRoom, match="characters do not fit into 1 tokens"):
        talk_with_tools(tokenizer, ["a"], limit=1)


@pytest.mark.parametrize("same", [True, False])
def test_a_lost_engine_costs_only_what_the_tools_say_differently(tokenizer, monkeypatch, same):
    """The retry plays the answers again that it has, and asks tools again, without the engine."""
    monkeypatch.setattr(sampler_module.drafts, "DRAFT_SECONDS", 0.01)
    texts = [f"[{ADD}]", f"[{ADD}, {ADD}]", "seven"]
    said = []

    async def call(name: str, given: dict) -> str:
        said.append(len(said))
        return "7" if same else str(len(said))

    def attempt(sampler):
        sampler.__class__ = Reader
        return asyncio.run(converse(sampler, [user("3 + 4?")], TOOLS, call, 9))

    book = DraftBook()
    row = ("slot", 1, 1)
    dying, engine = talker(tokenizer, texts[:2])

    async def respond(request):
        if len(engine.requests) < 2:
            return await engine.respond(request)
        while not asked_drafts:
            await asyncio.sleep(0.01)
        raise RuntimeError("lost")

    async def since(name, known):
        asked_drafts.append(known)
        return [Turn([], ids, [-1.0] * 3, [0] * 3, "")]

    asked_drafts = []
    ids = tokenizer.encode("sev", add_special_tokens=False)
    engine.generate.remote = respond
    engine.drafts = SimpleNamespace(remote=since)
    with pytest.raises(RuntimeError, match="lost"), book.of(*row) as (drafts,):
        dying.drafts = drafts
        attempt(dying)
    first, second = (drafted.answers[0][0] for drafted in drafts[:2])
    again, other = talker(tokenizer, texts[2:] if same else texts[1:])
    with book.of(*row) as (drafts,):
        again.drafts = drafts
        talk = attempt(again)
    assert talk.turns[0].token_ids == first.token_ids
    assert len(said) == 6 and talk.ended == "answer" and talk.response == "seven"
    if same:
        (request,) = other.requests
        assert [draft.token_ids for draft in request.drafts] == [ids]
        assert talk.turns[1].token_ids == second.token_ids
    else:
        assert [request.drafts for request in other.requests] == [[], []]
        assert "tool\n4<|im_end|>" in tokenizer.decode(other.requests[0].prompt_ids)
    assert len(stitch(talk.turns)) == 1 and not book.groups
