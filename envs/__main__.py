"""Tries a data file's rewards without an engine, a model or Ray: `python -m envs FILE.jsonl`."""

import asyncio
import json
import math
import statistics
import sys
import textwrap
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple, TypeVar

import tyro

import envs
from core import errors
from core.errors import InputError, ModuleError, reader_may_leave
from core.waits import within
from envs import check_rows, registry
from envs.check_rows import read_rows, use_services
from envs.parsers import parsers
from rollout.messages import chat, template_variables
from rollout.rows import first_of, read_lines
from settings.environment_services import Services

T = TypeVar("T")
# Fields that may contain a row's reference answer; the first one present is used.
REFERENCES = ("expected_answer", "answer", "reference_answer", "ground_truth", "solution")
SHOWN = 800  # maximum number of characters of a text to print
SECONDS = 120.0  # limit for an asynchronous `verify`, in seconds


class Answer(NamedTuple):
    """An answer to a row."""

    row: dict
    text: str
    source: str
    reward: float = math.nan  # the reward in the run that generated it


class Tried(NamedTuple):
    """The reward for an answer that was tried, and its cost."""

    reward: float
    seconds: float
    reward_in_run: float


@dataclass(frozen=True)
class Args:
    """Checks all rows of a data file, and lets `verify` judge an answer to some of them.

    The answer is the row's own reference answer, unless a flag names another.
    """

    file: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="FILE")]
    """JSONL file of NeMo-Gym rows."""
    number: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 3
    """Rows, or rollouts, to try per environment and data set."""
    answer: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(aliases=["-a"])
    ] = ()
    """Answer to try on each row; may be given several times."""
    field: Annotated[str, tyro.conf.arg(aliases=["-f"])] = ""
    """Field in the rows that contains an answer to try, such as metadata.solution."""
    rollouts: Annotated[str, tyro.conf.arg(aliases=["-r"])] = ""
    """rollouts.jsonl from a run on this file: its answers are judged again."""
    model: str = ""
    """Tokenizer folder, which a parser needs."""
    services: Services = Services()
    """External services that environments need, as in the run's configuration."""


def label(row: dict) -> str:
    """Returns a row's environment, and its data set if it names one."""
    return "/".join(str(x) for x in (row["agent_ref"]["name"], row.get("dataset")) if x)


def first(items: Iterable[T], number: int, label_of: Callable[[T], str]) -> Iterator[T]:
    """Yields the first `number` items with each label."""
    seen: Counter[str] = Counter()
    for item in items:
        seen[label_of(item)] += 1
        if seen[label_of(item)] <= number:
            yield item


def of_rows(rows: Iterable[dict], args: Args) -> Iterator[Answer]:
    """Yields, for each row, the answers given with -a, or else the answer in one of its fields.

    A row without a reference answer is reported and left out. Raises InputError if the field given
    with -f contains no answer.
    """
    for row in rows:
        yield from (Answer(row, text, "given") for text in args.answer)
        if args.answer:
            continue
        known = [name for name in REFERENCES if row.get(name) is not None]
        if not args.field and not known:
            print(
                f"{args.file}:{row['_line']} {label(row)}: "
                "not tried, it has no reference answer; -f FIELD or -a TEXT sets an answer to try"
            )
            continue
        field = args.field or known[0]
        try:
            value = envs.get(row, field, str | int | float | list | dict, "an answer")
        except ValueError as error:
            raise InputError(f"{args.file}:{row['_line']}: {error}") from None
        yield Answer(row, value if isinstance(value, str) else json.dumps(value), field)


async def judge(answer: Answer, args: Args) -> envs.Reward:
    """Returns an answer's reward. Raises InputError naming the row, module and line of an error."""
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
    """Prints a text, cut after SHOWN characters, below its name."""
    more = f" [... {len(text):,} characters]" if len(text) > SHOWN else ""
    print(f"  {name}:\n{textwrap.indent(text[:SHOWN] + more, '    ', lambda line: True)}")


