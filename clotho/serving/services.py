"""Everything the routes need from the rest of the program, handed in by `pipeline.py`.

What was sampled for a client is remembered before the client can know of it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Literal, Protocol

from msgspec import Struct

from clotho.config.schema import ServerSection
from protocols.sampling import Completion, CompletionDone, PromptLogprobs, SampleRequest, Sampling, TokenSampled
from protocols.step import WeightsReady


class Tokens(Protocol):
    """What the gateway needs of `ChatTokenizer`; every method may be called from a worker thread."""

    def encode(self, text: str, /) -> tuple[int, ...]:
        """Token identifiers of the text."""
        ...

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], /, *, add_generation_prompt: bool = True
    ) -> tuple[int, ...]:
        """Token identifiers of the rendered conversation."""
        ...

    def token_text(self, token: int, /) -> str:
        """Text of one token."""
        ...


class Completer(Protocol):
    """What the gateway needs of `Sampler`."""

    @property
    def running(self) -> int:
        """Requests asked for and not yet ended."""
        ...

    async def complete_all(self, requests: Sequence[SampleRequest], /) -> list[list[Completion]]:
        """Finish every request; cancelling aborts them."""
        ...

    def stream_all(
        self, requests: Sequence[SampleRequest], /
    ) -> AsyncGenerator[list[tuple[int, TokenSampled | CompletionDone]], None]:
        """Yield all progress there is, with the position of its request; closing aborts them."""
        ...


class Memory(Protocol):
    """What the gateway needs of `SampleLog`."""

    def remember(self, request: SampleRequest, completion: Completion, /, *, client_label: str) -> None:
        """Take note of a completion that ended well, and of who asked for it."""
        ...


class NullSampleLog:
    """Remembers nothing."""

    def remember(self, request: SampleRequest, completion: Completion, /, *, client_label: str) -> None:
        """Take no note."""


class HealthReport(Struct, frozen=True, kw_only=True):
    """How the program is. Only `ok` is answered with 200.

    children: supervised child -> state. progress_seconds: since the compute thread last moved.
    """

    status: Literal["ok", "stalled", "failed"]
    detail: str = ""
    children: dict[str, str] = {}
    progress_seconds: float = 0.0


class EngineNumbers(Struct, frozen=True, kw_only=True):
    """The decode engine now: sequences in and before the batch, cache use in [0, 1], prompts looked up and found."""

    rows_running: int = 0
    rows_waiting: int = 0
    cache_usage: float = 0.0
    prefix_queries: int = 0
    prefix_hits: int = 0


class TrainingNumbers(Struct, frozen=True, kw_only=True):
    """The training run now, for /metrics. None: no update has happened yet.

    depths, capacities: of each mailbox, in messages. discarded: reason -> groups. environments_trained,
    environments_discarded: environment -> groups. swap_seconds: of the last swap.
    """

    engine: EngineNumbers = EngineNumbers()
    reward_mean: float | None = None
    staleness_mean: float | None = None
    staleness_max: int | None = None
    swap_seconds: float | None = None
    groups_trained: int = 0
    discarded: dict[str, int] = {}
    environments_trained: dict[str, int] = {}
    environments_discarded: dict[str, int] = {}
    depths: dict[str, int] = {}
    capacities: dict[str, int] = {}


class GatewayServices(Struct, frozen=True, kw_only=True):
    """The gateway's whole view of the program.

    sampling: what a request gets where it does not say. weights: the ones that serve now.
    prompt_logprobs: scores a prompt's own tokens, with so many alternatives each; cancelling gives it up.
    context_length: prompt and completion together, in tokens. sampled: remembers what was sampled for clients.
    record_supports: what top-p, top-k and min-p leave is recorded with it, where top-k bounds it.
    """

    sampler: Completer
    tokenizer: Tokens
    settings: ServerSection
    sampling: Sampling
    prompt_logprobs: Callable[[tuple[int, ...], int], Awaitable[PromptLogprobs]]
    weights: Callable[[], WeightsReady]
    health: Callable[[], HealthReport]
    numbers: Callable[[], TrainingNumbers]
    context_length: int
    vocab_size: int
    sampled: Memory = NullSampleLog()
    record_supports: bool = False


class Remembering:
    """A sampler for one client, whose completions are remembered under its label as soon as it is to get them."""

    def __init__(self, sampler: Completer, sampled: Memory, client_label: str) -> None:
        self._sampler, self._drawn, self._client_label = sampler, sampled, client_label

    async def complete_all(self, requests: Sequence[SampleRequest]) -> list[list[Completion]]:
        """Finish every request; cancelling aborts them, and nothing is remembered."""
        results = await self._sampler.complete_all(requests)
        for request, completions in zip(requests, results, strict=True):
            for completion in completions:
                self._drawn.remember(request, completion, client_label=self._client_label)
        return results

    async def stream_all(
        self, requests: Sequence[SampleRequest]
    ) -> AsyncGenerator[list[tuple[int, TokenSampled | CompletionDone]], None]:
        """Yield all progress there is, with the position of its request; closing aborts what has not ended."""
        async with aclosing(self._sampler.stream_all(requests)) as batches:
            async for batch in batches:
                for position, event in batch:
                    if isinstance(event, CompletionDone):
                        self._drawn.remember(requests[position], event.completion, client_label=self._client_label)
                yield batch
