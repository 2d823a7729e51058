"""A limit of time for Python that others have written, as a chat template is: an alarm of the
system, which interrupts it wherever it is; in a thread that is not the main one, which hears no
alarm, an exception that the interpreter raises there at its next instruction.
"""

import ctypes
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Never


class TimeLimitExceeded(Exception):
    """Raised in code that runs longer than its limit."""


@contextmanager
def limit_time(seconds: float) -> Iterator[None]:
    """Raise TimeLimitExceeded in the code within once it has run for `seconds`: in the main thread
    whatever it does, in any other at its next Python instruction.
    """
    # only the main thread handles signals
    main = threading.current_thread() is threading.main_thread()
    try:
        with _alarm(seconds) if main else _async_exception(seconds):
            yield
    except TimeLimitExceeded:
        raise TimeLimitExceeded(f"it has taken over {seconds:g} s") from None


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Interrupt the main thread after `seconds` by SIGALRM; the previous handler is restored."""

    def stop(number: int, frame: FrameType | None) -> Never:
        """Raise the exception wherever the main thread is."""
        raise TimeLimitExceeded

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _async_exception(seconds: float) -> Iterator[None]:
    """Have the interpreter raise TimeLimitExceeded in this thread after `seconds`."""
    thread, lock, over = ctypes.c_ulong(threading.get_ident()), threading.Lock(), False
    schedule = ctypes.pythonapi.PyThreadState_SetAsyncExc

    def stop() -> None:
        """Schedule the exception, from the timer's thread, unless the code has finished."""
        with lock:
            if not over:
                schedule(thread, ctypes.py_object(TimeLimitExceeded))

    timer = threading.Timer(seconds, stop)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        # Either `stop` sees that it is over, or its exception is raised at a call below at the
        # latest. Withdrawing it instead (schedule NULL) would leave the interpreter's flag set:
        # every later call of every thread takes the slow path, and traced threads hang (3.11).
        with lock:
            over = True
        timer.cancel()
