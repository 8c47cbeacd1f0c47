"""Tries the rewards of a data file, without engine, model or Ray: `python -m envs FILE.jsonl`."""

import asyncio
import json
import math
import os
import statistics
import sys
import textwrap
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import tyro

import envs
from core import errors
from core.errors import InputError, ModuleError
from core.waits import within
from envs import check_rows, registry
from envs.check_rows import read_rows, use_services
from envs.parsers import parsers
from rollout.messages import chat, template_variables
from rollout.rows import first_of, read_lines
from settings.environment_services import Services

# Fields that are taken for the reference answer of a row.
REFERENCES = ("expected_answer", "answer", "reference_answer", "ground_truth", "solution")
SHOWN = 800  # characters of a text
SECONDS = 120.0  # that an async verify may take


class Answer(NamedTuple):
    """An answer to a row."""

    row: dict
    text: str
    source: str
    reward: float = math.nan  # in the run that it is from


@dataclass(frozen=True)
class Args:
    """Checks all rows of a data file, and lets `verify` judge an answer to some of them.

    That is the row's own reference answer, unless a flag names another.
    """

    file: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="FILE")]
    """JSONL file of NeMo-Gym rows."""
    number: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 3
    """Rows, or rollouts, to try of each environment and data set."""
    answer: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(aliases=["-a"])
    ] = ()
    """Answer to try on each row; may be given several times."""
    field: Annotated[str, tyro.conf.arg(aliases=["-f"])] = ""
    """Field of the rows that holds an answer to try, such as metadata.solution."""
    rollouts: Annotated[str, tyro.conf.arg(aliases=["-r"])] = ""
    """rollouts.jsonl of a run on this file: its answers are judged again."""
    model: str = ""
    """Folder of the tokenizer that a parser needs."""
    services: Services = Services()
    """What environments need from outside, as the run's configuration has it."""


def label(row: dict) -> str:
    """The environment of a row, and its data set where it names one."""
    return "/".join(str(x) for x in (row["agent_ref"]["name"], row.get("dataset")) if x)


def first(items: Iterable, number: int, label_of: Callable[[Any], str]) -> Iterator:
    """The first items of each label."""
    seen: Counter[str] = Counter()
    for item in items:
        seen[label_of(item)] += 1
        if seen[label_of(item)] <= number:
            yield item


def of_rows(rows: Iterable[dict], args: Args) -> Iterator[Answer]:
    """For each row the answers given, or that of its field.

    A row may have no reference: it is named and left out. Raises InputError where the field that
    was asked for holds no answer.
    """
    for row in rows:
        yield from (Answer(row, text, "given") for text in args.answer)
        if args.answer:
            continue
        known = [name for name in REFERENCES if row.get(name) is not None]
        if not args.field and not known:
            what = "no reference answer; -f FIELD or -a TEXT says what to try"
            print(f"{args.file}:{row['_line']} {label(row)}: not tried, {what}")
            continue
        field = args.field or known[0]
        try:
            value = envs.get(row, field, str | int | float | list | dict, "an answer")
        except ValueError as error:
            raise InputError(f"{args.file}:{row['_line']}: {error}") from None
        yield Answer(row, value if isinstance(value, str) else json.dumps(value), field)


async def judge(answer: Answer, args: Args) -> envs.Reward:
    """What `verify` says; raises InputError naming row, module and line where it is no reward."""
    params = answer.row["responses_create_params"]
    variables = template_variables(answer.row)
    response = await parsers.read(answer.text, args.model, params.get("tools"), variables)
    module = registry.environment(answer.row["agent_ref"]["name"])
    place = f"{args.file}:{answer.row['_line']}: verify"
    try:
        verdict = registry.verify(answer.row, response)
        reward = await within(SECONDS, f"verify of {answer.row['agent_ref']['name']!r}", verdict)
    except Exception as error:  # it is the user's own code
        raise InputError(f"{place} raised {errors.located(error, str(module.__file__))}") from None
    if not math.isfinite(reward.value):
        raise InputError(f"{place} returned {reward.value}, expected a finite number")
    return reward


