"""Bytes on their way out: server-sent events, and answers that end when the client goes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"


def event(body: Mapping[str, Any], name: str | None = None) -> bytes:
    """A server-sent event: JSON in UTF-8, whole in one chunk."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


class EventStream(Response):
    """Sends events as they come until the client goes; then, or at their end, calls `close`."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], close: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._close = events, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything. (ASGI)"""

        async def work() -> None:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async with aclosing(self._events) as events:
                async for chunk in events:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        try:
            await _unless_gone(receive, work())
        finally:
            self._close()


async def unless_gone(request: Request, work: Awaitable[T]) -> T | None:
    """What the work gives; None, and the work cancelled, if the client goes before."""
    return await _unless_gone(request.receive, work)


async def _unless_gone(receive: Receive, work: Awaitable[T]) -> T | None:
    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    doing, watching = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({doing, watching}, return_when=asyncio.FIRST_COMPLETED)
        return doing.result() if doing.done() else None
    finally:
        watching.cancel()
        doing.cancel()
        await asyncio.gather(doing, watching, return_exceptions=True)
