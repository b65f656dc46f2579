"""How a request is answered at any endpoint: validation, grammar, sampling, scores, metrics, and streams of events.

Tokens that are available when the server writes share writes of about `WRITE_BYTES`. A write per token would cost more
than the tokens, and an event loop with many streams would fall behind the engine. Larger writes would take memory for
clients that do not read.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Protocol, TypeVar

import anyio
import msgspec
from msgspec import Struct, structs
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Send

from clotho.lanes.daemon_threads import DaemonThreads, NoThreadError, OvertimeError
from clotho.serving.auth import client_of
from clotho.serving.bodies import VERSION_HEADER, json_response
from clotho.serving.chat_extension import ValidatedRequest
from clotho.serving.errors import ApiError, invalid_field, overloaded, to_api_error
from clotho.serving.limits import until_disconnect
from clotho.serving.metrics import ServerMetrics
from clotho.serving.openai_responses import Chunk, last_chunk
from clotho.serving.services import ClientSampler, ServerContext, Tokenizer
from protocols.sampling import Completion, CompletionDone, PromptLogprobs, TokenSampled
from protocols.step import WeightsReady

Batch = list[tuple[int, TokenSampled | CompletionDone]]
WRITE_BYTES = 16_384


class AnswerBuilder(Protocol):
    """Builds one answer, whole or as the encoded events of a stream."""

    @property
    def request(self) -> ValidatedRequest:
        """The request that is answered."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Gives the texts of tokens."""

    def whole(self, results: Sequence[Sequence[Completion]], /) -> Struct:
        """Return the body of the whole answer; results: completions by prompt."""

    def streamed(self, chunk: Chunk, *, opening: bool) -> bytes:
        """Return the events of a chunk; empty if nothing is final with it. opening: nothing has been sent yet."""

    def ending(self, completions: Sequence[Completion]) -> bytes:
        """Return the last events of a stream whose completions ended without an error."""

    def failure(self, error: ApiError) -> bytes:
        """Return the last events of a stream that failed."""


class EventStream(StreamingResponse):
    """A streaming response that closes its generator when the response ends, for whatever reason."""

    def __init__(self, events: AsyncGenerator[bytes, None], headers: dict[str, str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers=headers | {"cache-control": "no-cache"})
        self._events = events

    async def stream_response(self, send: Send) -> None:
        """Send all events."""
        async with aclosing(self._events):
            await super().stream_response(send)


async def event_stream(
    builder: AnswerBuilder,
    first: Batch,
    rest: AsyncGenerator[Batch, None],
    finished: Callable[[list[Completion]], None],
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream. Calls `finished` with the completions if every one ended without an error."""
    progress = _StreamProgress(builder)
    events, size = list[bytes](), 0
    opening = True
    async with aclosing(rest):
        try:
            async for batch in _prepend(first, rest):
                for position, event in batch:
                    chunk = progress.next_chunk(position, event)
                    if not _has_content(chunk, builder, opening=opening):
                        continue
                    if encoded := builder.streamed(chunk, opening=opening):
                        events.append(encoded)
                        opening, size = False, size + len(encoded)
                    if size >= WRITE_BYTES:
                        yield b"".join(events)
                        events, size = [], 0
                if events:
                    yield b"".join(events)
                    events, size = [], 0
            finished(progress.completions)
            events.append(builder.ending(progress.completions))
        except Exception as error:
            events.append(builder.failure(to_api_error(error)))
    yield b"".join(events)


async def _prepend(first: Batch, rest: AsyncGenerator[Batch, None]) -> AsyncGenerator[Batch, None]:
    yield first
    async for batch in rest:
        yield batch


def _has_content(chunk: Chunk, builder: AnswerBuilder, *, opening: bool) -> bool:
    """Return True if a chunk must be sent; text is held back while it may become a stop string."""
    returns_tokens = builder.request.return_token_ids or builder.request.top_logprobs is not None
    has_tokens = bool(chunk.tokens) and returns_tokens
    return bool(chunk.text) or chunk.first or chunk.finish_reason is not None or has_tokens or opening


class _StreamProgress:
    """The state of a stream: how many tokens and characters of each choice have been sent."""

    def __init__(self, builder: AnswerBuilder) -> None:
        self.completions: list[Completion] = []
        self._tokenizer, self._n = builder.tokenizer, builder.request.n
        self._counts_characters = builder.request.top_logprobs is not None
        self._tokens_sent: dict[int, int] = {}
        self._offset: dict[int, int] = {}

    def next_chunk(self, position: int, event: TokenSampled | CompletionDone) -> Chunk:
        """Return the new part of the choice that `event` belongs to. position: index of the prompt."""
        index = position * self._n + event.index
        offset, first = self._offset.get(index, 0), index not in self._tokens_sent
        chunk = self._token_chunk(event, index) if isinstance(event, TokenSampled) else self._last_chunk(event, index)
        self._tokens_sent[index] = self._tokens_sent.get(index, 0) + len(chunk.tokens)
        if self._counts_characters:
            self._offset[index] = offset + sum(len(self._tokenizer.token_text(token)) for token in chunk.tokens)
        return msgspec.structs.replace(chunk, offset=offset, first=first)

    def _token_chunk(self, event: TokenSampled, index: int) -> Chunk:
        return Chunk(
            index=index,
            text=event.text,
            tokens=(event.token,),
            logprobs=(event.logprob,),
            versions=(event.version,),
            top_logprobs=(event.top_logprobs,),
        )

    def _last_chunk(self, event: CompletionDone, index: int) -> Chunk:
        self.completions.append(event.completion)
        return last_chunk(event.completion, index, event.tail, sent=self._tokens_sent.get(index, 0))


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
