"""A cell that keeps the newest value."""

from __future__ import annotations

from contextlib import suppress

import pytest
from anyio import create_task_group, fail_after, to_thread, wait_all_tasks_blocked

from protocols.queues import EndOfStream, QueueClosed
from training_run.supervision.latest import Latest, wait_until


def test_an_empty_cell_has_no_value() -> None:
    """Reading it raises an error."""
    with pytest.raises(LookupError, match="'weights' is empty"):
        _ = Latest[int]("weights").value


async def test_the_newest_value_replaces_the_previous_one_without_waiting() -> None:
    """`put` returns at once, and readers never receive replaced values."""
    cell: Latest[int] = Latest("weights")
    for version in range(1000):
        cell.put(version)
    assert (cell.value, cell.revision) == (999, 1000)
    assert await cell.changed(after=0) == 999


async def test_wait_until_returns_the_first_value_that_satisfies_the_condition() -> None:
    """Each reader has its own condition. One put may satisfy several readers."""
    cell: Latest[int] = Latest("weights")
    seen: dict[int, int] = {}

    async def wait(minimum: int) -> None:
        seen[minimum] = await cell.wait_until(lambda version: version >= minimum)

    with fail_after(5):
        async with create_task_group() as group:
            for minimum in (1, 2, 5):
                group.start_soon(wait, minimum)
            await wait_all_tasks_blocked()
            assert seen == {}
            cell.put(1)
            await wait_all_tasks_blocked()
            assert seen == {1: 1}
            cell.put(4)
            cell.put(6)
    assert seen == {1: 1, 2: 6, 5: 6}


async def test_changed_returns_the_newest_revision() -> None:
    """A slow reader receives the newest value once."""
    cell: Latest[str] = Latest("weights")
    seen: list[str] = []

    async def follow() -> None:
        with suppress(EndOfStream):
            while True:
                seen.append(await cell.changed(after=cell.revision if seen else 0))

    with fail_after(5):
        async with create_task_group() as group:
            cell.put("a")
            group.start_soon(follow)
            await wait_all_tasks_blocked()
            cell.put("b")
            cell.put("c")
            await wait_all_tasks_blocked()
            cell.put("d")
            cell.close()
    assert seen == ["a", "c", "d"]


async def test_a_closed_cell_keeps_its_value_and_refuses_others() -> None:
    """The close ends waits whose condition is not satisfied."""
    cell: Latest[int] = Latest("weights")
    cell.put(3)
    cell.close()
    cell.close()
    assert cell.value == 3
    assert await cell.wait_until(lambda version: version == 3) == 3
    with pytest.raises(EndOfStream):
        await cell.wait_until(lambda version: version > 3)
    with pytest.raises(QueueClosed):
        cell.put(4)


async def test_a_close_wakes_waiting_readers() -> None:
    """No reader waits for a closed writer."""
    cell: Latest[int] = Latest("weights")
    ended: list[str] = []

    async def wait() -> None:
        try:
            await cell.wait_until(lambda version: version > 3)
        except EndOfStream:
            ended.append("ended")

    with fail_after(5):
        async with create_task_group() as group:
            group.start_soon(wait)
            group.start_soon(wait)
            await wait_all_tasks_blocked()
            cell.close()
    assert ended == ["ended", "ended"]


async def test_a_condition_on_several_cells_is_evaluated_at_every_change() -> None:
    """A change of any cell triggers it. A satisfied condition returns at once."""
    left: Latest[int] = Latest("left")
    right: Latest[int] = Latest("right")
    left.put(1)
    right.put(1)
    await wait_until(lambda: left.value + right.value == 2, left, right)
    seen: list[tuple[int, int]] = []

    async def wait(total: int) -> None:
        await wait_until(lambda: left.value + right.value >= total, left, right)
        seen.append((left.value, right.value))

    with fail_after(5):
        async with create_task_group() as group:
            for total in (4, 6, 8):
                group.start_soon(wait, total)
            await wait_all_tasks_blocked()
            left.put(3)
            await wait_all_tasks_blocked()
            assert seen == [(3, 1)]
            right.put(3)
            right.close()
            await wait_all_tasks_blocked()
            assert seen == [(3, 1), (3, 3)]
            left.put(5)
    assert seen[-1] == (5, 3)


async def test_a_wait_on_several_cells_ends_when_all_cells_are_closed() -> None:
    """The wait continues while one cell is open."""
    left: Latest[int] = Latest("left")
    right: Latest[int] = Latest("right")
    ended: list[str] = []

    async def wait() -> None:
        with pytest.raises(EndOfStream):
            await wait_until(lambda: False, left, right)
        ended.append("ended")

    with fail_after(5):
        async with create_task_group() as group:
            group.start_soon(wait)
            await wait_all_tasks_blocked()
            left.close()
            await wait_all_tasks_blocked()
            assert ended == []
            right.close()
    assert ended == ["ended"]


async def test_another_thread_may_read_a_cell_but_not_write_it() -> None:
    """A put from another thread would not wake the readers."""
    cell: Latest[int] = Latest("weights")
    cell.put(1)
    assert await to_thread.run_sync(lambda: cell.value) == 1
    with pytest.raises(RuntimeError, match="event loop's thread"):
        await to_thread.run_sync(cell.put, 2)


async def test_only_the_thread_of_the_event_loop_waits_for_a_value() -> None:
    """A wake-up of a waiter in another thread could be lost."""
    cell: Latest[int] = Latest("weights")
    cell.put(1)
    for wait in (cell.wait_until(bool), cell.changed(after=0)):
        with pytest.raises(RuntimeError, match="thread"):
            await to_thread.run_sync(wait.send, None)
