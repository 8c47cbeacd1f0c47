"""Runs coroutines on an event loop whose time is a number: it jumps to the next event."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn, TypeVar
from unittest import mock

from core import waits
from runtime.engines import fleet
from runtime.rollouts import outages, teachers

T = TypeVar("T")
# Times this close are one moment: a float that counts years in seconds has no finer resolution.
MOMENT = 1e-6


class Stuck(RuntimeError):
    """Raised if all tasks wait and no event is left that could wake one."""


class VirtualSelector:
    """A selector without files: instead of waiting, it lets time pass at once."""

    def __init__(self) -> None:
        self.now = 0.0

    def select(self, timeout: float | None) -> list:
        """Advances the clock by `timeout`. Raises Stuck if nothing will ever be due."""
        if timeout is None:
            raise Stuck(f"after {self.now:.0f} s all tasks wait and nothing is due")
        self.now += max(timeout, 0.0)
        return []

    def get_key(self, file: int) -> NoReturn:
        """Raises KeyError: no file is known."""
        raise KeyError(file)

    def register(
        self, file: int, events: int, handles: tuple[asyncio.Handle | None, asyncio.Handle | None]
    ) -> None:
        """Ignores the loop's own pipe, through which no thread will call."""

    def close(self) -> None:
        """Closes nothing."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop that runs callbacks at their time without waiting; threads' work is done at once."""

    def __init__(self) -> None:
        self.clock = VirtualSelector()
        super().__init__(self.clock)  # type: ignore[arg-type]
        self._clock_resolution = MOMENT

    def time(self) -> float:
        """Returns the virtual seconds since the loop began."""
        return self.clock.now

    def run_in_executor(
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Calls a function at once, in no virtual time: the clock would not wait for a thread."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


@contextlib.contextmanager
def replaced(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Replaces the values of objects' attributes while the block runs."""
    with contextlib.ExitStack() as stack:
        for change in changes:
            stack.enter_context(mock.patch.object(*change))
        yield


def run(main: Callable[[], Coroutine[Any, Any, T]], driver: ModuleType) -> T:
    """Runs a product coroutine, on virtual time in all product modules that read a clock."""
    loop = VirtualLoop()
    clocks = dict.fromkeys(("time", "monotonic", "perf_counter"), loop.time)
    virtual = SimpleNamespace(**clocks, strftime=time.strftime)
    changes = [(module, "time", virtual) for module in (driver, fleet, outages, teachers, waits)]
    with replaced(*changes), asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(main())
