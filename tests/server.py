"""A live server on a free port, for tests that speak to it as clients do."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI

from surefoot.engine import Engine
from surefoot.engine.service import Service
from surefoot.server.app import Settings, create_app
from surefoot.server.process import Server
from surefoot.server.spans import Spans

MODEL = "surefoot-demo"


@dataclass(frozen=True)
class Live:
    """Where it is, and what is inside."""

    url: str
    app: FastAPI
    server: Server

    @property
    def service(self) -> Service:
        service = self.app.state.service
        assert isinstance(service, Service)
        return service

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def wait_idle(self, seconds: float = 10.0) -> bool:
        """Whether every slot is free and nothing waits, within so many seconds."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            stats = self.service.stats()
            if stats.running == stats.waiting == 0:
                return True
            time.sleep(0.01)
        return False


@contextmanager
def serving(
    engine: Engine, spans: Spans | None = None, shutdown_timeout: float | None = None, **settings: Any
) -> Iterator[Live]:
    app = create_app(engine, Settings(MODEL, **settings), spans)
    server = Server(app, shutdown_timeout, port=0, log_level="error")
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield Live(f"http://127.0.0.1:{port}", app, server)
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
