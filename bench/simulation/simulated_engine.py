"""Simulates an engine on virtual time: all running sequences get a token at each of its steps.

Between two moments at which a sequence starts or ends, the seconds of a step depend on the number
of sequences and on their tokens. The next end is known, and nothing happens before it.
"""

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Callable

from bench.simulation.hardware import Hardware

NEARLY = 1e-6  # tokens: fewer than this count as none


class Sequence:
    """One answer that an engine writes."""

    __slots__ = ("began", "context", "done", "ends", "is_running", "left", "prefilled")

    def __init__(self, context: int, left: int, prefilled: int, done: Callable[[], None]):
        self.context = context  # tokens of prompt and answer so far
        self.left = left  # tokens that are still to be written, as of when it last began to run
        self.prefilled = prefilled  # tokens of the context that the engine has read already
        self.done = done
        self.ends = 0.0  # the engine's step count at which it ends
        self.began = -1.0  # virtual seconds at which it first ran; -1: it has not
        self.is_running = False


class Engine:
    """Sequences that wait and that run, first come first served; the latest gives way to others."""

    def __init__(self, hardware: Hardware, loop: asyncio.AbstractEventLoop):
        self.hardware = hardware
        self.loop = loop
        self.waiting: deque[Sequence] = deque()
        self.running: list[tuple[float, int, Sequence]] = []  # a heap by end
        self.stack: list[Sequence] = []  # in the order in which they began
        self.numbers = itertools.count()
        self.batch = 0
        self.context = 0.0  # tokens of all running sequences
        self.steps = 0.0  # steps of the engine so far
        self.reading = 0.0  # seconds of reading that prompts still need
        self.since = 0.0  # start of the current stretch
        self.until = 0.0  # end of the stretch
        self.stretch = 0.0  # steps in the stretch
        self.paused = False
        self.is_planned = False
        self.timer: asyncio.TimerHandle | None = None
        self.busy = 0.0  # seconds with a sequence
        self.filled = 0.0  # sequence-seconds
        self.tokens = 0.0  # tokens written
        self.reread = 0.0  # tokens of sequences that gave way, or moved here
        self.history: list[tuple[float, int]] | None = None  # (time, batch); None: not kept

    def add(self, sequence: Sequence) -> None:
        """Adds a sequence to be written."""
        self.waiting.append(sequence)
        self.plan_soon()

    def set_paused(self, paused: bool) -> None:
        """Stops making steps, or continues."""
        self.settle()
        self.paused = paused
        self.plan_soon()

    def drop(self, sequence: Sequence) -> None:
        """Drops a sequence that is no longer needed."""
        self.settle()
        if sequence.is_running:
            self._take_out(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self.plan_soon()

    def stop(self) -> None:
        """Stops the engine, which writes nothing more."""
        self.settle()
        for _, _, sequence in self.running:
            if sequence.is_running:
                self._take_out(sequence)
        self.waiting.clear()
        self.paused = True
        self.running.clear()
        self.plan_soon()

    def plan_soon(self) -> None:
        """Plans once, after everything that happens at this moment."""
        if not self.is_planned:
            self.is_planned = True
            self.loop.call_soon(self.plan)

    def settle(self) -> None:
        """Updates the counts to the current time."""
        now = self.loop.time()
        seconds = now - self.since
        if seconds <= 0:
            return
        if self.batch:
            self.busy += seconds
            self.filled += seconds * self.batch
        if self.stretch and self.until > self.since:
            part = min(1.0, seconds / (self.until - self.since))
            made = self.stretch * part
            self.reading *= 1 - part
            self.steps += made
            self.context += made * self.batch
            self.tokens += made * self.batch
            self.stretch -= made
        self.since = now

    def plan(self) -> None:
        """Removes finished sequences, starts those that fit, and looks ahead to the next end."""
        self.is_planned = False
        self.settle()
        if self.timer:
            self.timer.cancel()
            self.timer = None
        self.stretch = 0.0
        ended = self._ended()
        if not self.paused:
            self._make_room()
            self._admit()
            self._look_ahead()
        if self.history is not None:
            self.history.append((self.since, self.batch))
        for sequence in ended:
            sequence.done()

    def _ended(self) -> list[Sequence]:
        ended = []
        while self.running:
            ends, _, sequence = self.running[0]
            is_running = sequence.is_running and sequence.ends == ends
            if is_running and ends > self.steps + NEARLY:
                break
            heapq.heappop(self.running)
            if is_running:
                self._take_out(sequence)
                ended.append(sequence)
        return ended

    def _take_out(self, sequence: Sequence) -> None:
        left = max(0.0, sequence.ends - self.steps)
        sequence.is_running = False
        sequence.context += sequence.left - left
        sequence.left = left
        self.batch -= 1
        self.context = self.context - sequence.context if self.batch else 0.0

    def _make_room(self) -> None:
        room = self.hardware.room
        while self.batch > 1 and room.taken(self.batch, self.context + self.batch) > room.bytes:
            sequence = self.stack.pop()
            if sequence.is_running:
                self._take_out(sequence)
                sequence.prefilled = 0
                self.reread += sequence.context
                self.waiting.appendleft(sequence)

    def _admit(self) -> None:
        room = self.hardware.room
        while self.waiting and self.batch < room.slots:
            sequence = self.waiting[0]
            taken = room.taken(self.batch + 1, self.context + sequence.context + self.batch + 1)
            if self.batch and taken > room.bytes:
                return
            self.waiting.popleft()
            self.reading += self.hardware.prefill(sequence.context - sequence.prefilled)
            sequence.ends = self.steps + sequence.left
            sequence.began = self.since if sequence.began < 0 else sequence.began
            sequence.is_running = True
            self.batch += 1
            self.context += sequence.context
            heapq.heappush(self.running, (sequence.ends, next(self.numbers), sequence))
            if len(self.stack) > 2 * self.batch + 64:
                self.stack = [other for other in self.stack if other.is_running]
            self.stack.append(sequence)

    def _look_ahead(self) -> None:
        if not self.batch:
            return
        room = self.hardware.room
        steps = self.running[0][0] - self.steps
        if self.batch > 1:
            free = room.bytes - room.taken(self.batch, self.context)
            steps = min(steps, max(1.0, free / (self.batch * room.token)))
        middle = self.context + self.batch * steps / 2
        seconds = self.reading + steps * self.hardware.decode(self.batch, middle)
        self.stretch = steps
        self.until = self.since + seconds
        self.timer = self.loop.call_at(self.until, self.plan)
