"""The watchdog: once per stall, once per recovery, and idleness is no stall."""

from __future__ import annotations

import math
import time

import anyio
import pytest
from anyio import create_task_group, fail_after

from clotho.runtime.watchdog import Watchdog


class _Scene:
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

    def look_at(self, now: float) -> float:
        self.now = now
        return self.watchdog.look()


def test_a_stall_is_reported_once_with_its_length() -> None:
    """However often the watchdog looks while it lasts."""
    scene = _Scene()
    for now in (105.0, 110.0, 111.0, 150.0):
        scene.look_at(now)
    assert scene.reports == [10.0]
    assert scene.watchdog.stalled


def test_a_recovery_is_reported_and_the_next_stall_again() -> None:
    """Each stall has one beginning and one end."""
    scene = _Scene()
    scene.look_at(111.0)
    scene.progress = 112.0
    scene.look_at(113.0)
    scene.look_at(125.0)
    assert scene.reports == [11.0, "recovered", 13.0]


def test_idleness_is_never_a_stall_and_ends_one() -> None:
    """No work, no progress expected."""
    scene = _Scene()
    scene.progress = math.inf
    assert scene.look_at(1e9) == 10
    scene.progress = 0.0
    scene.look_at(1e9)
    scene.progress = math.inf
    scene.look_at(1e9)
    assert scene.reports == [1e9, "recovered"]


def test_the_next_look_is_when_the_limit_would_be_reached() -> None:
    """Derived from the limit: neither polling nor late."""
    scene = _Scene()
    assert scene.look_at(103.0) == 7.0
    assert scene.look_at(110.0) == 1.0


def test_a_limit_of_zero_is_refused() -> None:
    """Everything would be a stall."""
    with pytest.raises(ValueError, match="above 0"):
        Watchdog("watchdog", time.monotonic, limit_seconds=0, on_stall=print, on_recovered=print)


async def test_a_running_watchdog_notices_the_stall_and_its_end_by_itself() -> None:
    """With the real clock: the callbacks come without anybody asking."""
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
