"""NeMo-Gym rows: reading them, checking them before anything runs, rendering their prompts."""

import functools
import itertools
import json
import math
import os
import re
import reprlib
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from tqdm import tqdm

import envs
from envs.parsers import parsers
from envs.rollout import services
from envs.rollout.chat import DENSEST
from envs.rollout.messages import chat, functions, template_variables
from settings.reader import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from settings.run import RunSettings, TrainingSettings

BAD: dict[str, list[dict]] = {}  # of each file that was loaded, until the run folder is ours
LONGEST_LINE = 1 << 26  # bytes; what is longer is no row but a file without line breaks


class Rows(Sequence[dict]):
    """The good rows of a JSONL file, in order, each with its line number under `_line`.

    Memory holds 16 bytes of a row, as a blend may have 50 GB: where it begins, its number, and a
    checksum. Asking for a row raises InputError where the file has changed since.
    """

    def __init__(self, path: str):
        self.path = path
        self.file: Any = None  # opened when the first row is asked for
        self.starts = array("Q")
        self.lines = array("I")
        self.checksums = array("I")

    def add(self, start: int, line: int, text: bytes) -> None:
        """Adds a row that is known to be good."""
        self.starts.append(start)
        self.lines.append(line)
        self.checksums.append(zlib.crc32(text.rstrip(b"\n")))  # rows may be appended

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: Any) -> Any:
        self.file = self.file or open(self.path, "rb")  # noqa: SIM115
        self.file.seek(self.starts[index])
        text = self.file.readline()
        if zlib.crc32(text.rstrip(b"\n")) != self.checksums[index]:
            place = f"{self.path}:{self.lines[index]}"
            raise InputError(f"{place}: the file was changed while it was used: start again")
        return json.loads(text) | {"_line": self.lines[index]}


