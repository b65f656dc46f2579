"""How a request is answered at any endpoint: validation, grammar, sampling for its client, scores, and metrics."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

import anyio
from msgspec import Struct, structs
from starlette.requests import Request
from starlette.responses import Response

from clotho.lanes.daemon_threads import DaemonThreads, NoThreadError, OvertimeError
from clotho.serving.auth import client_of
from clotho.serving.errors import ApiError, invalid_field, overloaded
from clotho.serving.limits import until_disconnect
from clotho.serving.metrics import ServerMetrics
from clotho.serving.openai_requests import ValidatedRequest
from clotho.serving.parts import VERSION_HEADER, json_response
from clotho.serving.services import ClientSampler, ServerContext
from clotho.serving.streaming import EventStream, StreamBuilder, event_stream
from protocols.sampling import Completion, PromptLogprobs
from protocols.step import WeightsReady

T = TypeVar("T")
V = TypeVar("V", bound=ValidatedRequest)
TOKENIZE_SECONDS = 10.0
TOKENIZER_THREADS = 4
NOTHING = Completion(tokens=(), logprobs=(), versions=(), text="", finish_reason="length")
"""The completion of a request with `max_tokens: 0`."""
COMPILE_SECONDS = 10.0
LARGE_BODY_BYTES = 65_536
"""Larger bodies are parsed in a thread of their own, so that they do not delay others."""

RequestParser = Callable[[bytes, ServerContext], T]


class AnswerBuilder(StreamBuilder, Protocol):
    """Builds one answer, whole or as a stream."""

    def whole(self, results: Sequence[Sequence[Completion]], /) -> Struct:
        """Return the body of the whole answer; results: completions by prompt."""


class Answering:
    """The steps that answer a request. Used from one event loop."""

    def __init__(self, context: ServerContext, metrics: ServerMetrics) -> None:
        self._context, self._metrics = context, metrics
        limits = {"wait_seconds": TOKENIZE_SECONDS, "work_seconds": TOKENIZE_SECONDS}
        self._small_bodies = DaemonThreads("request", TOKENIZER_THREADS, **limits)
        self._large_bodies = DaemonThreads("large-request", 1, **limits)
        self._grammars = DaemonThreads("grammar", 2, wait_seconds=COMPILE_SECONDS, work_seconds=COMPILE_SECONDS)
        self._scoring = anyio.CapacityLimiter(1)

    async def parsed(self, parser: RequestParser[T], http: Request) -> T:
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

    async def compiled(self, request: V) -> V:
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

    async def recorded(self, http: Request, request: V) -> tuple[V, ClientSampler]:
        """Return a request as its recorder changes it, and the sampler for its client. Raises ApiError if refused."""
        recording = await self._context.sample_log.begin(http, request.samples)
        if samples := recording.samples:
            request = structs.replace(request, samples=samples, prompts=tuple(one.prompt for one in samples))
        return request, ClientSampler(self._context, client_of(http.scope), recording)

    async def scores(self, http: Request, request: ValidatedRequest, top: int) -> list[PromptLogprobs]:
        """Score the prompts of a request, one at a time, because each uses a KV cache of its own."""
        with client_of(http.scope).reserved(request.prompt_tokens):
            async with self._scoring:
                score, source = self._context.prompt_logprobs, request.model.source
                return [await score(prompt, top, source) for prompt in request.prompts]

    def counted(self, request: ValidatedRequest) -> Callable[[Sequence[Completion]], None]:
        """Count a validated request, and return the function that counts its completions when it has succeeded."""
        began = time.monotonic()
        self._metrics.request_started(request)
        return lambda completions: self._metrics.request_finished(completions, time.monotonic() - began)

    async def answer(
        self, http: Request, parser: RequestParser[V], build: Callable[[V, WeightsReady], Awaitable[AnswerBuilder]]
    ) -> Response:
        """Answer a request, whole or as a stream of events, as it asks. build: returns the builder of its answer."""
        request, sampler = await self.recorded(http, await self.compiled(await self.parsed(parser, http)))
        began, weights = time.monotonic(), request.model.weights()
        finished = self.counted(request)
        builder = await build(request, weights)
        if not request.stream:
            results = [[NOTHING] * request.n for _ in request.prompts]
            if request.samples:
                results = await until_disconnect(http.receive, sampler.complete_all(request.samples))
            body = builder.whole(results)
            finished([completion for group in results for completion in group])
            return json_response(body, weights.version, headers=sampler.headers)
        # Wait for the first events before the response starts: a request that the engine rejects receives a 400.
        batches = sampler.stream_all(request.samples)
        first = await until_disconnect(http.receive, anext(batches))
        self._metrics.first_token(time.monotonic() - began)
        headers = {VERSION_HEADER: str(weights.version), **sampler.headers}
        return EventStream(event_stream(builder, first, batches, finished), headers)
