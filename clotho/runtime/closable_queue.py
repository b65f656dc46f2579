"""What a mailbox stands on: an `asyncio.Queue` that can be closed from both sides, is fair, and safe to cancel."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

import anyio

from clotho.runtime.ends import EndOfMail, MailboxClosed
from clotho.runtime.line import Line
from clotho.runtime.loop_thread import LoopThread

T = TypeVar("T")


class End:
    """One end of a queue: who sends or receives. Closed is closed."""

    closed: bool = False


class ClosableQueue(Generic[T]):
    """A bounded queue of one event loop, which knows how many ends are open on either side.

    No writer left: readers get what is stored, then EndOfMail. No reader left: writers get MailboxClosed at once, and
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
        """Count one more writer. Raises MailboxClosed if every one before it has closed."""
        if self.ended:
            raise MailboxClosed(f"mailbox {self.name!r} has ended: open every writer before the last one closes")
        self._open_writers += 1

    def open_reader(self) -> None:
        """Count one more reader. Raises MailboxClosed if every one before it has closed."""
        if self.deserted:
            raise MailboxClosed(f"mailbox {self.name!r} is deserted: open every reader before the last one closes")
        self._open_readers += 1

    async def send(self, item: T, end: End) -> None:
        """Wait for room in line; see Outbox."""
        self._check_writer(end)
        if not self._has_room() and not await self.senders.wait(end):
            raise MailboxClosed(self._why_not(end))
        if end.closed or self.deserted:  # between being admitted and coming to run
            self.senders.admit()
            raise MailboxClosed(self._why_not(end))
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
            raise EndOfMail
        if end.closed:  # between being admitted and coming to run
            self.receivers.admit()
            raise EndOfMail
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
            raise MailboxClosed(self._why_not(end))

    def _check_reader(self, end: End) -> None:
        self.thread.check()
        if end.closed or (self.ended and self._items.empty()):
            raise EndOfMail

    def _why_not(self, end: End) -> str:
        reason = "this writer was closed" if end.closed else "every reader has closed"
        return f"mailbox {self.name!r} takes no more messages: {reason}"
