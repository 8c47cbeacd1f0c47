"""Judges that are away, as the rollout workers report them: the run waits, and no deadline runs."""

import asyncio
import time
from collections import Counter
from typing import Any

from tqdm import tqdm

import envs
from envs.shared.judge import Report

TICK = 1.0  # seconds between two looks whether a judge is back
PATIENCE = 60.0  # seconds until an outage is told of again, or the next one; then as it lasts


class Outages:
    """What the workers say of their judges, and how long the run has waited for any of them."""

    def __init__(self) -> None:
        self.reports: dict[Any, Report] = {}  # by worker
        self.failures: Counter[str] = Counter()  # by "NAME/REASON", since the last `meters`
        self.since: float | None = None  # when somebody first said that a judge is away
        self.earlier = 0.0  # seconds of outages that are over
        self.metered = 0.0  # seconds of which `meters` has told
        self.tell_at = -PATIENCE
        self.told = False  # of the present outage

    def hear(self, worker: Any, report: Report) -> None:
        """Takes note of what a worker says."""
        old = self.reports.get(worker)
        self.reports[worker] = report
        self.failures += report.failures - (old.failures if old else Counter())
        self.look()

    def forget(self, worker: Any) -> None:
        """A worker is gone; its successor knows of no outage yet."""
        self.reports.pop(worker, None)
        self.look()

    def look(self) -> None:
        """Times the outage, and tells of it."""
        now = time.monotonic()
        if not self.away():
            if self.told and self.since is not None:
                tqdm.write(f"judges answer again, after {now - self.since:.0f} s")
            self.earlier = self.seconds()
            self.since, self.told = None, False
            return
        if self.since is None:
            self.since = now
        if now >= self.tell_at:
            tqdm.write(f"the run waits: {self.state()}")
            self.told = True
            self.tell_at = now + max(PATIENCE, now - self.since)

    def away(self) -> dict[str, str]:
        """The judges that are away by any worker's report, and what it says of each."""
        every = list(self.reports.values())
        return {name: text for report in every for name, text in report.away.items()}

    def state(self) -> str:
        """Which judges are away, for error messages; "" for none."""
        return "; ".join(f"judge {name!r} is away: {why}" for name, why in self.away().items())

    def seconds(self) -> float:
        """Seconds in which some judge was away, up to now."""
        return self.earlier + (time.monotonic() - self.since if self.since is not None else 0.0)

    def concern(self, row: dict) -> bool:
        """Whether a judge is away that the row needs."""
        away = {f"judges.{name}" for name in self.away()}
        return bool(away) and not away.isdisjoint(envs.needs(row))

    async def over(self, row: dict) -> None:
        """Waits until no judge is away that the row needs.

        No deadline bounds it: a worker that misses a judge looks for it again and again, and is
        heard.
        """
        while self.concern(row):
            await asyncio.sleep(TICK)

    def meters(self) -> dict[str, float]:
        """Seconds without a judge and failed calls since the last time; nothing where none were."""
        seconds, self.metered = self.seconds() - self.metered, self.seconds()
        failures, self.failures = self.failures, Counter()
        found = {f"judge_failures/{name}": float(count) for name, count in failures.items()}
        return found | ({"judge_seconds_away": seconds} if seconds else {})
