"""Waiting on the loop for what another thread resolves."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from anyio import create_task_group, fail_after, wait_all_tasks_blocked

from clotho.runtime.compute_thread import WorkCancelled, finish


async def test_finish_returns_or_raises_what_the_work_did() -> None:
    """The error comes out as it was raised in its thread."""
    with ThreadPoolExecutor(1) as pool, fail_after(5):
        assert await finish(pool.submit(lambda: 42)) == 42
        with pytest.raises(ZeroDivisionError):
            await finish(pool.submit(lambda: 1 // 0))


async def test_cancelling_the_waiter_cancels_work_that_has_not_begun() -> None:
    """NullSampleLog wants the result any more, so the thread is told."""
    future: Future[int] = Future()
    with fail_after(5):
        async with create_task_group() as group:
            group.start_soon(finish, future)
            await wait_all_tasks_blocked()
            group.cancel_scope.cancel()
    assert future.cancelled()


async def test_cancelling_the_waiter_does_not_disturb_work_that_runs() -> None:
    """A running job ends in its own time, its result unused; the waiter is free at once."""
    release, finished = threading.Event(), threading.Event()

    def work() -> None:
        assert release.wait(5)
        finished.set()

    with ThreadPoolExecutor(1) as pool, fail_after(5):
        future = pool.submit(work)
        async with create_task_group() as group:
            group.start_soon(finish, future)
            await wait_all_tasks_blocked()
            group.cancel_scope.cancel()
        assert not finished.is_set()
        release.set()
    assert finished.is_set()


async def test_work_cancelled_by_its_thread_is_an_error_and_not_a_cancellation() -> None:
    """A stray CancelledError would end the waiting task in silence."""
    future: Future[int] = Future()
    future.cancel()
    with fail_after(5), pytest.raises(WorkCancelled):
        await finish(future)
