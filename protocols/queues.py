"""The two ends of a queue between actors. `training_run.supervision.queues` implements both."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self, TypeVar

from protocols.errors import ClothoError

T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)


class QueueClosed(ClothoError, RuntimeError):
    """The queue accepts no more messages: this end was closed, or every reader has closed."""


class EndOfStream(Exception):
    """Every writer has closed and every message was received. `async for` ends the loop instead."""


class Closable(Protocol):
    """An object with an idempotent `close`."""

    def close(self) -> None:
        """Close. Calling it again has no effect."""


class _End(Closable, Protocol):
    """Both ends are asynchronous context managers that close themselves on exit."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Outbox(_End, Protocol[T_contra]):
    """The sending end of a queue."""

    async def send(self, item: T_contra) -> None:
        """Send `item`, waiting while the queue is full (backpressure).

        If this raises, including on cancellation, the item was not sent.
        Raises QueueClosed if this end was closed or every reader has closed.
        """

    def send_nowait(self, item: T_contra) -> None:
        """Send `item` without waiting. Raises anyio.WouldBlock if the queue is full; QueueClosed as `send` does."""


class Inbox(_End, Protocol[T_co]):
    """The receiving end of a queue. Several inboxes of one queue share its messages; each message has one reader."""

    async def receive(self) -> T_co:
        """Receive the oldest message, waiting for one. If this raises, including on cancellation, none was received.

        Raises EndOfStream if this end was closed, or every writer has closed and the queue is empty.
        """

    def receive_nowait(self) -> T_co:
        """Receive without waiting. Raises anyio.WouldBlock if the queue is empty; EndOfStream as `receive` does."""

    def __aiter__(self) -> Self:
        """Iterate over messages until the end of the stream."""

    async def __anext__(self) -> T_co:
        """Receive; raises StopAsyncIteration in place of EndOfStream."""
