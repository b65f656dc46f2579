"""What was drawn for a client is remembered before the client can know of it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from clotho.serving.services import Completer, Memory
from protocols.sampling import Completion, CompletionDone, SampleRequest, TokenDrawn


class Remembering:
    """A sampler for one client, whose completions are remembered under its label as soon as it is to get them."""

    def __init__(self, sampler: Completer, drawn: Memory, asker: str) -> None:
        self._sampler, self._drawn, self._asker = sampler, drawn, asker

    async def complete_all(self, requests: Sequence[SampleRequest]) -> list[list[Completion]]:
        """Finish every request; cancelling aborts them, and nothing is remembered."""
        results = await self._sampler.complete_all(requests)
        for request, completions in zip(requests, results, strict=True):
            for completion in completions:
                self._drawn.remember(request, completion, asker=self._asker)
        return results

    async def stream_all(
        self, requests: Sequence[SampleRequest]
    ) -> AsyncGenerator[list[tuple[int, TokenDrawn | CompletionDone]], None]:
        """Yield all progress there is, with the position of its request; closing aborts what has not ended."""
        async with aclosing(self._sampler.stream_all(requests)) as batches:
            async for batch in batches:
                for position, event in batch:
                    if isinstance(event, CompletionDone):
                        self._drawn.remember(requests[position], event.completion, asker=self._asker)
                yield batch
