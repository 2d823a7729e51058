"""Steps an engine for requests that come from another thread, on all ranks of a model alike, and
counts what a server does, for Prometheus.

    other thread      submit, cancel, stop -> [what has come since]
    every rank        changes = the first rank's, broadcast   (consensus.run_on_rank_zero)
                      changes.new join, changes.cancelled leave, one step
    first rank        calls back with the result of the step

So one rank decides, between two steps, which requests join a forward, and all ranks compute the
same. While nothing runs the first rank sleeps until something comes; it broadcasts empty changes
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

MAX_SLEEP = 1.0  # seconds; the other ranks wait in a collective, which has a time limit


@dataclass
class StepChanges:
    """Requests that come and go between two steps, as plain values that pickle."""

    new: list[Request] = field(default_factory=list)
    cancelled: list[tuple[int, int | None]] = field(default_factory=list)
    """Request numbers, and the sample of each to cancel; None: all samples."""
    end: bool = False
    """The loop ends before the next step."""


@dataclass(frozen=True)
class EngineLoad:
    """Load of an engine after its last step."""

    running: int = 0
    """Samples that run."""
    waiting: int = 0
    """Samples that wait."""
    pages: int = 0
    """Pages of the KV cache in use."""


class EngineLoop:
    """Runs the steps of one engine, which nobody else may use, and feeds it requests from other
    threads.
    """

    def __init__(self, engine: Engine, mesh: Mesh):
        """The engine must be within its `with` when `run` is called. `mesh`: all ranks that step
        it.
        """
        self.engine, self.mesh = engine, mesh
        self.load = EngineLoad()
        # guards `_changes` and `_count`; `load` is shared too, and replaced as a whole
        self._condition = threading.Condition()
        self._changes, self._count = StepChanges(), 0

    def submit(self, request: Request) -> int:
        """Queue a checked request for the next step and return its number, which results refer to.
        May be called by any thread of the first rank.
        """
        with self._condition:
            self._changes.new.append(request)
            # the engine numbers requests from 0 in the order of `add`, which is that of `new`
            self._count += 1
            self._condition.notify()
            return self._count - 1

    def cancel(self, number: int, sample: int | None = None) -> None:
        """Cancel request `number`, or one of its samples that has forked already, before the next
        step, and free its pages. May be called by any thread of the first rank.
        """
        with self._condition:
            self._changes.cancelled.append((number, sample))
            self._condition.notify()

    def stop(self) -> None:
        """End `run` before the next step, on all ranks. May be called by any thread of the first
        rank.
        """
        with self._condition:
            self._changes.end = True
            self._condition.notify()

    def run(self, on_step: Callable[[StepOutput], None]) -> None:
        """Step until stopped, in one thread of each rank, within the engine's `with`. `on_step`
        gets the result of each step, cancelled samples among the finished ones. Raises what a step
        raises.
        """
        while True:
            changes = self._next()
            if changes.end:
                return
            # before the cancellations, as a request may be both new and cancelled
            for request in changes.new:
                self.engine.add(request)
            cancelled = [
                sequence
                for number, sample in changes.cancelled
                for sequence in self.engine.cancel(number, sample)
            ]
            output = self.engine.step()
            # replaced as a whole: another thread reads it without a lock
            self.load = EngineLoad(self.engine.running, self.engine.waiting, self.engine.pages)
            on_step(replace(output, finished=[*cancelled, *output.finished]))

    def _next(self) -> StepChanges:
        """Return the requests and cancellations since the last step, the same on all ranks: the
        first rank's, which it broadcasts.
        """
        take = self._take_changes
        return take() if self.mesh.size == 1 else consensus.run_on_rank_zero(take)

    def _take_changes(self) -> StepChanges:
        """Return and clear the changes since the last call. While the engine is idle, waits for
        some, at most MAX_SLEEP (1 s); without any by then the changes are empty.
        """
        with self._condition:
            # never waits while sequences run: then changes are only picked up
            if not self.engine.busy:
                self._condition.wait_for(self._has_changes, timeout=MAX_SLEEP)
            changes, self._changes = self._changes, StepChanges()
            return changes

    def _has_changes(self) -> bool:
        """Return whether requests were submitted or cancelled, or the loop was stopped, since
        changes were last taken. The caller holds the lock.
        """
        changes = self._changes
        return bool(changes.new or changes.cancelled or changes.end)


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LATENCY_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)


class ServerMetrics:
    """Counters of one server since its start, in Prometheus' format (/metrics)."""

    def __init__(self) -> None:
        """Register the counters and histograms in a registry of this server."""
        # not the process-wide registry: tests and programs may start several servers
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "dolmen_requests",
            "Finished requests, by status.",
            ["path", "status"],
            registry=registry,
        )
        self.prompt = Counter("dolmen_prompt_tokens", "Tokens of prompts.", registry=registry)
        self.new = Counter("dolmen_generated_tokens", "Generated tokens.", registry=registry)
        self.drafted = Counter(
            "dolmen_spec_decode_num_draft_tokens",
            "Drafted tokens of finished completions (speculative decoding).",
            registry=registry,
        )
        self.accepted = Counter(
            "dolmen_spec_decode_num_accepted_tokens",
            "Drafted tokens that were accepted.",
            registry=registry,
        )
        self.first = Histogram(
            "dolmen_first_token_seconds",
            "From a request to its first generated token.",
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self.whole = Histogram(
            "dolmen_request_seconds",
            "From a request to the end of its response.",
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )

    def register_gauges(self, load: Callable[[], EngineLoad], accepted: Callable[[], int]) -> None:
        """Register gauges that are read on each GET /metrics. `load`: returns the engine's load.
        `accepted`: returns the number of completions that run or wait.
        """
        gauges = {
            "dolmen_completions_running": (
                "Completions that are being generated.",
                lambda: load().running,
            ),
            "dolmen_completions_waiting": (
                "Completions that wait.",
                lambda: max(accepted() - load().running, 0),
            ),
            "dolmen_cache_pages": ("Pages of the KV cache in use.", lambda: load().pages),
        }
        for name, (help, value) in gauges.items():
            Gauge(name, help, registry=self.registry).set_function(value)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class RequestTimer:
    """Measures one request for the metrics; its time starts with the object."""

    def __init__(self, metrics: ServerMetrics):
        """Start measuring; `metrics` gets the results."""
        self.metrics, self.start, self.has_token = metrics, time.monotonic(), False

    def token(self) -> None:
        """Count a generated token; for the first one also record the time since the request
        came.
        """
        self.metrics.new.inc()
        if not self.has_token:
            self.has_token = True
            self.metrics.first.observe(time.monotonic() - self.start)

    def end(self, path: str, status: int) -> None:
        """Count the request by path and status, and record its duration."""
        self.metrics.requests.labels(path, str(status)).inc()
        self.metrics.whole.observe(time.monotonic() - self.start)
