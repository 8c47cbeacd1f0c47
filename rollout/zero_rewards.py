"""Finds the flaws that cost an episode all of its reward, named as in a configuration.

    reasoning_is_answer   the answer of a turn repeats its reasoning word for word
    empty_answer          the last turn has neither text nor a call
    inner_eos             one of the model's end tokens is within a turn, or ends it instead of
                          the tokenizer's own: Nemotron ends with <|im_end|>, never with </s>
    think_tags            a turn does not open and close its reasoning once, with the tokens for it

NeMo-RL's apply_reward_penalties (experience/rollouts.py, branch ultra-v3) looks for these flaws and
sets the rewards to 0 after the rule for low effort has shaped them, in evaluations as well. It also
calls an answer empty if an episode ends after a tool's reply. In that case the last turn is a call,
which is not empty here.
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
    """Returns whether an episode has any of these flaws; records each of them in its `info`."""
    every = with_summaries(episode.turns)
    found = {}
    for name in names:
        turns = episode.turns if name == "empty_answer" else every
        found[name] = FLAWS[name](turns, tokenizer)
    episode.reward.info |= found
    return any(found.values())


def repeats_its_reasoning(turns: "list[Turn]", tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Returns whether a turn's answer is its reasoning, ignoring white space around both."""
    for turn in turns:
        answer = turn.judged
        reasoning = answer.reasoning.strip()
        if reasoning and reasoning == answer.content.strip():
            return True
    return False


def is_empty(turns: "list[Turn]", tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Returns whether the last turn has neither text nor a call."""
    last = turns[-1].judged
    return not (last.tool_calls or last.content.strip())


def has_inner_end(turns: "list[Turn]", tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Returns whether a turn has an end token before its end, or ends with a foreign one."""
    every = ends(tokenizer)
    foreign = every - {tokenizer.eos_token_id}
    for turn in turns:
        if every.intersection(turn.token_ids[:-1]):
            return True
        if foreign.intersection(turn.token_ids[-1:]):
            return True
    return False


@functools.cache
def ends(tokenizer: "PreTrainedTokenizerBase") -> frozenset[int]:
    """Returns the tokens at which an engine ends an answer: the tokenizer's and the model's."""
    path = Path(tokenizer.name_or_path, "generation_config.json")
    of_model = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
    if not isinstance(of_model, list):
        of_model = [of_model]
    return frozenset({tokenizer.eos_token_id, *of_model} - {None})


def has_odd_tags(turns: "list[Turn]", tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Returns whether a turn's think tags do not fit its prompt, or are spelled out."""
    for turn in turns:
        if tag_counts(turn) not in expected_counts(turn, tokenizer):
            return True
        if spells_a_tag(turn, tokenizer):
            return True
    return False


def tag_counts(turn: "Turn") -> tuple[int, ...]:
    """Counts `<think>` and `</think>` in a turn."""
    return tuple(turn.text.count(tag) for tag in THINK)


def expected_counts(turn: "Turn", tokenizer: "PreTrainedTokenizerBase") -> list[tuple[int, ...]]:
    """Returns the counts of think tags that a turn may have.

    A turn closes the reasoning that its prompt opened, and opens no other. It has no tag if the
    prompt has closed the reasoning, as with reasoning off. If the prompt does neither, the turn may
    open its reasoning itself.
    """
    if turn.opening:
        return [(0, 1)]
    prompt_end = str(tokenizer.decode(turn.prompt_ids[-16:])).rstrip()
    return [(0, 0)] if prompt_end.endswith(THINK[1]) else [(0, 0), (1, 1)]


def spells_a_tag(turn: "Turn", tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Returns whether a turn spells a tag with tokens other than the tag's own.

    Parsers that read ids do not see such a tag.
    """
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
