"""`check`: counts the rows of files, and finds everything that is missing for training."""

import json
import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import tyro

from core.errors import InputError
from envs import check_rows, registry
from envs import services as configured
from envs.check_rows import parse
from envs.needs import needs_of
from envs.services import Need
from prep import files
from prep.placeholders import FIELD
from settings.config import RunSettings
from settings.environment_services import Services

NAMELESS = "(no agent)"


@dataclass
class Found:
    """One agent's rows in a file."""

    rows: int = 0
    datasets: Counter[str] = field(default_factory=Counter)
    bad: Counter[str] = field(default_factory=Counter)  # by error
    first: dict[str, str] = field(default_factory=dict)  # error -> place and message of the first
    needs: set[Need] = field(default_factory=set)  # needs of good rows


@dataclass
class Missing:
    """A need that is not met, and the agents whose rows have it."""

    problem: str
    agents: set[str] = field(default_factory=set)


class Summary(NamedTuple):
    """A file's contents, one line per agent, and what prevents training."""

    lines: list[str]
    problems: list[str]  # with the rows
    missing: dict[str, Missing]  # by the need's name
    rows: int = 0  # that can be trained on

    def add_missing(self, others: dict[str, Missing]) -> None:
        """Adds the unmet needs of another file."""
        for name, other in others.items():
            self.missing.setdefault(name, Missing(other.problem)).agents.update(other.agents)

    def needs_missing(self) -> list[str]:
        """Describes each unmet need once, however many agents have it."""
        found = []
        for name, need in sorted(self.missing.items()):
            first, *others = sorted(need.agents)
            who = f"{first} and {len(others)} more lack" if others else f"{first} lacks"
            found.append(f"{who} {name}: {need.problem}")
        return found


@dataclass(frozen=True)
class Check:
    """Prints what row files contain and what is missing; exits with 0 if they can be trained on."""

    files: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="FILE...")]
    """JSONL files of rows."""
    services: tuple[str, ...] = ()
    """`services` settings that the run will have; it is a problem if rows need any other."""
    nemo_gym: tuple[str, ...] = ()
    """NeMo-Gym head servers, as in the run's services.nemo_gym."""
    max_bad_rows: int = 0
    """Number of bad rows that a file may contain, as in the run's data.max_bad_rows."""

    def run(self) -> int:
        """Prints the contents and the problems."""
        if not self.files:
            raise InputError("check: expected the path of a JSONL file")
        try:
            servers = Services(nemo_gym=self.nemo_gym)
        except ValueError as error:
            raise InputError(f"--nemo_gym: {error}") from None
        if self.nemo_gym:
            configured.configure(servers)
        every = Summary([], [], {})
        for path in self.files:
            found = summary(path, self.max_bad_rows, self.services)
            print("\n".join([f"{path}: {found.lines[0]}", *found.lines[1:]]))
            every.problems.extend(found.problems)
            every.add_missing(found.missing)
        problems = [f"PROBLEM: {problem}" for problem in every.problems + every.needs_missing()]
        print("\n".join(problems or ["all rows can be trained on"]))
        return int(bool(problems))


def summary(
    path: str, max_bad_rows: int, services: Collection[str] = (), cfg: RunSettings | None = None
) -> Summary:
    """Summarises a file. Needed services must be configured or listed in `services`.

    With `cfg`, a prompt must fit the run's sampling settings. Raises InputError if the file cannot
    be read.
    """
    known = files.served()
    found = survey(path, cfg)
    rows = sum(agent.rows for agent in found.values())
    bad = sum(agent.bad.total() for agent in found.values())
    text = [f"{rows:,} rows" + (f", {bad:,} of them bad" if bad else "")]
    problems = [] if rows > bad else [f"{path}: holds no good rows, expected at least one"]
    lacking: dict[str, Missing] = {}
    for name, agent in sorted(found.items()):
        module = known.get(name)
        served = f"envs/{module}.py" if module else elsewhere(name)
        kinds = [f"{kind} {count:,}" for kind, count in agent.datasets.most_common(3) if kind]
        if len(agent.datasets) > 3:
            kinds.append("...")
        shown = f"; {', '.join(kinds)}" if kinds else ""
        text.append(f"  {name:<40} {agent.rows:>9,}  {served}{shown}")
        if bad > max_bad_rows:
            for kind, count in agent.bad.most_common():
                problems.append(f"{agent.first[kind]} ({count:,} rows)")
        for need in sorted(agent.needs, key=lambda need: need.name):
            has = {need.name, need.name.partition(".")[0]} & set(services)
            problem = "" if has else need.problem()
            missing = ", missing" if problem else ""
            text.append(f"  {'':<40} {'':>9}  needs {need.name}{missing}")
            if problem:
                lacking.setdefault(need.name, Missing(problem)).agents.add(name)
    return Summary(text, problems, lacking, rows - bad)


def elsewhere(agent: str) -> str:
    """Describes the server of an agent that no module of envs/ declares."""
    if not configured.current().nemo_gym:
        return "no environment serves it"
    try:
        return f"served at {registry.environment(agent).place(agent)}"
    except (OSError, ValueError):
        return "no server has it"


def survey(path: str, cfg: RunSettings | None = None) -> dict[str, Found]:
    """Returns a file's rows by agent; every row is checked as a run would check it."""
    found: dict[str, Found] = {}
    for line in files.lines(path):
        problem = ""
        needs: tuple[Need, ...] = ()
        try:
            row = loose(line.text) if FIELD in line.text else {}
            if FIELD in row:
                raise ValueError(f"{FIELD} is not filled: data_prep.py blend fills it")
            row = parse(line.text, None)
            needs = needs_of(row)
            if cfg:
                check_rows.check_sampling(row, len(line.text.encode()), cfg)
        except (ValueError, RecursionError) as error:
            row, problem = loose(line.text), str(error)
        agent = found.setdefault(files.agent(row) or NAMELESS, Found())
        agent.rows += 1
        agent.needs |= set(needs)
        agent.datasets[str(row.get("dataset") or "")] += 1
        if problem:
            # "responses_create_params.input[3].role is 5, expected ..." counts under its field.
            kind = re.sub(r"\[\d+\]", "[]", re.split(r" is |: ", problem)[0])
            agent.bad[kind] += 1
            agent.first.setdefault(kind, f"{line.place}: {problem}")
    return found


def loose(text: str) -> dict:
    """Returns the JSON object of a line that may be malformed; {} if there is none."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        row = {}
    return row if isinstance(row, dict) else {}
