"""Steps an engine for requests that come from another thread, on all ranks of a model alike.

    other thread      submit, cancel, stop -> [what has come since]
    every rank        turn = the first rank's, told to all   (agree.once)
                      turn.new join, turn.cancelled leave, one step
    first rank        what came of it is told to the other thread

So who joins which forward is decided on one rank, between two steps, and all ranks compute the
same. Where nothing runs, the first rank sleeps until something comes; it tells the others that
nothing has, now and then, since they wait in a collective, which has a limit.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from dolmen.core import agree
from dolmen.core.mesh import Mesh
from dolmen.serving.engine import Engine
from dolmen.serving.request import Happened, Request

IDLE = 1.0  # seconds that the first rank sleeps at most


@dataclass
class Turn:
    """What comes between two steps: plain values, which pickle."""

    new: list[Request] = field(default_factory=list)
    cancelled: list[tuple[int, int | None]] = field(default_factory=list)
    """Requests, and the sample of each that is meant; None: all of it."""
    end: bool = False


@dataclass(frozen=True)
class Load:
    """What an engine has to do, as it was after the last step."""

    running: int = 0
    waiting: int = 0
    pages: int = 0
    """Of the cache, in use."""


class Loop:
    """Of one engine that nobody else has asked for anything."""

    def __init__(self, engine: Engine, mesh: Mesh):
        self.engine, self.mesh = engine, mesh
        self.load = Load()
        self._coming = threading.Condition()
        self._turn, self._count = Turn(), 0

    def submit(self, request: Request) -> int:
        """It joins before the next step; the engine would not refuse it. -> Its number, by which
        all is told of it. Any thread, on the first rank.
        """
        with self._coming:
            self._turn.new.append(request)
            self._count += 1
            self._coming.notify()
            return self._count - 1

    def cancel(self, number: int, sample: int | None = None) -> None:
        """A request, or one sample of it that has begun, ends before the next step, and its pages
        are free. Any thread, on the first rank.
        """
        with self._coming:
            self._turn.cancelled.append((number, sample))
            self._coming.notify()

    def stop(self) -> None:
        """The loop ends before the next step. Any thread, on the first rank."""
        with self._coming:
            self._turn.end = True
            self._coming.notify()

    def run(self, tell: Callable[[Happened], None]) -> None:
        """Until it is stopped, by one thread of each rank within the engine's `with`. What comes of
        each step is told. What a step raises, this does.
        """
        while True:
            turn = self._next()
            if turn.end:
                return
            for request in turn.new:
                self.engine.add(request)
            ended = [
                one
                for number, sample in turn.cancelled
                for one in self.engine.cancel(number, sample)
            ]
            happened = self.engine.step()
            self.load = Load(self.engine.running, self.engine.waiting, self.engine.pages)
            tell(replace(happened, ended=[*ended, *happened.ended]))

    def _next(self) -> Turn:
        """The turn of the first rank, on all."""
        return self._taken() if self.mesh.size == 1 else agree.once(self._taken)

    def _taken(self) -> Turn:
        """What has come since it was last asked. Sleeps where there is nothing to do."""
        with self._coming:
            if not self.engine.busy:
                self._coming.wait_for(self._anything, timeout=IDLE)
            turn, self._turn = self._turn, Turn()
            return turn

    def _anything(self) -> bool:
        turn = self._turn
        return bool(turn.new or turn.cancelled or turn.end)
