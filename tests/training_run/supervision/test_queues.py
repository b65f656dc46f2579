"""Queues: backpressure, order, closing from both sides, and statistics."""

from __future__ import annotations

from itertools import pairwise
from unittest.mock import Mock

import anyio
import pytest
from anyio import create_task_group, fail_after, to_thread, wait_all_tasks_blocked

from protocols.queues import EndOfStream, Inbox, Outbox, QueueClosed
from training_run.supervision import queues
from training_run.supervision.queues import Queue, QueueEnd


async def _send_all(outbox: Outbox[int], items: range) -> None:
    async with outbox:
        for item in items:
            await outbox.send(item)


async def _receive_all(inbox: Inbox[int], into: list[int]) -> None:
    into.extend([item async for item in inbox])


async def test_a_full_queue_makes_its_writer_wait() -> None:
    """Backpressure: at most `capacity` messages are stored."""
    queue: Queue[int] = Queue("rollouts", capacity=2)
    reader = queue.inbox()
    with fail_after(5):
        async with create_task_group() as group:
            group.start_soon(_send_all, queue.outbox(), range(5))
            await wait_all_tasks_blocked()
            assert (queue.depth, queue.stats().sent) == (2, 2)
            assert await reader.receive() == 0
            await wait_all_tasks_blocked()
            assert (queue.depth, queue.stats().sent) == (2, 3)
            assert [item async for item in reader] == [1, 2, 3, 4]


def test_a_capacity_of_zero_is_refused() -> None:
    """asyncio treats a size of 0 as unbounded."""
    with pytest.raises(ValueError, match="capacity of at least 1"):
        Queue("rollouts", capacity=0)


async def test_messages_are_received_in_the_order_sent() -> None:
    """First in, first out, on both sides."""
    queue: Queue[int] = Queue("rollouts", capacity=3)
    reader, received = queue.inbox(), list[int]()
    with fail_after(5):
        async with create_task_group() as group:
            group.start_soon(_send_all, queue.outbox(), range(100))
            group.start_soon(_receive_all, reader, received)
    assert received == list(range(100))


async def test_waiting_writers_proceed_in_the_order_of_arrival() -> None:
    """A new writer does not overtake waiting ones, also if it arrives when room becomes free."""
    queue: Queue[str] = Queue("rollouts", capacity=1)
    reader, writer = queue.inbox(), queue.outbox()
    with fail_after(5):
        async with create_task_group() as group:
            await writer.send("first")
            group.start_soon(writer.send, "second")
            await wait_all_tasks_blocked()
            group.start_soon(writer.send, "third")
            await wait_all_tasks_blocked()
            received = [reader.receive_nowait()]
            with pytest.raises(anyio.WouldBlock):
                writer.send_nowait("newcomer")
            received += [await reader.receive(), await reader.receive()]
    assert received == ["first", "second", "third"]


async def test_a_new_reader_does_not_overtake_a_waiting_reader() -> None:
    """The message goes to the reader that waited first."""
    queue: Queue[int] = Queue("rollouts", capacity=1)
    reader, writer, received = queue.inbox(), queue.outbox(), list[int]()
    with fail_after(5):
        async with create_task_group() as group:
            group.start_soon(_receive_all, queue.inbox(), received)
            await wait_all_tasks_blocked()
            writer.send_nowait(1)
            with pytest.raises(anyio.WouldBlock):
                reader.receive_nowait()
            writer.close()
    assert received == [1]


async def test_a_queue_ends_when_every_writer_has_closed() -> None:
    """Several producers share a queue. The last close ends it."""
    queue: Queue[int] = Queue("rollouts", capacity=4)
    reader, first, second = queue.inbox(), queue.outbox(), queue.outbox()
    await first.send(1)
    first.close()
    first.close()
    await second.send(2)
    second.close()
    assert [item async for item in reader] == [1, 2]
    with pytest.raises(EndOfStream):
        await reader.receive()
    with pytest.raises(EndOfStream):
        reader.receive_nowait()
    with pytest.raises(QueueClosed, match="open every outbox before"):
        queue.outbox()


