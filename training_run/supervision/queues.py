"""Bounded FIFO queues between the actors of one event loop.

Each queue is an `asyncio.Queue` with two additions: both sides can be closed, and the time spent waiting is measured.
`asyncio.Queue.shutdown` has the first of these from Python 3.13 on only.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import anyio
from msgspec import Struct

from protocols.queues import EndOfStream, Inbox, Outbox, QueueClosed

T = TypeVar("T")


class LoopThread:
    """Remembers the first thread that calls `check`, and refuses every other thread."""

    def __init__(self, what: str) -> None:
        """what: the object to name in the error message."""
        self._what = what
        self._thread: int | None = None

    def check(self) -> None:
        """Raise RuntimeError in any thread but the first one that called this method."""
        current = threading.get_ident()
        if self._thread is None:
            self._thread = current
        elif self._thread != current:
            raise RuntimeError(
                f"{self._what} belongs to the event loop's thread, but thread {threading.current_thread().name!r} "
                "used it; call it with loop.call_soon_threadsafe"
            )


class QueueStats(Struct, frozen=True, kw_only=True):
    """Queue -> metrics. Totals since the queue was created; `sent = received + depth` always holds.

    send_wait_seconds: time that senders waited for room. It grows if the consumer is the slower side.
    receive_wait_seconds: time that receivers waited for a message. It grows if the producer is the slower side.
    """

    name: str
    capacity: int
    depth: int
    sent: int
    received: int
    send_wait_seconds: float
    receive_wait_seconds: float


class Queue(Generic[T]):
    """A bounded, typed FIFO queue. Senders wait while the queue is full (backpressure).

    Each producer opens an outbox and each consumer an inbox, and closes it when done. After the last outbox has closed,
    receivers get the remaining messages and then EndOfStream. After the last inbox has closed, senders get QueueClosed,
    and messages that were not received stay in `depth`.
    """

    def __init__(self, name: str, *, capacity: int) -> None:
        """Create an empty queue. Raises ValueError if `capacity` is less than 1."""
        if capacity < 1:
            raise ValueError(f"queue {name!r} needs a capacity of at least 1, not {capacity}")
        self.name, self.capacity = name, capacity
        self._thread = LoopThread(f"queue {name!r}")
        self._items: asyncio.Queue[T] = asyncio.Queue(capacity)
        self._senders, self._receivers = _Side(), _Side()
        self._sent = self._received = 0

    @property
    def depth(self) -> int:
        """Number of messages sent and not yet received. For metrics, not for control flow."""
        return self._items.qsize()

    @property
    def sent(self) -> int:
        """Number of messages sent. For metrics; any thread may read it."""
        return self._sent

    @property
    def received(self) -> int:
        """Number of messages received. For metrics; any thread may read it."""
        return self._received

    def stats(self) -> QueueStats:
        """Current metrics; includes waits in progress."""
        self._thread.check()
        return QueueStats(
            name=self.name,
            capacity=self.capacity,
            depth=self.depth,
            sent=self._sent,
            received=self._received,
            send_wait_seconds=self._senders.wait_seconds(),
            receive_wait_seconds=self._receivers.wait_seconds(),
        )

    def outbox(self) -> Outbox[T]:
        """Open the end of one producer. Raises QueueClosed if all producers have closed theirs."""
        if self._senders.closed:
            raise QueueClosed(f"queue {self.name!r} has ended: open every outbox before the last one is closed")
        return self._senders.add(QueueOutbox[T](self, self._senders))

    def inbox(self) -> Inbox[T]:
        """Open the end of one consumer. Raises QueueClosed if all consumers have closed theirs."""
        if self._receivers.closed:
            raise QueueClosed(f"queue {self.name!r} has no reader: open every inbox before the last one is closed")
        return self._receivers.add(_Inbox[T](self, self._receivers))

    def _close(self, end: QueueEnd, side: _Side) -> None:
        self._thread.check()
        side.close(end)
        if self._receivers.closed:
            self._senders.cancel_waiting()
        self._end_if_empty()

    def _end_if_empty(self) -> None:
        if self._senders.closed and self._items.empty():
            self._receivers.cancel_waiting()


class QueueEnd:
    """One end of a queue; leaving its `async with` block closes it.

    observe: called with each message that passes this end; None: not called.
    """

    closed: bool = False

    def __init__(self, queue: Queue[Any], side: _Side) -> None:
        self._queue, self._side = queue, side
        self.observe: Callable[[Any], None] | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether a coroutine waits at this end: for a message, or for room."""
        return self._side.has_waiting(self)

    def beside(self) -> Self:
        """Open another end on the same side of the queue."""
        return self._side.add(type(self)(self._queue, self._side))

    def close(self) -> None:
        """Close this end."""
        self._queue._close(self, self._side)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


