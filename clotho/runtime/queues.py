"""The arrow between two actors: bounded, typed, closable from both ends, and measured.

Coroutines waiting in line for places: what makes a queue closable, fair, and safe to cancel.

`asyncio.Queue` cannot be closed in every supported Python, and lets a newcomer overtake those who wait. So the
queue of a mailbox only stores, and its two lines (senders for room, receivers for items) do the waiting.

One thread, the event loop's, touches the runtime. Waking a coroutine from another would be lost or late.

The two ends of an arrow, as an actor sees them: shapes, not classes. Anything that has them will do.

What a mailbox stands on: an `asyncio.Queue` that can be closed from both sides, is fair, and safe to cancel.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from types import TracebackType
from typing import Generic, Self, TypeVar

import anyio
from msgspec import Struct

from protocols.queues import EndOfStream, Inbox, Outbox, QueueClosed


class _Waiter:
    """One coroutine in line: the future it awaits, for whom, and since when (monotonic seconds)."""

    __slots__ = ("future", "owner", "since")

    def __init__(self, owner: object) -> None:
        self.future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.owner = owner
        self.since = time.monotonic()


class Line:
    """First come, first served. One `admit` lets one waiter pass and keeps its place reserved until it has run.

    The owner of the places calls `admit` once for each place that falls free, and lets a newcomer pass without
    waiting only if more places are free than `reserved`. Then a place never goes to two, nor to nobody: a waiter
    cancelled after it was admitted hands its place to the next in line.
    """

    def __init__(self) -> None:
        self.reserved = 0
        self._waiters: deque[_Waiter] = deque()
        self._seconds = 0.0

    @property
    def seconds(self) -> float:
        """Time spent in line by all who ever waited, in seconds; those who still wait included."""
        now = time.monotonic()
        return self._seconds + sum(now - waiter.since for waiter in self._waiters)

    async def wait(self, owner: object) -> bool:
        """Stand in line. True: admitted, and the place must be used, or given on with `admit`. False: dismissed."""
        waiter = _Waiter(owner)
        self._waiters.append(waiter)
        try:
            admitted = await waiter.future
        except asyncio.CancelledError:
            self._give_up(waiter)
            raise
        self.reserved -= admitted
        return admitted

    def admit(self) -> None:
        """Let the first in line pass; does nothing if nobody waits."""
        while self._waiters:
            waiter = self._waiters.popleft()
            self._seconds += time.monotonic() - waiter.since
            if not waiter.future.done():
                waiter.future.set_result(True)
                self.reserved += 1
                return

    def dismiss(self, owner: object = None) -> None:
        """Send away, empty-handed, everybody who waits for `owner`; everybody at all if it is None."""
        for waiter in [waiter for waiter in self._waiters if owner is None or waiter.owner is owner]:
            self._leave(waiter)
            if not waiter.future.done():
                waiter.future.set_result(False)

    def _give_up(self, waiter: _Waiter) -> None:
        """Leave no trace of a cancelled waiter, whatever had become of it."""
        if waiter in self._waiters:
            self._leave(waiter)
        elif not waiter.future.cancelled() and waiter.future.result():
            self.reserved -= 1
            self.admit()

    def _leave(self, waiter: _Waiter) -> None:
        self._waiters.remove(waiter)
        self._seconds += time.monotonic() - waiter.since


class LoopThread:
    """Remembers the first thread that comes by, and refuses every other."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._thread: int | None = None

    def check(self) -> None:
        """Raise RuntimeError in any thread but the first one that called this."""
        here = threading.get_ident()
        if self._thread is None:
            self._thread = here
        elif self._thread != here:
            raise RuntimeError(
                f"{self._what} belongs to the event loop's thread, but thread {threading.current_thread().name!r} "
                "used it; hand the call over with loop.call_soon_threadsafe"
            )


T = TypeVar("T")


class End:
    """One end of a queue: who sends or receives. Closed is closed."""

    closed: bool = False


