"""Routes that control the decode engine, as trainers use them: pause, resume, abort and sleep of vLLM and SGLang."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Literal, TypeVar, cast, get_args

import anyio
import msgspec
from msgspec import Struct
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from attachments.dialects.sections import ALLOW_PAUSE
from clotho.lanes.compute_thread import finish
from clotho.serving.auth import client_of
from clotho.serving.bodies import json_object
from clotho.serving.errors import ApiError, invalid_field
from clotho.serving.openai_fields import RequestId
from clotho.serving.openai_requests import converted
from clotho.serving.parts import ServerParts
from clotho.serving.services import EngineAccess

PauseMode = Literal["abort", "wait", "keep"]
"""What happens to requests in progress: they end as aborted, they finish, or they stand still until `resume`."""

ID_PREFIXES = ("chatcmpl-", "cmpl-", "generate-tokens-", "resp_", "msg_")
POLL_SECONDS = 0.01


class EngineControl:
    """Pauses and resumes the engine, and aborts requests. Rollouts of a training run are never aborted."""

    def __init__(self, access: EngineAccess, *, may_pause: bool) -> None:
        """may_pause: whether clients may pause the engine."""
        self._submit, self._engine, self._may_pause = access.submit, access.engine, may_pause
        self.is_paused = self.is_sleeping = False

    def why_paused(self) -> str:
        """Return why requests wait; empty if they do not."""
        return "paused; POST /resume continues" if self.is_paused else ""

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Hold the engine: no request begins until `resume`. Raises ApiError with status 403 if that is not permitted.

        clear_cache: empty the prefix cache; with `keep`, it is kept.
        """
        self._require_permission()
        self.is_paused = True

        def hold() -> None:
            self._engine.held = "admission" if mode == "wait" else "everything"
            if mode == "abort":
                self._engine.abort_clients(None)

        await finish(self._submit(hold))
        while mode == "wait" and self.is_paused:
            if not await finish(self._submit(lambda: self._engine.running)):
                break
            await anyio.sleep(POLL_SECONDS)
        if clear_cache and mode != "keep":
            await finish(self._submit(self._engine.release_caches))

    async def resume(self) -> None:
        """Continue. Raises ApiError with status 403 if that is not permitted."""
        self._require_permission()

        def release() -> None:
            self._engine.held = "nothing"

        await finish(self._submit(release))
        self.is_paused = self.is_sleeping = False

    async def sleep(self, level: int, mode: PauseMode) -> None:
        """Pause; level 1 also frees caches. Raises ApiError for other levels: weights stay in unified memory."""
        if level not in (0, 1):
            raise invalid_field("level", "must be 0 or 1: the weights stay in memory")
        await self.pause(mode, clear_cache=level == 1)
        self.is_sleeping = True

    async def abort(self, request_ids: Collection[str] | None, owner: str) -> int:
        """Abort requests by their names; None: all requests of clients. Returns the number of aborted requests.

        owner: only requests of this client; empty: of all.
        """
        names = request_ids and {_bare(name) for name in request_ids}
        return await finish(self._submit(lambda: self._engine.abort_clients(names, owner)))

    async def flush(self) -> None:
        """Empty the prefix cache."""
        await finish(self._submit(self._engine.release_caches))

    def _require_permission(self) -> None:
        if not self._may_pause:
            message = "A training run is not paused by clients; set server.allow_pause."
            raise ApiError(403, message, code="control_disabled")


def _bare(name: str) -> str:
    for prefix in ID_PREFIXES:
        name = name.removeprefix(prefix)
    return name


SGLANG_MODES: dict[str, PauseMode] = {"abort": "abort", "in_place": "keep", "retract": "keep"}
"""SGLang's names of the modes. Requests that are retracted keep their KV cache here."""

B = TypeVar("B", bound=Struct)


