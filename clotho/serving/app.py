"""The ASGI application: the endpoints of the library, the routes of all endpoints, and the order of the middleware."""

from __future__ import annotations

import time
from functools import cached_property, partial

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from clotho import __version__
from clotho.serving.answering import json_response
from clotho.serving.auth import ClientMiddleware, LocalOriginMiddleware, for_admins
from clotho.serving.completion_requests import CompletionRequest, parse_completion_request
from clotho.serving.errors import EXCEPTION_HANDLERS
from clotho.serving.limits import AdmissionMiddleware, ConcurrencyLimit, UnreadBodyMiddleware, until_disconnect
from clotho.serving.loopback import is_loopback
from clotho.serving.openai_fields import ChatRequest
from clotho.serving.openai_requests import ValidatedRequest, parse_chat_request
from clotho.serving.openai_responses import (
    ChatResponse,
    CompletionResponse,
    ModelCard,
    ModelList,
)
from clotho.serving.parts import Endpoint, ServerParts
from clotho.serving.response_builder import ChatBuilder, CompletionBuilder, ResponseBuilder
from clotho.serving.services import Health, ServedModel, Version, find_served
from clotho.serving.struct_types import prepare_struct_types
from protocols.step import WeightsReady


def build_app(parts: ServerParts, limit: ConcurrencyLimit) -> Starlette:
    """Return the application. Middleware from the outside in: unread bodies, local origin, client, admission."""
    parts.limit = limit
    settings = parts.context.settings
    endpoints = (*_Core(parts).endpoints, *parts.endpoints)
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
    return Starlette(routes=routes, middleware=middleware, exception_handlers=EXCEPTION_HANDLERS)


def _routes(one: Endpoint) -> list[Route]:
    handle = for_admins(one.handle) if one.access == "admin" else one.handle
    return [Route(path, handle, methods=[one.method]) for path in (one.path, *one.also)]


class _Core:
    """The endpoints of the library."""

    def __init__(self, parts: ServerParts) -> None:
        self._parts, self._context = parts, parts.context
        self._started = int(time.time())

    @cached_property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """All of them."""
        return (
            Endpoint(
                "POST",
                "/v1/chat/completions",
                self.chat_completions,
                "Complete a conversation",
                (ChatRequest,),
                (ChatResponse,),
                streams=True,
            ),
            Endpoint(
                "POST",
                "/v1/completions",
                self.completions,
                "Complete prompts",
                (CompletionRequest,),
                (CompletionResponse,),
                streams=True,
            ),
            Endpoint(
                "GET", "/v1/models", self.models, "List the models that requests can name", responses=(ModelList,)
            ),
            Endpoint("GET", "/v1/models/{name:path}", self.model, "One model by its name", responses=(ModelCard,)),
            Endpoint(
                "GET",
                "/health",
                self.health,
                "State of the server; status 503 unless it is ok or paused",
                responses=(Health,),
            ),
            Endpoint("GET", "/version", self.version, "Version of Clotho", responses=(Version,)),
            Endpoint("GET", "/metrics", self.metrics, "Metrics in the text format of Prometheus"),
            Endpoint("GET", "/openapi.json", self.openapi),
        )

    async def chat_completions(self, http: Request) -> Response:
        """Answer a conversation."""
        build = partial(self._builder, http, ChatBuilder)
        return await self._parts.answering.answer(http, parse_chat_request, build)

    async def completions(self, http: Request) -> Response:
        """Complete prompts."""
        build = partial(self._builder, http, CompletionBuilder)
        return await self._parts.answering.answer(http, parse_completion_request, build)

    async def _builder(
        self, http: Request, kind: type[ResponseBuilder], request: ValidatedRequest, weights: WeightsReady
    ) -> ResponseBuilder:
        """Return the builder of the response. If the response contains scores of prompts, compute them first."""
        top = request.scored_alternatives
        if top is None:
            return kind(request, self._context, weights)
        scored = await until_disconnect(http.receive, self._parts.answering.scores(http, request, top))
        return kind(request, self._context, weights, scored)

    async def models(self, _: Request) -> Response:
        """List the served models."""
        cards = [self._card(model) for model in self._context.models()]
        return json_response(ModelList(data=cards), self._context.weights().version)

    async def model(self, http: Request) -> Response:
        """Describe one served model. Raises ApiError if there is none of this name."""
        card = self._card(find_served(http.path_params["name"], self._context))
        return json_response(card, card.weights_version)

    def _card(self, model: ServedModel) -> ModelCard:
        return ModelCard(
            id=model.id,
            root=model.root,
            parent=model.parent,
            created=self._started,
            max_model_len=self._context.context_length,
            weights_version=model.weights().version,
        )

    async def health(self, _: Request) -> Response:
        """Return the state of the run, with status 503 unless it is `ok` or `paused`."""
        report, weights = self._context.health(), self._context.weights()
        body = Health(
            status=report.status,
            detail=report.detail,
            model=self._context.settings.model_name,
            weights_version=weights.version,
            step=weights.step,
            fingerprint=weights.fingerprint,
            progress_seconds=report.progress_seconds,
            children=report.children,
            findings=report.findings,
        )
        return json_response(body, weights.version, status=200 if report.status in ("ok", "paused") else 503)

    async def version(self, _: Request) -> Response:
        """Return the version of Clotho."""
        return json_response(Version(version=__version__), self._context.weights().version)

    async def metrics(self, _: Request) -> Response:
        """Return the metrics in the text format of Prometheus."""
        return Response(self._parts.metrics.render(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def openapi(self, _: Request) -> Response:
        """Return the description of the API."""
        return Response(self._document, media_type="application/json")

    @cached_property
    def _document(self) -> bytes:
        from clotho.serving.openapi import document

        return document((*self.endpoints, *self._parts.endpoints))
