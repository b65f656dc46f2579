"""The asynchronous interface of the decode engine, for the event loop."""

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

MAX_UNREAD_TOKENS = 1024
"""Maximum number of streamed tokens that wait for the caller of one call. Each alternative of a token counts as one."""

T = TypeVar("T")
Progress = TokenSampled | CompletionDone
Refusal = RequestError | GenerationError
Item = tuple[int, SampleEvent] | tuple[int, RequestError] | BaseException
"""The position of a request and what happened to it, or an error that concerns all requests."""


class Submit(Protocol):
    """Runs a function in the decode thread: `ComputeThread.submit`. Thread-safe; never blocks."""

    def __call__(self, work: Callable[[], T], /) -> Future[T]:
        """Queue the function and return its future."""


class Engine(Protocol):
    """The part of `DecodeEngine` that the sampler uses, in the decode thread only."""

    def submit(self, request: SampleRequest, listener: Callable[[SampleEvent], None], /) -> int:
        """Accept a request and return its id. Raises RequestError if the request is invalid."""

    def abort(self, request_id: int, /) -> None:
        """Free the rows of a request. A request that has ended is ignored."""


class GroupSampler(Protocol):
    """Samples groups of completions: `EngineSampler`, or servers on other machines."""

    def groups(
        self, requests: Sequence[SampleRequest], /
    ) -> AsyncGenerator[tuple[int, list[Completion] | Refusal], None]:
        """Yield (position, completions or the error) for each request when it has ended."""


class Flight:
    """The requests of one call. `start` and `abort` run in the decode thread, which also calls `post`.

    withdrawn: set in any thread when the caller leaves; requests that have not started then never start.
    """

    def __init__(self, engine: Engine, requests: Sequence[SampleRequest], post: Callable[[Item], None]) -> None:
        self._engine, self._requests, self._post = engine, requests, post
        self._ids: dict[int, int] = {}
        self.withdrawn = False

    def start(self) -> None:
        """Submit all requests to the engine in one turn, unless the caller has left."""
        if self.withdrawn:
            return
        for position, request in enumerate(self._requests):
            try:
                self._ids[position] = self._engine.submit(request, partial(self._on_event, position))
            except RequestError as error:
                self._post((position, error))

    def abort(self, positions: Sequence[int]) -> None:
        """Abort the requests at `positions`, except requests that have not started."""
        for position in positions:
            if position in self._ids:
                self._engine.abort(self._ids[position])

    def _on_event(self, position: int, event: SampleEvent) -> None:
        self._post((position, event))


class _Inbox:
    """Items for the caller of one call; used in the event loop only.

    Holds at most `MAX_UNREAD_TOKENS` tokens. If the caller is slower, the further tokens of a completion are dropped
    and their text moves to the tail of the completion, which contains all its tokens.
    """

    def __init__(self) -> None:
        self._items: list[Item] = []
        self._filled = asyncio.Event()
        self._tokens = 0
        self._shown: dict[tuple[int, int], int] = {}
        self._dropped: set[tuple[int, int]] = set()

    def put(self, item: Item) -> None:
        """Add an item."""
        if not isinstance(item, BaseException):
            position, event = item
            if isinstance(event, TokenSampled):
                if self._drops((position, event.index), event):
                    return
            elif isinstance(event, CompletionDone):
                item = position, self._with_dropped_text((position, event.index), event)
        self._items.append(item)
        self._filled.set()

    def _drops(self, key: tuple[int, int], event: TokenSampled) -> bool:
        if self._tokens >= MAX_UNREAD_TOKENS or key in self._dropped:
            self._dropped.add(key)
            return True
        self._tokens += 1 + len(event.top_logprobs)
        self._shown[key] = self._shown.get(key, 0) + len(event.text)
        return False

    def _with_dropped_text(self, key: tuple[int, int], event: CompletionDone) -> CompletionDone:
        shown = self._shown.pop(key, 0)
        if key not in self._dropped:
            return event
        self._dropped.remove(key)
        return structs.replace(event, tail=event.completion.text[shown:])

    async def take(self) -> list[tuple[int, Progress | Refusal]]:
        """Wait for items and return all, at least one. Raises an error that concerns all requests."""
        await self._filled.wait()
        self._filled.clear()
        items, self._items, self._tokens = self._items, [], 0
        batch = []
        for item in items:
            if isinstance(item, BaseException):
                raise item
            batch.append((item[0], event_or_error(item[1])))
        return batch


