"""How far answers to a file are: a bar with tokens per second and the time that is left where a
person watches the terminal, else a plain line now and then. Always on stderr.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from dolmen.core.log import duration, say
from dolmen.core.messages import counted

EVERY = 30.0  # seconds between two plain lines
RECENT = 60.0  # seconds that a rate is of, at most: the first rows say little of the last


class Meter:
    """Rows and tokens until now."""

    def __init__(self, rows: int, done: int):
        """`done`: rows that were there when it began."""
        self.rows, self.done, self.tokens = rows, done, 0
        self._began = self._told = time.monotonic()
        self._marks = [(self._began, done, 0)]

    def count(self, rows: int, tokens: int) -> None:
        """So many more."""
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
        return f"{self.done:,} of {counted(self.rows, 'row')}, {rate:,.0f} tokens/s, {left} left"

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self._began

    def due(self) -> bool:
        """Whether a plain line is to be said, once every EVERY seconds."""
        now = time.monotonic()
        if now - self._told < EVERY:
            return False
        self._told = now
        return True


@contextmanager
def shown(meter: Meter, visible: bool) -> Iterator["Screen"]:
    """Within, `Screen.refresh()` shows where the meter is."""
    console = Console(stderr=True)
    if not (visible and console.is_terminal):
        yield Screen(meter, None, visible)
        return
    with Progress(
        BarColumn(), TextColumn("{task.description}"), console=console, transient=True
    ) as bar:
        yield Screen(meter, bar, visible)


class Screen:
    """What a person sees of a meter."""

    def __init__(self, meter: Meter, bar: Progress | None, visible: bool):
        self.meter, self.bar, self.visible = meter, bar, visible
        self.task = None if bar is None else bar.add_task("", total=meter.rows)

    def refresh(self) -> None:
        """After every step."""
        meter = self.meter
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, completed=meter.done, description=str(meter))
        elif self.visible and meter.due():
            say(str(meter))
