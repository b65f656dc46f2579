"""Streaming with server-sent events.

Tokens that are available when the server writes share writes of about `WRITE_BYTES`. A write per token would cost more
than the tokens, and an event loop with many streams would fall behind the engine. Larger writes would take memory for
clients that do not read.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Protocol

import msgspec
from starlette.responses import StreamingResponse
from starlette.types import Send

from clotho.serving.errors import ApiError, to_api_error
from clotho.serving.openai_requests import ValidatedRequest
from clotho.serving.openai_responses import Chunk, last_chunk
from clotho.serving.services import Tokenizer
from protocols.sampling import Completion, CompletionDone, TokenSampled

Batch = list[tuple[int, TokenSampled | CompletionDone]]
WRITE_BYTES = 16_384


class StreamBuilder(Protocol):
    """Builds the events of one stream, encoded."""

    @property
    def request(self) -> ValidatedRequest:
        """The request that the stream answers."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Gives the texts of tokens."""

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
    builder: StreamBuilder,
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


def _has_content(chunk: Chunk, builder: StreamBuilder, *, opening: bool) -> bool:
    """Return True if a chunk must be sent; text is held back while it may become a stop string."""
    returns_tokens = builder.request.return_token_ids or builder.request.top_logprobs is not None
    has_tokens = bool(chunk.tokens) and returns_tokens
    return bool(chunk.text) or chunk.first or chunk.finish_reason is not None or has_tokens or opening


class _StreamProgress:
    """The state of a stream: how many tokens and characters of each choice have been sent."""

    def __init__(self, builder: StreamBuilder) -> None:
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
