"""What environments need from outside this program: whether it is there, and what was seen of it.

A mechanism (judges, the sandbox, Lean, NeMo-Gym) registers here when an environment imports it. So
a process loads what its rows need, and nothing else.
"""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from settings.environment_services import Services

SILENCE = 20.0  # seconds without an answer of a server; then it has as long for a health check


class CheckerError(RuntimeError):
    """A check could not run: its processes do not start, die of any answer, or are starved."""


class Away(CheckerError):
    """A judge was away, and a call has waited for as long as it may. No row is at fault."""


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
CHECKS: dict[str, Callable[[str], str]] = {}  # need -> why it cannot be used, "" for nothing
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


def problem(need: str) -> str:
    """Why a needed service is unavailable and how to fix it; "" if it is available.

    `need` is what a mechanism registers, such as "sandbox", or "judges.NAME", which asks "judges"
    about NAME; or else the name of a setting in Services that must not be empty.
    """
    mechanism, _, name = need.partition(".")
    if mechanism in CHECKS:
        return CHECKS[mechanism](name)
    value = getattr(current(), need)
    return "" if value else f"services.{need} = {value!r}, expected a value"


def report() -> Report:
    """What this process has seen so far."""
    reports = [of_mechanism() for of_mechanism in REPORTS]
    away = {need: state for found in reports for need, state in found.away.items()}
    return Report(away, sum((found.failures for found in reports), Counter()))
