"""Our messages: through a mailbox, through actors under their supervisor, and through the compute thread and back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial

from bench.contenders.loop import Case, Once, serve
from clotho.runtime.actor import Actor
from clotho.runtime.child import transient
from clotho.runtime.compute_thread import ComputeExecutor, finish
from clotho.runtime.queues import Inbox, Mailbox, Outbox
from clotho.runtime.supervisor import Supervisor

SEMANTICS = (
    "Bounded mailboxes with waiting times measured and both ends closed in order; actors as children of the "
    "supervisor, started one by one; calls through the compute thread's queue of calls."
)


class Source:
    """Sends numbers."""

    name = "source"

    def __init__(self, outbox: Outbox[int], messages: int) -> None:
        self._outbox, self._messages = outbox, messages

    async def run(self) -> None:
        """Send all of them."""
        async with self._outbox:
            for number in range(self._messages):
                await self._outbox.send(number)


class Passing(Actor[int, int]):
    """Passes on what comes."""

    async def handle(self, message: int) -> int:
        """The same."""
        return message


class Drain:
    """Receives until the end."""

    name = "drain"

    def __init__(self, inbox: Inbox[int]) -> None:
        self._inbox = inbox
        self.received = 0

    async def run(self) -> None:
        """Receive all of them."""
        async with self._inbox:
            async for _ in self._inbox:
                self.received += 1


async def through_a_mailbox(messages: int, capacity: int) -> None:
    """Two tasks, nobody above them."""
    box: Mailbox[int] = Mailbox("box", capacity=capacity)
    source, drain = Source(box.writer(), messages), Drain(box.reader())
    await asyncio.gather(source.run(), drain.run())
    _check(drain.received, messages)


async def through_an_actor(messages: int, capacity: int) -> None:
    """Source, actor and drain as the pipeline has them: supervised, readers first, until the last has returned."""
    before: Mailbox[int] = Mailbox("before", capacity=capacity)
    after: Mailbox[int] = Mailbox("after", capacity=capacity)
    drain = Drain(after.reader())
    passing = Passing("passing", before.reader(), after.writer())
    children = [transient(drain), transient(passing), transient(Source(before.writer(), messages))]
    await Supervisor(children, on_failure=_raise, on_drain=lambda: None).run()
    _check(drain.received, messages)


def through_the_compute_thread(executor: ComputeExecutor) -> Callable[[int, int], Awaitable[None]]:
    """Calls one after the other, each awaited on the event loop before the next."""

    async def calls(messages: int, capacity: int) -> None:
        for number in range(messages):
            _check(await finish(executor.submit(partial(abs, number))), number)

    return calls


def prepare(case: Case) -> Once:
    """A path by its name."""
    executor = ComputeExecutor(decode_share=0.5)
    paths: dict[str, Callable[[int, int], Awaitable[None]]] = {
        "mailbox": through_a_mailbox,
        "actor": through_an_actor,
        "compute thread": through_the_compute_thread(executor),
    }
    if case["path"] == "compute thread":
        executor.start()
    path = paths[case["path"]]

    async def timed() -> float:
        began = time.perf_counter()
        await path(case["messages"], case["capacity"])
        return time.perf_counter() - began

    return lambda: {"message_seconds": asyncio.run(timed()) / case["messages"]}


def _check(found: int, wanted: int) -> None:
    if found != wanted:
        raise RuntimeError(f"{found} came, not {wanted}")


def _raise(_: str, error: Exception) -> None:
    raise error


if __name__ == "__main__":
    serve(prepare, semantics=SEMANTICS, packages=["anyio"])
