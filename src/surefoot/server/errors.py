"""Errors as the two APIs have them."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from fastapi.responses import JSONResponse

from surefoot.errors import ClosedError, InputError, QueueFullError, TokenizerError, shown

ANTHROPIC = "/v1/messages"
RETRY_AFTER = "1"
# The engine's names of what requests call otherwise.
NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "bad_words_ids": "bad_words",
    "structured": "structured_outputs",
    "json_schema": "response_format",
}
ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
# Parts of a location that name a type, not a field.
WRAPPERS = ("str", "int", "float", "bool", "body", "ToolChoice", "FlatChoice")
WORDS = ("string_type", "literal_error")  # a text was expected


@dataclass
class ApiError(Exception):
    """What the client is told: an HTTP `status`, a `message`, the field it is about, and a `code` if there is one."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None

    @property
    def kind(self) -> str:
        """OpenAI's type."""
        return {429: "rate_limit_error", 401: "authentication_error"}.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )

    def body(self, path: str) -> dict[str, Any]:
        """The JSON of the API that the path belongs to."""
        if path.startswith(ANTHROPIC):
            kind = ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
            return {"type": "error", "error": {"type": kind, "message": _clean(self.message)}}
        error = {"message": _clean(self.message), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self, path: str) -> JSONResponse:
        """The whole answer."""
        headers = {
            401: {"WWW-Authenticate": "Bearer"},
            429: {"Retry-After": RETRY_AFTER},
            503: {"Retry-After": RETRY_AFTER, "Connection": "close"},  # the next attempt should find another server
        }.get(self.status)
        return JSONResponse(self.body(path), self.status, headers)


def as_api_error(error: BaseException) -> ApiError:
    """Any error for the client: its own mistakes in full, ours without details unless they are on purpose."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full")
    if isinstance(error, ClosedError):
        return ApiError(503, "server: expected it to take requests, found it closing", code="closing")
    if isinstance(error, (InputError, TokenizerError)):
        name, _, rest = str(error).partition(":")
        stem = name.split("[")[0]
        wire = NAMES.get(stem, stem) + name[len(stem) :]
        return ApiError(400, f"{wire}:{rest}", param=wire if wire.isidentifier() else None)
    return ApiError(500, f"{type(error).__name__}: {error}")


def validation_error(errors: Seq[Mapping[str, Any]]) -> ApiError:
    """The first thing that pydantic found wrong with a body."""
    # Where a list or an object was given, that no text was given says less than what is wrong with it.
    first = next(
        (e for e in errors if e["type"] not in WORDS or not isinstance(e.get("input"), (list, dict))), errors[0]
    )
    parts = [str(part) for part in first["loc"]]
    path = ".".join(part for part in parts if part not in WRAPPERS and "[" not in part) or "body"
    kind, text = first["type"], str(first["msg"]).removeprefix("Input should be ").removeprefix("Value error, ")
    if kind == "extra_forbidden":
        text = "no such field"
    if kind == "json_invalid":
        return ApiError(400, f"body: expected JSON, found an error at character {parts[-1]}: {first['ctx']['error']}")
    if isinstance(first.get("input"), bytes):  # it was not read as JSON
        return ApiError(400, "body: expected JSON with Content-Type: application/json, found another type or none")
    if kind == "too_long":
        most = f"at most {first['ctx']['max_length']} entries"
        return ApiError(400, f"{path}: expected {most}, found {len(first['input'])}", param=path)
    if kind == "missing":
        return ApiError(400, f"{path}: expected a value, found none", param=path)
    return ApiError(400, f"{path}: expected {text}, found {shown(first.get('input'), 100)}", param=path)


def _clean(text: str) -> str:
    """Text that UTF-8 can hold, whatever the client sent."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