async def try_answers(answers: Iterable[Answer], args: Args) -> None:
    """Judges answers, and prints each verdict and a summary for each label."""
    tried: dict[str, list[Tried]] = defaultdict(list)
    for answer in answers:
        name = label(answer.row)
        began = time.perf_counter()
        reward = await judge(answer, args)
        tried[name].append(Tried(reward.value, time.perf_counter() - began, answer.reward))
        print(f"\n{args.file}:{answer.row['_line']} {name}")
        for message in chat(answer.row["responses_create_params"]["input"]):
            show(message["role"], message["content"] or json.dumps(message.get("tool_calls")))
        show(f"answer ({answer.source})", answer.text)
        print(f"  reward {reward.value:g} {json.dumps(reward.info, default=str)}")
    print()
    for name, found in tried.items():
        rewards = [one.reward for one in found]
        seconds = [one.seconds for one in found]
        in_run = ""
        if args.rollouts:
            in_run = f", in the run {statistics.fmean(one.reward_in_run for one in found):.4g}"
        # The first answer waits for what `verify` starts, such as a process that imports libraries.
        start, *usual = seconds
        took = f"verify took {1e3 * start:,.2f} ms, with what it starts"
        if usual:
            took = (
                f"verify took {1e3 * statistics.median(usual):,.2f} ms (median), "
                f"{1e3 * max(usual):,.2f} ms at most, "
                f"and for the first answer {1e3 * start:,.2f} ms"
            )
        print(
            f"{name}: {len(found)} tried, mean reward {statistics.fmean(rewards):.4g}{in_run} "
            f"({min(rewards):g} to {max(rewards):g}); {took}"
        )


def main(argv: list[str]) -> None:
    """Checks the rows and tries answers. Raises InputError if the flags or the file are wrong."""
    args = tyro.cli(Args, args=argv, prog="python -m envs")
    given = [flag for flag in (args.answer, args.field, args.rollouts) if flag]
    if len(given) > 1:
        raise InputError("-a, -f and -r are mutually exclusive, expected only one of them")
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
            if hasattr(module, "rollout"):
                print(f"{name}: not tried, its multi-turn `rollout` needs a model")
            else:
                print(f"{name}: not tried, it compares the answers in a group")
        elif hasattr(module, "rollout") or hasattr(module, "score_group"):
            print(f"{name}: only `verify` is tried; training does not use it alone")
    rows = [*served(rows, args.file)]
    if args.rollouts:
        answers = first(read_rollouts(args.rollouts, rows), args.number, lambda a: label(a.row))
    else:
        answers = of_rows(first(rows, args.number, label), args)
    if rows:
        asyncio.run(try_answers(answers, args))


def served(rows: Sequence[dict], path: str) -> Iterator[dict]:
    """Yields the rows whose services are available, since `verify` waits for a missing judge.

    Prints each environment that lacks a service. Raises InputError if no row is left or `needs`
    raises.
    """
    lacking: dict[str, str] = {}
    count = 0
    for row in rows:
        try:
            check_rows.check_services(row)
        except ModuleError as error:
            line = f"{label(row)}: not tried, {error}"
            lacking.setdefault(line, f"{path}:{row['_line']}: {error}")
        except Exception as error:  # from `needs`, which is the user's own code
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
    """Yields the last answer of each rollout whose prompt matches its row, from a rollouts.jsonl.

    Raises InputError if a line is not a rollout, or if no rollout belongs to these rows.
    """
    by_line = {row["_line"]: row for row in rows}
    found = False
    for number, line in enumerate(read_lines(path), 1):
        try:
            rollout = json.loads(line)
            row = by_line.get(rollout["row"])
            prompt = rollout["prompt"]
            text = rollout["response"][-1]
            reward = float(rollout["reward"])
        except (ValueError, LookupError, TypeError) as error:
            raise InputError(f"{path}:{number}: expected a rollout: {error!r}") from None
        messages = chat(row["responses_create_params"]["input"]) if row else []
        asked = messages[-1]["content"] if messages else ""
        # Rows in the run's other data file may have the same line numbers. Templates may change
        # white space.
        if row and "".join(asked.split()) in "".join(prompt.split()):
            found = True
            opening = "<think>" if prompt.rstrip().endswith("<think>") else ""
            yield Answer(row, opening + text, f"{path}:{number}", reward)
    if not found:
        raise InputError(f"{path}: contains no rollouts of these rows, expected at least one")


if __name__ == "__main__":
    with reader_may_leave():
        main(sys.argv[1:])
