"""Actors: one loop, one verb; end of input is end of life."""

from __future__ import annotations

import pytest
from anyio import create_task_group, fail_after

from clotho.runtime.actor import Actor
from clotho.runtime.queues import Queue
from protocols.queues import EndOfStream, Outbox, QueueClosed


class _Half(Actor[int, float]):
    async def handle(self, message: int) -> float:
        if message < 0:
            raise ValueError(f"cannot halve {message}")
        return message / 2


async def test_the_end_of_input_travels_down_the_flow() -> None:
    """Closing the first arrow lets each box finish what it has and close the next."""
    numbers: Queue[int] = Queue("numbers", capacity=1)
    halves: Queue[float] = Queue("halves", capacity=1)
    source, result = numbers.writer(), halves.reader()
    with fail_after(5):
        async with create_task_group() as group:
            for _ in range(2):
                group.start_soon(_Half("half", numbers.reader(), halves.writer()).run)
            async with create_task_group() as producing:
                producing.start_soon(_feed, source, [2, 4, 6, 8])
                assert sorted([half async for half in result]) == [1.0, 2.0, 3.0, 4.0]


async def _feed(outbox: Outbox[int], numbers: list[int]) -> None:
    async with outbox:
        for number in numbers:
            await outbox.send(number)


async def test_a_failing_actor_closes_both_its_ends() -> None:
    """NullSampleLog up or down the flow is left waiting for it."""
    numbers: Queue[int] = Queue("numbers", capacity=2)
    halves: Queue[float] = Queue("halves", capacity=1)
    source, result = numbers.writer(), halves.reader()
    actor = _Half("half", numbers.reader(), halves.writer())
    await source.send(-1)
    with pytest.raises(ValueError, match="cannot halve -1"):
        await actor.run()
    with pytest.raises(EndOfStream):
        await result.receive()
    with pytest.raises(QueueClosed):
        await source.send(1)
