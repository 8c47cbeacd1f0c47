"""A deadline for code of a model's own, which may run for ever."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

RENDER_SECONDS = 4.0  # of the processor; the longest prompts take a tenth of a second


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in what takes more of the processor. In a main thread alone.

    It rings again where the error is swallowed. Other threads receive no signals.
    """

    def ring(*_: Any) -> None:
        raise TimeoutError(f"it did not end in {seconds:g} s")

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
