"""Server-sent events: every token as it is sampled. A stream ends with `data: [DONE]`, after an error as well.

What has been sampled by the time that the server comes to write is written at once: each write costs more than what
stands in it, and a loop with many streams would otherwise fall behind the engine.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import msgspec
from msgspec import Struct
from starlette.responses import StreamingResponse
from starlette.types import Send

from clotho.serving.errors import as_api_error
from clotho.serving.openai_choices import Piece, finish_reason
from clotho.serving.openai_responses import Answer
from protocols.sampling import Completion, CompletionDone, TokenSampled

Batch = list[tuple[int, TokenSampled | CompletionDone]]
DONE = b"data: [DONE]\n\n"


def server_sent(body: Struct) -> bytes:
    """Encode one event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


class EventStream(StreamingResponse):
    """A response whose generator is closed the moment the response ends, however it ends."""

    def __init__(self, events: AsyncGenerator[bytes, None], headers: dict[str, str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers=headers | {"cache-control": "no-cache"})
        self._events = events

    async def stream_response(self, send: Send) -> None:
        """Send all chunks."""
        async with aclosing(self._events):
            await super().stream_response(send)


async def event_stream(
    answer: Answer, first: Batch, rest: AsyncGenerator[Batch, None], finished: Callable[[list[Completion]], None]
) -> AsyncGenerator[bytes, None]:
    """Yield the chunks of a streamed answer. `finished` is told the completions if all of them ended well."""
    tail = _Tail(answer)
    chunks: list[bytes] = []
    opening = True
    async with aclosing(rest):
        try:
            async for batch in _from(first, rest):
                for position, event in batch:
                    piece = tail.piece(position, event)
                    if _worth_sending(piece, answer, opening=opening):
                        chunks.append(server_sent(answer.chunk(piece, opening=opening)))
                        opening = False
                if chunks:
                    yield b"".join(chunks)
                    chunks.clear()
            finished(tail.done)
            if answer.ask.include_usage:
                chunks.append(server_sent(answer.usage_chunk(sum(len(one.tokens) for one in tail.done))))
        except Exception as error:
            chunks.append(server_sent(as_api_error(error).body))
    yield b"".join([*chunks, DONE])


async def _from(first: Batch, rest: AsyncGenerator[Batch, None]) -> AsyncGenerator[Batch, None]:
    yield first
    async for batch in rest:
        yield batch


def _worth_sending(piece: Piece, answer: Answer, *, opening: bool) -> bool:
    """Tell whether a piece says anything: text may be held back while it could still become a stop string."""
    told_tokens = bool(piece.tokens) and (answer.ask.return_token_ids or answer.ask.top_logprobs is not None)
    return bool(piece.text) or piece.first or piece.finish_reason is not None or told_tokens or opening


class _Tail:
    """What has been sent of each choice so far."""

    def __init__(self, answer: Answer) -> None:
        self.done: list[Completion] = []
        self._tokenizer, self._n = answer.tokenizer, answer.ask.n
        self._counts_characters = answer.ask.top_logprobs is not None
        self._sent: dict[int, int] = {}
        self._offset: dict[int, int] = {}

    def piece(self, position: int, event: TokenSampled | CompletionDone) -> Piece:
        """Return what is new with this event."""
        index = position * self._n + event.index
        offset, first = self._offset.get(index, 0), index not in self._sent
        piece = self._drawn(event, index) if isinstance(event, TokenSampled) else self._ended(event, index)
        self._sent[index] = self._sent.get(index, 0) + len(piece.tokens)
        if self._counts_characters:
            self._offset[index] = offset + sum(len(self._tokenizer.token_text(token)) for token in piece.tokens)
        return msgspec.structs.replace(piece, offset=offset, first=first)

    def _drawn(self, event: TokenSampled, index: int) -> Piece:
        return Piece(
            index=index,
            text=event.text,
            tokens=(event.token,),
            logprobs=(event.logprob,),
            versions=(event.version,),
            top_logprobs=(event.top_logprobs,),
        )

    def _ended(self, event: CompletionDone, index: int) -> Piece:
        completion = event.completion
        self.done.append(completion)
        sent = self._sent.get(index, 0)
        return Piece(
            index=index,
            text=event.tail,
            tokens=completion.tokens[sent:],
            logprobs=completion.logprobs[sent:],
            versions=completion.versions,
            top_logprobs=completion.top_logprobs[sent:],
            finish_reason=finish_reason(completion),
            stop_reason=completion.stop_reason,
        )
