"""The asynchronous face of the decode engine: asked from the event loop, answered there."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import aclosing, suppress
from functools import partial
from threading import Lock
from typing import Protocol, TypeVar

from msgspec import structs

from protocols.errors import ExecutorStoppedError, GenerationError, RequestError
from protocols.sampling import Completion, CompletionDone, SampleEvent, SampleFailed, SampleRequest, TokenSampled

__all__ = ["Engine", "GenerationError", "Progress", "RequestError", "Sampler", "Submit"]

T = TypeVar("T")
Progress = TokenSampled | CompletionDone
Refusal = RequestError | GenerationError
_Item = tuple[int, SampleEvent] | tuple[int, RequestError] | BaseException


class Submit(Protocol):
    """Run a function in the compute thread; `ComputeExecutor.submit`. Thread-safe and never blocks."""

    def __call__(self, work: Callable[[], T], /) -> Future[T]:
        """Queue the work and return its future."""
        ...


class Engine(Protocol):
    """What the sampler needs of `DecodeEngine`; both methods are called in the compute thread only."""

    def submit(self, request: SampleRequest, listener: Callable[[SampleEvent], None], /) -> int:
        """Accept a request, or raise RequestError."""
        ...

    def abort(self, request_id: int, /) -> None:
        """Free the rows of a request; a request that has ended is none of its business."""
        ...


class _Flight:
    """The requests of one call on their way through the compute thread, where `start` and `abort` run.

    withdrawn: set by the client_label who leaves, from the loop; a flight that has not started then never does.
    """

    def __init__(self, engine: Engine, requests: Sequence[SampleRequest], post: Callable[[_Item], None]) -> None:
        self._engine, self._requests, self._post = engine, requests, post
        self._ids: dict[int, int] = {}
        self.withdrawn = False

    def start(self) -> None:
        """Hand all requests to the engine in one turn, unless their client_label has already left."""
        if self.withdrawn:
            return
        for position, request in enumerate(self._requests):
            try:
                self._ids[position] = self._engine.submit(request, partial(self._heard, position))
            except RequestError as error:
                self._post((position, error))

    def abort(self, positions: Sequence[int]) -> None:
        """Abort those of these requests that have started."""
        for position in positions:
            if position in self._ids:
                self._engine.abort(self._ids[position])

    def _heard(self, position: int, event: SampleEvent) -> None:
        self._post((position, event))


class _Inbox:
    """What has come for the client_label of one call; lives on the loop."""

    def __init__(self) -> None:
        self._items: list[_Item] = []
        self._filled = asyncio.Event()

    def put(self, item: _Item) -> None:
        """Add an item."""
        self._items.append(item)
        self._filled.set()

    async def take(self) -> list[tuple[int, Progress | Refusal]]:
        """Return all that is there, at least one item; raises what stands for all requests."""
        await self._filled.wait()
        self._filled.clear()
        items, self._items = self._items, []
        batch = []
        for item in items:
            if isinstance(item, BaseException):
                raise item
            batch.append((item[0], _outcome(item[1])))
        return batch


class Sampler:
    """Completions for everyone on the event loop: rollouts, evaluation, HTTP.

    The requests of one call reach the engine in one turn of the compute thread, in order, so that its batches do not
    depend on timing. Events come back in batches: those of one decode tick, whatever requests they belong to, share
    one `call_soon_threadsafe`, and a caller that was busy meanwhile gets those of several ticks at once. One that is
    slow holds at most `max_tokens + 1` events per completion it asked for. One sampler serves one event loop.

    All methods raise ExecutorStoppedError when the compute thread has ended, and, where they do not say otherwise,
    RequestError for what the engine refuses and GenerationError for what it cannot finish.
    """

    def __init__(self, submit: Submit, engine: Engine) -> None:
        self._submit, self._engine = submit, engine
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = Lock()
        self._arrived: deque[tuple[_Inbox, _Item]] = deque()
        self._hop_scheduled = False
        self._running = 0

    @property
    def running(self) -> int:
        """Requests asked for and not yet ended."""
        return self._running

    async def complete(self, request: SampleRequest) -> list[Completion]:
        """Return `len(request.seeds)` completions, in the order of the seeds; cancelling aborts them in the engine."""
        return (await self.complete_all([request]))[0]

    async def complete_all(self, requests: Sequence[SampleRequest]) -> list[list[Completion]]:
        """Run `complete` for several requests at once; the first failure aborts the others."""
        done: dict[int, list[Completion]] = {}
        async with aclosing(self.groups(requests)) as outcomes:
            async for position, outcome in outcomes:
                if isinstance(outcome, Exception):
                    raise outcome
                done[position] = outcome
        return [done[position] for position in range(len(requests))]

    async def groups(
        self, requests: Sequence[SampleRequest]
    ) -> AsyncGenerator[tuple[int, list[Completion] | Refusal], None]:
        """Yield each request's completions when its last one is finished, with the position of the request.

        A request that is refused or fails yields its error instead, once; the others go on.
        """
        done: list[dict[int, Completion]] = [{} for _ in requests]
        async with aclosing(self._events([structs.replace(request, stream=False) for request in requests])) as batches:
            async for batch in batches:
                for position, event in batch:
                    if isinstance(event, CompletionDone):
                        found = done[position]
                        found[event.index] = event.completion
                        if len(found) == len(requests[position].seeds):
                            yield position, [found[index] for index in sorted(found)]
                    elif isinstance(event, Exception):
                        yield position, event

    async def stream(self, request: SampleRequest) -> AsyncGenerator[Progress, None]:
        """Yield every token as it is sampled, then each completion; closing the iterator aborts the rest."""
        async with aclosing(self.stream_all([request])) as batches:
            async for batch in batches:
                for _, event in batch:
                    yield event

    async def stream_all(self, requests: Sequence[SampleRequest]) -> AsyncGenerator[list[tuple[int, Progress]], None]:
        """Run `stream` for several requests at once; yield, with the position of its request, all that has come."""
        async with aclosing(self._events([structs.replace(request, stream=True) for request in requests])) as batches:
            async for batch in batches:
                good: list[tuple[int, Progress]] = []
                for position, event in batch:
                    if isinstance(event, Exception):
                        if good:
                            yield good
                        raise event
                    good.append((position, event))
                yield good

    async def _events(
        self, requests: Sequence[SampleRequest]
    ) -> AsyncGenerator[list[tuple[int, Progress | Refusal]], None]:
        """Yield all that becomes of the requests until each has ended; the last event of a failed one is its error."""
        self._loop = asyncio.get_running_loop()
        inbox = _Inbox()
        unfinished = {position: len(request.seeds) for position, request in enumerate(requests)}
        flight = _Flight(self._engine, requests, partial(self._post, inbox))
        self._submit(flight.start).add_done_callback(partial(self._started, inbox))
        self._running += len(requests)
        try:
            while unfinished:
                batch = await inbox.take()
                for position, event in batch:
                    if not isinstance(event, TokenSampled):
                        unfinished[position] -= 1
                        if isinstance(event, Exception) or not unfinished[position]:
                            del unfinished[position]
                            self._running -= 1
                yield batch
        finally:
            self._running -= len(unfinished)
            if unfinished:
                self._withdraw(flight, tuple(unfinished))

    def _started(self, inbox: _Inbox, future: Future[None]) -> None:
        """Report requests that could not be handed over; called in whichever thread settled the future."""
        if future.cancelled():
            self._post(inbox, ExecutorStoppedError("the compute thread ended before the request began"))
        elif (error := future.exception()) is not None:
            self._post(inbox, error)

    def _withdraw(self, flight: _Flight, positions: Sequence[int]) -> None:
        flight.withdrawn = True
        # A compute thread that has ended holds no rows to free.
        with suppress(ExecutorStoppedError):
            self._submit(partial(flight.abort, positions))

    def _post(self, inbox: _Inbox, item: _Item) -> None:
        """Take an item from the compute thread; the first since the last hop schedules the next hop."""
        with self._lock:
            self._arrived.append((inbox, item))
            if self._hop_scheduled or self._loop is None:
                return
            self._hop_scheduled = True
        # A loop that is closed has nobody left who waits.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            arrived, self._arrived = self._arrived, deque()
            self._hop_scheduled = False
        for inbox, item in arrived:
            inbox.put(item)


def _outcome(event: SampleEvent | RequestError) -> Progress | Refusal:
    return GenerationError(event.reason) if isinstance(event, SampleFailed) else event
