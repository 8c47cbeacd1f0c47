"""Lets the policy sum up an episode that outgrows the window, and continue in a new sequence.

A row asks for it with `"compactions": N`, the number of times that an episode may be summed up. It
happens in `Sampler.chat`, so it works in every multi-turn environment, and no environment sees it:
an environment's own list keeps all messages. Nothing that is judged comes from a summary.

    window     | prompt of the row | turn | turn | ... | turn | request, summary |
                                                          |
    the next   | prompt of the row with the summary | that turn | what followed it | turn | ...

An episode is summed up before a turn whose prompt leaves no room for an answer, the request and a
summary. Answer and summary may each take `sampling.max_response_tokens`, or a quarter of
`sampling.max_model_len` if that is less. An answer may not use the summary's room.

The request continues the sampled ids, so the summary ends the sequence that it sums up, and is
trained on like any other turn. The environment's latest messages are not summed up but shown again,
after the policy's last message, which the chat template renders. The summary has no role of its
own: it is added to the last message of the row's prompt, or becomes a user message if that
message is not the user's. The tokenizer's special tokens are removed from the summary, so it cannot
end that message.

If a summary is cut off or empty, or the new prompt does not fit, `NoRoom` is raised and the episode
ends as it does at the end of the window; the summary is trained on as its last turn. If the request
leaves no room for half a summary, or the chat template refuses the request, or the row's N
summaries are used up, the episode ends with the window.

    info/compacted, info/compactions      share of episodes that were summed up, and how often
    info/dropped_tokens                   tokens by which an episode's prompts became shorter
    info/compaction_failed                share of episodes that ended with a summary

In other programs: prime-rl's nano-rlm keeps the system message and the summary, and asks again if
the summary is empty. CompactionRL (arXiv 2607.05378) and SUPO (2510.06727) train on summaries too,
and train all sequences of an episode with the same advantage; so does NeMo-RL (pull request 3910).
"""

from typing import TYPE_CHECKING

from envs import final_text, unfinished
from rollout.chat import NoRoom, Prompt, rendered

if TYPE_CHECKING:
    from rollout.chat import Said
    from rollout.episode import Turn
    from rollout.sampler import Sampler
    from settings.config import Sampling

REQUEST = """\
The context window is almost full. Do not go on yet and call no tools: write a summary to go on \
from. You will see the task, this summary, your last message and what it led to, and nothing else \
of what was said. State what was done and found, with exact names, paths and values, what failed, \
and what is left to do."""
FRAME = """

[What came before was cut. This is your own summary of it:]
{}
[End of the summary]"""
LATER = "(follows the summary)"  # replaces a tool result that is shown after the summary
FAILED = "a summary that is cut off, empty or too long ends the episode"
MARGIN = 64  # template tokens around the request


class Compaction:
    """One episode's summaries: the number that may still be made, and their statistics."""

    def __init__(self, most: int, sampling: "Sampling") -> None:
        self.left = most
        self.limit = sampling.max_model_len
        self.longest = min(sampling.max_response_tokens, self.limit // 4)  # summary tokens
        self.dropped_tokens = 0
        self.failed = False

    def info(self, turns: "list[Turn]") -> dict[str, int]:
        """Returns the metrics of an episode that consists of these turns.

        After a time-out, the last turn may have a summary that no turn follows.
        """
        count = sum(bool(turn.summaries) for turn in turns[:-1])
        return {
            "compacted": min(count, 1),
            "compactions": count,
            "dropped_tokens": self.dropped_tokens if count else 0,
            "compaction_failed": int(self.failed or bool(turns[-1].summaries)),
        }

    async def prompt(self, sampler: "Sampler", messages: list[dict], tools: list | None) -> Prompt:
        """Returns the prompt for the next turn, after a summary if one is needed.

        Raises NoRoom if the window is full and no summary helps.
        """
        if self.failed:
            raise NoRoom(FAILED)
        said = self.usable(sampler.said, messages, tools)
        try:
            ids = await rendered(sampler, messages, tools, sampler.said)
        except NoRoom:
            if not said:
                raise
            ids = []
        reserve = self.longest + MARGIN + len(sampler.tokenizer.encode(REQUEST))
        needed = self.longest + reserve
        if said and (not ids or self.limit - len(ids) < needed):
            ids = await self.compacted(sampler, said, messages, ids)
        room = self.limit - len(ids)
        has_answers = sampler.said and sampler.said.leads_to(messages, tools)
        if self.left and has_answers and room >= needed:
            room -= reserve
        return Prompt(ids, min(room, sampler.sampling.max_response_tokens))

    def usable(
        self, said: "Said | None", messages: list[dict], tools: list | None
    ) -> "Said | None":
        """Returns `said` if it may be summed up, else None.

        The conversation must continue it, and it must have an answer before the last one.
        """
        if not self.left or not said or not said.leads_to(messages, tools):
            return None
        return said if len(said.messages) > said.head + 1 else None

    async def compacted(
        self, sampler: "Sampler", said: "Said", messages: list[dict], ids: list[int]
    ) -> list[int]:
        """Samples a summary; returns the first prompt of the next window.

        `ids` is the prompt without a summary, [] if that is too long; `ids` is returned if no
        summary can be asked for. Raises NoRoom if neither prompt can be used.
        """
        new = messages[len(said.messages) :]
        kept = await prompt_of(
            sampler, [*task(said, ""), said.messages[-1], *new], said.tools, None
        )
        if ids and len(ids) - len(kept) <= self.longest:
            return ids  # a summary may be longer than the messages that it would replace
        results = [message | {"content": LATER} for message in new if message["role"] == "tool"]
        request = [*said.messages, *results, {"role": "user", "content": REQUEST}]
        asked = await prompt_of(sampler, request, said.tools, said)
        room = self.limit - len(asked)
        if not asked or room < self.longest // 2:
            if not ids:
                raise NoRoom("there is no room for an answer or a summary")
            return ids
        (summary,) = await sampler.generate(asked, most=min(room, self.longest))
        said.turn.summaries += (summary,)
        text = final_text(summary.judged)
        shorter: list[int] = []
        if summary.finish_reason == "stop" and not unfinished(text):
            continued = [*task(said, plain_text(text, sampler)), said.messages[-1], *new]
            shorter = await prompt_of(sampler, continued, said.tools, None)
        if not shorter:
            self.failed = True
            raise NoRoom(FAILED)
        self.left -= 1
        self.dropped_tokens += max(0, (len(ids) or self.limit) - len(shorter))
        return shorter


async def prompt_of(
    sampler: "Sampler", messages: list[dict], tools: list | None, said: "Said | None"
) -> list[int]:
    """Renders a prompt; returns [] if it does not fit, or if the chat template refuses it."""
    try:
        return await rendered(sampler, messages, tools, said)
    except Exception:  # a chat template is the model's own code, and the messages are the policy's
        return []


def task(said: "Said", summary: str) -> list[dict]:
    """Returns the messages before the first answer, with the summary in the last one."""
    *first, last = said.messages[: said.head]
    text = FRAME.format(summary)
    if last["role"] == "user":
        return [*first, last | {"content": last["content"] + text}]
    return [*first, last, {"role": "user", "content": text.strip()}]


def plain_text(text: str, sampler: "Sampler") -> str:
    """Removes the tokenizer's special tokens from a summary, so it cannot end the message."""
    tokenizer = sampler.tokenizer
    special = {*tokenizer.all_special_tokens}
    for added in tokenizer.added_tokens_decoder.values():
        if added.special:  # some special tokens are not in all_special_tokens
            special.add(added.content)
    for token in special:
        text = text.replace(token, " ")
    return text
