"""Connections to the page: one whose request does not arrive whole in time is closed."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_LIMIT_S = 10.0
"""The time in which a request has to arrive whole. uvicorn itself waits for ever for the rest of one that was begun."""


class TimedConnection(H11Protocol):
    """An HTTP connection that is closed if it stays without a whole request for REQUEST_LIMIT_S to twice that long.

    An answer may take any time: a stream of events goes on.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._look_again()

    def _look_again(self) -> None:
        self._handled = self.cycle
        self._timer = self.loop.call_later(REQUEST_LIMIT_S, self._look)

    def _look(self) -> None:
        is_whole = self.conn.their_state in (h11.DONE, h11.MUST_CLOSE)
        if is_whole or self.cycle is not self._handled:
            self._look_again()
        else:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)
