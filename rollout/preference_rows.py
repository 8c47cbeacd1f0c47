"""Reads Hugging Face preference rows: a prompt, and a better and a worse answer to it.

    {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}
    {"chosen": [MESSAGE, ...], "rejected": [MESSAGE, ...], "tools": [...]}

If `prompt` is a string, it is a user message; an answer that is a string is an assistant message.
If the answers are whole conversations, the prompt is their common beginning, and the row needs no
`prompt`. Other keys of a row are ignored.
"""

import functools
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from core.errors import InputError
from envs import get, require
from rollout import rows
from rollout.messages import chat, check_message, check_tools, functions, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from settings.config import PairSettings

TEMPLATE_BYTES = 256  # assumed maximum that a chat template adds to an answer's JSON
ANSWERS = ("chosen", "rejected")


class Conversation(NamedTuple):
    """A row's conversation: the prompt's messages, and one message per answer."""

    prompt: list[dict]
    chosen: dict
    rejected: dict


class Tokens(NamedTuple):
    """A conversation's token ids, int32 [T], and the index at which its answer begins."""

    ids_T: np.ndarray
    start: int


class Pair(NamedTuple):
    """A row's two sequences."""

    chosen: Tokens
    rejected: Tokens

    @property
    def tokens(self) -> int:
        """The number of tokens in both sequences."""
        return len(self.chosen.ids_T) + len(self.rejected.ids_T)


def load_pairs(path: str, cfg: "PairSettings") -> rows.Rows:
    """Reads the rows of a JSONL file; leaves out malformed lines, and prints their number.

    Raises InputError, with file, line and field, if more than `data.max_bad_rows` lines are
    malformed, if no line is good, or if the chat template refuses the first good line.
    """

    def is_used(line: str) -> bool:
        row, size = rows.loads(line)
        split(row)
        # A token has at least one byte, and the prompt is in both sequences.
        if 2 * (size + TEMPLATE_BYTES) > cfg.policy.row_tokens:
            tokenize(row, cfg)
        return True

    found, bad = rows.sort_lines(path, cfg.data.max_bad_rows, is_used)
    rows.refuse_none(found, bad)
    rows.keep_bad(path, bad, cfg)
    render(found[0], path, cfg)
    return found


def summary(path: str, max_bad_rows: int) -> tuple[list[str], list[str]]:
    """Returns lines that describe a file, and the problems that prevent training on it."""

    def is_pair(line: str) -> bool:
        row, _ = rows.loads(line)
        split(row)
        return True

    found, bad = rows.sort_lines(path, math.inf, is_pair)
    of_bad = f", {len(bad):,} of them bad" if bad else ""
    lines = [f"{len(found) + len(bad):,} pairs{of_bad}"]
    if found and len(bad) <= max_bad_rows:
        return lines, []
    if bad:
        return lines, [rows.first_of(bad)]
    return lines, [f"{path}: holds no pairs"]


def split(row: Any) -> Conversation:
    """Splits a row into prompt and answers.

    Raises ValueError, with field, value and expectation, if that is impossible.
    """
    require(isinstance(row, dict), "the row", row, "a JSON object")
    check_tools(get(row, "tools", list | None, "a list of functions or null"), "tools")
    chosen = messages(row, "chosen", "assistant")
    rejected = messages(row, "rejected", "assistant")
    prompt = messages(row, "prompt", "user") if row.get("prompt") is not None else []
    if chosen[0]["role"] != "assistant":  # whole conversations repeat their prompt
        count = 0
        for ours, theirs in zip(chosen[:-1], rejected[:-1], strict=False):
            if ours != theirs:
                break
            count += 1
        prompt = chosen[:count]
        chosen = chosen[count:]
        rejected = rejected[count:]
    for name, items in (("chosen", chosen), ("rejected", rejected)):
        roles = ", ".join(item["role"] for item in items)
        if roles != "assistant":
            raise ValueError(
                f"{name} has {roles or 'nothing'}, "
                "expected one assistant message after the common prompt"
            )
    require(bool(prompt), "prompt", row.get("prompt"), "a question, or messages before the answers")
    differ = chosen != rejected
    require(differ, "rejected", row["rejected"], "an answer other than chosen")
    return Conversation(prompt, chosen[0], rejected[0])


def messages(row: dict, name: str, role: str) -> list[dict]:
    """Returns a field's messages; a string becomes a message of `role`.

    Raises ValueError if a chat template could not show them.
    """
    value = get(row, name, str | list, "text or a list of messages")
    require(bool(value), name, value, "text or a list of messages, not empty")
    items = [{"role": role, "content": value}] if isinstance(value, str) else value
    for i, item in enumerate(items):
        check_message(item, f"{name}[{i}].")
    return items


def render(row: dict, path: str, cfg: "PairSettings") -> Pair:
    """Returns the token ids of a row in a file. Raises InputError with the row's line number."""
    try:
        return tokenize(row, cfg)
    except ValueError as error:
        raise InputError(f"{path}:{row['_line']}: {error}") from None


def render_all(found: rows.Rows, places: Iterable[int], cfg: "PairSettings") -> list[Pair]:
    """Returns the token ids of some rows of a file; this is slow. Raises as `render` does."""
    return [render(found[i], found.path, cfg) for i in places]


def tokenize(row: dict, cfg: "PairSettings") -> Pair:
    """Returns the token ids of a row. Raises ValueError if it cannot be trained on."""
    prompt, chosen, rejected = split(row)
    tokenizer = load_tokenizer(cfg.model)
    show = functools.partial(_ids, tokenizer, row.get("tools"), cfg.data.chat_template_kwargs)
    prompt_T = show(prompt, True)
    pair = Pair(
        chosen=_after(prompt_T, show([*prompt, chosen], False)),
        rejected=_after(prompt_T, show([*prompt, rejected], False)),
    )
    for name, sequence in zip(ANSWERS, pair, strict=True):
        good = 0 < sequence.start < len(sequence.ids_T)
        require(good, name, row[name], "an answer that the chat template shows after the prompt")
    if pair.tokens > cfg.policy.row_tokens:
        raise ValueError(
            f"chosen and rejected are {pair.tokens} tokens long, "
            f"expected at most policy.row_tokens = {cfg.policy.row_tokens}"
        )
    return pair


def _ids(
    tokenizer: "PreTrainedTokenizerBase",
    tools: list | None,
    variables: dict[str, Any],
    items: list[dict],
    asks: bool,
) -> np.ndarray:
    """Returns the token ids of a conversation; with `asks`, up to the start of an answer."""
    try:
        ids = tokenizer.apply_chat_template(
            chat(items),
            tools=functions(tools),
            add_generation_prompt=asks,
            return_dict=False,
            **variables,
        )
    except Exception as error:  # a chat template is the model's own code
        raise ValueError(f"prompt is refused by the chat template: {error}") from None
    return np.array(ids, np.int32)


def _after(prompt_T: np.ndarray, ids_T: np.ndarray) -> Tokens:
    """Finds the answer in a conversation: it begins with the first id that is not the prompt's."""
    size = min(len(prompt_T), len(ids_T))
    differs = np.flatnonzero(prompt_T[:size] != ids_T[:size])
    return Tokens(ids_T, int(differs[0]) if len(differs) else size)
