"""The application: routes, who may call them, and what happens at the beginning and the end."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from surefoot.engine import Engine
from surefoot.engine.runner import RunsItself
from surefoot.engine.service import PREFIX_BYTES, Service
from surefoot.errors import ClosedError, InputError, SurefootError
from surefoot.loading.tokenizer import require_tokenizer
from surefoot.server.backend import Backend, Limits, Run, Whole
from surefoot.server.board import Board
from surefoot.server.errors import ApiError, as_api_error, validation_error
from surefoot.server.messages import Messages, count
from surefoot.server.openai import Chat, Completion
from surefoot.server.params import Reader
from surefoot.server.responses import Responses
from surefoot.server.schema import (
    ChatRequest,
    CompletionRequest,
    CountRequest,
    MessagesRequest,
    ResponsesRequest,
)
from surefoot.server.spans import Spans
from surefoot.server.wire import EventStream, unless_gone

GUARDED = "/v1/"
PAGE = Path(__file__).parent / "static"
CLIENT_GONE = 499  # in metrics only: nobody is there to read it


@dataclass(frozen=True)
class Settings:
    """How to serve: the `model`'s name for clients, any of `api_keys` if there are some, browsers' pages from
    `cors_origins`, at most `queue_limit` waiting requests, `max_body` bytes and `body_seconds` of one; up to
    `prefix_cache_bytes` of what was read of prompts are kept; `sampling` has fields of `SamplingParams` for requests
    that do not set them; spans go to `otel`, an OTLP/HTTP collector's address."""

    model: str
    api_keys: Sequence[str] = ()
    cors_origins: Sequence[str] = ()
    queue_limit: int = 256
    max_body: int = 16 * 2**20
    body_seconds: float = 60.0
    prefix_cache_bytes: int = PREFIX_BYTES
    sampling: Mapping[str, Any] = field(default_factory=dict)
    otel: str | None = None
    limits: Limits = field(default_factory=Limits)


def create_app(engine: Engine, settings: Settings, spans: Spans | None = None) -> FastAPI:
    """The application over an engine, which is its own from now on; its service is closed when the application shuts
    down, after running requests have ended. `spans` in place of those that the settings ask for. Raises TokenizerError
    for a model without a tokenizer, InputError for an empty API key and for spans without their packages."""
    tokenizer = require_tokenizer(engine.tokenizer, "the server")
    if "" in settings.api_keys:
        raise InputError("api_key: expected at least one character, found none")
    if settings.otel is not None and spans is None:
        spans = Spans(settings.otel)
    service = Service(engine, queue_limit=settings.queue_limit, prefix_cache_bytes=settings.prefix_cache_bytes)
    board = Board(service, spans)
    reader = Reader(tokenizer, engine.target.max_len, settings.sampling)
    backend = Backend(service, reader, settings.model, board, settings.limits)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.close)
        if spans is not None:
            await asyncio.to_thread(spans.close)

    app = FastAPI(title="Surefoot", version=metadata.version("surefoot"), lifespan=lifespan, responses=_ERRORS)
    app.state.service = service
    app.add_middleware(Gate, board=board, keys=settings.api_keys, max_body=settings.max_body,
                       body_seconds=settings.body_seconds)  # fmt: skip
    if settings.cors_origins:
        app.add_middleware(CORSMiddleware, allow_origins=list(settings.cors_origins), allow_methods=["*"],
                           allow_headers=["*"])  # fmt: skip
    _handle_errors(app)
    _add_information(app, engine, backend)
    _add_answers(app, backend)
    _add_page(app)
    return app


def _add_page(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        """The chat page."""
        return FileResponse(PAGE / "index.html")

    app.mount("/static", StaticFiles(directory=PAGE, check_dir=False))


def _add_information(app: FastAPI, engine: Engine, backend: Backend) -> None:
    card = {
        "id": backend.model,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "surefoot",
        "max_model_len": engine.target.max_len,
        "drafter": engine.drafter.name,
        "draft_length": engine.draft_length,
        "drafter_is_fixed": isinstance(engine.target, RunsItself),  # requests cannot choose another
    }

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Whether the server lives, and takes requests."""
        if not backend.service.open:
            raise ClosedError("service: expected it to be open, found it closing")
        return {"status": "ok"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The model that is served."""
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name:path}", responses={404: {}})
    async def model(name: str) -> dict[str, Any]:
        """The model that is served, by its name."""
        backend.check_model(name)
        return card

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Everything that is counted, for Prometheus."""
        return Response(generate_latest(backend.board.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/stats")
    async def stats() -> dict[str, Any]:
        """A few numbers, for people."""
        own = {"model": backend.model, "drafter": engine.drafter.name, "draft_length": engine.draft_length}
        return own | backend.board.stats()


def _add_answers(app: FastAPI, backend: Backend) -> None:
    @app.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatRequest, request: Request) -> Response:
        """An answer to a chat."""
        backend.check_model(body.model)
        make = partial(Chat.job, body, backend)
        run = await backend.start(make, request, "chatcmpl-")
        return await _answer(Chat(backend, body, run), body.stream, request)

    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """A text's continuation."""
        backend.check_model(body.model)
        run = await backend.start(partial(Completion.job, body, backend), request, "cmpl-")
        return await _answer(Completion(backend, body, run), body.stream, request)

    @app.post("/v1/messages", response_model=None)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """An answer to a chat, in Anthropic's form."""
        backend.check_model(body.model)
        run = await backend.start(partial(Messages.job, body, backend), request, "msg_")
        return await _answer(Messages(backend, body, run), body.stream, request)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountRequest) -> dict[str, int]:
        """How many tokens a request of that form would make the model read."""
        backend.check_model(body.model)
        return await asyncio.to_thread(count, body, backend)

    @app.post("/v1/responses", response_model=None)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """An answer, in the form of OpenAI's responses; nothing of it is kept."""
        backend.check_model(body.model)
        run = await backend.start(partial(Responses.job, body, backend), request, "resp_")
        return await _answer(Responses(backend, body, run), body.stream, request)


