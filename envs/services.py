"""Stores this process's services, checks the ones that environments need, and reports outages.

A module that uses something outside this program (a judge, the sandbox, Lean) defines a `Need`,
which checks that it is available and names the remedy if it is not. An environment's `needs(row)`
returns the Needs for judging that row.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from settings.environment_services import Services

SILENCE = 20.0  # seconds without an answer before a health check, which may take as long again


class CheckerError(RuntimeError):
    """Raised if a check could not run: its processes do not start, always die, or are starved."""


class Away(CheckerError):
    """Raised if a call has waited too long for an unavailable judge. No row is at fault."""


@dataclass(frozen=True)
class Need:
    """Something outside this program that judging a row requires."""

    # In reports and metrics: "sandbox", "judges.general". Needs with the same name are equal.
    name: str
    check: Callable[[], str] = field(compare=False)  # returns a problem and its remedy, or ""
    called: str = field(default="", compare=False)  # in error messages, in place of the name
    # True if the nodes of a job may have it even if the machine that submits the job does not.
    of_node: bool = field(default=True, compare=False)

    def __str__(self) -> str:
        return self.called or self.name

    def problem(self) -> str:
        """Returns why it is unavailable and how to fix it; "" if it is available or granted."""
        granted = any(is_granted(self) for is_granted in _granted)
        return "" if granted else self.check()


class Limits(NamedTuple):
    """Limits on this process's use of servers."""

    seconds: float = 3600.0  # seconds that a call may take
    processes: int = 1  # processes that share a server's concurrency


class Report(NamedTuple):
    """Outages and failures of services, and starved checks, that this process has seen."""

    away: dict[str, str]  # by need, "judges.NAME": its addresses, the downtime, the last failure
    failures: Counter[str]  # by "NAME/REASON", since this process started
    starved: Counter[str] = Counter()  # by "ENV/OUTCOME", since this process started


_current = [Services()]
_limits = [Limits()]
_granted: list[Callable[[Need], bool]] = []  # predicates set by `granting`
REPORTS: list[Callable[[], Report]] = []  # report functions of the imported mechanisms
_starved: Counter[str] = Counter()  # checks of this process that starved, by "ENV/OUTCOME"
# `agent_ref.name` of the row that this task judges. Tasks and threads that it starts inherit it.
ENVIRONMENT: ContextVar[str] = ContextVar("ENVIRONMENT", default="none")


def configure(services: Services, limits: Limits | None = None) -> None:
    """Sets the services and limits of this process; `limits=None` leaves the limits unchanged."""
    _current[0] = services
    if limits:
        _limits[0] = limits


def current() -> Services:
    """Returns this process's services."""
    return _current[0]


def limits() -> Limits:
    """Returns the limits for this process's use of servers."""
    return _limits[0]


def patience() -> float:
    """Returns SILENCE, or less if a call may take only a short time."""
    return min(SILENCE, limits().seconds / 10)


def setting(name: str, called: str = "") -> Need:
    """Returns the Need for a Services setting that must not be empty."""

    def check() -> str:
        value = getattr(current(), name)
        return "" if value else f"services.{name} = {value!r}, expected a value"

    return Need(name, check, called)


TOOL_PARSER = setting("tool_parser", "a tool-call parser")


@contextlib.contextmanager
def granting(is_granted: Callable[[Need], bool]) -> Iterator[None]:
    """Skips, inside the block, the check of each Need for which `is_granted` returns True."""
    _granted.append(is_granted)
    try:
        yield
    finally:
        _granted.remove(is_granted)


def count_starved(outcome: Literal["timeout", "error"]) -> None:
    """Counts a check of this task's environment that other processes starved of CPU time.

    The outcome is "timeout" if the answer counts as too slow, or "error" if it gets no verdict.
    """
    _starved[f"{ENVIRONMENT.get()}/{outcome}"] += 1


def report() -> Report:
    """Returns the combined report of all mechanisms, and the starved checks."""
    away: dict[str, str] = {}
    failures: Counter[str] = Counter()
    for report_of_mechanism in REPORTS:
        found = report_of_mechanism()
        away |= found.away
        failures += found.failures
    return Report(away, failures, _starved.copy())
