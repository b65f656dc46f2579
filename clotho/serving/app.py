"""The ASGI application: the endpoints of the library, the routes of all endpoints, and the order of the middleware."""

from __future__ import annotations

import time

from msgspec import structs
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from clotho import __version__
from clotho.serving.auth import ClientMiddleware, LocalOriginMiddleware, for_admins
from clotho.serving.bodies import json_response
from clotho.serving.errors import EXCEPTION_HANDLERS
from clotho.serving.limits import AdmissionMiddleware, ConcurrencyLimit, UnreadBodyMiddleware
from clotho.serving.parts import Endpoint, Handlers, ServerParts
from clotho.serving.services import Health, Version
from clotho.serving.struct_types import prepare_struct_types
from clotho.settings.server import is_loopback


def build_app(parts: ServerParts, limit: ConcurrencyLimit) -> Starlette:
    """Return the application. Middleware from the outside in: unread bodies, local origin, client, admission."""
    endpoints = (*_Core(parts).endpoints(), *parts.endpoints)
    parts.limit, parts.served = limit, endpoints
    settings = parts.context.settings
    middleware = [Middleware(UnreadBodyMiddleware, send_seconds=settings.send_seconds)]
    if is_loopback(settings.host):
        middleware.append(Middleware(LocalOriginMiddleware, host=settings.host))
    middleware.append(Middleware(ClientMiddleware, clients=parts.clients))
    admitted = frozenset(
        path for one in endpoints if one.method == "POST" and one.admitted for path in (one.path, *one.also)
    )
    middleware.append(Middleware(AdmissionMiddleware, paths=admitted, limit=limit, bodies=parts.bodies))
    routes = [
        *(route for one in endpoints for route in _routes(one)),
        *(route for pages in parts.pages for route in pages(limit.stopped)),
    ]
    prepare_struct_types()
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=EXCEPTION_HANDLERS)
    app.state.error_formats = {path: one.errors for one in endpoints for path in (one.path, *one.also)}
    return app


def _routes(one: Endpoint) -> list[Route]:
    handle = for_admins(one.handle) if one.access == "admin" else one.handle
    return [Route(path, handle, methods=[one.method]) for path in (one.path, *one.also)]


class _Core:
    """The endpoints of the library."""

    def __init__(self, parts: ServerParts) -> None:
        self._parts, self._context = parts, parts.context

    def endpoints(self) -> tuple[Endpoint, ...]:
        """Return all of them."""
        openai = Handlers("clotho.serving.openai_routes:OpenaiRoutes", self._parts, int(time.time()))
        responses, services = "clotho.serving.openai_responses", "clotho.serving.services"
        return (
            Endpoint(
                "POST",
                "/v1/chat/completions",
                openai.method("chat_completions"),
                "Complete a conversation",
                ("clotho.serving.openai_fields:ChatRequest",),
                (f"{responses}:ChatResponse",),
                streams=True,
            ),
            Endpoint(
                "POST",
                "/v1/completions",
                openai.method("completions"),
                "Complete prompts",
                ("clotho.serving.openai_requests:CompletionRequest",),
                (f"{responses}:CompletionResponse",),
                streams=True,
            ),
            Endpoint(
                "GET",
                "/v1/models",
                openai.method("models"),
                "List the models that requests can name",
                responses=(f"{responses}:ModelList",),
            ),
            Endpoint(
                "GET",
                "/v1/models/{name:path}",
                openai.method("model"),
                "One model by its name",
                responses=(f"{responses}:ModelCard",),
            ),
            Endpoint(
                "GET",
                "/health",
                self.health,
                "State of the server; status 503 unless it is ok or paused",
                responses=(f"{services}:Health",),
            ),
            Endpoint("GET", "/version", self.version, "Version of Clotho", responses=(f"{services}:Version",)),
            Endpoint("GET", "/metrics", self.metrics, "Metrics in the text format of Prometheus"),
        )

    async def health(self, _: Request) -> Response:
        """Return the state of the run, with status 503 unless it is `ok` or `paused`."""
        report, weights = self._context.health(), self._context.weights()
        body = Health(
            model=self._context.settings.model_name,
            weights_version=weights.version,
            step=weights.step,
            fingerprint=weights.fingerprint,
            **structs.asdict(report),
        )
        return json_response(body, weights.version, status=200 if report.status in ("ok", "paused") else 503)

    async def version(self, _: Request) -> Response:
        """Return the version of Clotho."""
        return json_response(Version(version=__version__), self._context.weights().version)

    async def metrics(self, _: Request) -> Response:
        """Return the metrics in the text format of Prometheus."""
        return Response(self._parts.metrics.render(), headers={"content-type": CONTENT_TYPE_LATEST})
