"""An event loop whose time is a number: it jumps to the next thing that is to happen."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

from core import waits
from runtime.engines import fleet
from runtime.rollouts import outages, teachers

T = TypeVar("T")
# Times this close are one moment: a float of years has no finer ones.
MOMENT = 1e-6


class Stuck(RuntimeError):
    """All tasks wait, and nothing is left that could end it."""


class VirtualSelector:
    """What the loop asks to wait for files: there are none, so time passes at once."""

    def __init__(self) -> None:
        self.now = 0.0

    def select(self, timeout: float | None) -> list:
        """Passes that many seconds. Raises Stuck where nothing is due, ever."""
        if timeout is None:
            raise Stuck(f"after {self.now:.0f} s all tasks wait and nothing is due")
        self.now += max(timeout, 0.0)
        return []

    def get_key(self, file: Any) -> Any:
        """Raises KeyError: no file is known."""
        raise KeyError(file)

    def register(self, *_: Any) -> None:
        """The loop's own pipe, through which no thread will call."""

    def close(self) -> None:
        """Closes nothing."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs callbacks at their time, without waiting for it; threads' work is done on the spot."""

    def __init__(self) -> None:
        self.clock = VirtualSelector()
        super().__init__(self.clock)  # type: ignore[arg-type]
        self._clock_resolution = MOMENT

    def time(self) -> float:
        """Virtual seconds since the loop began."""
        return self.clock.now

    def run_in_executor(self, executor: Any, func: Callable, *args: Any) -> asyncio.Future:
        """A thread would not hold the clock while it works; its work takes no virtual time."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


@contextlib.contextmanager
def replaced(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Attributes of objects, each with another value while the block lasts."""
    with contextlib.ExitStack() as stack:
        for change in changes:
            stack.enter_context(mock.patch.object(*change))
        yield


def run(main: Callable[[], Coroutine[Any, Any, T]], driver: ModuleType) -> T:
    """Runs a coroutine of the product, on virtual time in all modules of it that read a clock."""
    loop = VirtualLoop()
    clocks = dict.fromkeys(("time", "monotonic", "perf_counter"), loop.time)
    virtual = SimpleNamespace(**clocks, strftime=time.strftime)
    changes = [(module, "time", virtual) for module in (driver, fleet, outages, teachers, waits)]
    with replaced(*changes), asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(main())
