"""Random conversations on real chat templates: what was sampled is what is trained."""

import asyncio
import copy
import itertools
import random
import re

import numpy as np
import pytest

from envs import services
from envs.tools.tools import converse
from rollout.chat import Template
from rollout.episode import Turn, stitch
from rollout.sampler import Sampler
from settings.config import Sampling
from settings.environment_services import Services
from support.calls import TOOLS, answer, broken
from support.chats import Scripted, real, spell
from support.examples import tries

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_parsers")]

XML = ("nemotron_v3", "qwen3_coder")
# Parsers of thoughts and calls, and variables of the template.
FAMILIES = {
    "nemotron_3_super": (*XML, ("truncate_history_thinking", "enable_thinking", "low_effort")),
    "nemotron_3_nano": (*XML, ("truncate_history_thinking", "enable_thinking")),
    "qwen3": ("qwen3", "hermes", ("enable_thinking",)),
    "llama3_1": ("", "llama3_json", ("tools_in_user_message",)),
}
# What users and tools say: the words of templates, other scripts, half a character, nothing.
WORDS = ("", "the ban", "<|im_end|>", "</think>", "<tool_call>", "\n\n ", "思考 🤔", "\ud800", "{}")
WORDS += ("<|eot_id|>", "<tool_response>", "</tool_response>", "assistant", "<think>\n", "\x00")
NUMBER = re.compile(r"#\d+#")


@pytest.fixture
def tokenizer(name, tmp_path_factory):
    """A small tokenizer with a template, saved where its parsers find it."""
    made = real(name)
    folder = tmp_path_factory.getbasetemp() / "-".join(FAMILIES[name][:2])
    made.save_pretrained(folder)
    made.name_or_path = str(folder)
    return made


class Model:
    """Answers as a family of models writes them, with thoughts, calls and broken markup."""

    def __init__(self, tokenizer, form: str, dice: random.Random):
        self.tokenizer, self.form, self.dice = tokenizer, form, dice
        self.count = 0

    def __call__(self, request) -> tuple[list[int], str]:
        """Ids with many spellings, each answer with a number of its own."""
        dice = self.dice
        self.count += 1
        thinks = self.form != "llama3_json"
        text = f"<think>\nso @{self.count}@\n</think>\n\n" * (thinks and dice.random() < 0.8)
        if dice.random() < 0.6:
            called = answer(self.form, thinks, dice)
            text = broken(called, self.form, dice) if dice.random() < 0.1 else called.text
        else:
            text += f"@{self.count}@ " + "".join(dice.sample(WORDS[:5], dice.randint(0, 2)))
        end = self.tokenizer.decode(request.prompt_ids[-12:])
        if end.rstrip().endswith("<think>"):
            text = text.removeprefix("<think>\n")
        reason = "length" if dice.random() < 0.03 else "stop"
        ids = spell(self.tokenizer, text, dice)
        return ids + [self.tokenizer.eos_token_id] * (reason == "stop"), reason


class Recorder(Sampler):
    """Remembers what each answer was asked with."""

    asked: list[list[dict]]

    async def chat(self, messages: list[dict], tools: list | None = None) -> Turn:
        self.asked.append(copy.deepcopy(messages))
        return await super().chat(messages, tools)


class Told:
    """What a user and the tools say; each message has a number of its own."""

    def __init__(self, dice: random.Random):
        self.dice, self.count = dice, 0

    def say(self) -> str:
        self.count += 1
        return "".join(self.dice.sample(WORDS, 3)) + f"#{self.count}#" + self.dice.choice(WORDS)

    async def call(self, name: str, given: dict) -> str:
        return self.say()


async def conversation(tokenizer, name: str, seed: int) -> tuple[Recorder, list[Turn], int]:
    """A sampler after a conversation, its turns, and how often the history was rewritten."""
    reasoning, parser, variables = FAMILIES[name]
    services.configure(Services(reasoning_parser=reasoning, tool_parser=parser))
    dice = random.Random(seed)
    chosen = {variable: dice.random() < 0.5 for variable in variables if dice.random() < 0.5}
    sampling = Sampling(max_model_len=1 << 20, chat_template_kwargs=chosen)
    engine = Scripted(Model(tokenizer, parser, dice))
    sampler = Recorder(engine, tokenizer, sampling, 0, [], validation=False)
    sampler.asked = []
    told = Told(dice)
    tools = TOOLS if dice.random() < 0.8 else None
    messages = [{"role": "system", "content": told.say()}] * (dice.random() < 0.5)
    turns, rewritten = [], 0
    for _ in range(dice.randint(1, 4)):
        if turns and dice.random() < 0.1:
            rewritten += 1
            summary = {"role": "assistant", "content": turns[-1].message["content"]}
            messages = [{"role": "user", "content": told.say()}, summary]
        messages = [*messages, {"role": "user", "content": told.say()}]
        talk = await converse(sampler, messages, tools, told.call, dice.randint(1, 4))
        turns += talk.turns
        messages = talk.messages
    return sampler, turns, rewritten


def check(tokenizer, name: str, seed: int) -> tuple[int, int]:
    """Turns and sequences of a conversation; raises where a sampled token is lost or changed."""
    sampler, turns, rewritten = asyncio.run(conversation(tokenizer, name, seed))
    samples = stitch(turns)
    assert sum(sample.continues for sample in samples) == rewritten
    trained = np.concatenate([sample.tokens_T[sample.mask_T] for sample in samples])
    assert trained.tolist() == sum((turn.token_ids for turn in turns), [])
    template = Template(tokenizer, sampler.sampling.chat_template_kwargs)
    pairs = zip(turns, sampler.asked, strict=True)
    for (before, _), (turn, asked) in itertools.pairwise(pairs):
        known = before.prompt_ids + before.token_ids
        if turn.prompt_ids[: len(known)] != known:
            continue
        added = turn.prompt_ids[len(known) :]
        fresh = asked[asked.index(before.message) + 1 :]
        text = tokenizer.decode(added)
        assert NUMBER.findall(text) == NUMBER.findall("".join(m["content"] for m in fresh))
        assert "@" not in text
        if name == "llama3_1" and any(len(m.get("tool_calls", ())) > 1 for m in asked):
            continue  # its template refuses to show these
        whole = template.text(asked, sampler.tools).encode("utf-8", "replace").decode()
        ids = tokenizer.encode(whole, add_special_tokens=False)
        end = [tokenizer.eos_token_id] * (before.finish_reason == "stop")
        assert (end + added) == ids[-len(end + added) :]
    return len(turns), len(samples)


@pytest.mark.parametrize("name", FAMILIES)
def test_sampled_ids_are_trained_and_only_the_template_s_words_are_added(tokenizer, name):
    """Of many turns, and no sequence more than the environment made by rewriting its history."""
    seeds = tries(200)
    counts = np.array([check(tokenizer, name, seed) for seed in range(seeds)])
    assert counts[:, 0].sum() > 2 * seeds and counts[:, 1].max() > 1
