"""Describes rollouts: lengths of prompts and answers, seconds that environments and judges take."""

import asyncio
import dataclasses
import json
import math
import random
from collections import deque
from collections.abc import Callable
from pathlib import Path

from core.errors import InputError

SPREAD = 1.0  # assumed: spread of the logarithm of a response's length
ATTEMPTS = 60  # halvings of an interval: to the last bit


@dataclasses.dataclass(frozen=True)
class Latency:
    """Seconds that vary: log-normal around a mean, or always the mean if `spread` is 0."""

    mean: float = 0.0
    spread: float = 0.5  # spread of the logarithm

    def draw(self, numbers: random.Random) -> float:
        """Draws the seconds of one call."""
        if not self.mean or not self.spread:
            return self.mean
        return self.mean * math.exp(numbers.gauss(-(self.spread**2) / 2, self.spread))


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Tokens of responses: log-normal and cut at `limit`, or one of `known`."""

    mu: float
    spread: float
    limit: int
    known: tuple[int, ...] = ()

    def draw(self, numbers: random.Random) -> int:
        """Draws the tokens of one response."""
        if self.known:
            return min(numbers.choice(self.known), self.limit)
        return max(1, min(self.limit, int(math.exp(numbers.gauss(self.mu, self.spread)))))

    @classmethod
    def with_mean(cls, mean: float, limit: int, spread: float = SPREAD) -> "Lengths":
        """Returns lengths with this mean after cutting. Raises InputError if no lengths have it."""
        if not 1 <= mean < limit:
            raise InputError(f"mean = {mean:g}: expected at least 1 and below the limit, {limit}")
        low, high = math.log(mean) - 20, math.log(limit) + 20 * spread
        for _ in range(ATTEMPTS):
            mu = (low + high) / 2
            low, high = (mu, high) if cut_mean(mu, spread, limit) < mean else (low, mu)
        return cls((low + high) / 2, spread, limit)

    @classmethod
    def of_run(cls, path: str, limit: int) -> "Lengths":
        """Reads the lengths of a rollouts.jsonl, whose `versions` count the sampled tokens.

        Raises InputError naming the first line that is not a rollout.
        """
        known: list[int] = []
        where = path
        try:
            for number, line in enumerate(Path(path).read_text().splitlines(), 1):
                where = f"{path}:{number}"
                known.append(sum(count for _, count in json.loads(line)["versions"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{where}: expected lines of a rollouts.jsonl: {error!r}") from None
        known = [tokens for tokens in known if tokens]
        if not known:
            raise InputError(f"{path} holds no answer: expected lines of a rollouts.jsonl")
        return cls(0.0, 0.0, limit, tuple(known))


def cut_mean(mu: float, spread: float, limit: float) -> float:
    """Returns the mean of min(X, limit), log X being normal around mu."""
    if not spread:
        return min(math.exp(mu), limit)
    z = (math.log(limit) - mu) / spread
    below = math.exp(mu + spread**2 / 2) * normal(z - spread)
    return below + limit * (1 - normal(z))


def normal(z: float) -> float:
    """Returns the standard normal distribution function at z."""
    return math.erfc(-z / math.sqrt(2)) / 2


@dataclasses.dataclass(frozen=True)
class Workload:
    """One kind of prompt."""

    lengths: Lengths
    prompt: int = 1000  # tokens of a prompt
    reuses_prompts: bool = True  # a prompt is read once for all samples of its group
    environment: Latency = Latency()  # seconds per sample
    turns: int = 1  # turns into which a response is cut, with a tool between two of them
    tool: Latency = Latency()
    judge: Latency = Latency()
    judged_at_once: int = 10**9  # calls that the judges answer at a time; others wait
    seed: int = 1

    def of_group(self, prompt: int, n: int) -> list[int]:
        """Returns the response tokens of a prompt's n samples; the same at every try."""
        numbers = random.Random(self.seed * 1_000_003 + prompt)
        return [self.lengths.draw(numbers) for _ in range(n)]


@dataclasses.dataclass(frozen=True)
class Recorded(Workload):
    """The answers that a run had: `answers` holds the tokens of slot i's samples in place i."""

    answers: tuple[tuple[int, ...], ...] = ()

    def of_group(self, prompt: int, n: int) -> list[int]:
        """Returns the response tokens of the slot with this line; no row may be dropped."""
        return list(self.answers[prompt - 1])


class Judges:
    """Servers that answer a number of calls at a time, first come first served."""

    def __init__(self, latency: Latency, at_once: int, seed: int):
        self.latency = latency
        self.free = at_once
        self.queue: deque[Callable[[], None]] = deque()
        self.numbers = random.Random(seed)
        self.is_away = False

    def ask(self, done: Callable[[], None]) -> None:
        """Calls `done` once a judge has answered."""
        self.queue.append(done)
        self._serve()

    def set_away(self, is_away: bool) -> None:
        """Starts or ends an outage: calls wait, and none is lost."""
        self.is_away = is_away
        self._serve()

    def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        while self.queue and self.free and not self.is_away:
            self.free -= 1
            loop.call_later(self.latency.draw(self.numbers), self._end, self.queue.popleft())

    def _end(self, done: Callable[[], None]) -> None:
        self.free += 1
        done()
        self._serve()
