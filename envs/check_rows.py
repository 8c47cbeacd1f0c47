"""Checks, before any part of a run starts, that each NeMo-Gym row can be trained on."""

import functools
import inspect
import json
import os
import reprlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.cpu_alarm import at_most
from core.errors import InputError, ModuleError, located
from envs import get, registry, require, services
from envs.needs import needs_of
from envs.parsers import parsers
from rollout.chat import DENSEST
from rollout.messages import (
    RENDER_SECONDS,
    check_items,
    check_overrides,
    check_tools,
    load_tokenizer,
    render_messages,
    template_variables,
)
from rollout.rows import keep_bad, loads, refuse_none, sort_lines
from settings.environment_services import Services

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from settings.config import RunSettings


def check_services(row: dict) -> None:
    """Raises ModuleError if a service that the row's environment needs is missing."""
    name = row["agent_ref"]["name"]
    for need in needs_of(row):
        if why := need.problem():
            raise ModuleError(f"environment {name!r} lacks {need}: {why}")


def check_row(row: Any) -> None:
    """Raises ValueError with dotted path, value and expectation unless `row` is a Gym row."""
    at = "responses_create_params."
    items = get(row, at + "input", list | str, "a list of messages" + conversion(row))
    check_items(items, at + "input")
    check_tools(get(row, at + "tools", list | None, "a list or null"), at + "tools")
    check_overrides(row["responses_create_params"], at)
    most = get(row, "compactions", int | None, "a whole number, 0 or more, or null")
    is_count = most is None or (type(most) is int and most >= 0)
    require(is_count, "compactions", most, "a whole number, 0 or more")
    module = registry.environment(get(row, "agent_ref.name", str, "the name of an environment"))
    if most and not hasattr(module, "rollout"):
        raise ValueError(f"compactions is {most}, expected none: its environment has only one turn")
    if hasattr(module, "verify") and (has := other_arguments(module.verify)):
        raise ModuleError(
            f"{module.__file__} defines verify{has}, "
            "expected verify(row, response), the reward for one answer"
        )
    some = has_text(items) or (not items and getattr(module, "ALLOWS_EMPTY_INPUT", False))
    require(some, at + "input", items, "at least one message that contains text")
    try:
        getattr(module, "check", lambda row: None)(row)
    except ValueError:
        raise
    except ImportError as error:
        raise ModuleError(located(error, str(module.__file__))) from error
    except Exception as error:  # such as a KeyError for a missing field
        raise ValueError(located(error, str(module.__file__))) from error


@functools.cache
def other_arguments(judge: Callable) -> str:
    """Returns the signature of a `verify` that differs from ours, such as TRL's; else ""."""
    takes = inspect.signature(judge)
    try:
        takes.bind("row", "response")
    except TypeError:
        return str(takes)
    return str(takes) if {"completions", "prompts"} & takes.parameters.keys() else ""


def has_text(items: list | str) -> bool:
    """Returns whether a conversation contains any text or tool call."""
    if isinstance(items, str):
        return bool(items.strip())
    return any(item.get("content") or item.get("type", "message") != "message" for item in items)


def conversion(row: Any) -> str:
    """Returns a hint on how to convert a row in another format; "" if it may be a Gym row."""
    if not isinstance(row, dict) or not row or "responses_create_params" in row:
        return ""
    return f"; the row has {reprlib.repr(list(row))}: docs/own_data.md shows how to convert it"


def load_rows(path: str, cfg: "RunSettings") -> Sequence[dict]:
    """Returns the good rows of a JSONL file.

    A line is left out if it is malformed, names an unknown environment, or is longer than the model
    allows; the number of such lines is printed. Raises InputError naming the file, line and
    field if more than `data.max_bad_rows` lines are bad, if none is good, if the model's chat
    template refuses the first good row, or if vLLM cannot use the parsers that `services` names.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise InputError(f"{Path(path).resolve()}: expected a JSONL file, not a folder or a pipe")
    use_services(cfg.services, cfg.model)
    rows, bad = read_rows(path, cfg.data.max_bad_rows, cfg)
    try:
        check_length(rows[0], cfg)
    except ValueError as error:
        if not cfg.data.max_bad_rows:
            raise InputError(f"{path}:{rows[0]['_line']}: {error}") from None
    keep_bad(path, bad, cfg)
    return rows


def use_services(named: Services, model: str) -> None:
    """Sets the environments' services. Raises InputError if the model cannot use a parser."""
    services.configure(named)
    if problem := parsers.problem(named, model):
        raise InputError(problem)


