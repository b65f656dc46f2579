"""Error responses in the format of the endpoint.

By default, it is that of the OpenAI API: `{"error": {"message", "type", "param", "code"}}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

import msgspec
import structlog
from msgspec import Struct
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ExceptionHandler, Receive, Scope, Send

from clotho.extension import attachment_names, needs, provided
from protocols.errors import GenerationError, RequestError, nearest, visible

ERRORS = "clotho.serving.errors:ErrorBody"
"""The format of errors without another one, as `module:name`."""

INVALID = "invalid_request_error"
SERVER = "server_error"

MESSAGE_LIMIT, PARAM_LIMIT = 1000, 200
"""Maximum number of characters of a message and of the name of a field, which can quote the client's request."""

ATTACHMENTS: Mapping[str, tuple[str, ...]] = {
    "adapters": ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/lora/load", "/lora/unload", "/lora/status"),
    "dialects": (
        "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/generate", "/v1/generate",
        "/inference/v1/generate", "/tokenize", "/detokenize", "/tokenizer_info",
        "/pause", "/resume", "/is_paused", "/sleep", "/wake_up", "/is_sleeping", "/abort_requests", "/abort_request",
        "/pause_generation", "/continue_generation", "/flush_cache",
    ),
    "openapi": ("/openapi.json",),
    "remote": ("/v1/rollouts", "/v1/policy", "/v1/policy/weights"),
    "sessions": ("/v1/rewards",),
}  # fmt: skip
"""The paths of attachments, so that a path is refused by its attachment where that is not installed."""

log = structlog.get_logger(actor="server")


class ErrorDetail(Struct, frozen=True, kw_only=True):
    """One error. param: the request field that caused the error, if one did."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorFormat(Struct, frozen=True, kw_only=True):
    """The body of a response whose status is not 2xx. event: name of the event that ends a stream with it."""

    event: ClassVar[str] = ""

    @classmethod
    def of(cls, error: ApiError) -> Self:
        """Return the body for an error."""
        raise NotImplementedError


class ErrorBody(ErrorFormat, frozen=True, kw_only=True):
    """The body of the OpenAI API."""

    error: ErrorDetail

    @classmethod
    def of(cls, error: ApiError) -> Self:
        """Return the body for an error."""
        return cls(error=error.body.error)


class ApiError(Exception):
    """An error that ends the request with this HTTP status and body."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        error_type: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """error_type: without one, whether the request or the server is the cause."""
        message = visible(message, MESSAGE_LIMIT, keep_end=MESSAGE_LIMIT // 4)
        param = None if param is None else visible(param, PARAM_LIMIT)
        super().__init__(message)
        error_type = error_type or (INVALID if status < 500 else SERVER)
        self.status = status
        self.body = ErrorBody(error=ErrorDetail(message=message, type=error_type, param=param, code=code))
        self.headers = dict(headers or {})

    def response(self) -> Response:
        """Return the HTTP response."""
        return _ErrorResponse(self)


class _ErrorResponse(Response):
    """Responds with an error in the format of the endpoint."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(status_code=error.status)
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        content, error = msgspec.json.encode(error_body(self._error, scope)), self._error
        response = Response(content, status_code=error.status, headers=error.headers, media_type="application/json")
        await response(scope, receive, send)


def error_body(error: ApiError, scope: Scope) -> ErrorFormat:
    """Return the body of an error in the format of the endpoint that a request asks.

    Applications that only show pages, such as that of a run that loads, have no other formats.
    """
    places: Mapping[str, str] = getattr(scope["app"].state, "error_formats", {}) if "app" in scope else {}
    found: type[ErrorFormat] = provided(places.get(scope["path"], ERRORS))
    return found.of(error)


def overloaded(message: str) -> ApiError:
    """Return the 503 error for a shared resource that is not free in time."""
    return ApiError(503, message, code="overloaded", headers={"retry-after": "1"})


def invalid_field(param: str, message: str) -> ApiError:
    """Return the 400 error for the request field `param`."""
    return ApiError(400, f"{param}: {message}", param=param)


def to_api_error(error: Exception) -> ApiError:
    """Convert an exception; an unexpected one becomes a 500 without details, which the event log has."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError) and error.param == "queue":
        return overloaded(str(error))
    if isinstance(error, RequestError) and error.param == "model":  # unloaded after the request has been validated
        return ApiError(404, str(error), param="model", code="model_not_found")
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=error.param)
    if isinstance(error, GenerationError):
        return ApiError(500, f"The generation failed: {error}", code="generation_failed")
    log.error("request_failed", exc_info=error)
    return ApiError(500, "Internal error; the event log of the run contains the details.", code="internal_error")


async def _respond(_: Request, error: Exception) -> Response:
    return to_api_error(error).response()


async def _respond_to_http_exception(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    if error.status_code == 404 and (absent := _absent_attachment(request.url.path)):
        return ApiError(404, f"This path {needs(absent)}.").response()
    guess = nearest(request.url.path, (route.path for route in request.app.routes if isinstance(route, Route)))
    hint = "" if guess is None else f" Did you mean {guess}?"
    listed = " GET /openapi.json lists the endpoints." if "openapi" in attachment_names() else ""
    messages = {
        404: f"This path does not exist.{hint}{listed}",
        405: f"This path does not support the method {request.method}.",
    }
    message = messages.get(error.status_code, error.detail)
    return ApiError(error.status_code, message, headers=error.headers).response()


def _absent_attachment(path: str) -> str:
    """Return the attachment of a path if it is not installed; else an empty string."""
    owners = (name for name, paths in ATTACHMENTS.items() if path.rstrip("/") in paths)
    return next((name for name in owners if name not in attachment_names()), "")


async def _ignore_disconnect(_: Request, __: Exception) -> None:
    """Send nothing, because the client has disconnected."""


EXCEPTION_HANDLERS: dict[type[Exception], ExceptionHandler] = {
    ApiError: _respond,
    RequestError: _respond,
    GenerationError: _respond,
    HTTPException: _respond_to_http_exception,
    ClientDisconnect: _ignore_disconnect,  # type: ignore[dict-item]
    Exception: _respond,
}
