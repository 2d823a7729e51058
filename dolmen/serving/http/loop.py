"""Steps an engine for requests that come from another thread, on all ranks of a model alike, and
counts what a server does, for Prometheus.

    other thread      submit, cancel, stop -> [what has come since]
    every rank        turn = the first rank's, broadcast   (consensus.once)
                      turn.new join, turn.cancelled leave, one step
    first rank        calls back with the result of the step

So one rank decides, between two steps, which requests join a forward, and all ranks compute the
same. While nothing runs the first rank sleeps until something comes; it broadcasts an empty turn
now and then, since the others wait in a collective, which has a time limit.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from dolmen.core import consensus
from dolmen.core.mesh import Mesh
from dolmen.serving.engine import Engine
from dolmen.serving.request import Request, StepOutput

IDLE = 1.0  # seconds that the first rank sleeps at most


@dataclass
class Turn:
    """Changes between two steps, as plain values that pickle."""

    new: list[Request] = field(default_factory=list)
    cancelled: list[tuple[int, int | None]] = field(default_factory=list)
    """Request numbers, and the sample of each to cancel; None: all samples."""
    end: bool = False


@dataclass(frozen=True)
class Load:
    """Load of an engine after its last step."""

    running: int = 0
    waiting: int = 0
    pages: int = 0
    """Pages of the KV cache in use."""


class Loop:
    """Steps one engine, of which it is the only user."""

    def __init__(self, engine: Engine, mesh: Mesh):
        self.engine, self.mesh = engine, mesh
        self.load = Load()
        self._coming = threading.Condition()
        self._turn, self._count = Turn(), 0

    def submit(self, request: Request) -> int:
        """Add a checked request before the next step and return its number, which results refer
        to. Any thread, on the first rank.
        """
        with self._coming:
            self._turn.new.append(request)
            self._count += 1
            self._coming.notify()
            return self._count - 1

    def cancel(self, number: int, sample: int | None = None) -> None:
        """End a request, or one sample of it that has begun, before the next step, and free its
        pages. Any thread, on the first rank.
        """
        with self._coming:
            self._turn.cancelled.append((number, sample))
            self._coming.notify()

    def stop(self) -> None:
        """End the loop before the next step. Any thread, on the first rank."""
        with self._coming:
            self._turn.end = True
            self._coming.notify()

    def run(self, tell: Callable[[StepOutput], None]) -> None:
        """Step until stopped, in one thread of each rank within the engine's `with`; `tell` is
        called with the result of each step. Raises what a step raises.
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
            output = self.engine.step()
            self.load = Load(self.engine.running, self.engine.waiting, self.engine.pages)
            tell(replace(output, finished=[*ended, *output.finished]))

    def _next(self) -> Turn:
        """Return the first rank's turn, on all ranks."""
        return self._taken() if self.mesh.size == 1 else consensus.run_on_rank_zero(self._taken)

    def _taken(self) -> Turn:
        """Take the changes since the last call. Sleeps while there is nothing to do."""
        with self._coming:
            if not self.engine.busy:
                self._coming.wait_for(self._anything, timeout=IDLE)
            turn, self._turn = self._turn, Turn()
            return turn

    def _anything(self) -> bool:
        turn = self._turn
        return bool(turn.new or turn.cancelled or turn.end)


KIND = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)


class Metrics:
    """Counters of one server since its start, in Prometheus' format (/metrics)."""

    def __init__(self) -> None:
        self.registry = own = CollectorRegistry()
        self.requests = Counter(
            "dolmen_requests",
            "Requests that have ended, by status.",
            ["path", "status"],
            registry=own,
        )
        self.prompt = Counter("dolmen_prompt_tokens", "Tokens of prompts.", registry=own)
        self.new = Counter("dolmen_generated_tokens", "Tokens written.", registry=own)
        self.first = Histogram(
            "dolmen_first_token_seconds",
            "From a request to the first token of its answer.",
            buckets=SECONDS,
            registry=own,
        )
        self.whole = Histogram(
            "dolmen_request_seconds",
            "From a request to the end of its answer.",
            buckets=SECONDS,
            registry=own,
        )

    def watch(self, load: Callable[[], Load], taken: Callable[[], int]) -> None:
        """Register gauges that are read on request; `taken` completions run or wait."""
        told = {
            "dolmen_answers_running": ("Answers being written.", lambda: load().running),
            "dolmen_answers_waiting": (
                "Answers that wait to be.",
                lambda: max(taken() - load().running, 0),
            ),
            "dolmen_cache_pages": ("Pages of the cache in use.", lambda: load().pages),
        }
        for name, (help, value) in told.items():
            Gauge(name, help, registry=self.registry).set_function(value)

    def text(self) -> bytes:
        """Return all metrics as text."""
        return generate_latest(self.registry)


class Timer:
    """Times one request for the metrics."""

    def __init__(self, metrics: Metrics):
        self.metrics, self.began, self.begun = metrics, time.monotonic(), False

    def token(self) -> None:
        """Count a new token, and the time of the first."""
        self.metrics.new.inc()
        if not self.begun:
            self.begun = True
            self.metrics.first.observe(time.monotonic() - self.began)

    def end(self, path: str, status: int) -> None:
        """Count the request as answered."""
        self.metrics.requests.labels(path, str(status)).inc()
        self.metrics.whole.observe(time.monotonic() - self.began)
