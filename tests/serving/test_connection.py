"""The time limits of a connection, by a clock that is set: what begins one, what ends it, and when
the connection is closed or aborted.
"""

from typing import Any

import pytest

pytest.importorskip("uvicorn")

from uvicorn import Config  # noqa: E402
from uvicorn.server import ServerState  # noqa: E402

from dolmen.serving.http.server import ERROR_TIME, LimitedConnection  # noqa: E402

HEAD, READ = 7.0, 20.0
REQUEST = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"


class Timer:
    def __init__(self, at: float, call):
        self.at, self.call, self.cancelled = at, call, False

    def cancel(self) -> None:
        self.cancelled = True


class Loop:
    """The part of asyncio's loop that starts timers; `pass_time` calls those that are due."""

    def __init__(self):
        self.now, self.timers = 0.0, []

    def call_later(self, delay: float, call, *arguments) -> Timer:
        self.timers.append(Timer(self.now + delay, lambda: call(*arguments)))
        return self.timers[-1]

    def create_task(self, work) -> Any:
        work.close()
        return self

    def add_done_callback(self, _) -> None:
        pass

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        due = [timer for timer in self.timers if timer.at <= self.now and not timer.cancelled]
        self.timers = [timer for timer in self.timers if timer not in due]
        for timer in due:
            timer.call()


class Transport:
    """A connection that notes when it was closed and aborted."""

    def __init__(self, loop: Loop):
        self.loop, self.closed, self.aborted = loop, None, None

    def get_extra_info(self, name: str) -> Any:
        return None

    def is_closing(self) -> bool:
        return self.closed is not None

    def close(self) -> None:
        self.closed = self.loop.now if self.closed is None else self.closed

    def abort(self) -> None:
        self.aborted = self.loop.now

    def resume_reading(self) -> None:
        pass


class Limited(LimitedConnection):
    head_bytes, head_time, read_time = 1000, HEAD, READ


@pytest.fixture
def connection() -> Any:
    async def app(scope, receive, send):
        pass

    loop: Any = Loop()
    made = Limited(Config(app, log_config=None), ServerState(), {}, loop)
    made.connection_made(Transport(loop))  # pyright: ignore[reportArgumentType]
    return made


def test_a_head_has_its_time_from_its_first_byte(connection):
    loop, transport = connection.loop, connection.transport
    loop.pass_time(HEAD - 1)
    connection.data_received(REQUEST[:20])
    loop.pass_time(0.9)
    assert transport.closed is None, "the first byte starts no second limit"
    connection.data_received(REQUEST[20:])
    loop.pass_time(10 * HEAD)
    assert transport.closed is None, "the head is complete"


def test_a_head_that_is_late_is_closed_and_then_aborted(connection):
    loop, transport = connection.loop, connection.transport
    connection.data_received(REQUEST[:20])
    loop.pass_time(HEAD)
    assert (transport.closed, transport.aborted) == (HEAD, None)
    loop.pass_time(ERROR_TIME)
    assert transport.aborted == HEAD + ERROR_TIME


@pytest.mark.parametrize("way", ["shutdown", "timeout_keep_alive_handler"])
def test_an_idle_connection_is_closed_and_then_aborted(connection, way):
    getattr(connection, way)()
    assert connection.transport.closed == 0.0 and connection.transport.aborted is None
    connection.loop.pass_time(ERROR_TIME)
    assert connection.transport.aborted == ERROR_TIME


def test_a_connection_with_a_request_outlives_the_begin_of_a_shutdown(connection):
    connection.data_received(REQUEST)
    connection.shutdown()
    connection.loop.pass_time(READ)
    assert connection.transport.closed is None and connection.transport.aborted is None


def test_a_response_that_is_not_read_aborts_the_connection(connection):
    """The time begins anew with each full buffer, and ends as the client reads."""
    loop, transport = connection.loop, connection.transport
    connection.data_received(REQUEST)
    connection.pause_writing()
    loop.pass_time(READ - 1)
    connection.resume_writing()
    loop.pass_time(READ)
    assert transport.aborted is None
    connection.pause_writing()
    connection.pause_writing()
    loop.pass_time(READ - 1)
    assert transport.aborted is None
    loop.pass_time(1)
    assert transport.aborted == loop.now


@pytest.mark.parametrize("paused", [True, False])
def test_a_response_that_closes_is_read_within_its_time(connection, paused):
    """Of a client that has stopped reading before, from then on."""
    connection.data_received(REQUEST)
    if paused:
        connection.pause_writing()
        connection.loop.pass_time(1)
    connection.transport.close()
    connection.on_response_complete()
    connection.loop.pass_time(READ - 1)
    assert connection.transport.aborted == (READ if paused else None)
    connection.loop.pass_time(1)
    assert connection.transport.aborted is not None


@pytest.mark.parametrize("data", [REQUEST[:20], REQUEST])
def test_a_connection_that_is_lost_has_no_timers(connection, data):
    connection.data_received(data)
    connection.pause_writing()
    connection.connection_lost(OSError())
    connection.loop.pass_time(10 * READ)
    assert connection.transport.closed is None and connection.transport.aborted is None