def read_rows(
    path: str, allowed: float, cfg: "RunSettings | None" = None
) -> tuple[Sequence[dict], list[dict]]:
    """Returns the good rows of a JSONL file, and the errors in the others.

    Without `cfg`, prompts may have any length. Raises InputError if more than `allowed` rows, or
    all, are bad, if an environment's module cannot be used, or if training rows need a comparison
    of answers but the run generates only one answer per row. Validation leaves out such rows.
    """
    single = single_answers(path, cfg) if cfg else ""
    alone: Counter[str] = Counter()  # rows that lack a second answer, by agent
    unheard: Counter[str] = Counter()  # rows whose value is not used, by sampling parameter

    def is_used(line: str) -> bool:
        row = parse(line, cfg)
        if cfg:
            unheard.update(overridden(row, cfg))
        agent = row["agent_ref"]["name"]
        lacks = bool(single) and registry.only_compares(agent)
        alone[agent] += lacks
        return not lacks

    rows, bad = sort_lines(path, allowed, is_used)
    if cfg and alone.total():
        counts = ", ".join(f"{count:,} of {name}" for name, count in alone.items() if count)
        if not rows or path == cfg.data.train:
            raise InputError(
                f"{path}: rows need answers to compare ({counts}), "
                f"but {single} = 1, expected 2 or more"
            )
        print(
            f"{path}: rows need answers to compare ({counts}), "
            f"but {single} = 1: they are not evaluated"
        )
    if cfg:
        for name, count in unheard.items():
            print(
                f"{path}: rows that ask for another {name}: {count:,}; "
                f"sampling.{name} = {getattr(cfg.sampling, name)} is used"
            )
    refuse_none(rows, bad)
    return rows, bad


def single_answers(path: str, cfg: "RunSettings") -> str:
    """Returns the setting that limits this file's rows to one answer each; "" if none does."""
    if path == cfg.data.val and cfg.data.val_samples < 2:
        return "data.val_samples"
    is_compared = path == cfg.data.train and getattr(cfg, "verify", True)
    if is_compared and getattr(cfg, "group_size", 2) < 2:  # not all algorithms have groups
        return "group_size"
    return ""


def parse(line: str, cfg: "RunSettings | None") -> dict:
    """Returns a line's row. Raises ValueError if it is malformed or cannot be used."""
    row, size = loads(line)
    check_row(row)
    if cfg:
        check_services(row)
        check_sampling(row, size, cfg)
    return row


def check_sampling(row: dict, size: int, cfg: "RunSettings") -> None:
    """Raises ValueError if the run's sampling settings exclude a row of `size` bytes."""
    check_temperature(row, cfg)
    if size + 256 > cfg.sampling.max_model_len:  # a token is at least one byte
        check_length(row, cfg)


def check_temperature(row: dict, cfg: "RunSettings") -> None:
    """Raises ValueError if a row asks for a different temperature than the trainer divides by."""
    temperature = row["responses_create_params"].get("temperature")
    own = cfg.sampling.temperature
    if temperature not in (None, own):
        raise ValueError(
            f"responses_create_params.temperature is {reprlib.repr(temperature)}, "
            f"expected sampling.temperature = {own}, or null"
        )


def overridden(row: dict, cfg: "RunSettings") -> list[str]:
    """Returns the sampling parameters for which a row has other values than the run.

    As in NeMo-RL (experience/rollouts.py), the run's values are used: released rows ask for a top_p
    of 0.95, and are trained with 1.
    """
    params = row["responses_create_params"]
    names = ("top_p", "top_k", "min_p")
    return [name for name in names if params.get(name) not in (None, getattr(cfg.sampling, name))]


def check_length(row: dict, cfg: "RunSettings") -> None:
    """Raises ValueError unless the prompt leaves the model room for an answer."""
    params = row["responses_create_params"]
    if not params["input"]:
        return
    limit = cfg.sampling.max_model_len
    size = len(json.dumps([params["input"], params.get("tools")], ensure_ascii=False))
    if size > DENSEST * limit:
        raise ValueError(
            f"responses_create_params.input is {size} characters long, "
            f"expected less than sampling.max_model_len = {limit} tokens"
        )
    try:
        tokenizer = load_tokenizer(cfg.model)
        with at_most(RENDER_SECONDS):
            length = len(render(tokenizer, row, cfg.sampling.chat_template_kwargs))
    except Exception as error:  # a chat template is the model's own code
        raise ValueError(
            f"responses_create_params.input is refused by the chat template: {error}"
        ) from None
    if length >= limit:
        raise ValueError(
            f"responses_create_params.input is {length} tokens long, "
            f"expected less than sampling.max_model_len = {limit}"
        )


def render(
    tokenizer: "PreTrainedTokenizerBase", row: dict, chat_template_kwargs: dict[str, Any]
) -> list[int]:
    """Returns the token ids of the row's conversation, up to the start of the model's answer."""
    params = row["responses_create_params"]
    variables = chat_template_kwargs | template_variables(row)
    return render_messages(tokenizer, params["input"], params.get("tools"), variables)
