"""A conversation goes on from the token ids that were sampled: no answer is tokenised again.

    prompt ids + sampled ids + the ids of what the chat template writes after that answer

What it writes there is found behind a word that stands in for the answer. So it does not matter how
a template shows earlier turns: it may drop their thoughts, and they stay; nor what they hold. This
is the outcome of NeMo-RL's prefix rule (models/generation/openai_server_utils.py), which counts the
tokens that end messages instead. An answer can spell those.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

from envs.rollout.messages import functions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from envs.rollout.episode import Turn

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
        if said and tools == said.tools and messages[: len(said.messages)] == said.messages:
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
