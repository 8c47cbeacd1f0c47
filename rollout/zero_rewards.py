"""Flaws of an episode that cost it all of its reward, by the names that a configuration has.

    reasoning_is_answer   a turn says as its answer, word for word, what it thought
    empty_answer          the last turn neither says nor calls anything
    inner_eos             an end token of the model stands within a turn, or ends it in place of
                          the tokenizer's own: Nemotron ends with <|im_end|>, never with </s>
    think_tags            a turn does not open and close one thought, with tokens made for that

NeMo-RL has them in apply_reward_penalties (experience/rollouts.py, branch ultra-v3), and sets their
rewards to 0 after low effort has shaped them, in evaluations as well. It calls an answer empty also
where an episode ends behind a tool's reply. There the last turn is a call, which we do not.
"""

import functools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rollout.answer_markup import THINK
from rollout.episode import with_summaries

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rollout.episode import Episode, Turn


def mark(episode: "Episode", names: Iterable[str], tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether an episode has a flaw of these names; its `info` says of each whether it has."""
    every = with_summaries(episode.turns)
    judged = {name: episode.turns if name == "empty_answer" else every for name in names}
    found = {name: FLAWS[name](turns, tokenizer) for name, turns in judged.items()}
    episode.reward.info |= found
    return any(found.values())


def repeats_its_reasoning(turns: "list[Turn]", tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether a turn's answer is its thought; white space around either does not count."""
    pairs = ((said.reasoning.strip(), said.content.strip()) for said in (t.judged for t in turns))
    return any(reasoning and reasoning == content for reasoning, content in pairs)


def is_empty(turns: "list[Turn]", tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether the last turn says nothing and calls nothing."""
    said = turns[-1].judged
    return not (said.tool_calls or said.content.strip())


def has_inner_end(turns: "list[Turn]", tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether an end token stands where a turn should not have one."""
    every = ends(tokenizer)
    foreign = every - {tokenizer.eos_token_id}
    return any(every & {*t.token_ids[:-1]} or foreign & {*t.token_ids[-1:]} for t in turns)


@functools.cache
def ends(tokenizer: "PreTrainedTokenizerBase") -> frozenset[int]:
    """The tokens at which an engine ends an answer: the tokenizer's, and those of the model."""
    path = Path(tokenizer.name_or_path, "generation_config.json")
    named = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
    named = named if isinstance(named, list) else [named]
    return frozenset({tokenizer.eos_token_id, *named} - {None})


def has_odd_tags(turns: "list[Turn]", tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether a turn's think tags are not those that follow from its prompt, or are spelled."""
    odd = (tag_counts(t) not in expected_counts(t, tokenizer) for t in turns)
    return any(odd) or any(spells_a_tag(turn, tokenizer) for turn in turns)


def tag_counts(turn: "Turn") -> tuple[int, ...]:
    """How often a turn writes `<think>` and `</think>`."""
    return tuple(turn.text.count(tag) for tag in THINK)


def expected_counts(turn: "Turn", tokenizer: "PreTrainedTokenizerBase") -> list[tuple[int, ...]]:
    """What a turn's tags may be: it closes the thought that its prompt opened, and opens none.

    It has none where the prompt has closed the thought, as with reasoning off. Where the prompt
    does neither, the turn may open one itself.
    """
    if turn.opening:
        return [(0, 1)]
    prompt_end = str(tokenizer.decode(turn.prompt_ids[-16:])).rstrip()
    return [(0, 0)] if prompt_end.endswith(THINK[1]) else [(0, 0), (1, 1)]


def spells_a_tag(turn: "Turn", tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether a turn writes a tag that is one token with others: no parser of ids sees that."""
    for tag, count in zip(THINK, tag_counts(turn), strict=True):
        token = tokenizer.convert_tokens_to_ids(tag)
        is_one = token not in (None, tokenizer.unk_token_id)
        if is_one and turn.token_ids.count(token) != count:
            return True
    return False


FLAWS: "dict[str, Callable[[list[Turn], PreTrainedTokenizerBase], bool]]" = {
    "reasoning_is_answer": repeats_its_reasoning,
    "empty_answer": is_empty,
    "inner_eos": has_inner_end,
    "think_tags": has_odd_tags,
}
