"""A run whose rewards a judge gives, and what an outage of that judge costs it."""

import time
import zlib
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from support.judges import Judge
from support.program import Program, copy
from support.samples import asking

ENVIRONMENT = '''
"""Asks the judge, whose verdict is a function of row and answer."""

from envs import Reward
from envs.judge import judge

AGENTS = ("asks_judge",)


def needs(row):
    return (judge.need("general"),)


async def verify(row, response):
    messages = [{"role": "user", "content": f"{row['_line']} {response}"}]
    return Reward(await judge.ask("general", messages, {"[[YES]]": 1.0, "[[NO]]": 0.0}.get))
'''


def verdict(row: int, response: str) -> float:
    """The right reward of an answer to a line of the data."""
    return float(zlib.crc32(f"{row} {response}".encode()) % 2)


def reply(messages: list[dict]) -> str:
    """What the judge says."""
    row, _, response = messages[0]["content"].partition(" ")
    return "[[YES]]" if verdict(int(row), response) else "[[NO]]"


def rows(count: int) -> list[dict]:
    """Prompts of the environment."""
    return [asking(f"row {i}", "asks_judge") for i in range(1, count + 1)]


def fork(folder: Path) -> Path:
    """A copy of the project that has the environment."""
    (copy(folder) / "envs" / "asks_judge.py").write_text(ENVIRONMENT)
    return folder


class Endured(NamedTuple):
    """What became of a run."""

    told: str
    seconds: list[float]  # of each step
    away: float  # seconds, as the run counted them
    failures: Counter[str]  # calls, by "NAME/REASON"
    wrong: int  # rewards
    answers: int  # that were trained
    verdicts: int  # that the judge gave


def endure(cfg, root: Path, judge: Judge, fault: str, seconds: float) -> Endured:
    """Runs `cfg`, whose judge goes away after its first step for so many seconds.

    `fault` is "down", or one of support.judges.FAULTS. Fails where a slot was not trained once,
    with its own prompt, or where a prompt was dropped.
    """
    program = Program(cfg, root=root)
    try:
        program.wait_until(lambda: len(program.steps()) >= 1, 600)
        judge.down() if fault == "down" else judge.fail(fault)
        time.sleep(seconds)
        assert program.process.poll() is None, program.told()[-4000:]
        judge.up() if fault == "down" else judge.mend()
        program.succeeds(600)
    finally:
        program.stop()
    program.check_slots(cfg, rows=10**9)
    assert not program.lines("dropped.jsonl")
    lines = program.lines("rollouts.jsonl")
    steps = program.steps()
    name = "judge_failures/"
    failures = Counter()
    for step in steps:
        failures.update({k.removeprefix(name): n for k, n in step.items() if k.startswith(name)})
    return Endured(
        program.told(),
        [step["step_seconds"] for step in steps],
        sum(step.get("judge_seconds_away", 0.0) for step in steps),
        failures,
        sum(line["reward"] != verdict(line["row"], line["response"][0]) for line in lines),
        len(lines),
        len(judge.asked),
    )