E = TypeVar("E", bound=QueueEnd)


class _Side:
    """The ends on one side of a queue, the coroutines that wait there, and the time that they have waited.

    closed: ends were opened, and all have been closed.
    turn: held by the first coroutine in line; `asyncio.Lock` admits the others in the order of their arrival.
    """

    def __init__(self) -> None:
        self.closed = False
        self.turn = asyncio.Lock()
        self._open = 0
        self._waiting: dict[anyio.CancelScope, tuple[QueueEnd, float]] = {}
        self._seconds = 0.0

    def wait_seconds(self) -> float:
        """Total wait, including the coroutines that still wait."""
        now = time.monotonic()
        return self._seconds + sum(now - since for _, since in self._waiting.values())

    def add(self, end: E) -> E:
        """Count an open end."""
        self._open += 1
        return end

    def close(self, end: QueueEnd) -> None:
        """Close an end, and stop the coroutines that wait at it."""
        if end.closed:
            return
        end.closed = True
        self._open -= 1
        self.closed = self._open == 0
        self.cancel_waiting(end)

    @contextmanager
    def waiting(self, end: QueueEnd) -> Iterator[None]:
        """Measure the wait in this block. `cancel_waiting` ends the block at its next await, without an exception."""
        with anyio.CancelScope() as scope:
            self._waiting[scope] = end, time.monotonic()
            try:
                yield
            finally:
                _, since = self._waiting.pop(scope)
                self._seconds += time.monotonic() - since

    def has_waiting(self, end: QueueEnd) -> bool:
        """Whether a coroutine waits at this end."""
        return any(owner is end for owner, _ in self._waiting.values())

    def cancel_waiting(self, end: QueueEnd | None = None) -> None:
        """Stop the coroutines that wait at this end; None: at any end."""
        for scope, (owner, _) in self._waiting.items():
            if end is None or owner is end:
                scope.cancel()


class QueueOutbox(QueueEnd, Generic[T]):
    """See `protocols.queues.Outbox`."""

    async def send(self, item: T) -> None:
        """Send an item; waits while the queue is full."""
        queue, senders = self._queue, self._side
        self._check_open()
        if queue._items.full() or senders.turn.locked():
            with senders.waiting(self):
                async with senders.turn:
                    await queue._items.put(item)
                    return self._sent(item)
            raise self._closed_error()
        queue._items.put_nowait(item)
        return self._sent(item)

    def send_nowait(self, item: T) -> None:
        """Send an item. Raises WouldBlock if the queue is full, or others wait."""
        self._check_open()
        if self._queue._items.full() or self._side.turn.locked():
            raise anyio.WouldBlock
        self._queue._items.put_nowait(item)
        self._sent(item)

    def _sent(self, item: T) -> None:
        self._queue._sent += 1
        if self.observe is not None:
            self.observe(item)

    def _check_open(self) -> None:
        self._queue._thread.check()
        if self.closed or self._queue._receivers.closed:
            raise self._closed_error()

    def _closed_error(self) -> QueueClosed:
        reason = "this outbox was closed" if self.closed else "every inbox was closed"
        return QueueClosed(f"queue {self._queue.name!r} accepts no more messages: {reason}")


class _Inbox(QueueEnd, Generic[T]):
    """See `protocols.queues.Inbox`."""

    async def receive(self) -> T:
        """Receive an item; waits while the queue is empty."""
        queue, receivers = self._queue, self._side
        self._check_not_ended()
        if queue._items.empty() or receivers.turn.locked():
            with receivers.waiting(self):
                async with receivers.turn:
                    return self._received(await queue._items.get())
            raise EndOfStream
        return self._received(queue._items.get_nowait())

    def receive_nowait(self) -> T:
        """Receive an item. Raises WouldBlock if the queue is empty, or others wait."""
        self._check_not_ended()
        if self._queue._items.empty() or self._side.turn.locked():
            raise anyio.WouldBlock
        return self._received(self._queue._items.get_nowait())

    def _received(self, item: T) -> T:
        self._queue._received += 1
        self._queue._end_if_empty()
        if self.observe is not None:
            self.observe(item)
        return item

    def _check_not_ended(self) -> None:
        self._queue._thread.check()
        if self.closed or (self._queue._senders.closed and self._queue._items.empty()):
            raise EndOfStream

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        try:
            return await self.receive()
        except EndOfStream:
            raise StopAsyncIteration from None
