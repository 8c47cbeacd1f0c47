"""What environments need from outside this program: whether it is there, and what was seen of it.

A module that talks to something outside (a judge, the sandbox, Lean) offers a `Need`: it knows what
is missing and the remedy. An environment's `needs(row)` returns those that its row takes.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from settings.environment_services import Services

SILENCE = 20.0  # seconds without an answer of a server; then it has as long for a health check


class CheckerError(RuntimeError):
    """A check could not run: its processes do not start, die of any answer, or are starved."""


class Away(CheckerError):
    """A judge was away, and a call has waited for as long as it may. No row is at fault."""


@dataclass(frozen=True)
class Need:
    """Something outside this program that judging a row takes."""

    name: str  # in reports and metrics: "sandbox", "judges.general"; two of one name are equal
    check: Callable[[], str] = field(compare=False)  # why it is unavailable, and the remedy, or ""
    called: str = field(default="", compare=False)  # in error messages, if not by its name
    # Whether the nodes of a job may have it if the machine that submits the job lacks it.
    of_node: bool = field(default=True, compare=False)

    def __str__(self) -> str:
        return self.called or self.name

    def problem(self) -> str:
        """Why it is unavailable and how to fix it; "" if it is available, or taken for granted."""
        granted = any(is_granted(self) for is_granted in _granted)
        return "" if granted else self.check()


class Limits(NamedTuple):
    """What this process may use of servers outside."""

    seconds: float = 3600.0  # that a call may take
    processes: int = 1  # that divide a server's concurrency among them


class Report(NamedTuple):
    """What this process has seen of the judges, and of what else rows wait for."""

    away: dict[str, str]  # by need, "judges.NAME": its addresses, how long, the last failure
    failures: Counter[str]  # by "NAME/REASON", since this process started


_current = [Services()]
_limits = [Limits()]
_granted: list[Callable[[Need], bool]] = []  # by `granting`
REPORTS: list[Callable[[], Report]] = []  # of each mechanism that was imported


def configure(services: Services, limits: Limits | None = None) -> None:
    """Sets what the environments of this process use; None leaves the limits as they are."""
    _current[0] = services
    if limits:
        _limits[0] = limits


def current() -> Services:
    """The services of this process."""
    return _current[0]


def limits() -> Limits:
    """What this process may use of servers outside."""
    return _limits[0]


def patience() -> float:
    """SILENCE; less where a call may take little time."""
    return min(SILENCE, limits().seconds / 10)


def setting(name: str, called: str = "") -> Need:
    """The need for a setting of Services that must not be empty."""

    def check() -> str:
        value = getattr(current(), name)
        return "" if value else f"services.{name} = {value!r}, expected a value"

    return Need(name, check, called)


TOOL_PARSER = setting("tool_parser", "a parser of calls")


@contextlib.contextmanager
def granting(is_granted: Callable[[Need], bool]) -> Iterator[None]:
    """Inside the block, a need for which `is_granted` returns True is not checked."""
    _granted.append(is_granted)
    try:
        yield
    finally:
        _granted.remove(is_granted)


def report() -> Report:
    """What this process has seen so far."""
    reports = [of_mechanism() for of_mechanism in REPORTS]
    away = {need: state for found in reports for need, state in found.away.items()}
    return Report(away, sum((found.failures for found in reports), Counter()))
