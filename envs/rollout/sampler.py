"""What environments use to sample from the policy: token ids in, Turns out."""

import asyncio
import contextlib
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import ray

from core.waits import together
from envs.parsers import parsers
from envs.rollout.chat import NoRoom as NoRoom
from envs.rollout.chat import Said, Template
from envs.rollout.drafts import DraftedCall
from envs.rollout.episode import Turn
from envs.rollout.response import Response
from envs.rollout.rows import render_messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from settings.run import Sampling

# A megabyte takes a tokenizer a second, in which it lets other threads work.
RENDERERS = ThreadPoolExecutor(4)
DRAFT_SECONDS = 5.0  # what a lost engine may cost of an answer that it was writing


class Request(NamedTuple):
    """What an engine is asked for: n answers to one prompt."""

    name: str  # unique
    prompt_ids: list[int]
    n: int
    seed: int
    drafts: list[Turn]  # what a lost engine had written of each answer; [] for none
    max_tokens: int | None = None  # of an answer; None: sampling.max_response_tokens
    sampling: dict[str, float] = {}  # overrides of temperature, top_p, ... in validation
    priority: int = 0  # the smaller one goes first


class Sampler:
    """The policy, as one rollout of an environment sees it; always the same engine.

    `drafts` outlives it. Should the engine be lost, the rollout that runs again finds its earlier
    calls there, as far as their answers had come. Those with the same prompt are played again: of a
    conversation until a tool says something else.
    """

    def __init__(
        self,
        engine: Any,  # a Ray actor
        tokenizer: "PreTrainedTokenizerBase",
        sampling: "Sampling",  # of the row
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
        self.tools: list | None = None  # of the conversation that was rendered last
        self.said: Said | None = None  # what `chat` has asked last

    def render(self, messages: list[dict] | str, tools: list | None = None) -> list[int]:
        """Token ids of a conversation, up to where the model's answer begins."""
        self.tools = tools
        kwargs = self.sampling.chat_template_kwargs
        return render_messages(self.tokenizer, messages, tools, kwargs)

    def room(self, prompt_ids: list[int]) -> int:
        """Tokens that an answer to this prompt may have below max_model_len; 0 for none."""
        return max(0, self.sampling.max_model_len - len(prompt_ids))

    async def chat(self, messages: list[dict], tools: list | None = None) -> Turn:
        """The answer to a conversation, as chat templates take it (envs.rollout.messages.chat).

        Where `messages` are those of the last call, the `message` of its Turn, and new ones, the
        prompt goes on from the ids that were sampled. Any other change of what was said before
        starts a new sample, as `stitch` sees it. Raises NoRoom.
        """
        self.tools = tools
        prompt = Template(self.tokenizer, self.sampling.chat_template_kwargs).prompt
        limit = self.sampling.max_model_len
        rendering = RENDERERS.submit(prompt, messages, tools, self.said, limit)
        prompt_ids = await asyncio.wrap_future(rendering)
        (turn,) = await self.generate(prompt_ids)
        said = [dict(message) for message in (*messages, turn.message)]
        self.said = Said(said, tools, turn)
        return turn

    async def generate(self, prompt_ids: list[int], n: int = 1) -> list[Turn]:
        """n answers to one prompt, with their text, which is parsed for the tools rendered last."""
        k = self.calls
        self.calls += 1
        drafted = self.drafts[k] if k < len(self.drafts) else DraftedCall([], [])
        if drafted.prompt_ids != prompt_ids or len(drafted.answers) not in (0, n):
            drafted = DraftedCall(prompt_ids, [])
            self.drafts[k:] = [drafted]
        whole = drafted.known() == [None] * n  # an engine that was lost later has answered this
        turns = drafted.turns() if whole else await self._request(k, n, drafted)
        self.drafts[k] = DraftedCall(prompt_ids, [[turn] for turn in turns])
        prompt_end = str(self.tokenizer.decode(prompt_ids[-16:])).rstrip()
        for turn in turns:
            turn.prompt_ids = prompt_ids  # the engine has sent a copy
            turn.text = answer_text(self.tokenizer, turn)
            turn.opening = "<think>" if prompt_end.endswith("<think>") else ""
        parsed = await together(self.parse(turn.opening + turn.text) for turn in turns)
        for turn, response in zip(turns, parsed, strict=True):
            turn.parsed = response
        return turns

    async def parse(self, text: str) -> Response:
        """An answer, read by the parsers of the configuration."""
        kwargs = self.sampling.chat_template_kwargs
        return await parsers.read(text, self.tokenizer.name_or_path, self.tools, kwargs)

    async def _request(self, k: int, n: int, drafted: DraftedCall) -> list[Turn]:
        """Asks the engine, and copies drafts of the answers while it writes them."""
        name = uuid.uuid4().hex
        seed = self.seed + 1000 * k
        limit = self.sampling.max_response_tokens
        request = Request(name, drafted.prompt_ids, n, seed, drafted.turns(), limit, self.overrides)
        answer = self.engine.generate.remote(request)
        pending = asyncio.ensure_future(answer)
        try:
            while not (await asyncio.wait([pending], timeout=DRAFT_SECONDS))[0]:
                with contextlib.suppress(Exception):  # `pending` raises when an engine is lost
                    new = await self.engine.drafts.remote(name, self.drafts[k].known())
                    self.drafts[k] = self.drafts[k].extended(new)
        finally:
            if not pending.done():  # this rollout was given up: the engine must not go on for it
                ray.cancel(answer)
        return await pending


def answer_text(tokenizer: "PreTrainedTokenizerBase", turn: Turn) -> str:
    """An answer without its end and padding tokens; every other token is kept.

    Some tokenizers declare `</think>` special, so skip_special_tokens would join thought and
    answer.
    """
    ids = turn.token_ids
    # A model's generation_config.json may name more stop tokens than the tokenizer's EOS.
    if turn.finish_reason == "stop" and not tokenizer.decode(ids[-1:], skip_special_tokens=True):
        ids = ids[:-1]
    silent = (tokenizer.eos_token_id, tokenizer.pad_token_id)
    return str(tokenizer.decode([token for token in ids if token not in silent]))
