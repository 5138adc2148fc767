"""The HTTP server around the application, and how it ends: what runs is finished, for so long at most."""

from __future__ import annotations

import asyncio
import math
import socket
import time
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from surefoot.engine.service import Service

FAREWELL_S = 5  # for answers whose requests have been cancelled to reach their clients
TICK_S = 0.1  # between two looks at whether ctrl-C came again, as uvicorn has it
HEADERS_S = 30.0  # for a request's headers to come
LATE = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class HeadersInTime(H11Protocol):
    """HTTP/1.1 as uvicorn speaks it, but a connection whose next request does not get past its headers is closed:
    uvicorn would wait for ever, and so would whoever needs a file descriptor."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Wait for the first request."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Wait on while these bytes have not completed the headers."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._stop()
        super().connection_lost(exc)

    def _watch(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._stop()
        elif self._late is None:
            self._late = self.loop.call_later(HEADERS_S, self._close)

    def _stop(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _close(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(LATE)
            self.transport.close()


class Server(uvicorn.Server):
    """Serves an application of `create_app`. Told to end, it finishes the requests that it has, and tells others until
    then that it is closing; after `seconds` (None: when they are done) they are cancelled, and clients that still read
    nothing are left. Told once more by ctrl-C, it ends at once."""

    def __init__(self, app: FastAPI, seconds: float | None = None, **settings: Any) -> None:
        super().__init__(
            uvicorn.Config(app, http=HeadersInTime, access_log=False, timeout_graceful_shutdown=FAREWELL_S, **settings)
        )
        self._service: Service = app.state.service
        self._seconds = seconds

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the service, and listen on until what was under way has been answered; then uvicorn's own end."""
        closing = asyncio.create_task(asyncio.to_thread(self._service.close, timeout=self._seconds))
        under_way = {closing, *self.server_state.tasks}
        end = math.inf if self._seconds is None else time.monotonic() + self._seconds
        while under_way and not self.force_exit and time.monotonic() < end:
            _, under_way = await asyncio.wait(under_way, timeout=TICK_S)
            await self.on_tick(0)  # which keeps the date of answers right
        await super().shutdown(sockets)
        if self.force_exit:
            await asyncio.to_thread(self._service.close, drain=False)
        await closing
