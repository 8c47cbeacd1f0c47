"""Preference rows of Hugging Face: a prompt and two answers to it, of which one is better.

    {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}
    {"chosen": [MESSAGE, ...], "rejected": [MESSAGE, ...], "tools": [...]}

Texts are messages: of the user, and of the assistant. Whole conversations need no prompt, which is
what both begin with; other keys of a row are ignored.
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

TEMPLATE_BYTES = 256  # that a chat template may add to an answer's JSON
ANSWERS = ("chosen", "rejected")


class Conversation(NamedTuple):
    """A row: the prompt's messages, and the one message of each answer."""

    prompt: list[dict]
    chosen: dict
    rejected: dict


class Tokens(NamedTuple):
    """A conversation's token ids, int32 [T], and where its answer begins."""

    ids_T: np.ndarray
    start: int


class Pair(NamedTuple):
    """The two sequences of a row."""

    chosen: Tokens
    rejected: Tokens

    @property
    def tokens(self) -> int:
        """Of both."""
        return len(self.chosen.ids_T) + len(self.rejected.ids_T)


def load_pairs(path: str, cfg: "PairSettings") -> rows.Rows:
    """The rows of a JSONL file, whose malformed lines are counted on the terminal and left out.

    Raises InputError naming file, line and field where there are more than `data.max_bad_rows` of
    them, or nothing else, and where the chat template refuses the first good one.
    """

    def is_used(line: str) -> bool:
        row, size = rows.loads(line)
        split(row)
        # A token is at least one byte; a prompt is in both sequences.
        if 2 * (size + TEMPLATE_BYTES) > cfg.policy.row_tokens:
            tokenize(row, cfg)
        return True

    found, bad = rows.sort_lines(path, cfg.data.max_bad_rows, is_used)
    rows.refuse_none(found, bad)
    rows.keep_bad(path, bad, cfg)
    render(found[0], path, cfg)
    return found


def summary(path: str, max_bad_rows: int) -> tuple[list[str], list[str]]:
    """What is in a file, and what keeps it from being trained on."""
    found, bad = rows.sort_lines(path, math.inf, lambda line: bool(split(rows.loads(line)[0])))
    lines = [f"{len(found) + len(bad):,} pairs" + (f", {len(bad):,} of them bad" if bad else "")]
    enough = len(bad) <= max_bad_rows and len(found)
    return lines, [] if enough else [rows.first_of(bad) if bad else f"{path}: holds no pairs"]


def split(row: Any) -> Conversation:
    """The conversation of a row. Raises ValueError naming field, value and expectation."""
    require(isinstance(row, dict), "the row", row, "a JSON object")
    check_tools(get(row, "tools", list | None, "a list of functions or null"), "tools")
    answers = [messages(row, name, "assistant") for name in ANSWERS]
    prompt = messages(row, "prompt", "user") if row.get("prompt") is not None else []
    if answers[0][0]["role"] != "assistant":  # whole conversations repeat their prompt
        same = [a == b for a, b in zip(*(items[:-1] for items in answers), strict=False)]
        count = [*same, False].index(False)
        prompt = answers[0][:count]
        answers = [items[count:] for items in answers]
    for name, items in zip(ANSWERS, answers, strict=True):
        roles = ", ".join(item["role"] for item in items)
        if roles != "assistant":
            expected = "expected one message of the assistant after the common prompt"
            raise ValueError(f"{name} has {roles or 'nothing'}, {expected}")
    require(bool(prompt), "prompt", row.get("prompt"), "a question, or messages before the answers")
    same_answer = answers[0] == answers[1]
    require(not same_answer, "rejected", row["rejected"], "another answer than chosen")
    return Conversation(prompt, answers[0][0], answers[1][0])


def messages(row: dict, name: str, role: str) -> list[dict]:
    """A field's messages; a text is one of a role. Raises ValueError unless they can be shown."""
    value = get(row, name, str | list, "text or a list of messages")
    require(bool(value), name, value, "text or a list of messages, not empty")
    items = [{"role": role, "content": value}] if isinstance(value, str) else value
    for i, item in enumerate(items):
        check_message(item, f"{name}[{i}].")
    return items


def render(row: dict, path: str, cfg: "PairSettings") -> Pair:
    """The token ids of a row of a file. Raises InputError naming its line."""
    try:
        return tokenize(row, cfg)
    except ValueError as error:
        raise InputError(f"{path}:{row['_line']}: {error}") from None


def render_all(found: rows.Rows, places: Iterable[int], cfg: "PairSettings") -> list[Pair]:
    """The token ids of some rows of a file; takes a while. Raises as `render` does."""
    return [render(found[i], found.path, cfg) for i in places]


def tokenize(row: dict, cfg: "PairSettings") -> Pair:
    """The token ids of a row. Raises ValueError for what cannot be trained on."""
    prompt, *answers = split(row)
    tokenizer = load_tokenizer(cfg.model)
    show = functools.partial(_ids, tokenizer, row.get("tools"), cfg.data.chat_template_kwargs)
    asked_T = show(prompt, True)
    pair = Pair(*(_after(asked_T, show([*prompt, answer], False)) for answer in answers))
    for name, sequence in zip(ANSWERS, pair, strict=True):
        good = 0 < sequence.start < len(sequence.ids_T)
        require(good, name, row[name], "an answer that the chat template shows after the prompt")
    if pair.tokens > cfg.policy.row_tokens:
        expected = f"expected at most policy.row_tokens = {cfg.policy.row_tokens}"
        raise ValueError(f"chosen and rejected are {pair.tokens} tokens long, {expected}")
    return pair


def _ids(
    tokenizer: "PreTrainedTokenizerBase",
    tools: list | None,
    variables: dict[str, Any],
    items: list[dict],
    asks: bool,
) -> np.ndarray:
    """Token ids of a conversation; with `asks`, up to where an answer begins."""
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


def _after(asked_T: np.ndarray, ids_T: np.ndarray) -> Tokens:
    """A conversation whose answer begins where it is no longer what was asked."""
    size = min(len(asked_T), len(ids_T))
    differs = np.flatnonzero(asked_T[:size] != ids_T[:size])
    return Tokens(ids_T, int(differs[0]) if len(differs) else size)
