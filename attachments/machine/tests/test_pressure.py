"""Memory pressure lowers the number of sequences that are decoded at once, and its end raises it again."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from types import SimpleNamespace

import psutil
import pytest
from structlog.testing import capture_logs

from attachments.machine import pressure
from attachments.machine.pressure import (
    CALM_CHECKS,
    HOLD_CHECKS,
    SWAP_CHECKS,
    SWAP_GROWTH,
    Level,
    MemoryReading,
    MemoryWatch,
    RowsLimit,
    read_memory,
)

GIB = 2**30
MB = 10**6


def reading(level: Level = "normal", *, swap: int = GIB, by_kernel: bool = False) -> MemoryReading:
    """Return a reading. One GiB of swap that does not grow is no pressure."""
    return MemoryReading(level=level, swap_bytes=swap, available_bytes=4 * GIB, by_kernel=by_kernel)


def values(limit: RowsLimit, readings: Sequence[MemoryReading]) -> list[int]:
    """Return the limit after each reading."""
    found = []
    for one in readings:
        limit.observe(one)
        found.append(limit.value)
    return found


def test_critical_pressure_halves_the_limit_at_once_and_again_after_a_pause() -> None:
    """Sequences need time to end, so that a single shortage is not answered several times."""
    limit = RowsLimit(64)
    pause = [32] * HOLD_CHECKS
    assert values(limit, [reading("critical")] * (2 + HOLD_CHECKS)) == [32, *pause, 16]
    assert limit.reason == "memory_pressure"


def test_the_limit_is_never_below_an_eighth_of_its_maximum_and_never_below_1() -> None:
    """Training continues while other programs use the memory."""
    for maximum, smallest in ((64, 8), (3, 1), (1, 1)):
        limit = RowsLimit(maximum)
        assert values(limit, [reading("critical")] * 100)[-1] == smallest


def test_swap_that_grows_within_a_minute_halves_the_limit() -> None:
    """Used swap alone is no pressure, because macOS and Linux move idle pages of other programs to it."""
    limit = RowsLimit(64)
    assert values(limit, [reading(swap=8 * GIB)] * 50)[-1] == 64
    assert values(limit, [reading(swap=8 * GIB + SWAP_GROWTH - 1), reading(swap=8 * GIB + SWAP_GROWTH)]) == [64, 32]
    assert (limit.reason, limit.swap_growth) == ("swap", SWAP_GROWTH)


def test_swap_that_stays_after_a_change_does_not_lower_the_limit_again() -> None:
    """Growth counts from the last change."""
    limit = RowsLimit(64)
    grown = reading(swap=8 * GIB + SWAP_GROWTH)
    assert values(limit, [reading(swap=8 * GIB), grown]) == [64, 32]
    assert values(limit, [grown] * (CALM_CHECKS - 1)) == [32] * (CALM_CHECKS - 1)


def test_swap_that_grows_slowly_does_not_change_the_limit() -> None:
    """Less than `SWAP_GROWTH` in any `SWAP_CHECKS` checks."""
    slow = [reading(swap=step * (SWAP_GROWTH // SWAP_CHECKS - 1)) for step in range(200)]
    assert set(values(RowsLimit(64), slow)) == {64}


BURSTS = {
    "300 MB at once": [0, *[300 * MB] * 400],
    "3 GB within a minute": [min(step, 12) * 250 * MB for step in range(400)],
    "300 MB every two minutes": [step // 24 * 300 * MB for step in range(400)],
    "64 MB with every reading": [step * 64 * MB for step in range(400)],
}
"""Used swap in readings of 33 minutes, beyond what was used before."""


@pytest.mark.parametrize("burst", BURSTS)
def test_no_burst_of_swap_lowers_the_limit_while_macos_reports_the_level_normal(burst: str) -> None:
    """macOS moves idle programs to the swap when much memory is taken, without any pressure."""
    readings = [reading(swap=GIB + swap, by_kernel=True) for swap in BURSTS[burst]]
    assert set(values(RowsLimit(64), readings)) == {64}


@pytest.mark.parametrize("burst", BURSTS)
def test_a_burst_of_swap_lowers_the_limit_where_a_level_tells_little(burst: str) -> None:
    """On Linux in any case, and on macOS at the level `warning`."""
    cases: tuple[tuple[Level, bool], ...] = (("normal", False), ("warning", True))
    for level, by_kernel in cases:
        readings = [reading(level, swap=GIB + swap, by_kernel=by_kernel) for swap in BURSTS[burst]]
        assert min(values(RowsLimit(64), readings)) <= 32


def test_a_critical_level_of_macos_halves_the_limit_with_and_without_swap() -> None:
    """Its end is followed by the maximum within minutes."""
    for swap in (0, GIB):
        limit = RowsLimit(64)
        assert values(limit, [reading("critical", swap=swap, by_kernel=True)] * 3)[0] == 32
        assert values(limit, [reading(swap=swap + GIB, by_kernel=True)] * CALM_CHECKS)[-1] == 64


def test_the_limit_is_doubled_after_each_minute_without_pressure() -> None:
    """Up to the maximum. A warning of the kernel interrupts the minute and lowers nothing."""
    limit = RowsLimit(64)
    values(limit, [reading("critical")] * (2 + HOLD_CHECKS))
    assert limit.value == 16
    assert values(limit, [reading()] * (3 * CALM_CHECKS))[CALM_CHECKS - 2 :: CALM_CHECKS] == [16, 32, 64]
    limit = RowsLimit(64)
    limit.observe(reading("critical"))
    assert values(limit, [reading()] * (CALM_CHECKS - 1)) == [32] * (CALM_CHECKS - 1)
    assert values(limit, [reading("warning")]) == [32]
    assert values(limit, [reading()] * CALM_CHECKS)[-2:] == [32, 64]
    assert limit.reason == "recovered"


def changes_after(limit: RowsLimit, one: MemoryReading) -> int:
    """Return how many equal readings change the limit."""
    readings = 1
    while not limit.observe(one):
        readings += 1
    return readings


def test_a_rise_that_brought_the_pressure_back_is_repeated_after_twice_the_time() -> None:
    """Otherwise the limit would alternate every minute."""
    limit = RowsLimit(64)
    waits = []
    for _ in range(3):
        changes_after(limit, reading("critical"))
        waits.append(changes_after(limit, reading()))
    assert waits == [CALM_CHECKS, 2 * CALM_CHECKS, 4 * CALM_CHECKS]


def test_a_watch_applies_and_logs_every_change() -> None:
    """Events are constant; the values, the reason and the reading are fields."""
    applied: list[int] = []
    readings = iter([reading(), reading("critical"), *[reading()] * CALM_CHECKS])
    watch = MemoryWatch(8, apply=applied.append, read=lambda: next(readings), settled=lambda: True)
    with capture_logs() as logs:
        for _ in range(2 + CALM_CHECKS):
            watch.check()
    assert applied == [4, 8]
    lowered, raised = logs
    assert (lowered["event"], lowered["log_level"]) == ("concurrency_reduced", "warning")
    assert (raised["event"], raised["log_level"]) == ("concurrency_raised", "info")
    fields = ("key", "value", "before", "maximum", "reason", "level", "swap_mb", "swap_growth_mb", "available_mb")
    assert [lowered[name] for name in fields] == [
        "engine.max_num_seqs", 4, 8, 8, "memory_pressure", "critical", 1024, 0, 4096,
    ]  # fmt: skip
    assert [raised[name] for name in fields[:5]] == ["engine.max_num_seqs", 8, 4, 8, "recovered"]


def test_swap_that_grows_until_the_first_batch_is_done_is_no_pressure() -> None:
    """A run that loads and allocates moves other programs to the swap once. Growth counts from then on."""
    applied: list[int] = []
    grown = iter([GIB, 3 * GIB, 4 * GIB, 4 * GIB, 4 * GIB + SWAP_GROWTH])
    settled = iter([False, False, False, True])  # it is not asked again
    watch = MemoryWatch(8, apply=applied.append, read=lambda: reading(swap=next(grown)), settled=lambda: next(settled))
    for _ in range(4):
        watch.check()
    assert applied == []
    watch.check()
    assert applied == [4]


def test_memory_that_cannot_be_read_is_logged_once_and_changes_nothing() -> None:
    """The run continues."""

    def unreadable() -> MemoryReading:
        raise psutil.AccessDenied(pid=1)

    applied: list[int] = []
    watch = MemoryWatch(8, apply=applied.append, read=unreadable, settled=lambda: True)
    with capture_logs() as logs:
        watch.check()
        watch.check()
    assert [line["event"] for line in logs] == ["memory_unreadable"]
    assert applied == []


def simulate(monkeypatch: pytest.MonkeyPatch, *, available: int, kernel: Level | None, headroom: int | None) -> None:
    """Let a machine with 16 GiB of memory and 3 GiB of used swap report these values."""
    memory = SimpleNamespace(total=16 * GIB, available=available)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(used=3 * GIB))
    monkeypatch.setattr(pressure, "kernel_level", lambda: kernel)
    monkeypatch.setattr(pressure, "cgroup_headroom", lambda: headroom)


@pytest.mark.parametrize("kernel", ["normal", "warning", "critical"])
def test_the_level_of_the_kernel_counts_where_there_is_one(monkeypatch: pytest.MonkeyPatch, kernel: Level) -> None:
    """macOS compresses memory, so that little available memory alone means nothing."""
    simulate(monkeypatch, available=GIB // 10, kernel=kernel, headroom=None)
    expected = MemoryReading(level=kernel, swap_bytes=3 * GIB, available_bytes=GIB // 10, by_kernel=True)
    assert read_memory() == expected
    assert expected.swap_matters == (kernel != "normal")


@pytest.mark.parametrize(("available", "level"), [(8 * GIB, "normal"), (GIB // 2, "warning"), (GIB // 4, "critical")])
def test_elsewhere_the_level_follows_from_the_available_memory(
    monkeypatch: pytest.MonkeyPatch, available: int, level: Level
) -> None:
    """Below 5 % it is a warning, below 2 % critical; in a container, memory below its limit is available."""
    simulate(monkeypatch, available=available, kernel=None, headroom=None)
    assert read_memory().level == level
    assert read_memory().swap_matters
    simulate(monkeypatch, available=12 * GIB, kernel=None, headroom=available)
    assert (read_memory().level, read_memory().available_bytes) == (level, available)


def test_this_machine_can_be_read() -> None:
    """Without simulation."""
    found = read_memory()
    assert 0 < found.available_bytes < psutil.virtual_memory().total
    assert found.swap_bytes >= 0
    assert (pressure.kernel_level() is None) == (platform.system() != "Darwin")
