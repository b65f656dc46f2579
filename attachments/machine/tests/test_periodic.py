"""Checks and readings of the machine that are repeated."""

from __future__ import annotations

import threading

import anyio
from anyio import create_task_group, fail_after

from attachments.machine.periodic import PeriodicCheck, PeriodicReading


async def test_a_periodic_check_is_called_again_and_again() -> None:
    """Until it is cancelled."""
    thrice = anyio.Event()
    calls: list[None] = []

    def check() -> None:
        calls.append(None)
        if len(calls) == 3:
            thrice.set()

    periodic = PeriodicCheck("memory watch", check, seconds=0.001)
    with fail_after(5):
        async with create_task_group() as group:
            group.start_soon(periodic.run)
            await thrice.wait()
            group.cancel_scope.cancel()
    assert periodic.name == "memory watch"


async def test_a_periodic_reading_reads_in_a_thread_and_passes_the_result_to_the_event_loop() -> None:
    """A reading that waits does not delay the event loop."""
    thrice, threads = anyio.Event(), list[tuple[str, str]]()

    def take(reader: str) -> None:
        threads.append((reader, threading.current_thread().name))
        if len(threads) == 3:
            thrice.set()

    reading = PeriodicReading("resource watch", lambda: threading.current_thread().name, take, seconds=0.001)
    with fail_after(5):
        async with create_task_group() as group:
            group.start_soon(reading.run)
            await thrice.wait()
            group.cancel_scope.cancel()
    assert set(threads) == {("resource watch", threading.current_thread().name)}
