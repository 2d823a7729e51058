"""What a server has done and does, as Prometheus reads it (/metrics)."""

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from dolmen.serving.http.loop import Load

KIND = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)


class Metrics:
    """Of one server, from its start."""

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
        """What is asked of others when somebody looks: `taken` answers are written or wait."""
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
        """All of it."""
        return generate_latest(self.registry)


class Timer:
    """Of one request."""

    def __init__(self, metrics: Metrics):
        self.metrics, self.began, self.begun = metrics, time.monotonic(), False

    def token(self) -> None:
        """One has come."""
        self.metrics.new.inc()
        if not self.begun:
            self.begun = True
            self.metrics.first.observe(time.monotonic() - self.began)

    def end(self, path: str, status: int) -> None:
        """It has its answer."""
        self.metrics.requests.labels(path, str(status)).inc()
        self.metrics.whole.observe(time.monotonic() - self.began)
