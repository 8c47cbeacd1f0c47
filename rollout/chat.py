"""A conversation goes on from the token ids that were sampled: no answer is tokenised again.

    prompt ids + sampled ids + the ids of what the chat template writes after that answer

What it writes there is found behind a word that stands in for the answer. So it does not matter how
a template shows earlier turns: it may drop their thoughts, and they stay; nor what they hold. This
is the outcome of NeMo-RL's prefix rule (models/generation/openai_server_utils.py), which counts the
tokens that end messages instead. An answer can spell those.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from rollout.messages import functions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rollout.episode import Turn
    from rollout.sampler import Sampler

# A megabyte takes a tokenizer a second, in which it lets other threads work.
RENDERERS = ThreadPoolExecutor(4)
# Characters per token that no text reaches: one with more is not worth minutes of tokenising.
DENSEST = 32
MARK = "answer-4b1f7c0e92d8"  # templates leave such a word as it is
QUESTION = {"role": "user", "content": "?"}


class NoRoom(Exception):
    """A prompt leaves no room for an answer below sampling.max_model_len."""


class Said(NamedTuple):
    """A conversation as it was when its last message was sampled."""

    messages: list[dict]
    tools: list[dict] | None
    turn: "Turn"
    head: int = 0  # messages before the first answer that was sampled

    @classmethod
    def of(
        cls, before: "Said | None", messages: list[dict], tools: list[dict] | None, turn: "Turn"
    ) -> "Said":
        """The conversation after an answer to `messages`; `before` is the one that was last."""
        head = before.head if before and before.leads_to(messages, tools) else len(messages)
        return cls([dict(message) for message in (*messages, turn.message)], tools, turn, head)

    def leads_to(self, messages: list[dict], tools: list[dict] | None) -> bool:
        """Whether a conversation goes on from this one."""
        return tools == self.tools and messages[: len(self.messages)] == self.messages


class Template(NamedTuple):
    """A model's chat template, with its variables."""

    tokenizer: "PreTrainedTokenizerBase"
    variables: dict[str, Any]

    def prompt(
        self, messages: list[dict], tools: list[dict] | None, said: Said | None, limit: int
    ) -> list[int]:
        """Token ids up to where the next answer begins, which go on from what was said before.

        Where `messages` do not, or the template hides what is new, all of them are rendered. Raises
        NoRoom for `limit` tokens or more.
        """
        known: list[int] = []
        text, stopped = None, False
        if said and said.leads_to(messages, tools):
            text = self.after(said, messages[len(said.messages) :])
            known = said.turn.prompt_ids + said.turn.token_ids
            stopped = said.turn.finish_reason == "stop"
        if text is None:
            known = []
            text = self.text(messages, tools)
        if len(text) > DENSEST * limit:
            raise NoRoom(f"{len(text)} characters do not fit into {limit} tokens")
        whole = text.encode("utf-8", "replace").decode()  # half a surrogate pair is no character
        new = self.tokenizer.encode(whole, add_special_tokens=False)
        if stopped and known[-1:] == new[:1]:
            new = new[1:]  # the answer has ended as the template ends it
        if len(known) + len(new) >= limit:
            raise NoRoom(f"{len(known) + len(new)} tokens leave no room below {limit}")
        return known + new

    def text(self, messages: list[dict], tools: list[dict] | None, prompt: bool = True) -> str:
        """A conversation; with `prompt` up to where the next answer begins."""
        rendered: Any = self.tokenizer.apply_chat_template(
            messages,
            tools=functions(tools),
            add_generation_prompt=prompt,
            tokenize=False,
            **self.variables,
        )
        return rendered

    def after(self, said: Said, new: list[dict]) -> str | None:
        """What a template writes after an answer, from the token that ends it, for new messages.

        None where it cannot be told from what stands before.
        """
        *earlier, answer = said.messages
        told = [stand_in(m, "-") if m["role"] == "assistant" else m for m in earlier]
        marked = stand_in(answer, MARK)
        _, found, rest = self.text([*told, marked, *new], said.tools).partition(MARK)
        _, known, closing = self.text([QUESTION, marked], said.tools, prompt=False).partition(MARK)
        tokens = [token for token in self.tokenizer.all_special_tokens if token in closing]
        end = max(map(closing.rfind, tokens), default=len(closing.rstrip()))
        clear = found and known and MARK not in rest and rest.startswith(closing[:end])
        return rest[end:] if clear else None


class Prompt(NamedTuple):
    """A prompt, and the tokens that its answer may have; 0 for as many as row and run allow."""

    ids: list[int]
    most: int = 0


async def prompt(sampler: "Sampler", messages: list[dict], tools: list[dict] | None) -> Prompt:
    """The prompt of a sampler's next turn, for which its compaction may shorten what was said.

    Raises NoRoom.
    """
    if sampler.compaction:
        return await sampler.compaction.prompt(sampler, messages, tools)
    return Prompt(await rendered(sampler, messages, tools, sampler.said))


async def rendered(
    sampler: "Sampler", messages: list[dict], tools: list[dict] | None, said: Said | None
) -> list[int]:
    """A prompt that goes on from `said` where it can. Raises NoRoom."""
    sampler.tools = tools
    template = Template(sampler.tokenizer, sampler.sampling.chat_template_kwargs)
    limit = sampler.sampling.max_model_len
    rendering = RENDERERS.submit(template.prompt, messages, tools, said, limit)
    return await asyncio.wrap_future(rendering)


def stand_in(answer: dict, word: str) -> dict:
    """A message in the place of an answer that says one word, in a call where the answer has one.

    It has one call at most, as some templates refuse more.
    """
    calls = [
        call | {"function": call["function"] | {"arguments": {"_": word}}}
        for call in answer.get("tool_calls", ())[-1:]
    ]
    said = {"role": "assistant", "content": "" if calls else word}
    return said | {"tool_calls": calls} if calls else said
