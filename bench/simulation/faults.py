"""Injects faults: processes are lost independently, at a rate per hour."""

import asyncio
import dataclasses
import math
import random
from typing import NamedTuple

from bench.simulation.simulated_actors import EngineActor, Lost, Stage
from core.errors import InputError

KINDS = {
    "engine": "an engine dies",
    "hang": "an engine neither works nor answers",
    "worker": "a rollout worker dies, with the drafts that it has",
    "judge": "all judges are down for the seconds after the x: judge=0.5x600",
}

LOOK = 0.01  # seconds between two checks of the engines' version


class Strike(NamedTuple):
    """An engine's death at a known moment: a number of seconds after a version has arrived."""

    version: int
    seconds: float
    lost: frozenset[int] = frozenset()  # slots that it works on
    kept: frozenset[int] = frozenset()  # slots that another engine works on


@dataclasses.dataclass(frozen=True)
class Faults:
    """Faults per hour of the whole run, by kind; and single faults."""

    rates: dict[str, float] = dataclasses.field(default_factory=dict)
    outage: float = 600.0  # seconds that judges are down
    seed: int = 1
    strikes: tuple[Strike, ...] = ()

    @classmethod
    def read(cls, text: str) -> "Faults":
        """Parses engine=1,judge=0.5x600: each kind, at its rate per hour. Raises InputError."""
        rates: dict[str, float] = {}
        outage = cls.outage
        for part in filter(None, text.split(",")):
            kind, _, amount = part.partition("=")
            rate, _, seconds = amount.partition("x")
            try:
                if kind not in KINDS or (seconds and kind != "judge"):
                    raise ValueError
                rates[kind] = float(rate)
                outage = float(seconds or outage)
                if not (0 <= rates[kind] < 3600 and 0 < outage < math.inf):
                    raise ValueError
            except ValueError:
                expected = "expected KIND=TIMES AN HOUR, of " + ", ".join(KINDS)
                raise InputError(f"--faults {text!r}: {part!r}: {expected}") from None
        return cls(rates, outage)

    def start(self, stage: Stage) -> list[asyncio.Task]:
        """Returns tasks that cause faults until they are cancelled."""
        repeated = [self._repeat(stage, kind, rate) for kind, rate in self.rates.items() if rate]
        return [
            asyncio.create_task(task)
            for task in (*repeated, *(once(stage, strike) for strike in self.strikes))
        ]

    async def _repeat(self, stage: Stage, kind: str, rate: float) -> None:
        numbers = random.Random(f"{self.seed} {kind}")
        while True:
            await asyncio.sleep(numbers.expovariate(rate / 3600))
            if kind == "judge":
                stage.deaths[kind] += 1
                stage.judges.set_away(True)
                await asyncio.sleep(self.outage)
                stage.judges.set_away(False)
                continue
            those = stage.workers if kind == "worker" else stage.engines
            if not those:
                continue
            stage.deaths[kind] += 1
            victim = numbers.choice(those)
            if kind == "hang":
                victim.hang()
            else:
                victim.die(Lost(f"{KINDS[kind]}"))


async def once(stage: Stage, due: Strike) -> None:
    """Kills the engine for which `due` was recorded."""
    while not any(engine.version >= due.version for engine in stage.engines):
        await asyncio.sleep(LOOK)
    await asyncio.sleep(due.seconds)

    def likeness(engine: EngineActor) -> int:
        slots = {group.slot.number for group in engine.groups}
        return len(slots & due.lost) - len(slots & due.kept)

    stage.deaths["engine"] += 1
    max(stage.engines, key=likeness).die(Lost(KINDS["engine"]))
