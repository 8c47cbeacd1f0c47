"""Measures how fast each environment judges, and how long it stops its worker's event loop.

    python bench/verifiers.py [NAME ...]

Judges known answers again and again for SECONDS on one core, children included. The answers are in
../shared/data or, if that is missing, partly in tests/data. "bare" calls the check of envs/NAME.py
in this process: no child, no deadline. "blocks" is the longest time that the event loop stood still
while answers of 1 MB were judged.
"""

import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
WHOLE = ROOT.parent / "shared/data/known_answers"
KNOWN = WHOLE if WHOLE.is_dir() else ROOT / "tests/data/known_answers"
sys.path.insert(0, str(ROOT))

from envs import Reward, check_rows, registry  # noqa: E402
from envs.sandbox.checkers import Checkers  # noqa: E402
from envs.services import CheckerError  # noqa: E402
from rollout.response import Response  # noqa: E402

SECONDS = 5.0
AT_ONCE = 8  # answers that are judged together
TICK = 0.001
FAILED: Counter[str] = Counter()  # checks without a verdict, by reason
# Known-answers file -> agent that judges its answers.
SAME = ("math", "mcqa", "structured_outputs", "reasoning_gym", "calendar", "terminus_judge")
FILES = {name: name for name in (*SAME, "terminal_multi_harness")}
FILES |= dict.fromkeys(("instruction_following_gym", "ifeval"), "instruction_following")
FILES |= dict.fromkeys(("code_gen_gym", "code_function"), "code_gen")
FILES |= {"single_step_tool_use": "single_step_tool_use_with_argument_comparison"}


class Case(NamedTuple):
    """An answer to a row."""

    row: dict[str, Any]
    response: Response


def cases(name: str) -> Iterator[Case]:
    """Yields the known answers of a file that its environment accepts."""
    for line in (KNOWN / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
        known = json.loads(line)
        row = known | known.get("metadata", {}) | {"agent_ref": {"name": FILES[name]}}
        if name == "math":
            row["expected_answer"] = known["reference"]
        elif name == "reasoning_gym":
            row |= {"answer": known["reference"], "metadata": known["metadata"]}
        elif "unit_tests" in row:
            row["verifier_metadata"] = {"unit_tests": row["unit_tests"]}
        items = known.get("output", [])
        calls = [item for item in items if item["type"] == "function_call"]
        row["responses_create_params"] = {"input": [{"role": "user", "content": "?"}]}
        try:
            check_rows.check_row(row)
        except ValueError:
            continue
        yield Case(row, Response(known["response"], tool_calls=calls))


async def rate(judge: Callable[[Case], Awaitable], found: list[Case]) -> float:
    """Measures verifications per second."""
    began = time.perf_counter()
    done = 0
    while time.perf_counter() - began < SECONDS:
        batch = [found[(done + i) % len(found)] for i in range(AT_ONCE)]
        await asyncio.gather(*map(judge, batch))
        done += len(batch)
    return done / (time.perf_counter() - began)


async def longest_block(judge: Callable[[Case], Awaitable], found: list[Case]) -> float:
    """Measures the longest pause of the event loop, in ms, while long answers are judged."""
    texts = ["a" * 10**6, "\\boxed{" * 10**5, "[" * 10**6, "<a>" * 10**5, "word, " * 10**5]
    long = [Case(found[0].row, Response(text)) for text in texts]
    long.append(Case(found[0].row, Response(str(found[0].response) * 1000)))
    gaps = [0.0]

    async def beat() -> None:
        before = time.perf_counter()
        while True:
            await asyncio.sleep(TICK)
            now = time.perf_counter()
            gaps.append(now - before - TICK)
            before = now

    beating = asyncio.create_task(beat())
    await asyncio.gather(*map(judge, long))
    beating.cancel()
    return 1000 * max(gaps)


async def verify(case: Case) -> Reward | None:
    """Judges as a worker does. Counts checks without a verdict, as on a busy machine."""
    try:
        return await registry.verify(case.row, case.response)
    except CheckerError as error:
        FAILED[str(error)] += 1
        return None


def bare(agent: str) -> Callable[[Case], Awaitable[Reward]] | None:
    """Returns a judge that runs its checks in this process; None if the agent has no checks."""
    module = registry.environment(agent)
    own = {name: value for name, value in vars(module).items() if isinstance(value, Checkers)}
    if not own:
        return None
    check = module.make_check()

    class Here:
        async def run(self, deadline: float, **request: Any) -> dict:
            return check(**request)

    async def judge(case: Case) -> Reward:
        vars(module).update(dict.fromkeys(own, Here()))
        try:
            return await registry.verify(case.row, case.response)
        finally:
            vars(module).update(own)

    return judge


async def main(names: list[str]) -> None:
    if KNOWN != WHOLE:
        print("Only the known answers in tests/data: ../shared/data is absent and has more.\n")
    print("| known answers | answers | a second and core | bare | times | blocks, ms |")
    print("|---|---|---|---|---|---|")
    every = os.sched_getaffinity(0)
    for name in names:
        found = list(cases(name))
        os.sched_setaffinity(0, {min(every)})  # this process and all children, which start now
        await asyncio.gather(*map(verify, found[:AT_ONCE]))
        judged = await rate(verify, found)
        direct = bare(FILES[name])
        plain = await rate(direct, found) if direct else 0.0
        os.sched_setaffinity(0, every)
        blocks = await longest_block(verify, found)
        ratio = f"{plain:.0f} | {plain / judged:.1f}" if plain else "- | -"
        print(f"| {name} | {len(found)} | {judged:.0f} | {ratio} | {blocks:.0f} |", flush=True)
    for reason, count in FAILED.most_common():
        print(f"\n{count} times without a verdict: {reason}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:] or list(FILES)))