def show(name: str, text: str) -> None:
    """Prints a text below its name; of a long one the start."""
    more = f" [... {len(text):,} characters]" if len(text) > SHOWN else ""
    print(f"  {name}:\n{textwrap.indent(text[:SHOWN] + more, '    ', lambda line: True)}")


async def try_answers(answers: Iterable[Answer], args: Args) -> None:
    """Judges answers, and prints each verdict and a summary for each label."""
    tried: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for answer in answers:
        name = label(answer.row)
        began = time.perf_counter()
        reward = await judge(answer, args)
        tried[name].append((reward.value, time.perf_counter() - began, answer.reward))
        print(f"\n{args.file}:{answer.row['_line']} {name}")
        for message in chat(answer.row["responses_create_params"]["input"]):
            show(message["role"], message["content"] or json.dumps(message.get("tool_calls")))
        show(f"answer ({answer.source})", answer.text)
        print(f"  reward {reward.value:g} {json.dumps(reward.info, default=str)}")
    print()
    for name, found in tried.items():
        rewards, seconds, before = zip(*found, strict=True)
        then = f", in the run {statistics.fmean(before):.4g}" if args.rollouts else ""
        mean = f"mean reward {statistics.fmean(rewards):.4g}{then}"
        spread = f"{min(rewards):g} to {max(rewards):g}"
        half = statistics.median(seconds)
        took = f"verify took {1e3 * half:,.2f} ms (median), {1e3 * max(seconds):,.2f} ms at most"
        print(f"{name}: {len(found)} tried, {mean} ({spread}); {took}")


def main(argv: list[str]) -> None:
    """Checks the rows and tries answers. Raises InputError for what is wrong."""
    args = tyro.cli(Args, args=argv, prog="python -m envs")
    if sum(map(bool, (args.answer, args.field, args.rollouts))) > 1:
        raise InputError("-a, -f and -r exclude each other, expected one of them")
    use_services(args.services, args.model)
    rows, bad = read_rows(args.file, math.inf)
    if bad:
        raise InputError(first_of(bad))
    for name, count in Counter(map(label, rows)).items():
        print(f"{name}: {count:,} good rows in {args.file}")
    for name in dict.fromkeys(row["agent_ref"]["name"] for row in rows):
        module = registry.environment(name)
        if not hasattr(module, "verify"):
            rows = [row for row in rows if row["agent_ref"]["name"] != name]
            rollout = "its `rollout` of several turns needs a model"
            why = rollout if hasattr(module, "rollout") else "it compares the answers of a group"
            print(f"{name}: not tried, {why}")
        elif hasattr(module, "rollout") or hasattr(module, "score_group"):
            print(f"{name}: only `verify` is tried, which does not decide alone in training")
    rows = [*served(rows, args.file)]
    if args.rollouts:
        answers = first(read_rollouts(args.rollouts, rows), args.number, lambda a: label(a.row))
    else:
        answers = of_rows(first(rows, args.number, label), args)
    if rows:
        asyncio.run(try_answers(answers, args))


def served(rows: Sequence[dict], path: str) -> Iterator[dict]:
    """The rows whose services are there; `verify` would wait for a judge that no server has.

    Names each environment that lacks one. Raises InputError where no row is left, and where
    `needs` raises.
    """
    lacking: dict[str, str] = {}
    count = 0
    for row in rows:
        try:
            check_rows.check_services(row)
        except ModuleError as error:
            lacking.setdefault(
                f"{label(row)}: not tried, {error}", f"{path}:{row['_line']}: {error}"
            )
        except Exception as error:  # of `needs`, which is the user's own code
            module = registry.environment(row["agent_ref"]["name"])
            why = errors.located(error, str(module.__file__))
            raise InputError(f"{path}:{row['_line']}: needs raised {why}") from None
        else:
            count += 1
            yield row
    if lacking and not count:
        raise InputError(next(iter(lacking.values())))
    for line in lacking:
        print(line)


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


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
