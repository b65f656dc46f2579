"""The watchdog reports each stall and each recovery once and ignores idleness.

The guard ends the run with errors from outside the actors.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import anyio
import pytest
from anyio import create_task_group, fail_after

from tests.actors.actor_helpers import cancel_when_blocked
from training_run.supervision.watchdog import EngineGuard, StartupWatch, Watchdog


class _WatchdogHarness:
    """A clock and a progress that the test sets, and what the watchdog reported."""

    def __init__(self) -> None:
        self.now, self.progress = 100.0, 100.0
        self.reports: list[float | str] = []
        self.watchdog = Watchdog(
            "watchdog",
            lambda: self.progress,
            limit_seconds=10,
            on_stall=self.reports.append,
            on_recovered=lambda: self.reports.append("recovered"),
            clock=lambda: self.now,
        )

    def check_at(self, now: float) -> float:
        self.now = now
        return self.watchdog.look()


def test_a_stall_is_reported_once_with_its_length() -> None:
    """Also if the watchdog checks repeatedly during the stall."""
    harness = _WatchdogHarness()
    for now in (105.0, 110.0, 111.0, 150.0):
        harness.check_at(now)
    assert harness.reports == [10.0]
    assert harness.watchdog.stalled


def test_a_recovery_is_reported_and_so_is_the_next_stall() -> None:
    """Each stall has one start and one end."""
    harness = _WatchdogHarness()
    harness.check_at(111.0)
    harness.progress = 112.0
    harness.check_at(113.0)
    harness.check_at(125.0)
    assert harness.reports == [11.0, "recovered", 13.0]


def test_idleness_is_not_a_stall_and_ends_one() -> None:
    """Without work no progress is expected."""
    harness = _WatchdogHarness()
    harness.progress = math.inf
    assert harness.check_at(1e9) == 10
    harness.progress = 0.0
    harness.check_at(1e9)
    harness.progress = math.inf
    harness.check_at(1e9)
    assert harness.reports == [1e9, "recovered"]


def test_the_next_check_is_at_the_limit() -> None:
    """The watchdog does not poll, and a stall is detected as soon as the limit is reached."""
    harness = _WatchdogHarness()
    assert harness.check_at(103.0) == 7.0
    assert harness.check_at(110.0) == 1.0


def test_a_slow_phase_of_the_start_is_reported() -> None:
    """Repeatedly, by its name, although the thread of the phase is blocked; not after its end."""
    reports: queue.SimpleQueue[tuple[str, float, str]] = queue.SimpleQueue()
    watch = StartupWatch(limit_seconds=0.01, on_slow=lambda *report: reports.put(report))
    with watch.phase("model", "a hint"):
        slow = [reports.get(timeout=20) for _ in range(3)]
        threads = [thread for thread in threading.enumerate() if thread.name == StartupWatch.thread_name]
    for thread in threads:
        thread.join(20)
    assert [(name, hint) for name, _, hint in slow] == [("model", "a hint")] * 3
    assert slow == sorted(slow)
    assert not any(thread.is_alive() for thread in threads)


def test_a_limit_of_zero_is_refused() -> None:
    """Every wait would be a stall."""
    with pytest.raises(ValueError, match="above 0"):
        Watchdog("watchdog", time.monotonic, limit_seconds=0, on_stall=print, on_recovered=print)


async def test_a_running_watchdog_reports_a_stall_and_its_recovery() -> None:
    """With the real clock."""
    stalled, recovered = anyio.Event(), anyio.Event()
    progress = [time.monotonic()]
    watchdog = Watchdog(
        "watchdog",
        lambda: progress[0],
        limit_seconds=0.02,
        on_stall=lambda _: stalled.set(),
        on_recovered=recovered.set,
    )
    with fail_after(5):
        async with create_task_group() as group:
            group.start_soon(watchdog.run)
            await stalled.wait()
            progress[0] = math.inf
            await recovered.wait()
            group.cancel_scope.cancel()


def guard(broken: Future[None], failed: list[str]) -> EngineGuard:
    """Return a guard whose engine is attached with a new future."""
    done: Future[None] = Future()
    done.set_result(None)

    def submit(work: Callable[[], None]) -> Future[None]:
        work()
        return done

    return EngineGuard(broken, submit=submit, fail_requests=failed.append, attach=Future)


async def test_an_error_of_the_engine_is_the_failure_of_the_guard() -> None:
    """The error itself is raised, after all requests have failed. The next run attaches the engine again."""
    broken: Future[None] = Future()
    failed: list[str] = []
    guarded = guard(broken, failed)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.to_thread.run_sync, broken.set_exception, LookupError("a defect"))
        with pytest.raises(LookupError, match="a defect"):
            await guarded.run()
    assert len(failed) == 1
    assert "a defect" in failed[0]
    async with anyio.create_task_group() as tasks:
        await tasks.start(guarded.run)
        tasks.cancel_scope.cancel()
    assert len(failed) == 1


async def test_a_cancelled_guard_leaves_its_future_open() -> None:
    """The compute thread may still set the future during the shutdown, which would raise in a cancelled future."""
    broken: Future[None] = Future()
    await cancel_when_blocked(guard(broken, []).run)
    assert not broken.cancelled()
    broken.set_exception(LookupError("late"))
