"""A limit of time for Python that others have written, as a chat template is: an alarm of the
system, which interrupts it wherever it is.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Never


class TookTooLong(Exception):
    """What was to end within a limit has not."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raises TookTooLong in what runs within, once it has taken so long. Signals come to the main
    thread alone: in any other there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> Never:
        raise TookTooLong(f"it has taken over {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
