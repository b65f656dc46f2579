"""The arrow between two actors: bounded, typed, closable from both ends, and measured."""

from __future__ import annotations

from types import TracebackType
from typing import Generic, Self, TypeVar

from msgspec import Struct

from clotho.runtime.closable_queue import ClosableQueue, End
from clotho.runtime.ends import EndOfMail, Inbox, Outbox

T = TypeVar("T")


class MailboxStats(Struct, frozen=True, kw_only=True):
    """Mailbox -> metrics. Counts since the beginning; `sent = received + depth` at every moment.

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


class Mailbox(Generic[T]):
    """A bounded, typed arrow between actors of one event loop. Full means that the producer waits.

    Each producer opens a `writer` and each consumer a `reader`, and closes it when done. When every writer ever opened
    has closed, readers receive what is left and then reach the end. When every reader ever opened has closed, writers
    get MailboxClosed, so that no producer waits for a dead consumer; what was not received stays in `depth`.
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

    def stats(self) -> MailboxStats:
        """Measure the mailbox as it is now; waits still in progress count."""
        queue = self._queue
        queue.thread.check()
        return MailboxStats(
            name=self.name,
            capacity=self.capacity,
            depth=queue.depth,
            sent=queue.sent,
            received=queue.received,
            send_wait_seconds=queue.senders.seconds,
            receive_wait_seconds=queue.receivers.seconds,
        )

    def writer(self) -> Outbox[T]:
        """Open an end for one producer. Raises MailboxClosed if every writer before it has closed."""
        self._queue.open_writer()
        return _Writer(self._queue)

    def reader(self) -> Inbox[T]:
        """Open an end for one consumer. Raises MailboxClosed if every reader before it has closed."""
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
        except EndOfMail:
            raise StopAsyncIteration from None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
