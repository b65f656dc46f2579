"""Cancellation: whatever is cancelled, whenever, no message is lost, doubled or stuck."""

from __future__ import annotations

import asyncio
import random

import pytest
from anyio import CancelScope, create_task_group, fail_after, wait_all_tasks_blocked
from anyio.lowlevel import checkpoint

from clotho.runtime.queues import Queue
from protocols.queues import EndOfStream, Inbox, Outbox


async def test_a_message_given_to_a_reader_cancelled_at_that_moment_goes_to_the_next() -> None:
    """Admitted, then cancelled before it ran: the place passes on."""
    mailbox: Queue[int] = Queue("rollouts", capacity=1)
    writer, cancelled, other = mailbox.writer(), mailbox.reader(), mailbox.reader()
    first = asyncio.ensure_future(cancelled.receive())
    await wait_all_tasks_blocked()
    second = asyncio.ensure_future(other.receive())
    await wait_all_tasks_blocked()
    writer.send_nowait(1)
    first.cancel()
    with fail_after(5):
        assert await second == 1
    assert first.cancelled()


async def test_a_message_survives_the_cancellation_of_its_only_reader() -> None:
    """It stays in the mailbox for the next receive."""
    mailbox: Queue[int] = Queue("rollouts", capacity=1)
    writer, reader = mailbox.writer(), mailbox.reader()
    task = asyncio.ensure_future(reader.receive())
    await wait_all_tasks_blocked()
    writer.send_nowait(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (mailbox.depth, reader.receive_nowait()) == (1, 1)


@pytest.mark.parametrize("already_waiting", [True, False])
async def test_the_last_message_reaches_the_other_reader_even_after_the_end(already_waiting: bool) -> None:
    """A reader must not be told the end while a message may still fall to it."""
    mailbox: Queue[int] = Queue("rollouts", capacity=1)
    writer, cancelled, other = mailbox.writer(), mailbox.reader(), mailbox.reader()
    first = asyncio.ensure_future(cancelled.receive())
    await wait_all_tasks_blocked()
    second = asyncio.ensure_future(other.receive())
    if already_waiting:
        await wait_all_tasks_blocked()
    writer.send_nowait(1)
    writer.close()
    first.cancel()
    with fail_after(5):
        assert await second == 1
        with pytest.raises(EndOfStream):
            await other.receive()


async def test_a_message_given_to_a_reader_closed_at_that_moment_goes_to_the_next() -> None:
    """Closing is like cancelling: what was not received yet stays for the others."""
    mailbox: Queue[int] = Queue("rollouts", capacity=1)
    writer, closing, other = mailbox.writer(), mailbox.reader(), mailbox.reader()
    first = asyncio.ensure_future(closing.receive())
    await wait_all_tasks_blocked()
    second = asyncio.ensure_future(other.receive())
    await wait_all_tasks_blocked()
    writer.send_nowait(1)
    closing.close()
    with fail_after(5):
        assert await second == 1
        with pytest.raises(EndOfStream):
            await first


async def test_a_cancelled_send_has_sent_nothing_and_frees_its_place() -> None:
    """Whether it waited or had just been admitted, the next in line gets the room."""
    mailbox: Queue[int] = Queue("rollouts", capacity=1)
    writer, reader = mailbox.writer(), mailbox.reader()
    await writer.send(0)
    sends = []
    for item in (1, 2, 3):
        sends.append(asyncio.ensure_future(writer.send(item)))
        await wait_all_tasks_blocked()
    sends[0].cancel()  # still waiting
    assert reader.receive_nowait() == 0  # admits the second, or the first if it were still in line
    sends[1].cancel()  # just admitted
    with fail_after(5):
        assert await reader.receive() == 3
    assert [send.cancelled() for send in sends] == [True, True, False]
    assert mailbox.stats().sent == 2


class _Hostile:
    """Producers and consumers cancelled at random, each retrying; counts what was surely sent and received."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.mailbox: Queue[int] = Queue("hostile", capacity=self.random.randint(1, 3))
        self.sent: list[int] = []
        self.received: list[int] = []
        self.scopes: set[CancelScope] = set()

    async def produce(self, outbox: Outbox[int], items: range) -> None:
        async with outbox:
            for item in items:
                while item not in self.sent:
                    with CancelScope() as scope:
                        self.scopes.add(scope)
                        await outbox.send(item)
                        self.sent.append(item)
                    self.scopes.discard(scope)
                if self.random.random() < 0.5:
                    await checkpoint()

    async def consume(self, inbox: Inbox[int]) -> None:
        while True:
            with CancelScope() as scope:
                self.scopes.add(scope)
                try:
                    self.received.append(await inbox.receive())
                except EndOfStream:
                    return
                finally:
                    self.scopes.discard(scope)
            if self.random.random() < 0.3:
                await checkpoint()

    async def disturb(self) -> None:
        while True:
            await checkpoint()
            for scope in sorted(self.scopes, key=id):
                if self.random.random() < 0.2:
                    scope.cancel()


@pytest.mark.parametrize("seed", range(30))
async def test_random_cancellation_loses_nothing_and_doubles_nothing(seed: int) -> None:
    """Sent is what `send` returned for; every such message is received once, and everybody comes to an end."""
    world = _Hostile(seed)
    writers = [(world.mailbox.writer(), range(20 * n, 20 * n + 20)) for n in range(3)]
    readers = [world.mailbox.reader() for _ in range(3)]
    with fail_after(20):
        async with create_task_group() as outer:
            outer.start_soon(world.disturb)
            async with create_task_group() as group:
                for writer, items in writers:
                    group.start_soon(world.produce, writer, items)
                for reader in readers:
                    group.start_soon(world.consume, reader)
            outer.cancel_scope.cancel()
    assert sorted(world.received) == list(range(60))
    assert sorted(world.sent) == list(range(60))
    assert world.mailbox.depth == 0
