"""The newest-wins cell."""

from __future__ import annotations

from contextlib import suppress

import pytest
from anyio import create_task_group, fail_after, to_thread, wait_all_tasks_blocked

from clotho.runtime.latest import Latest, wait_until
from protocols.queues import EndOfStream, QueueClosed


def test_an_empty_cell_has_no_value() -> None:
    """There is no None to mistake for a value."""
    with pytest.raises(LookupError, match="'weights' is empty"):
        _ = Latest[int]("weights").value


async def test_the_newest_value_wins_and_its_writer_never_waits() -> None:
    """`put` returns at once, whoever reads; replaced values are never seen."""
    cell: Latest[int] = Latest("weights")
    for version in range(1000):
        cell.put(version)
    assert (cell.value, cell.revision) == (999, 1000)
    assert await cell.changed(after=0) == 999


async def test_wait_until_returns_the_first_newest_value_that_satisfies() -> None:
    """Every reader waits for its own condition, and one put may satisfy several."""
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


async def test_changed_follows_the_revisions_without_missing_the_last() -> None:
    """A reader that comes back late gets the newest, once."""
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


async def test_a_closed_cell_keeps_its_value_and_takes_no_other() -> None:
    """The close ends those who wait, not those who are satisfied."""
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


async def test_the_close_wakes_those_who_wait() -> None:
    """A reader never waits for a writer that has gone."""
    cell: Latest[int] = Latest("weights")
    ended: list[str] = []

    async def wait() -> None:
        try:
            await cell.wait_until(lambda version: version > 3)
        except EndOfStream:
            ended.append("told")

    with fail_after(5):
        async with create_task_group() as group:
            group.start_soon(wait)
            group.start_soon(wait)
            await wait_all_tasks_blocked()
            cell.close()
    assert ended == ["told", "told"]


async def test_a_condition_on_several_cells_is_looked_at_with_every_value() -> None:
    """Whichever of them it comes from; it holds at once if it does already."""
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


async def test_it_is_given_up_when_no_cell_can_change_any_more() -> None:
    """One of them that is still open is a hope."""
    left: Latest[int] = Latest("left")
    right: Latest[int] = Latest("right")
    ended: list[str] = []

    async def wait() -> None:
        with pytest.raises(EndOfStream):
            await wait_until(lambda: False, left, right)
        ended.append("told")

    with fail_after(5):
        async with create_task_group() as group:
            group.start_soon(wait)
            await wait_all_tasks_blocked()
            left.close()
            await wait_all_tasks_blocked()
            assert ended == []
            right.close()
    assert ended == ["told"]


async def test_another_thread_may_read_the_cell_and_not_write_it() -> None:
    """A reader woken from another thread would never notice."""
    cell: Latest[int] = Latest("weights")
    cell.put(1)
    assert await to_thread.run_sync(lambda: cell.value) == 1
    with pytest.raises(RuntimeError, match="event loop's thread"):
        await to_thread.run_sync(cell.put, 2)
