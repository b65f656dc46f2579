"""The routes of Tinker's API: how requests are read, and how what answers them is written."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from functools import cache, partial
from inspect import isawaitable, signature
from operator import attrgetter
from typing import Any, get_type_hints

from msgspec import defstruct, structs
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from attachments.tinker import bodies
from attachments.tinker.rest import TinkerRest
from attachments.tinker.sections import TinkerApi
from attachments.tinker.service import TinkerService
from attachments.tinker.wire import JSON, PROTOBUF, encoded, read_forward_backward
from clotho.sampler import BaseAccess
from clotho.serving.auth import client_of
from clotho.serving.bodies import json_object
from clotho.serving.errors import ApiError
from clotho.serving.openai_requests import converted
from clotho.serving.parts import ServerParts

POLL_SECONDS = 20.0
"""How long an answer of retrieve_future waits for a result. The SDK waits for 45 seconds."""


@cache
def _read_as(method: Callable[..., Any]) -> Any:
    """Return the type of a method's requests: that of its argument `call`, or one with its arguments as fields."""
    hints, given = get_type_hints(method, include_extras=True), signature(method).parameters.values()
    fields = [(one.name, hints[one.name], *([] if one.default is one.empty else [one.default])) for one in given]
    own: Any = [field for field in fields if field[0] != "client"]
    return hints.get("call") or defstruct(method.__name__, own, frozen=True, kw_only=True)


def _answer(found: bodies.Answer, status: int = 200) -> Response:
    return Response(encoded(found, binary=False)[0], status_code=status, media_type=JSON)


class TinkerRoutes:
    """The routes of one server."""

    def __init__(self, parts: ServerParts, access: BaseAccess, settings: TinkerApi) -> None:
        self._parts, self.service = parts, TinkerService(access, parts.context, settings)
        self.rest = TinkerRest(self.service)

    async def _read(self, http: Request, kind: Any) -> Any:
        """Read a request: its body, its path, and its query."""
        given: dict[str, Any] = {}
        if http.method in ("POST", "PUT"):
            async with self._parts.bodies.read(http.scope, http.receive) as content:
                given = json_object(content or b"{}")
        return converted({**given, **http.query_params, **http.path_params}, kind, strict=http.method != "GET")

    async def call(self, http: Request, *, by: str, counts: bool = False) -> Response:
        """Answer by a method of `service` or of `rest`. counts: in the quota of the client."""
        method, client = attrgetter(by)(self), client_of(http.scope)
        kind = _read_as(method)
        call = await self._read(http, kind)
        given = {"call": call} if kind.__module__ == bodies.__name__ else structs.asdict(call)
        with client.request() if counts else nullcontext():
            found = method(**given, client=client)
        return _answer(await found if isawaitable(found) else found)

    async def constant(self, http: Request, *, found: bodies.Answer) -> Response:
        """Serve a route with one answer. A body is read, and not kept."""
        await self._read(http, dict[str, Any])
        return _answer(found)

    async def refused(self, _: Request, *, advice: str) -> Response:
        """Refuse a route of Tinker that is not served."""
        raise ApiError(400, advice, code="not_served")

    async def forward_backward(self, http: Request, *, forward_only: bool = False) -> Response:
        """Serve POST forward_backward and POST forward, whose bodies may be protobuf."""
        media_type, client = http.headers.get("content-type", ""), client_of(http.scope)
        async with self._parts.bodies.read(http.scope, http.receive, binary=PROTOBUF) as content:
            call = read_forward_backward(content, media_type)
        with client.request():
            call = structs.replace(call, forward_only=forward_only or call.forward_only)
            return _answer(self.service.forward_backward(call, client))

    async def retrieve_future(self, http: Request) -> Response:
        """Serve POST retrieve_future: the result, or 408 if there is none yet."""
        call = await self._read(http, bodies.OfFuture)
        write = partial(encoded, binary=PROTOBUF in http.headers.get("accept", ""))
        found = await self.service.sessions.result(call.request_id, client_of(http.scope), POLL_SECONDS, write)
        if found is None:
            waiting = {"type": "try_again", "request_id": call.request_id, "queue_state": "active"}
            return _answer(waiting, status=408)
        return Response(found[0], media_type=found[1])

    async def archive(self, http: Request) -> Response:
        """Serve GET of a checkpoint's archive: a redirection to this server, which sends the file itself.

        SDK 0.34 reads the address from `location`; a client that sends `accept: application/gzip` gets the file.
        """
        call, client = await self._read(http, bodies.OfCheckpoint), client_of(http.scope)
        name, content = await self.rest.archive(call, client)
        if "gzip" in http.headers.get("accept", ""):
            headers = {"content-disposition": f'attachment; filename="{name}"'}
            return Response(content, media_type="application/gzip", headers=headers)
        until = format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True)
        return Response(status_code=302, headers={"location": str(http.url), "expires": until})

    async def tenants(self, _: Request) -> Response:
        """Serve the page of all tenants."""
        return HTMLResponse(self.rest.tenants())