class Form(Protocol):
    """How an answer is put: whole, or as events."""

    run: Run

    def answer(self, wholes: Sequence[Whole]) -> dict[str, Any]:
        """The whole answer."""

    def stream(self) -> AsyncGenerator[bytes, None]:
        """The answer as events."""


async def _answer(form: Form, stream: bool | None, request: Request) -> Response:
    """The answer, whole or as a stream; a client that goes ends it."""
    if stream:
        return EventStream(form.stream(), form.run.close)
    try:
        wholes = await unless_gone(request, form.run.whole())
    finally:
        form.run.close()
    return Response(status_code=CLIENT_GONE) if wholes is None else JSONResponse(form.answer(wholes))


def _handle_errors(app: FastAPI) -> None:
    async def refuse(request: Request, error: Exception) -> Response:
        return as_api_error(error).response(request.url.path)

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return validation_error(error.errors()).response(request.url.path)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return ApiError(error.status_code, f"{request.url.path}: {error.detail}").response(request.url.path)

    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    for kind in (ApiError, SurefootError, Exception):
        app.add_exception_handler(kind, refuse)


class Gate:
    """Lets requests in whose key is right and whose body is small enough, and counts answers. (ASGI)"""

    def __init__(self, app: ASGIApp, board: Board, keys: Sequence[str], max_body: int, body_seconds: float) -> None:
        self._app, self._board, self._max_body, self._seconds = app, board, max_body, body_seconds
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        headers = dict(scope["headers"])
        size = 0
        complete = began = False
        end = time.monotonic() + self._seconds
        refusal: ApiError | None = None

        async def counted() -> Message:
            nonlocal size, complete, refusal
            if complete:
                return await receive()  # which waits for the client to go
            try:
                message = await asyncio.wait_for(receive(), max(0.0, end - time.monotonic()))
            except TimeoutError:
                refusal = ApiError(408, f"body: expected it within {self._seconds:g} s, found a part", code="timeout")
                raise refusal from None
            size += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if size > self._max_body:
                refusal = self._too_large(f"more than {self._max_body}")
                raise refusal
            return message

        async def noted(message: Message) -> None:
            nonlocal began
            if refusal is not None and not began:
                return  # what others make of the error
            if message["type"] == "http.response.start":
                began = True
                self._count(scope, message["status"])
            await send(message)

        try:
            self._check(path, headers)
            await self._app(scope, counted, noted)
        except ApiError as error:
            refusal = error
        except Exception:
            if not began:  # it is answered further out
                self._count(scope, 500)
            raise
        if refusal is not None and not began:
            answer, refusal = refusal.response(path), None
            await answer(scope, receive, noted)

    def _count(self, scope: Scope, status: int) -> None:
        self._board.answered(getattr(scope.get("route"), "path", "other"), status)

    def _check(self, path: str, headers: dict[bytes, bytes]) -> None:
        if self._keys and path.startswith(GUARDED) and not self._knows(headers):
            raise ApiError(401, "api_key: expected a key of this server (Authorization: Bearer KEY), "
                           "found none or another", code="invalid_api_key")  # fmt: skip
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_body:
            raise self._too_large(length.decode())

    def _knows(self, headers: dict[bytes, bytes]) -> bool:
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        given = bearer.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        return any(hmac.compare_digest(given, key) for key in self._keys)

    def _too_large(self, found: str) -> ApiError:
        return ApiError(413, f"body: expected at most {self._max_body} bytes, found {found}", code="body_too_large")


def _shape(status: str) -> dict[str, Any]:
    error = {"type": "object", "properties": {"error": {"type": "object"}}, "required": ["error"]}
    return {"description": status, "content": {"application/json": {"schema": error}}}


_ERRORS: dict[int | str, dict[str, Any]] = {
    400: _shape("A field is wrong; the message names it."),
    401: _shape("No API key, or another."),
    404: _shape("Another model, or no such path."),
    408: _shape("The body did not come in time."),
    413: _shape("The body is too large."),
    429: _shape("Too many requests wait already."),
    500: _shape("The request failed."),
    503: _shape("The server is closing."),
}
