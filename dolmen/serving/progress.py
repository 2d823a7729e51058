"""Progress of `dolmen generate --input`: a bar with tokens per second and the time left on a
terminal, else a plain line now and then. Always on stderr.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from dolmen.core.log import duration, say
from dolmen.core.messages import plural

EVERY = 30.0  # seconds between two plain lines
RECENT = 60.0  # seconds that the rate is averaged over, as early rows predict late ones poorly


class Meter:
    """Counts finished rows and new tokens."""

    def __init__(self, rows: int, done: int):
        """`done`: rows that were finished by an earlier run."""
        self.rows, self.done, self.tokens = rows, done, 0
        self._began = self._told = time.monotonic()
        self._marks = [(self._began, done, 0)]

    def count(self, rows: int, tokens: int) -> None:
        """Add finished rows and new tokens."""
        self.done += rows
        self.tokens += tokens
        now = time.monotonic()
        if now - self._marks[-1][0] > RECENT / 20:
            self._marks = [mark for mark in self._marks if now - mark[0] < RECENT]
            self._marks.append((now, self.done, self.tokens))

    def __str__(self) -> str:
        """12 of 256 rows, 2,743 tokens/s, 1:23 left"""
        began, done, tokens = self._marks[0]
        seconds = max(time.monotonic() - began, 1e-9)
        left = "-:--"
        if self.done > done:
            left = duration((self.rows - self.done) * seconds / (self.done - done))
        rate = (self.tokens - tokens) / seconds
        return f"{self.done:,} of {plural(self.rows, 'row')}, {rate:,.0f} tokens/s, {left} left"

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    def due(self) -> bool:
        """Whether to print a plain line: once every EVERY seconds."""
        now = time.monotonic()
        if now - self._told < EVERY:
            return False
        self._told = now
        return True


@contextmanager
def show(meter: Meter, visible: bool) -> Iterator["Screen"]:
    """Show the meter within; `Screen.refresh()` updates it."""
    console = Console(stderr=True)
    if not (visible and console.is_terminal):
        yield Screen(meter, None, visible)
        return
    with Progress(
        BarColumn(), TextColumn("{task.description}"), console=console, transient=True
    ) as bar:
        yield Screen(meter, bar, visible)


class Screen:
    """The bar or the plain lines of a meter."""

    def __init__(self, meter: Meter, bar: Progress | None, visible: bool):
        self.meter, self.bar, self.visible = meter, bar, visible
        self.task = None if bar is None else bar.add_task("", total=meter.rows)

    def refresh(self) -> None:
        """Update the bar, or print a line when one is due."""
        meter = self.meter
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, completed=meter.done, description=str(meter))
        elif self.visible and meter.due():
            say(str(meter))
