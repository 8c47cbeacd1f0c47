"""Small tokenizers with real chat templates, and engines that answer with given texts."""

import json
import random
import re
from collections.abc import Callable, Iterable
from types import SimpleNamespace

from rollout.episode import Request, Turn
from rollout.response import Response
from rollout.sampler import Sampler
from settings.config import Sampling
from support.data import template

CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LLAMA = ["<|begin_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"]
HEADER = ["<|start_header_id|>", "<|end_header_id|>"]
SPECIAL = {"llama3_1": LLAMA + HEADER}
# Like Qwen3's: the last answer has its thought, earlier ones lose theirs before a new question.
FORGETFUL = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.index0 > ns.last %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content | trim }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
TAG = re.compile(f"({'|'.join(TAGS)})")
SPECIAL_TOKEN = re.compile(r"<\|\w+\|>")


def make_tokenizer(template: str, special: list[str], eos: str):
    """A byte-level tokenizer with some words of several letters, so that a text has many spellings.

    Tags of thoughts and tools are tokens that are not special, as in Qwen3's tokenizer.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("t", "h"), ("th", "e"), ("a", "n"), ("Ġ", "the"), ("a", "b"), ("ab", "an")]
    merges += [("i", "m"), ("<", "|"), ("Ċ", "Ċ"), ("e", "r"), ("us", "er"), ("u", "s")]
    merges.sort(key=lambda pair: len("".join(pair)))
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    model = Tokenizer(models.BPE(vocab, merges))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    model.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    named = {"eos_token": eos, "pad_token": special[0], "bos_token": special[0]}
    named["additional_special_tokens"] = special
    fast = PreTrainedTokenizerFast(tokenizer_object=model, **named)
    fast.chat_template = template
    return fast


def real(name: str):
    """A tokenizer with the real chat template of that name."""
    special = SPECIAL.get(name, CHATML)
    eos = "<|eot_id|>" if name in SPECIAL else "<|im_end|>"
    return make_tokenizer(template(name), special, eos)


def spell(tokenizer, text: str, dice: random.Random) -> list[int]:
    """Ids of a text, cut at random places, so that tokenising it again may give others.

    Tags are one token each, as an engine samples them; what looks like a special token is none.
    """
    ids: list[int] = []
    for part in TAG.split(text):
        while part and part not in TAGS:
            special = SPECIAL_TOKEN.search(part)
            n = dice.choice((1, 1, 2, 3, 5, 40))
            n = min(n, special.start() + 2) if special else n
            ids += tokenizer.encode(part[:n], add_special_tokens=False)
            part = part[n:]
        ids += tokenizer.encode(part, add_special_tokens=False)
    return ids


def sampled(prompt: Iterable[int], tokens: Iterable[int], reason: str = "stop") -> Turn:
    """A turn of version 0."""
    ids = list(tokens)
    return Turn(list(prompt), ids, [-1.0] * len(ids), [0] * len(ids), reason)


class Scripted:
    """An engine that answers each request with what `say` makes of its prompt: ids and reason."""

    def __init__(self, say: Callable[[Request], tuple[list[int], str]]):
        self.say = say
        self.requests: list[Request] = []
        self.generate = SimpleNamespace(remote=self.respond)

    async def respond(self, request: Request) -> list[Turn]:
        self.requests.append(request)
        return [sampled(request.prompt_ids, *self.say(request)) for _ in range(request.n)]


class Reader(Sampler):
    """Reads a call where an answer is JSON, as a parser of calls would."""

    async def parse(self, text: str) -> Response:
        """An answer that is a list of [name, arguments as text] calls these tools."""
        try:
            calls = [{"name": name, "arguments": made} for name, made in json.loads(text)]
        except ValueError:
            return Response.of(text)
        told = [{"type": "function_call"} | call for call in calls]
        return Response(text, content="", tool_calls=told)


def saying(tokenizer, say, seed: int = 0, limit: int = 4096, longest: int = 4096) -> Reader:
    """A sampler whose engine answers with what `say` makes of the prompt's text, oddly spelled.

    That may be an error, which is raised. An answer is cut off where it ends with "...".
    """
    dice = random.Random(seed)

    def answer(request):
        said = say(tokenizer.decode(request.prompt_ids))
        if isinstance(said, Exception):
            raise said
        end = [tokenizer.eos_token_id] * (not said.endswith("..."))
        return spell(tokenizer, said, dice) + end, "stop" if end else "length"

    options = {"max_model_len": limit, "max_response_tokens": longest, "chat_template_kwargs": {}}
    return Reader(Scripted(answer), tokenizer, Sampling(**options), seed, [], validation=False)


def talker(tokenizer, texts: list[str], limit=4096, reasons=()):
    """A sampler, and its engine that says the texts one after the other, oddly spelled."""
    dice = random.Random(0)
    left = list(texts)
    why = list(reasons) or ["stop"] * len(texts)

    def say(request):
        reason = why.pop(0)
        end = [tokenizer.eos_token_id] * (reason == "stop")
        return spell(tokenizer, left.pop(0), dice) + end, reason

    engine = Scripted(say)
    settings = Sampling(max_model_len=limit, chat_template_kwargs={})
    return Sampler(engine, tokenizer, settings, 0, [], validation=False), engine
