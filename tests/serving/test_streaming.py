"""Server-sent events: events that arrive together are written together."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator

import msgspec
import pytest

from clotho.serving import answering
from clotho.serving.answering import Batch, event_stream
from clotho.serving.openai_requests import parse_completion_request
from clotho.serving.openai_responses import DONE
from clotho.serving.openai_routes import CompletionBuilder, ResponseBuilder
from protocols.sampling import CompletionDone
from tests.serving.running_server import Served, server_context, serving


async def builder_and_events(served: Served, **fields: object) -> tuple[ResponseBuilder, Batch]:
    """Return a response builder for a streamed request of 5 tokens, and the events of the engine."""
    body = msgspec.json.encode({"prompt": "p", "seed": 3, "max_tokens": 5, "stream": True, **fields})
    context = server_context(served)
    request = parse_completion_request(body, context)
    events = [event async for batch in served.sampler.stream_all(request.samples) for event in batch]
    return CompletionBuilder(request, context, served.weights), events


async def writes(builder: ResponseBuilder, batches: list[Batch]) -> list[bytes]:
    """Return what is written if the events arrive in these batches."""

    async def rest() -> AsyncGenerator[Batch, None]:
        for batch in batches[1:]:
            yield batch

    return [written async for written in event_stream(builder, batches[0], rest(), lambda _: None)]


@pytest.mark.parametrize("fields", [{}, {"logprobs": 2}, {"n": 2, "stream_options": {"include_usage": True}}])
async def test_events_that_arrive_together_are_written_together(fields: dict[str, object]) -> None:
    """One write for the batch and one for the end; the bytes do not depend on the batches."""
    async with serving() as served:
        builder, events = await builder_and_events(served, **fields)
        together = await writes(builder, [events])
        one_by_one = await writes(builder, [[event] for event in events])
        assert len(together) == 2
        assert len(one_by_one) > len(together)
        assert b"".join(together) == b"".join(one_by_one)


async def test_the_size_of_writes_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write ends with the event that reaches WRITE_BYTES; the bytes of the stream are the same."""
    async with serving() as served:
        builder, events = await builder_and_events(served, logprobs=2)
        longest = max(map(len, await writes(builder, [[event] for event in events])))
        together = await writes(builder, [events])
        monkeypatch.setattr(answering, "WRITE_BYTES", 2 * longest)
        split = await writes(builder, [events])
        assert len(split) > len(together)
        assert max(map(len, split)) < 3 * longest
        assert b"".join(split) == b"".join(together)


async def test_tokens_before_a_failure_are_written() -> None:
    """The error follows the tokens of the same batch."""
    async with serving() as served:
        builder, events = await builder_and_events(served)
        position, last = events[-1]
        assert isinstance(last, CompletionDone)
        ending = msgspec.structs.replace(last, completion=None)
        written = b"".join(await writes(builder, [[*events[:3], (position, ending)]]))
        chunks = written.removesuffix(DONE).decode().strip().split("\n\n")
        bodies = [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]
        assert written.endswith(DONE)
        assert [len(body["choices"]) for body in bodies[:3]] == [1, 1, 1]
        assert bodies[3]["error"]["code"] == "internal_error"