class EngineSampler:
    """Samples completions for all clients in one event loop: rollouts, evaluation and HTTP.

    Requests from another event loop raise RuntimeError while requests of the first one run.
    All requests of one call reach the engine in one turn of the decode thread, in order, so that batches do not depend
    on timing. The events of one decode step share one `call_soon_threadsafe` after the step, and a busy caller receives
    the events of several decode steps at once. If `MAX_UNREAD_TOKENS` wait for a slow caller, further tokens reach it
    with their completion only.

    running: number of requests that have not ended.
    All methods raise ExecutorStoppedError if the decode thread has ended. Unless stated otherwise they raise
    RequestError if the engine refuses a request, and GenerationError if the engine cannot finish it.
    """

    def __init__(self, submit: Submit, engine: Engine) -> None:
        self._submit, self._engine = submit, engine
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = Lock()
        self._arrived: deque[tuple[_Inbox, Item]] = deque()
        self._hop_scheduled = False
        self.running = 0

    async def complete(self, request: SampleRequest) -> list[Completion]:
        """Return one completion per seed, in the order of the seeds. Cancellation aborts the request."""
        return (await self.complete_all([request]))[0]

    async def complete_all(self, requests: Sequence[SampleRequest]) -> list[list[Completion]]:
        """Run `complete` for several requests at once. The first failure aborts the other requests."""
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
        """Yield (position, completions) for each request when its last completion is finished.

        A request that is refused or fails yields its error once instead; the other requests continue.
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
        """Yield every token when it is sampled, then each completion. Closing the iterator aborts the request."""
        async with aclosing(self.stream_all([request])) as batches:
            async for batch in batches:
                for _, event in batch:
                    yield event

    async def stream_all(self, requests: Sequence[SampleRequest]) -> AsyncGenerator[list[tuple[int, Progress]], None]:
        """Run `stream` for several requests at once. Yields batches of (position of the request, event)."""
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
        """Yield batches of events until each request has ended; the last event of a failed request is its error."""
        self._use(asyncio.get_running_loop())
        inbox = _Inbox()
        unfinished = {position: len(request.seeds) for position, request in enumerate(requests)}
        flight = Flight(self._engine, requests, partial(self._post, inbox))
        self._submit(flight.start).add_done_callback(partial(self._started, inbox))
        self.running += len(requests)
        try:
            while unfinished:
                batch = await inbox.take()
                for position, event in batch:
                    if not isinstance(event, TokenSampled):
                        unfinished[position] -= 1
                        if isinstance(event, Exception) or not unfinished[position]:
                            del unfinished[position]
                            self.running -= 1
                yield batch
        finally:
            self.running -= len(unfinished)
            if unfinished:
                self._withdraw(flight, tuple(unfinished))

    def _use(self, loop: asyncio.AbstractEventLoop) -> None:
        """Deliver to this event loop. Raises RuntimeError if another event loop has requests."""
        with self._lock:
            if self.running and loop is not self._loop:
                raise RuntimeError(
                    "the sampler has requests of another event loop: one event loop may use it at a time"
                )
            self._loop = loop

    def _started(self, inbox: _Inbox, future: Future[None]) -> None:
        """Report that the requests could not be submitted. Called in any thread."""
        error = None if future.cancelled() else future.exception()
        if future.cancelled():
            error = ExecutorStoppedError("the decode thread ended before the request began")
        if error is not None and self._is_first(inbox, error):
            self._wake()

    def _withdraw(self, flight: Flight, positions: Sequence[int]) -> None:
        flight.withdrawn = True
        # If the decode thread has ended, there are no rows to free.
        with suppress(ExecutorStoppedError):
            self._submit(partial(flight.abort, positions))

    def _post(self, inbox: _Inbox, item: Item) -> None:
        """Pass an item from the decode thread to the loop. The first item after a delivery schedules the next one.

        The loop is woken after the turn of the decode thread. A wake-up within a decode step would let the loop take
        the interpreter lock from the step, and several wake-ups would follow for the other rows of the step.
        """
        if self._is_first(inbox, item):
            try:
                self._submit(_end_turn).add_done_callback(self._wake)
            except ExecutorStoppedError:
                self._wake()

    def _is_first(self, inbox: _Inbox, item: Item) -> bool:
        """Add an item; return whether it is the first one after a delivery, so that the loop must be woken."""
        with self._lock:
            self._arrived.append((inbox, item))
            first, self._hop_scheduled = not self._hop_scheduled, True
            return first

    def _wake(self, _: Future[None] | None = None) -> None:
        """Schedule a delivery. Called in any thread."""
        assert self._loop is not None
        # A closed loop has no waiting callers.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            arrived, self._arrived = self._arrived, deque()
            self._hop_scheduled = False
        for inbox, item in arrived:
            inbox.put(item)


def _end_turn() -> None:
    """Do nothing: when this call is done, the turn of the decode thread has ended."""


def event_or_error(event: SampleEvent | RequestError) -> Progress | Refusal:
    """Return an event, or the error that ended its request."""
    if not isinstance(event, SampleFailed):
        return event
    return RequestError(event.reason, param=event.param) if event.param else GenerationError(event.reason)
