"""The HTTP server around the application, and how it ends: what runs is finished, for so long at most."""

from __future__ import annotations

import asyncio
import math
import socket
from typing import Any

import uvicorn
from fastapi import FastAPI

from surefoot.engine.service import Service

FAREWELL_S = 5  # for answers whose requests have been cancelled to reach their clients


class Server(uvicorn.Server):
    """Serves an application of `create_app`. Told to end, it takes no further request and finishes those that it has;
    after `seconds` (None: when they are done) they are cancelled, and clients that still read nothing are left. Told
    once more by ctrl-C, it ends at once."""

    def __init__(self, app: FastAPI, seconds: float | None = None, **settings: Any) -> None:
        patience = None if seconds is None else math.ceil(seconds) + FAREWELL_S
        super().__init__(uvicorn.Config(app, access_log=False, timeout_graceful_shutdown=patience, **settings))
        self._service: Service = app.state.service
        self._seconds = seconds

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the service beside uvicorn's own end, which waits for the answers."""
        closing = asyncio.create_task(asyncio.to_thread(self._service.close, timeout=self._seconds))
        await super().shutdown(sockets)
        if self.force_exit:
            await asyncio.to_thread(self._service.close, drain=False)
        await closing
