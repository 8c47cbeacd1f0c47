"""Judges the same answers by NeMo-Gym's own code and by ours, and prints where they agree.

    python tests/oracle.py VENV [ENVIRONMENT ...]

VENV is a virtual environment with nemo-gym 0.4.0, and what those of its resources servers need that
judge: math-verify==0.8.0, openapi-schema-validator==0.6.3, xmltodict==1.0.2, reasoning-gym,
numpy==2.2.6, pandas, tiktoken, httpx, rich; from a repository, verifiable-instructions. A server
that cannot be imported is named and left out. The answers are those of tests/support/oracle/.

Where a judge is asked, both sides get the same replies, ours by the real client from a server of
recorded ones. The names with "recorded" have what judges said in NeMo-Gym's example rollouts and
unit tests. The exit status is 1 where rewards differ and no line of
tests/support/oracle/differences.py says why.
"""

import asyncio
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from envs import registry, services  # noqa: E402
from rollout.response import Response  # noqa: E402
from settings.environment_services import Services  # noqa: E402
from support.oracle.cases import ENVIRONMENTS, Case, cases  # noqa: E402
from support.oracle.differences import EXPLAINED  # noqa: E402
from support.oracle.our_rewards import Recorded, recorded  # noqa: E402

THEIRS = ROOT / "tests/support/oracle/nemo_gym_rewards.py"
AT_ONCE = 2
LINE = "{:26} {:>5} {:>6} {:>9} {:>11} {:>10}"
HEAD = ("environment", "cases", "equal", "explained", "unexplained", "not judged")


class Absent(Exception):
    """A server of NeMo-Gym's that does not start."""


def theirs(venv: Path, name: str, given: list[Case]) -> list[float | str]:
    """NeMo-Gym's rewards, or why it gives none. Raises Absent."""
    environment = ENVIRONMENTS[name]
    fields = ("row", "text", "calls", "replies", "config", "group")
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, "cases"), Path(folder, "rewards")]
        made = [json.dumps({key: getattr(case, key) for key in fields}) for case in given]
        paths[0].write_text("\n".join(made))
        config = environment.config or environment.server
        command = [venv / "bin/python", THEIRS, environment.server, config, *paths]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=1800)
        if ran.returncode:
            raise Absent(ran.stderr.strip().rpartition("\n")[2])
        return [json.loads(line) for line in paths[1].read_text().splitlines()]


def ours(name: str, given: list[Case]) -> list[float | str]:
    """Our rewards, or why we refuse the row."""

    async def every(judge: Recorded) -> list[float | str]:
        width = asyncio.Semaphore(1 if any(case.replies for case in given) else AT_ONCE)

        async def one(case: Case) -> float | str:
            async with width:
                return await our(judge, ENVIRONMENTS[name].agent, case)

        return await asyncio.gather(*map(one, given))

    with recorded() as judge:
        return asyncio.run(every(judge))


async def our(judge: Recorded, agent: str, case: Case) -> float | str:
    """Our reward for an answer, or why there is none: a bad row, or a machine that is busy."""
    row = case.row | {"agent_ref": {"name": agent}}
    read = Response.of(case.text)
    calls = [call | {"type": "function_call"} for call in case.calls]
    response = Response(case.text, read.reasoning, read.content, calls, read.malformed)
    try:
        registry.environment(agent).check(row)
        if case.group:
            return (await judge.rewards(row, case.group, case))[case.group.index(case.text)]
        if case.replies:
            return await judge.reward(row, response, case)
        return (await registry.verify(row, response)).value
    except (ValueError, services.CheckerError) as error:
        return str(error)


def compared(venv: Path, name: str) -> tuple[Counter, Counter]:
    """How many answers are judged alike and otherwise, and the reasons for the others."""
    (gym,) = venv.glob("lib/python3*/site-packages")
    counts, reasons = Counter(), Counter()
    given = list(cases(name, gym))
    rewards = theirs(venv, name, given)
    for case, their, own in zip(given, rewards, ours(name, given), strict=True):
        counts["cases"] += 1
        if isinstance(their, str) or isinstance(own, str):
            counts["not judged"] += 1
            reasons[f"not judged: {their if isinstance(their, str) else own}"[:120]] += 1
        elif abs(their - own) < 1e-6:
            counts["equal"] += 1
        elif reason := explained(name, case, their, own):
            counts["explained"] += 1
            reasons[reason] += 1
        else:
            counts["unexplained"] += 1
            print(f"{name}: {case.source}: there {their}, here {own}: {shown(case)}")
    return counts, reasons


def explained(name: str, case: Case, their: float, own: float) -> str:
    """Why two rewards differ; "" where nobody has said."""
    for environment, holds, reason in EXPLAINED:
        if name.startswith(environment) and holds(case, their, own):
            return reason
    return ""


def shown(case: Case) -> str:
    """An answer in a line."""
    gold = case.row.get("expected_answer", case.row.get("answer"))
    return f"{case.text[-300:]!r} {json.dumps(case.calls)[:300]}, expected {str(gold)[:100]!r}"


def main(venv: str, *chosen: str) -> int:
    """Prints the table; returns the exit status."""
    (gym,) = Path(venv).glob("lib/python3*/site-packages")
    office = gym / "resources_servers/workplace_assistant/csv_data/processed"
    services.configure(Services(workplace=str(office)), services.Limits(600.0))
    table, notes = [LINE.format(*HEAD)], []
    total = 0
    for name in chosen or ENVIRONMENTS:
        try:
            counts, reasons = compared(Path(venv).absolute(), name)
        except Absent as error:
            table.append(f"{name:26} not compared: {error}")
            continue
        total += counts["unexplained"]
        table.append(LINE.format(name, *(counts[column] for column in HEAD[1:])))
        notes += [f"{name}: {n}: {reason}" for reason, n in reasons.most_common()]
    print("\n".join([*table, "", *notes]))
    return int(total > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
