"""Ends code that uses more CPU time than it may."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in a block that exceeds this CPU time; works only in the main thread.

    Only the main thread receives signals, and only between two steps of Python: a call of native
    code ends first. The alarm rings again if the error is swallowed.
    """

    def ring(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"it did not end within {seconds:g} s")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
