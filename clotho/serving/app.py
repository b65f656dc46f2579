"""The ASGI application: the table of routes, their handlers, and the order of the middleware."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import chain
from typing import TypeVar

import anyio
import msgspec
from msgspec import Struct, structs
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from attachments.adapters.routes_adapters import AdapterRoutes
from attachments.dialects.native import GenerationResult, NativeRequest
from attachments.dialects.responses_format import ResponsesBuilder
from attachments.dialects.responses_requests import ResponsesRequest, parse_responses_request
from attachments.dialects.routes_control import ControlHandlers
from attachments.dialects.routes_generate import parse_generate_request
from attachments.dialects.routes_tokenize import detokenize, tokenize_text
from attachments.dialects.routes_tokens import parse_tokens_request
from attachments.dialects.routes_trl import parse_trl_request
from attachments.remote.routes import PolicyRoutes, parse_rollout_call, rollout_answer
from clotho import __version__
from clotho.lanes.daemon_threads import DaemonThreads, NoThreadError, OvertimeError
from clotho.serving.auth import ClientMiddleware, Clients, LocalOriginMiddleware, client_of, for_admins
from clotho.serving.bodies import RequestBodies
from clotho.serving.completion_requests import parse_completion_request
from clotho.serving.errors import EXCEPTION_HANDLERS, ApiError, invalid_field, overloaded
from clotho.serving.limits import (
    AdmissionMiddleware,
    ConcurrencyLimit,
    UnreadBodyMiddleware,
    until_disconnect,
)
from clotho.serving.loopback import is_loopback
from clotho.serving.metrics import ServerMetrics
from clotho.serving.openai_requests import ValidatedRequest, parse_chat_request
from clotho.serving.openai_responses import (
    ChatFormat,
    CompletionFormat,
    ModelCard,
    ModelList,
    ResponseBuilder,
    ResponseFormat,
)
from clotho.serving.prompt_scores import PromptedBuilder
from clotho.serving.services import ClientSampler, Health, ServedModel, ServerContext, Version, find_served
from clotho.serving.streaming import EventStream, event_stream
from clotho.serving.struct_types import prepare_struct_types
from protocols.sampling import Completion, PromptLogprobs
from protocols.step import WeightsReady

T = TypeVar("T")
V = TypeVar("V", bound=ValidatedRequest)
VERSION_HEADER = "x-clotho-weights-version"
TOKENIZE_SECONDS = 10.0
TOKENIZER_THREADS = 4
NOTHING = Completion(tokens=(), logprobs=(), versions=(), text="", finish_reason="length")
"""The completion of a request with `max_tokens: 0`."""
COMPILE_SECONDS = 10.0
LARGE_BODY_BYTES = 65_536
"""Larger bodies are parsed in a thread of their own, so that they do not delay others."""

RequestParser = Callable[[bytes, ServerContext], T]
Builder = ResponseBuilder | ResponsesBuilder


def build_app(context: ServerContext, limit: ConcurrencyLimit) -> Starlette:
    """Return the application. Middleware from the outside in: unread bodies, local origin, client, admission.

    Raises ProfileError if the file of API keys is not valid.
    """
    clients = Clients(context.settings)
    handlers = _Handlers(context, limit, clients)
    settings = context.settings
    middleware = [Middleware(UnreadBodyMiddleware, send_seconds=settings.send_seconds)]
    if is_loopback(settings.host):
        middleware.append(Middleware(LocalOriginMiddleware, host=settings.host))
    middleware.append(Middleware(ClientMiddleware, clients=clients))
    bodies = RequestBodies(max_bytes=settings.max_body_bytes, seconds=settings.body_seconds)
    policy = PolicyRoutes(context, settings.body_seconds)
    gets = {
        "/health": handlers.health,
        "/metrics": handlers.metrics,
        "/openapi.json": handlers.openapi,
        "/version": handlers.version,
        "/v1/policy": policy.get,
        "/v1/models": handlers.models,
        "/v1/models/{name:path}": handlers.model,
    }
    posts = {
        "/v1/completions": handlers.completions,
        "/v1/chat/completions": handlers.chat_completions,
        "/v1/responses": handlers.responses,
        "/generate": handlers.generate,
        "/v1/generate": handlers.trl_generate,
        "/v1/generate/": handlers.trl_generate,
        "/inference/v1/generate": handlers.tokens_generate,
        "/tokenize": handlers.tokenize,
        "/detokenize": handlers.detokenize,
        "/v1/rollouts": handlers.rollouts,
    }
    if context.adapters is not None:
        adapters = AdapterRoutes(context.adapters)
        gets |= {"/lora/status": adapters.status}
        posts |= {
            "/v1/load_lora_adapter": adapters.load,
            "/v1/unload_lora_adapter": adapters.unload,
            "/lora/load": adapters.load_by_path,
            "/lora/unload": adapters.unload_by_name,
        }
    controls = {}
    if context.control is not None:
        control = ControlHandlers(context.control, bodies)
        gets |= {"/is_paused": control.is_paused, "/is_sleeping": control.is_sleeping}
        controls = {
            "/pause": for_admins(control.pause),
            "/resume": for_admins(control.resume),
            "/sleep": for_admins(control.sleep),
            "/wake_up": for_admins(control.wake_up),
            "/abort_requests": control.abort_requests,
            "/abort_request": control.abort_request,
            "/pause_generation": for_admins(control.pause_generation),
            "/continue_generation": for_admins(control.resume),
            "/flush_cache": for_admins(control.flush_cache),
        }
    middleware.append(Middleware(AdmissionMiddleware, paths=frozenset(posts), limit=limit, bodies=bodies))
    routes = [
        *(Route(path, handler) for path, handler in gets.items()),
        *(Route(path, handler, methods=["POST"]) for path, handler in (posts | controls).items()),
        Route("/v1/policy/weights", for_admins(policy.put), methods=["PUT"]),
        *context.dashboard(limit.stopped),
    ]
    prepare_struct_types()
    return Starlette(routes=routes, middleware=middleware, exception_handlers=EXCEPTION_HANDLERS)


class _Handlers:
    """The routes of all other endpoints, each named after its endpoint."""

    def __init__(self, context: ServerContext, limit: ConcurrencyLimit, clients: Clients) -> None:
        self._context = context
        self._metrics = ServerMetrics(context, limit, clients.quotas)
        limits = {"wait_seconds": TOKENIZE_SECONDS, "work_seconds": TOKENIZE_SECONDS}
        self._small_bodies = DaemonThreads("request", TOKENIZER_THREADS, **limits)
        self._large_bodies = DaemonThreads("large-request", 1, **limits)
        self._grammars = DaemonThreads("grammar", 2, wait_seconds=COMPILE_SECONDS, work_seconds=COMPILE_SECONDS)
        self._scoring = anyio.CapacityLimiter(1)
        self._started = int(time.time())

    async def health(self, _: Request) -> Response:
        report, weights, control = self._context.health(), self._context.weights(), self._context.control
        if report.status == "ok" and control is not None and control.is_paused:
            detail = "; ".join(filter(None, ["paused; POST /resume continues", report.detail]))
            report = structs.replace(report, status="paused", detail=detail)
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
        return _json(body, weights.version, status=200 if report.status in ("ok", "paused") else 503)

    async def metrics(self, _: Request) -> Response:
        return Response(self._metrics.render(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def models(self, _: Request) -> Response:
        cards = [self._card(model) for model in self._context.models()]
        return _json(ModelList(data=cards), self._context.weights().version)

    async def model(self, http: Request) -> Response:
        card = self._card(find_served(http.path_params["name"], self._context))
        return _json(card, card.weights_version)

    def _card(self, model: ServedModel) -> ModelCard:
        return ModelCard(
            id=model.id,
            root=model.root,
            parent=model.parent,
            created=self._started,
            max_model_len=self._context.context_length,
            weights_version=model.weights().version,
        )

    async def completions(self, http: Request) -> Response:
        return await self._openai(http, parse_completion_request, partial(self._builder, http, CompletionFormat()))

    async def chat_completions(self, http: Request) -> Response:
        return await self._openai(http, parse_chat_request, partial(self._builder, http, ChatFormat()))

    async def responses(self, http: Request) -> Response:
        async def build(request: ResponsesRequest, weights: WeightsReady) -> ResponsesBuilder:
            return ResponsesBuilder(request, self._context.tokenizer, weights)

        return await self._openai(http, parse_responses_request, build)

    async def generate(self, http: Request) -> Response:
        return await self._native(http, parse_generate_request)

    async def trl_generate(self, http: Request) -> Response:
        return await self._native(http, parse_trl_request)

    async def tokens_generate(self, http: Request) -> Response:
        return await self._native(http, parse_tokens_request)

    async def tokenize(self, http: Request) -> Response:
        return _json(await self._parse(tokenize_text, http), self._context.weights().version)

    async def detokenize(self, http: Request) -> Response:
        return _json(await self._parse(detokenize, http), self._context.weights().version)

    async def openapi(self, _: Request) -> Response:
        from clotho.serving.openapi import document

        return Response(document(), media_type="application/json")

    async def version(self, _: Request) -> Response:
        return _json(Version(version=__version__), self._context.weights().version)

    async def rollouts(self, http: Request) -> Response:
        request = await self._parse(parse_rollout_call, http)
        started, weights = time.monotonic(), self._context.weights()
        self._metrics.request_started(request)
        (completions,) = await until_disconnect(http.receive, self._sampler(http).complete_all(request.samples))
        self._metrics.request_finished(completions, time.monotonic() - started)
        return _json(rollout_answer(tuple(completions), self._context), weights.version)

    async def _native(self, http: Request, parser: RequestParser[NativeRequest]) -> Response:
        native = await self._parse(parser, http)
        native = structs.replace(native, request=await self._compiled(native.request))
        started, weights = time.monotonic(), native.request.model.weights()
        self._metrics.request_started(native.request)
        result = await until_disconnect(http.receive, self._result(http, native, weights))
        body = native.respond(result)
        self._metrics.request_finished(result.completions, time.monotonic() - started)
        return _json(body, weights.version)

    async def _result(self, http: Request, native: NativeRequest, weights: WeightsReady) -> GenerationResult:
        """Complete the prompts, then score the prompt if requested.

        The prompt is scored last, so that a request that the engine rejects costs no forward pass.
        """
        results = await self._sampler(http).complete_all(native.request.samples)
        prompt = None
        if native.prompt_logprobs is not None:
            (prompt,) = await self._score(http, native.request, native.prompt_logprobs)
        completions = tuple(chain.from_iterable(results))
        return GenerationResult(model=native.request.model.id, completions=completions, weights=weights, prompt=prompt)

    async def _openai(
        self, http: Request, parser: RequestParser[V], build: Callable[[V, WeightsReady], Awaitable[Builder]]
    ) -> Response:
        request = await self._compiled(await self._parse(parser, http))
        started, weights, sampler = time.monotonic(), request.model.weights(), self._sampler(http)
        self._metrics.request_started(request)
        builder = await build(request, weights)

        def finished(completions: Sequence[Completion]) -> None:
            self._metrics.request_finished(completions, time.monotonic() - started)

        if not request.stream:
            results = [[NOTHING] * request.n for _ in request.prompts]
            if request.samples:
                results = await until_disconnect(http.receive, sampler.complete_all(request.samples))
            body = builder.whole(results)
            finished([completion for group in results for completion in group])
            return _json(body, weights.version)
        # Wait for the first events before the response starts: a request that the engine rejects receives a 400.
        batches = sampler.stream_all(request.samples)
        first = await until_disconnect(http.receive, anext(batches))
        self._metrics.first_token(time.monotonic() - started)
        return EventStream(event_stream(builder, first, batches, finished), {VERSION_HEADER: str(weights.version)})

    async def _builder(
        self, http: Request, response_format: ResponseFormat, request: ValidatedRequest, weights: WeightsReady
    ) -> ResponseBuilder:
        """Return the builder of the response. If the response contains scores of prompts, compute them first."""
        if not request.echo and request.prompt_logprobs is None:
            return ResponseBuilder(response_format, request, self._context, weights)
        builder = PromptedBuilder(response_format, request, self._context, weights)
        if (top := request.scored_alternatives) is not None:
            builder.scored = await until_disconnect(http.receive, self._score(http, request, top))
        return builder

    async def _score(self, http: Request, request: ValidatedRequest, top: int) -> list[PromptLogprobs]:
        """Score the prompts of a request, one at a time, because each uses a KV cache of its own."""
        with client_of(http.scope).reserved(request.prompt_tokens):
            return await self._score_in_turn(request, top)

    async def _score_in_turn(self, request: ValidatedRequest, top: int) -> list[PromptLogprobs]:
        async with self._scoring:
            score, source = self._context.prompt_logprobs, request.model.source
            return [await score(prompt, top, source) for prompt in request.prompts]

    def _sampler(self, http: Request) -> ClientSampler:
        """Return the sampler for the client of this request."""
        return ClientSampler(self._context, client_of(http.scope))

    async def _parse(self, parser: RequestParser[T], http: Request) -> T:
        """Validate and tokenize a request in a daemon thread; an endless chat template fails only its request."""
        body = await http.body()
        threads = self._large_bodies if len(body) > LARGE_BODY_BYTES else self._small_bodies
        try:
            return await threads.run(partial(parser, body, self._context))
        except NoThreadError:
            raise overloaded("Other requests are being tokenized; retry later.") from None
        except OvertimeError:
            message = f"The tokenization took longer than {TOKENIZE_SECONDS:g} seconds; shorten the prompt."
            raise ApiError(400, message) from None

    async def _compiled(self, request: V) -> V:
        """Compile the grammar of a request in a daemon thread, if it has one."""
        grammar = request.grammar
        if grammar is None:
            return request
        work = partial(self._context.tokenizer.compile_grammar, grammar, self._context.vocab_size)
        try:
            constraint = await self._grammars.run(work)
        except NoThreadError:
            raise overloaded("Other grammars are being compiled; retry later.") from None
        except OvertimeError:
            raise invalid_field(grammar.param, f"took longer than {COMPILE_SECONDS:g} seconds to compile") from None
        samples = tuple(structs.replace(sample, constraint=constraint) for sample in request.samples)
        return structs.replace(request, samples=samples)


def _json(body: Struct | list[Struct], version: int, *, status: int = 200) -> Response:
    headers = {VERSION_HEADER: str(version)}
    return Response(msgspec.json.encode(body), status_code=status, headers=headers, media_type="application/json")