def load_rows(path: str, cfg: "RunSettings") -> Sequence[dict]:
    """The rows of a JSONL file.

    A line that is malformed, of an unknown environment, or longer than the model allows is counted
    on the terminal and left out. Raises InputError naming file, line and field where there are more
    than `data.max_bad_rows` of them, or nothing else, where the model's chat template refuses the
    first good one, and where vLLM cannot use the parsers of `services`.
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


def keep_bad(path: str, bad: list[dict], cfg: "TrainingSettings") -> None:
    """Keeps the bad rows of a file until `quarantine` writes them, and says how many they are."""
    BAD[path] = bad
    if bad:
        # "responses_create_params.input[3].role is 5, expected ..." is counted under its field.
        kinds = (re.split(r" is |: ", row["reason"])[0] for row in bad)
        counts = Counter(re.sub(r"\[\d+\]", "[]", kind) for kind in kinds)
        summary = ", ".join(f"{kind} {count}" for kind, count in counts.most_common())
        print(f"{path}: {len(bad)} bad rows go to {cfg.run_dir}/quarantine.jsonl: {summary}")


def use_services(named: services.Services, model: str) -> None:
    """Sets what environments use. Raises InputError where a parser cannot be used for the model."""
    services.configure(named)
    if problem := parsers.problem(named, model):
        raise InputError(problem)


def read_rows(
    path: str, allowed: float, cfg: "RunSettings | None" = None
) -> tuple[Sequence[dict], list[dict]]:
    """The good rows of a JSONL file, and what is wrong with the others.

    Without `cfg` prompts may have any length. Raises InputError where more than `allowed` rows are
    bad, or all, for an environment's module that cannot be used, and for rows to train on that
    compare answers where there is only one. Such rows are left out of validation.
    """
    single = single_answers(path, cfg) if cfg else ""
    alone: Counter[str] = Counter()  # rows by agent, that lack a second answer

    def is_used(line: str) -> bool:
        agent = parse(line, cfg)["agent_ref"]["name"]
        lacks = bool(single) and envs.only_compares(agent)
        alone[agent] += lacks
        return not lacks

    rows, bad = sort_lines(path, allowed, is_used)
    if cfg and alone.total():
        counts = ", ".join(f"{count:,} of {name}" for name, count in alone.items() if count)
        told = f"{path}: rows that compare answers, {counts}, and {single} = 1"
        if not rows or path == cfg.data.train:
            raise InputError(f"{told}, expected 2 or more")
        print(f"{told}: they are not evaluated")
    refuse_none(rows, bad)
    return rows, bad


def sort_lines(
    path: str, allowed: float, is_used: Callable[[str], bool]
) -> tuple[Rows, list[dict]]:
    """The rows of a JSONL file that are used, and what is wrong with the bad ones.

    `is_used` raises ValueError for a bad line. Raises InputError where more than `allowed` are bad,
    and for an environment's module that cannot be used.
    """
    rows = Rows(path)
    bad: list[dict] = []
    for number, (start, text) in enumerate(raw_lines(path), 1):
        line = decoded(text)
        if line.isspace():
            continue
        try:
            if is_used(line):
                rows.add(start, number, text)
        except envs.ModuleError as error:
            raise InputError(str(error)) from None
        except (ValueError, RecursionError) as error:
            shown = line[:200].rstrip("\n")
            bad.append({"file": path, "line": number, "reason": str(error), "text": shown})
        if len(bad) > allowed:
            limit = f", more than data.max_bad_rows = {allowed}" if allowed else ""
            raise InputError(first_of(bad) + limit)
    return rows, bad


def refuse_none(rows: Rows, bad: list[dict]) -> None:
    """Raises InputError where a file holds no good row."""
    if not rows:
        all_bad = f"; {first_of(bad)}" if bad else ""
        raise InputError(f"{rows.path}: holds no good rows, expected at least one{all_bad}")


def single_answers(path: str, cfg: "RunSettings") -> str:
    """The setting that gives rows of this file one answer each; "" where they get more."""
    samples = {"data.val_samples": cfg.data.val_samples} if path == cfg.data.val else {}
    if path == cfg.data.train:
        samples["group_size"] = getattr(cfg, "group_size", 2)  # not all algorithms have groups
    return next((name for name, count in samples.items() if count < 2), "")


def first_of(bad: list[dict]) -> str:
    """What is wrong with the first bad row, and where the others are."""
    lines = ", ".join(str(row["line"]) for row in bad[:10]) + ", ..." * (len(bad) > 10)
    more = f" ({len(bad)} bad rows: lines {lines})" if len(bad) > 1 else ""
    return f"{bad[0]['file']}:{bad[0]['line']}: {bad[0]['reason']}{more}"


def quarantine(run_dir: str) -> None:
    """Writes the bad rows of the files that were loaded to a run folder that this process owns.

    Each has its file, line number, reason and first characters.
    """
    path = Path(run_dir) / "quarantine.jsonl"
    bad = list(itertools.chain(*BAD.values()))
    if bad or path.exists():
        aside = path.with_suffix(".partial")
        aside.write_text("".join(json.dumps(row) + "\n" for row in bad))
        aside.replace(path)


def read_lines(path: str) -> Iterator[str]:
    """The lines of a file, bytes that are no UTF-8 as surrogates; an endless one is cut off.

    Raises InputError where the file cannot be read.
    """
    return (decoded(text) for _, text in raw_lines(path))


def raw_lines(path: str) -> Iterator[tuple[int, bytes]]:
    """Where each line of a file begins, and its bytes; a bar is shown where it takes a while."""
    start = 0
    try:
        bar: dict[str, Any] = {"total": os.path.getsize(path), "unit": "B", "unit_scale": True}
        progress = tqdm(desc=path, delay=2, disable=None, leave=False, **bar)
        with open(path, "rb") as file, progress:
            while line := file.readline(LONGEST_LINE + 1):
                yield start, line
                while len(line) > LONGEST_LINE and not line.endswith(b"\n"):
                    start += len(line)
                    line = file.readline(LONGEST_LINE + 1)
                start += len(line)
                progress.update(start - progress.n)
    except OSError as error:
        tried = Path(path).resolve()
        raise InputError(f"{tried}: expected a JSONL file: {error.strerror}") from None


def decoded(text: bytes) -> str:
    """The text of a line, bytes that are no UTF-8 as surrogates."""
    return text.decode("utf-8", "surrogateescape")


def parse(line: str, cfg: "RunSettings | None") -> dict:
    """The row of a line. Raises ValueError saying what is wrong with it."""
    row, size = loads(line)
    envs.check_row(row)
    if cfg:
        envs.check_services(row)
        check_temperature(row, cfg)
    if cfg and size + 256 > cfg.sampling.max_model_len:  # a token is at least one byte
        check_length(row, cfg)
    return row


def loads(line: str) -> tuple[Any, int]:
    """The JSON value of a line, and its bytes. Raises ValueError saying what is wrong with it."""
    if len(line) > LONGEST_LINE:
        raise ValueError(f"the line is longer than {LONGEST_LINE:,} bytes")
    try:
        size = len(line.encode())
        row = json.loads(line, object_pairs_hook=unique, parse_float=finite, parse_constant=finite)
        if re.search(r"\\u[dD][89a-fA-F]", line):  # half a surrogate pair is no character
            json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        code = ord(error.object[error.start])
        is_byte = 0xDC80 <= code <= 0xDCFF
        what = f"byte {code - 0xDC00:#x}" if is_byte else f"half a pair, \\u{code:x},"
        raise ValueError(f"expected UTF-8: {what} at character {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected JSON: {error}") from None
    return row, size


def unique(pairs: list[tuple]) -> dict:
    """A JSON object. Raises ValueError for one that has a key twice."""
    row = dict(pairs)
    if len(row) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {reprlib.repr(twice)} appears twice")
    return row


def finite(number: str) -> float:
    """A JSON number. Raises ValueError for NaN, and for what overflows."""
    if not math.isfinite(float(number)):
        raise ValueError(f"{reprlib.repr(number)} is not finite")
    return float(number)


def check_temperature(row: dict, cfg: "RunSettings") -> None:
    """Raises ValueError where a row asks for another temperature than the trainer divides by."""
    temperature = row["responses_create_params"].get("temperature")
    own = cfg.sampling.temperature
    if temperature not in (None, own):
        at = "responses_create_params.temperature"
        raise ValueError(f"{at} is {temperature}, expected sampling.temperature = {own}, or null")


def check_length(row: dict, cfg: "RunSettings") -> None:
    """Raises ValueError unless the prompt leaves the model room for an answer."""
    params = row["responses_create_params"]
    if not params["input"]:
        return
    limit = cfg.sampling.max_model_len
    at = "responses_create_params.input"
    expected = f"expected less than sampling.max_model_len = {limit}"
    size = len(json.dumps([params["input"], params.get("tools")], ensure_ascii=False))
    if size > DENSEST * limit:
        raise ValueError(f"{at} is {size} characters long, {expected} tokens")
    try:
        tokenizer = load_tokenizer(cfg.model)
        length = len(render(tokenizer, row, cfg.sampling.chat_template_kwargs))
    except Exception as error:  # a chat template is the model's own code
        raise ValueError(f"{at} is refused by the chat template: {error}") from None
    if length >= limit:
        raise ValueError(f"{at} is {length} tokens long, {expected}")


def fingerprint(rows: Sequence[dict], position: int) -> int:
    """CRC-32 of the prompt before `position` in the stream; it differs where rows have shifted."""
    row = rows[(position - 1) % len(rows)]
    return zlib.crc32(json.dumps(row | {"_line": 0}).encode())


class Answer(NamedTuple):
    """An answer to a row."""

    row: dict
    text: str
    source: str
    reward: float = math.nan  # in the run that it is from


def read_rollouts(path: str, rows: Sequence[dict]) -> Iterator[Answer]:
    """The last answer of each rollout in a rollouts.jsonl whose prompt asks what its row asks.

    Raises InputError for a line that is no rollout, and where no rollout is of these rows.
    """
    by_line = {row["_line"]: row for row in rows}
    found = False
    for number, line in enumerate(read_lines(path), 1):
        try:
            rollout = json.loads(line)
            row, prompt = by_line.get(rollout["row"]), rollout["prompt"]
            text, reward = rollout["response"][-1], float(rollout["reward"])
        except (ValueError, LookupError, TypeError) as error:
            raise InputError(f"{path}:{number}: expected a rollout: {error!r}") from None
        messages = chat(row["responses_create_params"]["input"]) if row else []
        asked = messages[-1]["content"] if messages else ""
        # Rows of the run's other data file have the same line numbers. Templates may change blanks.
        if row and "".join(asked.split()) in "".join(prompt.split()):
            found = True
            opening = "<think>" if prompt.rstrip().endswith("<think>") else ""
            yield Answer(row, opening + text, f"{path}:{number}", reward)
    if not found:
        raise InputError(f"{path}: holds no rollouts of these rows, expected at least one")


@functools.cache
def load_tokenizer(model: str) -> "PreTrainedTokenizerBase":
    """The model's tokenizer. transformers takes 2 s to import, so it waits until it is needed."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def render(
    tokenizer: "PreTrainedTokenizerBase", row: dict, chat_template_kwargs: dict[str, Any]
) -> list[int]:
    """Token ids of the row's conversation, up to where the model's answer begins."""
    params = row["responses_create_params"]
    variables = chat_template_kwargs | template_variables(row)
    return render_messages(tokenizer, params["input"], params.get("tools"), variables)


def last_question(row: dict) -> str:
    """The text of the last message of the user in a row; "" where there is none."""
    messages = chat(row["responses_create_params"]["input"])
    return next((m["content"] for m in reversed(messages) if m["role"] == "user"), "")


def render_messages(
    tokenizer: "PreTrainedTokenizerBase",
    messages: list[dict] | str,
    tools: list | None,
    chat_template_kwargs: dict[str, Any],
) -> list[int]:
    """Token ids of a conversation, up to where the model's answer begins."""
    ids = tokenizer.apply_chat_template(
        chat(messages),
        tools=functions(tools),
        add_generation_prompt=True,
        return_dict=False,
        **chat_template_kwargs,
    )
    return cast(list[int], ids)
