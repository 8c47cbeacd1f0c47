"""Waits under named deadlines, and measures the time in which nothing runs."""

import asyncio
import concurrent.futures
import contextvars
import math
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Protocol, TypeVar, TypeVarTuple

from tqdm import tqdm

# Deadline for a health check, and for joining the weight group. A late process is replaced.
ANSWER_SECONDS = 25.0

T = TypeVar("T")
Value = TypeVar("Value", covariant=True)
Arguments = TypeVarTuple("Arguments")


class Ref(Awaitable[Value], Protocol[Value]):
    """A reference to a value that Ray holds.

    Awaiting it fetches the value, or raises the error of the call that makes it.
    """


class Idle:
    """A counter of the seconds in which nothing runs, from the first `change` or `take` on."""

    def __init__(self) -> None:
        self.running = 0
        self.since = math.inf  # the time up to which `seconds` is complete
        self.seconds = 0.0

    def change(self, by: int) -> None:
        """Records that from now on one more task runs (`by` is 1), or one fewer (-1)."""
        now = time.monotonic()
        self.seconds += 0.0 if self.running else max(0.0, now - self.since)
        self.since = now
        self.running += by

    def take(self) -> float:
        """Returns the seconds in which nothing ran since the last call."""
        self.change(0)
        seconds, self.seconds = self.seconds, 0.0
        return seconds


async def together(awaitables: Iterable[Awaitable[T]]) -> list[T]:
    """Gathers as asyncio.gather does, but ends the other awaitables before it raises an error."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def unless_stopped(stop: Coroutine, work: asyncio.Future[T]) -> T | None:
    """Returns the result of `work`; if `stop` returns first, cancels `work` and returns None.

    Raises what either of them raises.
    """
    stopped = asyncio.create_task(stop)
    try:
        await asyncio.wait((work, stopped), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        work.cancel()
        await asyncio.wait((work,))
        if not work.cancelled():
            work.exception()  # asyncio complains about an exception that is never retrieved
        stopped.result()
        return None
    finally:
        stopped.cancel()
        work.cancel()  # if the caller was cancelled, `work` must not keep running


async def answer(call: Awaitable[T], seconds: float, name: str) -> T:
    """Returns the reply to a health check. Raises TimeoutError naming an actor that does not reply.

    If this process itself was stopped for longer, for example by Ctrl-Z, it waits again.
    """
    task = asyncio.ensure_future(call)
    began = time.monotonic()
    await asyncio.wait([task], timeout=seconds)
    if time.monotonic() - began > 1.5 * seconds:
        await asyncio.wait([task], timeout=seconds)
    if not task.done():
        task.cancel()
        raise TimeoutError(f"{name} did not answer for {seconds:.0f} s")
    return task.result()


async def in_thread(function: Callable[[*Arguments], T], *args: *Arguments) -> T:
    """Runs a function that may block, in a thread of its own.

    A function that never returns takes no thread from others, and the process can end without it.
    It sees the context variables of this task.
    Raises RuntimeError in place of an error that would end the process, such as SystemExit.
    """
    done: concurrent.futures.Future = concurrent.futures.Future()
    done.set_running_or_notify_cancel()
    context = contextvars.copy_context()

    def work() -> None:
        try:
            done.set_result((context.run(function, *args), None))
        except BaseException as error:
            done.set_result((None, error))

    while True:
        try:
            threading.Thread(target=work, daemon=True).start()
            break
        except RuntimeError:  # this user can have no more threads until others end
            await asyncio.sleep(0.1)
    result, error = await asyncio.wrap_future(done)
    if isinstance(error, Exception):
        raise error
    if error:
        raise RuntimeError(f"{function.__qualname__} raised {error!r}") from error
    return result


async def within(
    seconds: float,
    what: str,
    awaitable: Awaitable[T],
    state: Callable[[], str] = lambda: "",
    stopped: Callable[[], float] = float,
    late: type[Exception] = TimeoutError,
) -> T:
    """Awaits under a named deadline; after it, raises a `late` error with that name and `state`.

    A printed line warns when half of the time has passed. `stopped` counts the seconds during which
    the clock stands still. A cancelled task gets CancelledError even if asyncio.gather would raise
    the error that one of its members raised at that moment.
    """
    task = asyncio.current_task()
    assert task is not None  # a coroutine always runs in a task
    before = task.cancelling()
    loop = asyncio.get_running_loop()
    began = loop.time() - stopped()
    alarm: asyncio.TimerHandle

    def look(due: float) -> None:
        nonlocal alarm
        left = due - (loop.time() - stopped() - began)
        if left > 1e-3:  # the clock stood still
            alarm = loop.call_later(max(left, 0.1), look, due)
        elif due < seconds:
            tqdm.write(f"waiting for {what}: {due:.0f} of {seconds:.0f} s have passed. {state()}")
            alarm = loop.call_later(seconds - due, look, seconds)
        else:
            deadline.reschedule(loop.time())

    alarm = loop.call_later(seconds / 2, look, seconds / 2)
    try:
        async with asyncio.timeout(None) as deadline:
            return await awaitable
    except Exception as error:
        if isinstance(error, TimeoutError) and deadline.expired():
            raise late(f"waited {seconds:.0f} s for {what}. {state()}") from None
        if task.cancelling() > before:
            raise asyncio.CancelledError from error
        raise
    finally:
        alarm.cancel()
        look = None  # type: ignore[assignment]  # ends a cycle that reference counting keeps