class ControlStatus(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The state after a change. level, elapsed_ms: of sleep and wake-up. aborted: number of aborted requests."""

    status: str
    level: int | None = None
    elapsed_ms: float | None = None
    aborted: int | None = None


class Paused(Struct, frozen=True, kw_only=True):
    """The response of GET /is_paused."""

    is_paused: bool


class Sleeping(Struct, frozen=True, kw_only=True):
    """The response of GET /is_sleeping."""

    is_sleeping: bool


class AbortRequests(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of vLLM's /abort_requests: the names of requests."""

    request_ids: list[RequestId]


class AbortRequest(Struct, frozen=True, kw_only=True):
    """The body of SGLang's /abort_request: the name of a request, or all."""

    rid: RequestId | None = None
    abort_all: bool = False


class PauseGeneration(Struct, frozen=True, kw_only=True):
    """The body of SGLang's /pause_generation."""

    mode: Literal["abort", "in_place", "retract"] = "abort"


class ControlHandlers:
    """The handlers of the routes. They are not subject to the concurrency limit, which paused requests can exhaust."""

    def __init__(self, parts: ServerParts, access: EngineAccess) -> None:
        self._bodies = parts.bodies
        may_pause = access.may_pause or ALLOW_PAUSE.of(parts.offered.settings)
        self._control = EngineControl(access, may_pause=may_pause)
        parts.pauses.append(self._control.why_paused)

    async def pause(self, http: Request) -> Response:
        """Serve vLLM's POST /pause."""
        query = http.query_params
        mode: PauseMode = "wait" if _flag(query, "wait_for_inflight_requests", default=False) else _mode(query)
        await self._control.pause(mode, clear_cache=_flag(query, "clear_cache", default=True))
        return _json(ControlStatus(status="paused"))

    async def resume(self, _: Request) -> Response:
        """Serve vLLM's POST /resume."""
        await self._control.resume()
        return _json(ControlStatus(status="resumed"))

    async def is_paused(self, _: Request) -> Response:
        """Serve vLLM's GET /is_paused."""
        return _json(Paused(is_paused=self._control.is_paused))

    async def sleep(self, http: Request) -> Response:
        """Serve vLLM's POST /sleep."""
        began, level = time.monotonic(), http.query_params.get("level", "1")
        if not level.isdecimal() or len(level) > 3:
            raise invalid_field("level", "must be 0 or 1")
        await self._control.sleep(int(level), _mode(http.query_params))
        return _json(ControlStatus(status="sleeping", level=int(level), elapsed_ms=_since(began)))

    async def wake_up(self, _: Request) -> Response:
        """Serve vLLM's POST /wake_up."""
        began = time.monotonic()
        await self._control.resume()
        return _json(ControlStatus(status="awake", elapsed_ms=_since(began)))

    async def is_sleeping(self, _: Request) -> Response:
        """Serve vLLM's GET /is_sleeping."""
        return _json(Sleeping(is_sleeping=self._control.is_sleeping))

    async def abort_requests(self, http: Request) -> Response:
        """Serve vLLM's POST /abort_requests."""
        body = await self._body(http, AbortRequests)
        return await self._abort(http, body.request_ids)

    async def abort_request(self, http: Request) -> Response:
        """Serve SGLang's POST /abort_request."""
        body = await self._body(http, AbortRequest)
        if not body.abort_all and body.rid is None:
            raise invalid_field("rid", "is missing; name a request, or set abort_all")
        return await self._abort(http, None if body.abort_all else [body.rid or ""])

    async def _abort(self, http: Request, names: list[str] | None) -> Response:
        aborted = await self._control.abort(names, client_of(http.scope).owner)
        return _json(ControlStatus(status="aborted", aborted=aborted))

    async def pause_generation(self, http: Request) -> Response:
        """Serve SGLang's POST /pause_generation."""
        body = await self._body(http, PauseGeneration)
        await self._control.pause(SGLANG_MODES[body.mode], clear_cache=False)
        return _json(ControlStatus(status="paused"))

    async def flush_cache(self, _: Request) -> Response:
        """Serve SGLang's POST /flush_cache."""
        await self._control.flush()
        return _json(ControlStatus(status="flushed"))

    async def _body(self, http: Request, kind: type[B]) -> B:
        async with self._bodies.read(http.scope, http.receive) as body:
            return converted(json_object(body), kind)


def _mode(query: QueryParams) -> PauseMode:
    mode = query.get("mode", "abort")
    if mode not in get_args(PauseMode):
        raise invalid_field("mode", f"must be one of {', '.join(get_args(PauseMode))}")
    return cast(PauseMode, mode)


def _flag(query: QueryParams, name: str, *, default: bool) -> bool:
    value = query.get(name, str(default)).lower()
    if value not in ("true", "false", "1", "0"):
        raise invalid_field(name, "must be true or false")
    return value in ("true", "1")


def _since(began: float) -> float:
    return round(1000 * (time.monotonic() - began), 2)


def _json(body: Struct) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
