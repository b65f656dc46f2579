"""The routes: what each answers, and in which order a request passes the guards."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import TypeVar

import anyio
import msgspec
from msgspec import Struct
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from clotho.config.addresses import is_loopback
from clotho.serving.auth import ApiKey, LocalPagesOnly, client_label
from clotho.serving.errors import HANDLERS, invalid
from clotho.serving.limits import Admission, Traffic, UnreadBodies, read_body, until_disconnect
from clotho.serving.metrics import RequestMetrics
from clotho.serving.native import NativeAsk, Outcome
from clotho.serving.openai_choices import ChatStyle, CompletionStyle, Style
from clotho.serving.openai_responses import Answer, ModelCard, ModelList
from clotho.serving.routes_sglang import generate_ask
from clotho.serving.routes_trl import trl_ask
from clotho.serving.sample_requests import Ask, chat_ask, completion_ask
from clotho.serving.services import GatewayServices, Remembering
from clotho.serving.streaming import EventStream, event_stream
from protocols.sampling import Completion
from protocols.step import WeightsReady

T = TypeVar("T")
VERSION_HEADER = "x-clotho-weights-version"
TOKENIZE_SECONDS = 10.0
Reader = Callable[[bytes, GatewayServices], T]


def build_app(services: GatewayServices, traffic: Traffic) -> Starlette:
    """Return the application. From the outside in: unread bodies, foreign pages, API key, admission, routes."""
    routes = _Routes(services)
    guards = [Middleware(UnreadBodies)]
    if is_loopback(services.settings.host):
        guards.append(Middleware(LocalPagesOnly, host=services.settings.host))
    if services.settings.api_key:
        guards.append(Middleware(ApiKey, key=services.settings.api_key))
    guards.append(Middleware(Admission, traffic=traffic))
    return Starlette(
        routes=[
            Route("/health", routes.health),
            Route("/metrics", routes.metrics),
            Route("/v1/models", routes.models),
            Route("/v1/completions", routes.completions, methods=["POST"]),
            Route("/v1/chat/completions", routes.chat, methods=["POST"]),
            Route("/generate", routes.generate, methods=["POST"]),
            Route("/v1/generate", routes.generate_rows, methods=["POST"]),
            Route("/v1/generate/", routes.generate_rows, methods=["POST"]),
        ],
        middleware=guards,
        exception_handlers=HANDLERS,
    )


class Health(Struct, frozen=True, kw_only=True):
    """The body of /health."""

    status: str
    detail: str
    model: str
    weights_version: int
    step: int
    fingerprint: str
    progress_seconds: float
    children: dict[str, str]


class _Routes:
    def __init__(self, services: GatewayServices) -> None:
        self._services = services
        self._metrics = RequestMetrics(services)
        self._tokenizing = anyio.CapacityLimiter(4)
        self._scoring = anyio.CapacityLimiter(1)
        self._since = int(time.time())

    async def health(self, _: Request) -> Response:
        report, weights = self._services.health(), self._services.weights()
        body = Health(
            status=report.status,
            detail=report.detail,
            model=self._services.settings.model_name,
            weights_version=weights.version,
            step=weights.step,
            fingerprint=weights.fingerprint,
            progress_seconds=report.progress_seconds,
            children=report.children,
        )
        return _json(body, weights.version, status=200 if report.status == "ok" else 503)

    async def metrics(self, _: Request) -> Response:
        return Response(self._metrics.render(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def models(self, _: Request) -> Response:
        version = self._services.weights().version
        name = self._services.settings.model_name
        length = self._services.context_length
        card = ModelCard(id=name, root=name, created=self._since, max_model_len=length, weights_version=version)
        return _json(ModelList(data=[card]), version)

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, completion_ask, CompletionStyle())

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, chat_ask, ChatStyle())

    async def generate(self, request: Request) -> Response:
        return await self._generate_natively(request, generate_ask)

    async def generate_rows(self, request: Request) -> Response:
        return await self._generate_natively(request, trl_ask)

    async def _generate_natively(self, request: Request, reader: Reader[NativeAsk]) -> Response:
        native = await self._read(reader, request)
        began, weights = time.monotonic(), self._services.weights()
        self._metrics.asked(native.ask)
        outcome = await until_disconnect(request.receive, self._outcome(request, native, weights))
        reply = native.answer(outcome)
        self._metrics.finished(outcome.completions, time.monotonic() - began)
        return _json(reply, weights.version)

    async def _outcome(self, request: Request, native: NativeAsk, weights: WeightsReady) -> Outcome:
        """Complete the prompt and score it, if asked for: second, so that what the engine refuses costs nothing.

        One prompt is scored at a time: each holds a cache of its own.
        """
        results = await self._sampler(request).complete_all(native.ask.requests)
        prompt = None
        if native.prompt_logprobs is not None:
            async with self._scoring:
                prompt = await self._services.prompt_logprobs(native.ask.requests[0].prompt, native.prompt_logprobs)
        return Outcome(completions=tuple(chain.from_iterable(results)), weights=weights, prompt=prompt)

    async def _generate(self, request: Request, reader: Reader[Ask], style: Style) -> Response:
        ask = await self._read(reader, request)
        began, weights, sampler = time.monotonic(), self._services.weights(), self._sampler(request)
        self._metrics.asked(ask)
        answer = Answer(style, ask, self._services, weights)

        def finished(completions: Sequence[Completion]) -> None:
            self._metrics.finished(completions, time.monotonic() - began)

        if not ask.stream:
            results = await until_disconnect(request.receive, sampler.complete_all(ask.requests))
            reply = answer.whole(results)
            finished([completion for group in results for completion in group])
            return _json(reply, weights.version)
        # The first events are awaited before the answer begins, so that what the engine refuses is still a 400.
        batches = sampler.stream_all(ask.requests)
        first = await until_disconnect(request.receive, anext(batches))
        self._metrics.first_token(time.monotonic() - began)
        return EventStream(event_stream(answer, first, batches, finished), {VERSION_HEADER: str(weights.version)})

    def _sampler(self, request: Request) -> Remembering:
        """Return the sampler of this request's client."""
        label = client_label(request.headers.get("authorization", ""), key=self._services.settings.api_key)
        return Remembering(self._services.sampler, self._services.sampled, label)

    async def _read(self, reader: Reader[T], request: Request) -> T:
        """Validate and tokenise in a worker thread; an endless chat template costs only its request."""
        settings = self._services.settings
        body = await read_body(
            request.scope, request.receive, max_bytes=settings.max_body_bytes, seconds=settings.body_seconds
        )
        with anyio.move_on_after(TOKENIZE_SECONDS):
            return await anyio.to_thread.run_sync(
                partial(reader, body, self._services), abandon_on_cancel=True, limiter=self._tokenizing
            )
        raise invalid("prompt", f"was not tokenised within {TOKENIZE_SECONDS:g} seconds")


def _json(body: Struct | list[Struct], version: int, *, status: int = 200) -> Response:
    headers = {VERSION_HEADER: str(version)}
    return Response(msgspec.json.encode(body), status_code=status, headers=headers, media_type="application/json")
