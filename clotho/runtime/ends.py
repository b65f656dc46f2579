"""The two ends of an arrow, as an actor sees them: shapes, not classes. Anything that has them will do."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self, TypeVar

from protocols.errors import ClothoError

T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)


class MailboxClosed(ClothoError, RuntimeError):
    """A message was offered to an end, or a mailbox, that takes no more: nobody would ever read it."""


class EndOfMail(Exception):
    """Everything was received and nothing more will come. `async for` turns it into the end of the loop."""


class Closable(Protocol):
    """Something to be closed, once or more often; the second time does nothing."""

    def close(self) -> None:
        """Give it up."""


class _End(Closable, Protocol):
    """What both ends share: leaving the `async with` block closes them."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Outbox(_End, Protocol[T_contra]):
    """Where an actor puts its messages."""

    async def send(self, item: T_contra) -> None:
        """Put `item` into the mailbox, waiting for room: that wait is the back-pressure.

        If this raises, cancellation included, the item was not sent.
        Raises MailboxClosed if this end was closed or every reader has gone.
        """

    def send_nowait(self, item: T_contra) -> None:
        """Put `item` into the mailbox at once; anyio.WouldBlock if there is no room, MailboxClosed as in `send`."""


class Inbox(_End, Protocol[T_co]):
    """Where an actor finds its messages. Several inboxes of one mailbox share the messages, one reader each."""

    async def receive(self) -> T_co:
        """Take the oldest message, waiting for one. If this raises, cancellation included, none was taken.

        Raises EndOfMail if this end was closed, or every writer has closed and all was received.
        """

    def receive_nowait(self) -> T_co:
        """Take the oldest message at once; anyio.WouldBlock if there is none yet, EndOfMail as in `receive`."""

    def __aiter__(self) -> Self:
        """Iterate until the end of mail."""

    async def __anext__(self) -> T_co:
        """Receive, with StopAsyncIteration in place of EndOfMail."""
