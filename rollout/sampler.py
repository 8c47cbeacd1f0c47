"""Lets environments sample from the policy: token ids in, Turns out."""

import contextlib
import dataclasses
import uuid
import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from core.waits import Idle, in_thread, together
from envs import services
from envs.parsers import parsers
from rollout import chat, drafts, zero_rewards
from rollout.compaction import Compaction
from rollout.drafts import DraftBook, DraftedCall
from rollout.episode import Episode, Request, Turn
from rollout.messages import load_tokenizer, render_messages, template_variables
from rollout.response import Response

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from transformers import PreTrainedTokenizerBase

    from rollout.chat import Said
    from rollout.compaction import Compaction
    from settings.config import RunSettings, Sampling


class GroupSamplers(NamedTuple):
    """The samplers of a group's rollouts, and a clock that runs while no call is open."""

    samplers: "list[Sampler]"
    idle: Idle


class Samplers:
    """Creates groups' samplers from the tokenizer and the run's sampling and seed."""

    def __init__(self, cfg: "RunSettings") -> None:
        limits = services.Limits(cfg.timeouts.rollout, cfg.rollout_workers)
        services.configure(cfg.services, limits)
        self.cfg = cfg
        self.tokenizer = load_tokenizer(cfg.model)
        self.drafts = DraftBook()

    @contextlib.contextmanager
    def of_group(
        self, engine: "ActorHandle", row: dict, slot: "Slot", n: int
    ) -> Iterator[GroupSamplers]:
        """Yields a sampler for each of a row's n rollouts; a slot has the same seeds in every try.

        If the block raises, the slot's next samplers continue from these drafts.
        """
        seed = zlib.crc32(f"{self.cfg.seed} {slot}".encode())
        sampling = sampling_of(row, self.cfg.sampling)
        validation = slot.evaluation is not None
        idle = Idle()
        samplers = []
        with self.drafts.of(slot, row["_line"], n) as calls_G:
            for j, calls in enumerate(calls_G):
                sampler = Sampler(engine, self.tokenizer, sampling, seed + j, calls, validation)
                sampler.idle = idle
                if row.get("compactions"):
                    sampler.compaction = Compaction(row["compactions"], sampling)
                samplers.append(sampler)
            yield GroupSamplers(samplers, idle)

    def flawed(self, episodes: list[Episode], names: Sequence[str]) -> list[bool]:
        """Returns, for each episode, whether it has one of the named flaws."""
        if not names:
            return [False] * len(episodes)
        return [zero_rewards.mark(episode, names, self.tokenizer) for episode in episodes]


class Slot(Protocol):
    """A place in the stream of prompts; its text is part of the seed."""

    @property
    def evaluation(self) -> int | None:
        """The policy version that is evaluated; None for training."""


class Sampler:
    """The policy as one rollout of an environment sees it, always on the same engine.

    `drafts` outlives the sampler. If the engine is lost, the repeated rollout finds its earlier
    calls there, with their answers or drafts. It reuses them for each call that has the same
    prompt: in a conversation, until a tool returns a different result.
    """

    def __init__(
        self,
        engine: "ActorHandle",
        tokenizer: "PreTrainedTokenizerBase",
        sampling: "Sampling",  # the row's sampling
        seed: int,
        drafts: list[DraftedCall],
        validation: bool,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.sampling = sampling
        self.seed = seed
        self.drafts = drafts
        self.overrides: dict[Any, float] = dict(sampling.validation) if validation else {}
        self.calls = 0
        self.idle = Idle()  # counts the time without calls, across all samplers of the group
        self.tools: list | None = None  # tools of the conversation that was rendered last
        self.said: Said | None = None  # the conversation up to the last answer of `chat`
        self.compaction: Compaction | None = None  # sums up an episode that outgrows the window

    def render(self, messages: list[dict] | str, tools: list | None = None) -> list[int]:
        """Returns the token ids of a conversation, up to the start of the answer."""
        self.tools = tools
        return render_messages(self.tokenizer, messages, tools, self.sampling.chat_template_kwargs)

    def room(self, prompt_ids: list[int]) -> int:
        """Returns how many tokens an answer may have below max_model_len; 0 if none fits."""
        return max(0, self.sampling.max_model_len - len(prompt_ids))

    async def chat(self, messages: list[dict], tools: list | None = None) -> Turn:
        """Returns the answer to a conversation of chat messages (rollout/chat.py).

        If `messages` are the last call's messages, its Turn's `message` and new messages, the
        prompt continues from the sampled token ids. Any other change to earlier messages starts a
        new sample (`stitch`). Raises NoRoom if the window has no room for an answer.
        """
        prompt_ids, most = await chat.prompt(self, messages, tools)
        (turn,) = await self.generate(prompt_ids, most=most)
        self.said = chat.Said.of(self.said, messages, tools, turn)
        return turn

    async def generate(self, prompt_ids: list[int], n: int = 1, most: int = 0) -> list[Turn]:
        """Returns n answers to one prompt, with their text parsed for the tools rendered last.

        An answer has at most `most` tokens; 0 means the limit set by the row and the run.
        """
        k = self.calls
        self.calls += 1
        seed = self.seed + 1000 * k
        limit = most or self.sampling.max_response_tokens
        request = Request(
            name=uuid.uuid4().hex,
            prompt_ids=prompt_ids,
            n=n,
            seed=seed,
            drafts=[],
            max_tokens=limit,
            sampling=self.overrides,
        )
        self.idle.change(1)
        try:
            turns = await drafts.answers(self.drafts, k, self.engine, request)
        finally:
            self.idle.change(-1)
        prompt_end = str(self.tokenizer.decode(prompt_ids[-16:])).rstrip()
        for turn in turns:
            turn.prompt_ids = prompt_ids  # the engine sent a copy
            turn.text = answer_text(self.tokenizer, turn)
            turn.opening = "<think>" if prompt_end.endswith("<think>") else ""
        parsed = await together(self.parse(turn.opening + turn.text) for turn in turns)
        for turn, response in zip(turns, parsed, strict=True):
            turn.parsed = response
        return turns

    async def parse(self, text: str) -> Response:
        """Parses an answer with the configured parsers."""
        named = services.current()
        if not (named.reasoning_parser or named.tool_parser):
            return await in_thread(Response.of, text)
        kwargs = self.sampling.chat_template_kwargs
        return await parsers.read(text, self.tokenizer.name_or_path, self.tools, kwargs)


def sampling_of(row: dict, sampling: "Sampling") -> "Sampling":
    """Returns the run's sampling with a row's template variables and answer length."""
    params = row["responses_create_params"]
    limit = params.get("max_output_tokens") or sampling.max_response_tokens
    return dataclasses.replace(
        sampling,
        chat_template_kwargs=sampling.chat_template_kwargs | template_variables(row),
        max_response_tokens=min(limit, sampling.max_response_tokens),
    )


def answer_text(tokenizer: "PreTrainedTokenizerBase", turn: Turn) -> str:
    """Decodes an answer without its end and padding tokens; every other token is kept.

    Some tokenizers declare `</think>` as special, so skip_special_tokens would join reasoning and
    answer.
    """
    ids = turn.token_ids
    # A model's generation_config.json may name more stop tokens than the tokenizer's EOS.
    if turn.finish_reason == "stop" and not tokenizer.decode(ids[-1:], skip_special_tokens=True):
        ids = ids[:-1]
    silent = (tokenizer.eos_token_id, tokenizer.pad_token_id)
    return str(tokenizer.decode([token for token in ids if token not in silent]))
