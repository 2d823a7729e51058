"""A connection whose client must say what it wants: uvicorn ends one that is idle after an answer,
and waits for ever for the head of a first request, or for the rest of a head.
"""

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


def ending_after(seconds: float) -> type[H11Protocol]:
    """Connections that end where a head (its first line and headers) has not come so many seconds
    after it could have begun: of the first request with the connection, of others with their first
    byte.
    """

    class Connection(H11Protocol):
        waiting: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  # as uvicorn's
            super().connection_made(transport)
            self.waiting = self.loop.call_later(seconds, transport.close)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is not h11.IDLE:  # the head is here, or nothing more comes
                self._come()
            elif self.waiting is None:
                self.waiting = self.loop.call_later(seconds, self.transport.close)

        def connection_lost(self, exc: Exception | None) -> None:
            self._come()
            super().connection_lost(exc)

        def _come(self) -> None:
            if self.waiting is not None:
                self.waiting.cancel()
                self.waiting = None

    return Connection
