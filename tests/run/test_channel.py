"""Channels: inserted stages process messages in order, and taps receive copies."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest

from clotho.run.custom_actors import Channel, Tee
from clotho.runtime.queues import Queue
from clotho.runtime.supervisor import Child, Restart, temporary, transient
from protocols.queues import EndOfStream, Inbox, Outbox, QueueClosed
from tests.actors.boxes import cancelled_midway, everything, filled


class Adding:
    """Adds a letter to every message."""

    def __init__(self, name: str, inbox: Inbox[str], outbox: Outbox[str]) -> None:
        self.name, self._inbox, self._outbox = name, inbox, outbox

    async def run(self) -> None:
        """Process all messages."""
        async with self._inbox, self._outbox:
            async for message in self._inbox:
                await self._outbox.send(message + self.name)


class Listening:
    """Keeps what it hears; with a limit, it stops listening after so many."""

    def __init__(self, name: str, inbox: Inbox[str], *, limit: int = 10**9) -> None:
        self.name, self.heard = name, list[str]()
        self._inbox, self._limit = inbox, limit

    async def run(self) -> None:
        """Listen."""
        async with self._inbox:
            async for message in self._inbox:
                self.heard.append(message)
                if len(self.heard) == self._limit:
                    return


def adding(letter: str) -> Callable[[Inbox[str], Outbox[str]], Child]:
    """A stage on the channel."""
    return lambda inbox, outbox: transient(Adding(letter, inbox, outbox))


def listening(name: str, **options: int) -> Callable[[Inbox[str]], Child]:
    """A tap on the channel."""
    return lambda inbox: temporary(Listening(name, inbox, **options))


async def through(channel: Channel[str], messages: list[str]) -> list[str]:
    """Send the messages into the channel, and receive what comes out."""
    writer, reader = channel.outbox(), channel.inbox()

    async def send() -> None:
        async with writer:
            for message in messages:
                await writer.send(message)

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            for child in channel.children:
                tasks.start_soon(child.actor.run)
            tasks.start_soon(send)
            received = await everything(reader)
    return received


async def test_a_channel_with_nothing_on_it_is_a_queue() -> None:
    """No stretch, no child, no cost."""
    channel = Channel[str]("plain", capacity=3)
    assert ([queue.name for queue in channel.queues], channel.children) == (["plain"], [])
    assert await through(channel, ["1", "2", "3", "4"]) == ["1", "2", "3", "4"]


async def test_stages_stand_in_order_and_taps_hear_what_leaves_them() -> None:
    """Each message passes every stage, then is copied to every tap; ends travel with the messages."""
    taps = [listening("x"), listening("y")]
    channel = Channel[str]("busy", capacity=2)
    channel.insert(adding("a"))
    channel.insert(adding("b"))
    channel.tap(taps)
    messages = [str(number) for number in range(20)]
    assert await through(channel, messages) == [message + "ab" for message in messages]
    heard = [child.actor.heard for child in channel.children if isinstance(child.actor, Listening)]
    assert heard == [[message + "ab" for message in messages]] * 2
    assert [queue.name for queue in channel.queues] == ["busy", "busy.1", "busy.2", "busy.tapped"]
    assert [(queue.name, queue.capacity) for queue in channel.copies] == [("busy.tap1", 2), ("busy.tap2", 2)]
    assert {child.restart for child in channel.children} == {Restart.TRANSIENT, Restart.TEMPORARY}


async def test_a_tap_that_has_ended_is_left_out() -> None:
    """The channel goes on, for the other taps too."""
    channel = Channel[str]("tapped", capacity=1)
    channel.tap([listening("x", limit=2), listening("y")])
    messages = [str(number) for number in range(9)]
    assert await through(channel, messages) == messages
    heard = [child.actor.heard for child in channel.children if isinstance(child.actor, Listening)]
    assert heard == [messages[:2], messages]


async def test_a_slow_tap_makes_the_channel_wait() -> None:
    """Nothing on the way is unbounded, copies neither."""
    inbox = filled("in", ["1", "2", "3", "4", "5"])
    outbox, copy = Queue[str]("out", capacity=10), Queue[str]("copy", capacity=2)
    slow, reader = copy.inbox(), outbox.inbox()
    tee = Tee("tee", inbox.inbox(), outbox.outbox(), [copy.outbox()])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tee.run)
        await anyio.wait_all_tasks_blocked()
        assert (inbox.depth, copy.depth, outbox.depth) == (2, 2, 2)
        assert await everything(slow) == ["1", "2", "3", "4", "5"]
    assert await everything(reader) == ["1", "2", "3", "4", "5"]


@pytest.mark.parametrize("end", ["cancelled", "deserted"])
async def test_however_a_tee_ends_it_closes_all_its_ends(end: str) -> None:
    """Taps and the next box reach their end, whoever sends gets QueueClosed."""
    inbox = filled("in", ["1", "2"], ended=False)
    outbox, copy = Queue[str]("out", capacity=1), Queue[str]("copy", capacity=9)
    tapped, reader = copy.inbox(), outbox.inbox()
    tee = Tee("tee", inbox.inbox(), outbox.outbox(), [copy.outbox()])
    if end == "deserted":
        reader.close()
        with pytest.raises(QueueClosed):
            await tee.run()
    else:
        await cancelled_midway(tee.run)
        assert await everything(reader) == ["1"]
    assert (await everything(tapped))[0] == "1"
    with pytest.raises(EndOfStream):
        await tapped.receive()
    with pytest.raises(QueueClosed):
        inbox.inbox()
