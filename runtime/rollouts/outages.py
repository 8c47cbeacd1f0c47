"""Servers that are away, as rollout workers report them: the run waits, and no deadline runs."""

import asyncio
import time
from collections import Counter
from typing import Any

from tqdm import tqdm

from envs import registry
from envs.services import Report

LOOK_SECONDS = 1.0  # between two looks whether a server is back
PATIENCE = 60.0  # seconds until the outage message repeats, then at doubling intervals


class Outages:
    """What the workers report of their servers, and how long the run has waited for any of them."""

    def __init__(self) -> None:
        self.reports: dict[Any, Report] = {}  # by worker
        self.troubled: dict[Any, dict[str, str]] = {}  # what is away, by the worker that reports it
        self.failures: Counter[str] = Counter()  # by "NAME/REASON", since the last `meters`
        self.since: float | None = None  # when a worker first reported that one is away
        self.earlier = 0.0  # seconds of outages that are over
        self.metered = 0.0  # seconds of which `meters` has told
        self.tell_at = -PATIENCE
        self.told = False  # of the present outage

    def receive(self, worker: Any, report: Report) -> None:
        """Takes note of a worker's report."""
        old = self.reports.get(worker)
        self.reports[worker] = report
        self.troubled.pop(worker, None)
        if report.away:
            self.troubled[worker] = report.away
        self.failures += report.failures - (old.failures if old else Counter())
        self.look()

    def forget(self, worker: Any) -> None:
        """Forgets a worker that is gone; its successor has seen no outage yet."""
        self.reports.pop(worker, None)
        self.troubled.pop(worker, None)
        self.look()

    def look(self) -> None:
        """Times the outage, and prints it."""
        now = time.monotonic()
        if not self.away():
            if self.told and self.since is not None:
                tqdm.write(f"all answer again, after {now - self.since:.0f} s")
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
        """What is away by any worker's report: need -> addresses, how long, the last failure."""
        every = list(self.troubled.values())  # hundreds of workers report nothing
        return {need: text for away in every for need, text in away.items()}

    def state(self) -> str:
        """Which servers are away, for error messages; "" for none."""
        return "; ".join(f"{need} is away: {why}" for need, why in self.away().items())

    def seconds(self) -> float:
        """Seconds in which some server was away, up to now."""
        return self.earlier + (time.monotonic() - self.since if self.since is not None else 0.0)

    def concern(self, row: dict) -> bool:
        """Whether a server is away that the row needs."""
        away = self.away()
        if not away:
            return False
        needs = registry.declared_needs(row)
        return any((need if isinstance(need, str) else need.name) in away for need in needs)

    async def over(self, row: dict) -> None:
        """Waits until no server is away that the row needs.

        No deadline bounds it: a worker that misses a server looks for it again and again, and
        reports it.
        """
        while self.concern(row):
            await asyncio.sleep(LOOK_SECONDS)

    def meters(self) -> dict[str, float]:
        """Seconds without a server and failed calls since the last time; nothing for none."""
        seconds, self.metered = self.seconds() - self.metered, self.seconds()
        failures, self.failures = self.failures, Counter()
        found = {f"judge_failures/{name}": float(count) for name, count in failures.items()}
        return found | ({"judge_seconds_away": seconds} if seconds else {})
