"""Makes the run wait while rollout workers report that servers are down; deadlines stop then.

Also adds up the failed calls and the starved checks that the workers report.
"""

import asyncio
import time
from collections import Counter
from typing import TYPE_CHECKING

from tqdm import tqdm

from envs import registry
from envs.services import Report

if TYPE_CHECKING:
    from ray.actor import ActorHandle

LOOK_SECONDS = 1.0  # seconds between two checks of whether a server is back
PATIENCE = 60.0  # seconds until the outage message is repeated, then at doubling intervals


class Outages:
    """The workers' reports of their servers, and how long the run has waited for any server."""

    def __init__(self) -> None:
        self.reports: dict[ActorHandle, Report] = {}  # by worker
        self.troubled: dict[ActorHandle, dict[str, str]] = {}  # by worker: what it reports as down
        self.failures: Counter[str] = Counter()  # by "NAME/REASON", since the last `meters`
        self.starved: Counter[str] = Counter()  # by "ENV/OUTCOME", since the last `meters`
        self.since: float | None = None  # when the current outage was first reported
        self.earlier = 0.0  # seconds of past outages
        self.metered = 0.0  # seconds that `meters` has returned so far
        self.tell_at = -PATIENCE  # when to print a message next
        self.told = False  # True once the current outage has been printed

    def receive(self, worker: "ActorHandle", report: Report) -> None:
        """Notes a worker's report."""
        known = self.reports.get(worker) or Report({}, Counter())
        self.reports[worker] = report
        self.troubled.pop(worker, None)
        if report.away:
            self.troubled[worker] = report.away
        self.failures += report.failures - known.failures
        self.starved += report.starved - known.starved
        self.look()

    def forget(self, worker: "ActorHandle") -> None:
        """Forgets a worker that is gone; its successor has seen no outage yet."""
        self.reports.pop(worker, None)
        self.troubled.pop(worker, None)
        self.look()

    def look(self) -> None:
        """Times the outage, and prints its state now and then."""
        now = time.monotonic()
        if not self.away():
            if self.told and self.since is not None:
                tqdm.write(f"all servers answer again, after {now - self.since:.0f} s")
            self.earlier = self.seconds()
            self.since = None
            self.told = False
            return
        if self.since is None:
            self.since = now
        if now >= self.tell_at:
            tqdm.write(f"the run is waiting: {self.state()}")
            self.told = True
            self.tell_at = now + max(PATIENCE, now - self.since)

    def away(self) -> dict[str, str]:
        """Returns what workers report as down: need -> addresses, how long, last failure."""
        found: dict[str, str] = {}
        for away in self.troubled.values():  # empty in most runs, however many workers they have
            found |= away
        return found

    def state(self) -> str:
        """Returns which servers are down, for error messages; "" if all answer."""
        return "; ".join(f"{need} is down: {why}" for need, why in self.away().items())

    def seconds(self) -> float:
        """Returns the seconds during which some server was down, up to now."""
        if self.since is None:
            return self.earlier
        return self.earlier + (time.monotonic() - self.since)

    def concern(self, row: dict) -> bool:
        """Returns True if a server that the row needs is down."""
        away = self.away()
        if not away:
            return False
        for need in registry.declared_needs(row):
            name = need if isinstance(need, str) else need.name
            if name in away:
                return True
        return False

    async def over(self, row: dict) -> None:
        """Waits until all servers that the row needs are back.

        No deadline bounds the wait: a worker that misses a server looks for it again and again, and
        reports when it is back.
        """
        while self.concern(row):
            await asyncio.sleep(LOOK_SECONDS)

    def meters(self) -> dict[str, float]:
        """Returns seconds without a server, failed calls and starved checks since the last call.

        A count of 0 is left out.
        """
        seconds = self.seconds()
        away = seconds - self.metered
        self.metered = seconds
        found: dict[str, float] = {}
        for name, count in self.failures.items():
            found[f"judge_failures/{name}"] = float(count)
        for name, count in self.starved.items():
            found[f"starved_checks/{name}"] = float(count)
        self.failures = Counter()
        self.starved = Counter()
        if away:
            found["judge_seconds_away"] = away
        return found