class ClosableQueue(Generic[T]):
    """A bounded queue of one event loop, which knows how many ends are open on either side.

    No writer left: readers get what is stored, then EndOfStream. No reader left: writers get QueueClosed at once, and
    what is stored stays. A send or receive that raises, cancellation included, has moved no item.
    """

    def __init__(self, name: str, capacity: int) -> None:
        self.name, self.capacity = name, capacity
        self.thread = LoopThread(f"mailbox {name!r}")
        self.senders, self.receivers = Line(), Line()
        self.sent, self.received = 0, 0
        self.ended = False  # every writer has closed
        self.deserted = False  # every reader has closed
        self._items: asyncio.Queue[T] = asyncio.Queue(capacity)
        self._open_writers, self._open_readers = 0, 0

    @property
    def depth(self) -> int:
        """Items sent and not yet received."""
        return self._items.qsize()

    def open_writer(self) -> None:
        """Count one more writer. Raises QueueClosed if every one before it has closed."""
        if self.ended:
            raise QueueClosed(f"mailbox {self.name!r} has ended: open every writer before the last one closes")
        self._open_writers += 1

    def open_reader(self) -> None:
        """Count one more reader. Raises QueueClosed if every one before it has closed."""
        if self.deserted:
            raise QueueClosed(f"mailbox {self.name!r} is deserted: open every reader before the last one closes")
        self._open_readers += 1

    async def send(self, item: T, end: End) -> None:
        """Wait for room in line; see Outbox."""
        self._check_writer(end)
        if not self._has_room() and not await self.senders.wait(end):
            raise QueueClosed(self._why_not(end))
        if end.closed or self.deserted:  # between being admitted and coming to run
            self.senders.admit()
            raise QueueClosed(self._why_not(end))
        self._put(item)

    def send_nowait(self, item: T, end: End) -> None:
        """Overtake nobody who waits; see Outbox."""
        self._check_writer(end)
        if not self._has_room():
            raise anyio.WouldBlock
        self._put(item)

    async def receive(self, end: End) -> T:
        """Wait for an item in line; see Inbox."""
        self._check_reader(end)
        if not self._has_item() and not await self.receivers.wait(end):
            raise EndOfStream
        if end.closed:  # between being admitted and coming to run
            self.receivers.admit()
            raise EndOfStream
        return self._take()

    def receive_nowait(self, end: End) -> T:
        """Overtake nobody who waits; see Inbox."""
        self._check_reader(end)
        if not self._has_item():
            raise anyio.WouldBlock
        return self._take()

    def close_writer(self, end: End) -> None:
        """Count one writer less, and send away whoever waits to send through it."""
        self.thread.check()
        if end.closed:
            return
        end.closed = True
        self.senders.dismiss(end)
        self._open_writers -= 1
        if self._open_writers == 0:
            self.ended = True
            self._end_if_dry()

    def close_reader(self, end: End) -> None:
        """Count one reader less, and send away whoever waits to receive through it."""
        self.thread.check()
        if end.closed:
            return
        end.closed = True
        self.receivers.dismiss(end)
        self._open_readers -= 1
        if self._open_readers == 0:
            self.deserted = True
            self.senders.dismiss()

    def _has_room(self) -> bool:
        return self.capacity - self.depth > self.senders.reserved

    def _has_item(self) -> bool:
        return self.depth > self.receivers.reserved

    def _put(self, item: T) -> None:
        self._items.put_nowait(item)
        self.sent += 1
        self.receivers.admit()

    def _take(self) -> T:
        item = self._items.get_nowait()
        self.received += 1
        self.senders.admit()
        self._end_if_dry()
        return item

    def _end_if_dry(self) -> None:
        """Only an empty queue ends its readers: an item reserved for one may yet fall to another."""
        if self.ended and self._items.empty():
            self.receivers.dismiss()

    def _check_writer(self, end: End) -> None:
        self.thread.check()
        if end.closed or self.deserted:
            raise QueueClosed(self._why_not(end))

    def _check_reader(self, end: End) -> None:
        self.thread.check()
        if end.closed or (self.ended and self._items.empty()):
            raise EndOfStream

    def _why_not(self, end: End) -> str:
        reason = "this writer was closed" if end.closed else "every reader has closed"
        return f"mailbox {self.name!r} takes no more messages: {reason}"


class QueueStats(Struct, frozen=True, kw_only=True):
    """Queue -> metrics. Counts since the beginning; `sent = received + depth` at every moment.

    send_wait_seconds: summed over the writers, time spent waiting for room: the consumer is the slower one.
    receive_wait_seconds: summed over the readers, time spent waiting for a message: the producer is the slower one.
    """

    name: str
    capacity: int
    depth: int
    sent: int
    received: int
    send_wait_seconds: float
    receive_wait_seconds: float


class Queue(Generic[T]):
    """A bounded, typed arrow between actors of one event loop. Full means that the producer waits.

    Each producer opens a `writer` and each consumer a `reader`, and closes it when done. When every writer ever opened
    has closed, readers receive what is left and then reach the end. When every reader ever opened has closed, writers
    get QueueClosed, so that no producer waits for a dead consumer; what was not received stays in `depth`.
    Messages are received in the order sent, and those who wait are served in the order they came.
    """

    def __init__(self, name: str, *, capacity: int) -> None:
        """Make an empty mailbox for `capacity` messages; ValueError if that is less than one."""
        if capacity < 1:
            raise ValueError(f"mailbox {name!r} needs a capacity of at least 1, not {capacity}")
        self.name = name
        self.capacity = capacity
        self._queue: ClosableQueue[T] = ClosableQueue(name, capacity)

    @property
    def depth(self) -> int:
        """Messages sent and not yet received. For measurement, never for control flow."""
        return self._queue.depth

    def stats(self) -> QueueStats:
        """Measure the mailbox as it is now; waits still in progress count."""
        queue = self._queue
        queue.thread.check()
        return QueueStats(
            name=self.name,
            capacity=self.capacity,
            depth=queue.depth,
            sent=queue.sent,
            received=queue.received,
            send_wait_seconds=queue.senders.seconds,
            receive_wait_seconds=queue.receivers.seconds,
        )

    def writer(self) -> Outbox[T]:
        """Open an end for one producer. Raises QueueClosed if every writer before it has closed."""
        self._queue.open_writer()
        return _Writer(self._queue)

    def reader(self) -> Inbox[T]:
        """Open an end for one consumer. Raises QueueClosed if every reader before it has closed."""
        self._queue.open_reader()
        return _Reader(self._queue)


class _Writer(End, Generic[T]):
    """A producer's end: see Outbox."""

    def __init__(self, queue: ClosableQueue[T]) -> None:
        self._queue = queue

    async def send(self, item: T) -> None:
        await self._queue.send(item, self)

    def send_nowait(self, item: T) -> None:
        self._queue.send_nowait(item, self)

    def close(self) -> None:
        self._queue.close_writer(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Reader(End, Generic[T]):
    """A consumer's end: see Inbox."""

    def __init__(self, queue: ClosableQueue[T]) -> None:
        self._queue = queue

    async def receive(self) -> T:
        return await self._queue.receive(self)

    def receive_nowait(self) -> T:
        return self._queue.receive_nowait(self)

    def close(self) -> None:
        self._queue.close_reader(self)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        try:
            return await self.receive()
        except EndOfStream:
            raise StopAsyncIteration from None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