async def test_several_writers_and_readers_lose_and_duplicate_no_message() -> None:
    """Each message goes to one reader, and the messages of each writer keep their order."""
    queue: Queue[int] = Queue("rollouts", capacity=3)
    ends = [(queue.inbox(), list[int]()) for _ in range(3)]
    writers = [queue.outbox() for _ in range(4)]
    with fail_after(5):
        async with create_task_group() as group:
            for reader, received in ends:
                group.start_soon(_receive_all, reader, received)
            for index, writer in enumerate(writers):
                group.start_soon(_send_all, writer, range(100 * index, 100 * index + 50))
    received = [item for _, items in ends for item in items]
    assert sorted(received) == [100 * index + n for index in range(4) for n in range(50)]
    for _, items in ends:
        assert all(a < b for a, b in pairwise(items) if a // 100 == b // 100)


async def test_closing_the_last_writer_wakes_every_reader() -> None:
    """Waiting readers receive the end without polling."""
    queue: Queue[int] = Queue("rollouts", capacity=1)
    writer, readers = queue.outbox(), [queue.inbox() for _ in range(3)]
    with fail_after(5):
        async with create_task_group() as group:
            for reader in readers:
                group.start_soon(_receive_all, reader, [])
            await wait_all_tasks_blocked()
            writer.close()


async def test_closing_the_last_reader_fails_every_waiting_writer() -> None:
    """No producer waits for a closed consumer. Unreceived messages are still counted."""
    queue: Queue[int] = Queue("rollouts", capacity=1)
    first, second, writer = queue.inbox(), queue.inbox(), queue.outbox()
    failures: list[str] = []

    async def send(item: int) -> None:
        try:
            await writer.send(item)
        except QueueClosed as error:
            failures.append(str(error))

    with fail_after(5):
        await writer.send(0)
        async with create_task_group() as group:
            group.start_soon(send, 1)
            group.start_soon(send, 2)
            await wait_all_tasks_blocked()
            first.close()
            await wait_all_tasks_blocked()
            assert failures == []
            second.close()
    assert failures == ["queue 'rollouts' accepts no more messages: every inbox was closed"] * 2
    with pytest.raises(QueueClosed):
        await writer.send(3)
    with pytest.raises(QueueClosed):
        queue.inbox()
    stats = queue.stats()
    assert (stats.sent, stats.received, stats.depth) == (1, 0, 1)


async def test_closing_one_end_does_not_affect_the_others() -> None:
    """Sending after the writer's own close is refused. A reader's own close ends only its own wait."""
    queue: Queue[int] = Queue("rollouts", capacity=1)
    closing, other, writer, received = queue.inbox(), queue.inbox(), queue.outbox(), list[int]()
    with fail_after(5):
        async with create_task_group() as group:
            group.start_soon(_receive_all, closing, [])
            await wait_all_tasks_blocked()
            group.start_soon(_receive_all, other, received)
            await wait_all_tasks_blocked()
            closing.close()
            await writer.send(7)
            writer.close()
            with pytest.raises(QueueClosed, match="this outbox was closed"):
                await writer.send(8)
    assert received == [7]


async def test_a_writer_closed_in_its_wait_makes_room_for_the_next() -> None:
    """Its message is not sent."""
    queue: Queue[int] = Queue("rollouts", capacity=1)
    reader, closing, other = queue.inbox(), queue.outbox(), queue.outbox()

    async def send_in_vain() -> None:
        with pytest.raises(QueueClosed):
            await closing.send(1)

    with fail_after(5):
        await other.send(0)
        async with create_task_group() as group:
            group.start_soon(send_in_vain)
            await wait_all_tasks_blocked()
            group.start_soon(other.send, 2)
            await wait_all_tasks_blocked()
            closing.close()
            await wait_all_tasks_blocked()
            assert reader.receive_nowait() == 0
            assert await reader.receive() == 2


async def test_statistics_contain_the_waiting_time_of_each_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time in a wait that is still in progress counts too."""
    clock = Mock(return_value=100.0)
    monkeypatch.setattr(queues, "time", Mock(monotonic=clock))
    queue: Queue[int] = Queue("rollouts", capacity=1)
    reader, writer = queue.inbox(), queue.outbox()
    with fail_after(5):
        await writer.send(0)
        async with create_task_group() as group:
            group.start_soon(writer.send, 1)
            await wait_all_tasks_blocked()
            clock.return_value = 103.0
            waiting = queue.stats()
            assert (waiting.send_wait_seconds, waiting.receive_wait_seconds) == (3.0, 0.0)
            clock.return_value = 104.0
            await reader.receive()
    done = queue.stats()
    assert (done.send_wait_seconds, done.receive_wait_seconds) == (4.0, 0.0)
    assert (done.name, done.capacity, done.depth, done.sent, done.received) == ("rollouts", 1, 1, 2, 1)


async def test_use_from_another_thread_is_refused() -> None:
    """A wake-up from another thread would be lost. The message says how to hand the call over."""
    queue: Queue[int] = Queue("rollouts", capacity=1)
    reader, writer = queue.inbox(), queue.outbox()
    await writer.send(1)
    for call in (writer.close, reader.close, reader.receive_nowait, queue.stats):
        with pytest.raises(RuntimeError, match="call_soon_threadsafe"):
            await to_thread.run_sync(call)
    assert await reader.receive() == 1


async def test_an_end_tells_what_passes_it_and_whether_it_waits() -> None:
    """Once per message. Another end of the same side keeps the queue open."""
    queue: Queue[int] = Queue("rollouts", capacity=1)
    reader, writer = queue.inbox(), queue.outbox()
    assert isinstance(reader, QueueEnd)
    assert isinstance(writer, QueueEnd)
    seen: list[tuple[str, int]] = []
    reader.observe = lambda item: seen.append(("received", item))
    writer.observe = lambda item: seen.append(("sent", item))
    other = writer.beside()
    with fail_after(5):
        async with create_task_group() as group:
            group.start_soon(reader.receive)
            await wait_all_tasks_blocked()
            assert (reader.is_waiting, writer.is_waiting) == (True, False)
            await writer.send(1)
        writer.close()
        assert not reader.is_waiting
        await other.send(2)
        other.close()
        assert await reader.receive() == 2
    assert sorted(seen) == [("received", 1), ("received", 2), ("sent", 1)]
