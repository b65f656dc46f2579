"""Errors as OpenAI clients know them: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import structlog
from msgspec import Struct
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ExceptionHandler

from protocols.errors import GenerationError, RequestError

INVALID = "invalid_request_error"
SERVER = "server_error"


class ErrorDetail(Struct, frozen=True, kw_only=True):
    """What went wrong; `param` names the field at fault."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(Struct, frozen=True, kw_only=True):
    """The body of every answer that is not a success."""

    error: ErrorDetail


class ApiError(Exception):
    """A request that ends here, with the answer it gets."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        kind = INVALID if status < 500 else SERVER
        self.status = status
        self.body = ErrorBody(error=ErrorDetail(message=message, type=kind, param=param, code=code))
        self.headers = dict(headers or {})

    def response(self) -> Response:
        """Return the answer to send."""
        content = msgspec.json.encode(self.body)
        return Response(content, status_code=self.status, headers=self.headers, media_type="application/json")


def invalid(param: str, message: str) -> ApiError:
    """Return the 400 for a field that cannot be used as given."""
    return ApiError(400, f"{param}: {message}", param=param)


def as_api_error(error: Exception) -> ApiError:
    """Translate what sampling raises; anything else is our own fault: logged whole, told in brief."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError) and error.param == "queue":
        return ApiError(503, str(error), code="overloaded", headers={"retry-after": "1"})
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=error.param)
    if isinstance(error, GenerationError):
        return ApiError(500, f"the generation failed: {error}", code="generation_failed")
    structlog.get_logger("gateway").error("request_failed", exc_info=error)
    return ApiError(500, "internal error; the log of the run has the details", code="internal_error")


async def _answer(_: Request, error: Exception) -> Response:
    return as_api_error(error).response()


async def _answer_http(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    message = {404: "there is no such route", 405: f"this route does not answer {request.method}"}
    text = message.get(error.status_code, error.detail)
    return ApiError(error.status_code, text, headers=error.headers).response()


async def _nobody_there(_: Request, __: Exception) -> None:
    """Send nothing: the client has left."""


HANDLERS: dict[type[Exception], ExceptionHandler] = {
    ApiError: _answer,
    RequestError: _answer,
    GenerationError: _answer,
    HTTPException: _answer_http,
    ClientDisconnect: _nobody_there,  # type: ignore[dict-item]
    Exception: _answer,
}
