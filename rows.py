"""NeMo-Gym rows: reading them, checking them before anything runs, rendering their prompts."""

import json
from pathlib import Path

import envs
from configs import InputError


def load_rows(path: str, cfg) -> list[dict]:
    """The rows of a JSONL file, in order, each with its line number under `_line`.

    Raises InputError naming file, line and field for what is malformed, of an unknown environment,
    or longer than the model allows. `cfg` gives `model`, `max_model_len` and `thinking`.
    """
    rows, tokenizer = [], None
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            envs.check_row(row)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}:{number}: {error}") from None
        # A token is at least one byte: only lines that could be too long are worth tokenising.
        if len(line.encode()) + 256 > cfg.max_model_len:
            tokenizer = tokenizer or load_tokenizer(cfg.model)
            length = len(render(tokenizer, row, cfg.thinking))
            if length >= cfg.max_model_len:
                raise InputError(
                    f"{path}:{number}: responses_create_params.input is {length} tokens long, "
                    f"expected less than max_model_len = {cfg.max_model_len}"
                )
        rows.append(row | {"_line": number})
    if not rows:
        raise InputError(f"{path}: holds no rows, expected at least one")
    return rows


def read_lines(path: str) -> list[str]:
    """The lines of a UTF-8 file. Raises InputError where it cannot be read as such."""
    try:
        return Path(path).read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise InputError(f"{path}: expected a JSONL file: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: expected UTF-8: {error}") from None


def load_tokenizer(model: str):
    """The model's tokenizer. transformers takes 2 s to import, so it waits until it is needed."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def render(tokenizer, row: dict, thinking: bool) -> list[int]:
    """Token ids of the row's conversation, up to where the model's answer begins."""
    params = row["responses_create_params"]
    messages = [message | {"content": plain(message["content"])} for message in params["input"]]
    return tokenizer.apply_chat_template(
        messages,
        tools=params.get("tools"),
        add_generation_prompt=True,
        enable_thinking=thinking,
        return_dict=False,
    )


def plain(content: str | list[dict]) -> str:
    """A message's text; templates would drop or print the parts of the Responses API."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
