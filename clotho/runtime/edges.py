"""An arrow of the topology: a mailbox, with whatever actors a profile puts on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from clotho.runtime.child import Child, transient
from clotho.runtime.queues import Queue
from protocols.queues import Inbox, Outbox, QueueClosed

T = TypeVar("T")

Insert = Callable[[Inbox[Any], Outbox[Any]], Child]
"""Makes an actor that stands on the arrow: what it receives at one end it sends, changed or not, from the other."""

Tap = Callable[[Inbox[Any]], Child]
"""Makes an actor that receives every message beside the next box."""


class Arrow(Generic[T]):
    """Messages go in at `writer` and come out at `reader`; between the two stand inserted actors, then taps, in order.

    Every stretch has the arrow's capacity.
    """

    def __init__(self, name: str, *, capacity: int, inserts: Sequence[Insert] = (), taps: Sequence[Tap] = ()) -> None:
        """Build the arrow; `children` are the actors on it, to be supervised; `mailboxes` its stretches."""
        self.children: list[Child] = []
        self.mailboxes: list[Queue[Any]] = [Queue(name, capacity=capacity)]
        self._last = self.mailboxes[0]
        for number, insert in enumerate(inserts, 1):
            before, self._last = self._last, self._stretch(f"{name}.{number}", capacity)
            self.children.append(insert(before.reader(), self._last.writer()))
        if taps:
            copies = [self._stretch(f"{name}.tap{number}", capacity) for number in range(1, len(taps) + 1)]
            before, self._last = self._last, self._stretch(f"{name}.tapped", capacity)
            tee = Tee(f"{name} tee", before.reader(), self._last.writer(), [copy.writer() for copy in copies])
            self.children.append(transient(tee))
            self.children += [tap(copy.reader()) for tap, copy in zip(taps, copies, strict=True)]

    def writer(self) -> Outbox[T]:
        """An end for one producer."""
        return self.mailboxes[0].writer()

    def reader(self) -> Inbox[T]:
        """The end for the consumer."""
        return self._last.reader()

    def _stretch(self, name: str, capacity: int) -> Queue[Any]:
        self.mailboxes.append(Queue(name, capacity=capacity))
        return self.mailboxes[-1]


class Tee(Generic[T]):
    """Passes every message on, after handing it to each tap.

    A tap that falls behind makes the arrow wait, as any full mailbox does; one that has ended is left out.
    """

    def __init__(self, name: str, inbox: Inbox[T], outbox: Outbox[T], copies: list[Outbox[T]]) -> None:
        """Take ownership of all ends."""
        self.name = name
        self._inbox, self._outbox, self._copies = inbox, outbox, copies

    async def run(self) -> None:
        """Pass on until the messages end."""
        try:
            async with self._inbox, self._outbox:
                async for item in self._inbox:
                    await self._copy(item)
                    await self._outbox.send(item)
        finally:
            for copies in self._copies:
                copies.close()

    async def _copy(self, item: T) -> None:
        for copies in tuple(self._copies):
            try:
                await copies.send(item)
            except QueueClosed:
                self._copies.remove(copies)
