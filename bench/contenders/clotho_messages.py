"""Clotho's messages: through a queue, through supervised actors, and through the compute thread and back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial

from bench.contenders.semantics import SEMANTICS
from bench.contenders.worker import Case, MeasureOnce, serve
from clotho.lanes.compute_thread import Compute, finish
from clotho.models.machine import compute_slots
from protocols.queues import Inbox, Outbox
from training_run.supervision.queues import Queue
from training_run.supervision.supervisor import Supervisor, transient


class Source:
    """Sends numbers."""

    name = "source"

    def __init__(self, outbox: Outbox[int], messages: int) -> None:
        self._outbox, self._messages = outbox, messages

    async def run(self) -> None:
        """Send all numbers."""
        async with self._outbox:
            for number in range(self._messages):
                await self._outbox.send(number)


class Relay:
    """Forwards every message."""

    name = "relay"

    def __init__(self, inbox: Inbox[int], outbox: Outbox[int]) -> None:
        self._inbox, self._outbox = inbox, outbox

    async def run(self) -> None:
        """Forward until the queue is closed."""
        async with self._inbox, self._outbox:
            async for message in self._inbox:
                await self._outbox.send(message)


class Drain:
    """Receives until the queue is closed."""

    name = "drain"

    def __init__(self, inbox: Inbox[int]) -> None:
        self._inbox = inbox
        self.received = 0

    async def run(self) -> None:
        """Receive all messages."""
        async with self._inbox:
            async for _ in self._inbox:
                self.received += 1


async def through_a_queue(messages: int, capacity: int) -> None:
    """Two tasks and one queue, without supervision."""
    box: Queue[int] = Queue("box", capacity=capacity)
    source, drain = Source(box.outbox(), messages), Drain(box.inbox())
    await asyncio.gather(source.run(), drain.run())
    _check(drain.received, messages)


async def through_an_actor(messages: int, capacity: int) -> None:
    """Source, actor and drain as in the pipeline: supervised, readers started first, until the last one returns."""
    before: Queue[int] = Queue("before", capacity=capacity)
    after: Queue[int] = Queue("after", capacity=capacity)
    drain = Drain(after.inbox())
    relay = Relay(before.inbox(), after.outbox())
    children = [transient(drain), transient(relay), transient(Source(before.outbox(), messages))]
    await Supervisor(on_failure=_raise).run(children, on_drain=lambda: None)
    _check(drain.received, messages)


def through_the_compute_thread(compute: Compute) -> Callable[[int, int], Awaitable[None]]:
    """Calls in sequence, each awaited on the event loop before the next."""

    async def calls(messages: int, capacity: int) -> None:
        for number in range(messages):
            _check(await finish(compute.decode.submit(partial(abs, number))), number)

    return calls


def prepare(case: Case) -> MeasureOnce:
    """Select the path of the case."""
    compute = Compute(decode_share=0.5, slots=compute_slots())
    paths: dict[str, Callable[[int, int], Awaitable[None]]] = {
        "mailbox": through_a_queue,
        "actor": through_an_actor,
        "compute thread": through_the_compute_thread(compute),
    }
    if case["path"] == "compute thread":
        compute.start()
    path = paths[case["path"]]

    async def timed() -> float:
        began = time.perf_counter()
        await path(case["messages"], case["capacity"])
        return time.perf_counter() - began

    return lambda: {"message_seconds": asyncio.run(timed()) / case["messages"]}


def _check(found: int, wanted: int) -> None:
    if found != wanted:
        raise RuntimeError(f"received {found} messages instead of {wanted}")


def _raise(_: str, error: Exception) -> None:
    raise error


if __name__ == "__main__":
    serve(prepare, semantics=SEMANTICS["clotho_messages"], packages=["anyio"])
