"""Continues conversations from the token ids that were sampled: no answer is tokenised again.

    prompt ids + sampled ids + the ids of the text that the chat template writes after that answer

To find that text, the conversation is rendered with a word in place of the answer. So neither the
content of earlier turns nor how the template shows them matters: reasoning that it drops stays in
the prompt. NeMo-RL's prefix rule (models/generation/openai_server_utils.py) has the same outcome.
That rule instead counts the tokens that end messages, and an answer may contain such tokens.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from rollout.messages import functions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rollout.episode import Turn
    from rollout.sampler import Sampler

# A tokenizer takes a second per megabyte, and lets other threads run meanwhile.
RENDERERS = ThreadPoolExecutor(4)
# More characters per token than any text has: longer text is refused before it is tokenised.
DENSEST = 32
MARK = "answer-4b1f7c0e92d8"  # templates do not change such a word
QUESTION = {"role": "user", "content": "?"}


class NoRoom(Exception):
    """Raised if a prompt leaves no room for an answer below sampling.max_model_len."""


class Said(NamedTuple):
    """A conversation at the moment when its last message was sampled."""

    messages: list[dict]
    tools: list[dict] | None
    turn: "Turn"
    head: int = 0  # number of messages before the first sampled answer

    @classmethod
    def of(
        cls, before: "Said | None", messages: list[dict], tools: list[dict] | None, turn: "Turn"
    ) -> "Said":
        """Returns the conversation after an answer to `messages`; `before` is the previous one."""
        continues = before is not None and before.leads_to(messages, tools)
        head = before.head if before and continues else len(messages)
        copies = [dict(message) for message in (*messages, turn.message)]
        return cls(copies, tools, turn, head)

    def leads_to(self, messages: list[dict], tools: list[dict] | None) -> bool:
        """Returns whether a conversation continues this one."""
        return tools == self.tools and messages[: len(self.messages)] == self.messages


class Template(NamedTuple):
    """A model's chat template, with its variables."""

    tokenizer: "PreTrainedTokenizerBase"
    variables: dict[str, Any]

    def prompt(
        self, messages: list[dict], tools: list[dict] | None, said: Said | None, limit: int
    ) -> list[int]:
        """Returns the token ids up to the start of the next answer, continuing the ids of `said`.

        If `messages` do not continue `said`, or the template hides the new ones, all messages are
        rendered. Raises NoRoom for `limit` tokens or more.
        """
        known: list[int] = []
        text = None
        stopped = False
        if said and said.leads_to(messages, tools):
            text = self.after(said, messages[len(said.messages) :])
            known = said.turn.prompt_ids + said.turn.token_ids
            stopped = said.turn.finish_reason == "stop"
        if text is None:
            known = []
            text = self.text(messages, tools)
        if len(text) > DENSEST * limit:
            raise NoRoom(f"{len(text)} characters do not fit into {limit} tokens")
        whole = text.encode("utf-8", "replace").decode()  # replaces lone surrogates
        new = self.tokenizer.encode(whole, add_special_tokens=False)
        if stopped and known[-1:] == new[:1]:
            new = new[1:]  # the answer ends with the token with which the template ends it
        if len(known) + len(new) >= limit:
            raise NoRoom(f"{len(known) + len(new)} tokens leave no room below {limit}")
        return known + new

    def text(self, messages: list[dict], tools: list[dict] | None, prompt: bool = True) -> str:
        """Renders a conversation; with `prompt`, up to the start of the next answer."""
        rendered: str = self.tokenizer.apply_chat_template(
            messages,
            tools=functions(tools),
            add_generation_prompt=prompt,
            tokenize=False,
            **self.variables,
        )
        return rendered

    def after(self, said: Said, new: list[dict]) -> str | None:
        """Returns the text that a template writes for new messages, from the end of the answer on.

        It begins with the token that ends the answer. Returns None if the text cannot be separated
        from the text before it.
        """
        *earlier, answer = said.messages
        shortened = [stand_in(m, "-") if m["role"] == "assistant" else m for m in earlier]
        marked = stand_in(answer, MARK)
        whole = self.text([*shortened, marked, *new], said.tools)
        _, found, rest = whole.partition(MARK)
        ended = self.text([QUESTION, marked], said.tools, prompt=False)
        _, known, closing = ended.partition(MARK)
        tokens = [token for token in self.tokenizer.all_special_tokens if token in closing]
        end = max(map(closing.rfind, tokens), default=len(closing.rstrip()))
        is_clear = found and known and MARK not in rest and rest.startswith(closing[:end])
        return rest[end:] if is_clear else None


class Prompt(NamedTuple):
    """A prompt and its answer's token limit; 0 means the limit set by the row and the run."""

    ids: list[int]
    most: int = 0


async def prompt(sampler: "Sampler", messages: list[dict], tools: list[dict] | None) -> Prompt:
    """Renders the prompt for a sampler's next turn; its compaction may shorten the conversation.

    Raises NoRoom if the prompt leaves no room for an answer.
    """
    if sampler.compaction:
        return await sampler.compaction.prompt(sampler, messages, tools)
    return Prompt(await rendered(sampler, messages, tools, sampler.said))


async def rendered(
    sampler: "Sampler", messages: list[dict], tools: list[dict] | None, said: Said | None
) -> list[int]:
    """Renders a prompt, continuing `said` if it can. Raises NoRoom as `Template.prompt` does."""
    sampler.tools = tools
    template = Template(sampler.tokenizer, sampler.sampling.chat_template_kwargs)
    limit = sampler.sampling.max_model_len
    rendering = RENDERERS.submit(template.prompt, messages, tools, said, limit)
    return await asyncio.wrap_future(rendering)


def stand_in(answer: dict, word: str) -> dict:
    """Makes a one-word message to replace an answer; the word is in a call if the answer has calls.

    The message has only one call, because some templates refuse more.
    """
    calls = answer.get("tool_calls", ())
    if not calls:
        return {"role": "assistant", "content": word}
    call = calls[-1]
    marked = call | {"function": call["function"] | {"arguments": {"_": word}}}
    return {"role": "assistant", "content": "", "tool_calls": [marked]}
