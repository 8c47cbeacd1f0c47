"""An episode that outgrows the window: the policy sums it up, and goes on in a new sequence.

A row asks for it by `"compactions": N`, how often an episode may be summed up. It happens in
`Sampler.chat`, so each environment of many turns has it, and none sees it: its messages stay all of
them. Nothing that is judged comes from a summary.

    window     | prompt of the row | turn | turn | ... | turn | request, summary |
                                                          |
    the next   | prompt of the row with the summary | that turn | what followed it | turn | ...

When: before a turn whose prompt leaves less room than for an answer, the request and a summary.
Each of the two may have `sampling.max_response_tokens`, or a quarter of `sampling.max_model_len`
where that is less. An answer is not let into the room of the summary after it.

The request goes on from the sampled ids, so the summary ends the sequence that it sums up, and is
trained as every turn is. What the environment said last is not summed up but shown again, behind
the policy's last message, which the chat template renders. The summary is in no role of its own: it
is added to the last message of the row's prompt, or a message of the user where that is not one.
Tokens that are special in the tokenizer are taken out of it, so it cannot end that message.

Where a summary is cut off or empty, or the new prompt has no room, `NoRoom` is raised, and the
episode ends as it does at the end of the window; the summary is trained as its last turn. Where the
request leaves no room for half a summary, or the chat template refuses it, or the row's N are used
up, the window is the end.

    info/compacted, info/compactions      share of episodes that were summed up, and how often
    info/dropped_tokens                   by which their prompts became shorter, of an episode
    info/compaction_failed                share of episodes that ended by a summary

Others: prime-rl's nano-rlm keeps the system message and the summary, and asks again for one that is
empty. CompactionRL (arXiv 2607.05378) and SUPO (2510.06727) train summaries as well, all sequences
of an episode by its one advantage; so does NeMo-RL (pull request 3910).
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
LATER = "(follows the summary)"  # in place of a tool's result that is shown after it
FAILED = "a summary that is cut off, empty or too long ends the episode"
MARGIN = 64  # tokens of a template around the request


class Compaction:
    """The summaries of one episode: how many may still be made, and what they came to."""

    def __init__(self, most: int, sampling: "Sampling") -> None:
        self.left = most
        self.limit = sampling.max_model_len
        self.longest = min(sampling.max_response_tokens, self.limit // 4)  # summary, in tokens
        self.dropped_tokens = 0
        self.failed = False

    def info(self, turns: "list[Turn]") -> dict[str, int]:
        """What it came to in an episode of these turns; a time-out may come before the next one."""
        count = sum(bool(turn.summaries) for turn in turns[:-1])
        counts = {"compacted": min(count, 1), "compactions": count}
        counts |= {"dropped_tokens": self.dropped_tokens if count else 0}
        return counts | {"compaction_failed": int(self.failed or bool(turns[-1].summaries))}

    async def prompt(self, sampler: "Sampler", messages: list[dict], tools: list | None) -> Prompt:
        """The prompt of the next turn, after a summary where one is needed. Raises NoRoom."""
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
        is_later = sampler.said and sampler.said.leads_to(messages, tools)  # than the first answer
        room -= reserve if self.left and is_later and room >= needed else 0
        return Prompt(ids, min(room, sampler.sampling.max_response_tokens))

    def usable(
        self, said: "Said | None", messages: list[dict], tools: list | None
    ) -> "Said | None":
        """A conversation that may be summed up: it has answers before the last one."""
        if not self.left or not said or not said.leads_to(messages, tools):
            return None
        return said if len(said.messages) > said.head + 1 else None

    async def compacted(
        self, sampler: "Sampler", said: "Said", messages: list[dict], ids: list[int]
    ) -> list[int]:
        """The first prompt of the next window, in the place of `ids`, [] for a prompt too long.

        Those are returned where no summary can be asked for. Raises NoRoom.
        """
        new = messages[len(said.messages) :]
        kept = await prompt_of(
            sampler, [*task(said, ""), said.messages[-1], *new], said.tools, None
        )
        if ids and len(ids) - len(kept) <= self.longest:
            return ids  # a summary may be longer than what it would replace
        results = [message | {"content": LATER} for message in new if message["role"] == "tool"]
        request = [*said.messages, *results, {"role": "user", "content": REQUEST}]
        asked = await prompt_of(sampler, request, said.tools, said)
        room = self.limit - len(asked)
        if not asked or room < self.longest // 2:
            if not ids:
                raise NoRoom("neither an answer nor a summary has room")
            return ids
        (summary,) = await sampler.generate(asked, most=min(room, self.longest))
        said.turn.summaries += (summary,)
        text = final_text(summary.judged)
        good = summary.finish_reason == "stop" and not unfinished(text)
        going_on = [*task(said, plain_text(text, sampler)), said.messages[-1], *new]
        shorter = await prompt_of(sampler, going_on, said.tools, None) if good else []
        if not shorter:
            self.failed = True
            raise NoRoom(FAILED)
        self.left -= 1
        self.dropped_tokens += max(0, (len(ids) or self.limit) - len(shorter))
        return shorter


async def prompt_of(
    sampler: "Sampler", messages: list[dict], tools: list | None, said: "Said | None"
) -> list[int]:
    """A prompt; [] for one that has no room, or that the chat template refuses."""
    try:
        return await rendered(sampler, messages, tools, said)
    except Exception:  # a chat template is the model's own code, and the messages are the policy's
        return []


def task(said: "Said", summary: str) -> list[dict]:
    """The messages before the first answer, of which the last one holds the summary."""
    *first, last = said.messages[: said.head]
    text = FRAME.format(summary)
    if last["role"] == "user":
        return [*first, last | {"content": last["content"] + text}]
    return [*first, last, {"role": "user", "content": text.strip()}]


def plain_text(text: str, sampler: "Sampler") -> str:
    """A summary without what is special in the tokenizer: it cannot end its message."""
    tokenizer = sampler.tokenizer
    added = tokenizer.added_tokens_decoder.values()  # some special ones are in no role
    for token in {*tokenizer.all_special_tokens, *(a.content for a in added if a.special)}:
        text = text.replace(token, " ")
    return text
