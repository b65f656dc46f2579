"""The message benchmark with the standard library: plain queues, plain tasks, a pool of one thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from bench.contenders.semantics import SEMANTICS
from bench.contenders.worker import Case, MeasureOnce, serve

Queue = asyncio.Queue[int | None]


async def send(queue: Queue, messages: int) -> None:
    """Send numbers, then the sentinel."""
    for number in range(messages):
        await queue.put(number)
    await queue.put(None)


async def relay(before: Queue, after: Queue) -> None:
    """Forward all messages and the sentinel."""
    while (message := await before.get()) is not None:
        await after.put(message)
    await after.put(None)


async def drain(queue: Queue, messages: int) -> None:
    """Receive all messages. Raises RuntimeError if the count differs."""
    received = 0
    while await queue.get() is not None:
        received += 1
    if received != messages:
        raise RuntimeError(f"received {received} messages instead of {messages}")


async def through_a_queue(messages: int, capacity: int) -> None:
    """Two tasks and one queue."""
    queue: Queue = asyncio.Queue(capacity)
    await asyncio.gather(send(queue, messages), drain(queue, messages))


async def through_a_task(messages: int, capacity: int) -> None:
    """Three tasks and two queues."""
    before: Queue = asyncio.Queue(capacity)
    after: Queue = asyncio.Queue(capacity)
    await asyncio.gather(drain(after, messages), relay(before, after), send(before, messages))


async def through_a_thread(messages: int, capacity: int) -> None:
    """Calls in sequence, each awaited before the next."""
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1) as pool:
        for number in range(messages):
            await loop.run_in_executor(pool, abs, number)


PATHS: dict[str, Callable[[int, int], Awaitable[None]]] = {
    "mailbox": through_a_queue,
    "actor": through_a_task,
    "compute thread": through_a_thread,
}


def prepare(case: Case) -> MeasureOnce:
    """Select the path of the case."""
    path = PATHS[case["path"]]

    async def timed() -> float:
        began = time.perf_counter()
        await path(case["messages"], case["capacity"])
        return time.perf_counter() - began

    return lambda: {"message_seconds": asyncio.run(timed()) / case["messages"]}


if __name__ == "__main__":
    serve(prepare, semantics=SEMANTICS["asyncio_messages"], packages=[])
