"""Functions in daemon threads: results, limits, interruption, and the end of the process."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import anyio
import pytest

from clotho.lanes.daemon_threads import DaemonThreads, NoThreadError, OvertimeError, _Call

ROOT = Path(__file__).parents[2]


def threads(limit: int = 1, *, wait_seconds: float = 10.0, work_seconds: float = 10.0) -> DaemonThreads:
    """Return daemon threads with these limits."""
    return DaemonThreads("test", limit, wait_seconds=wait_seconds, work_seconds=work_seconds)


async def test_the_result_or_the_exception_of_the_function_is_returned() -> None:
    """The function runs in another thread. Its TimeoutError is not taken for an exceeded limit."""
    pool = threads()
    assert await pool.run(threading.get_ident) != threading.get_ident()
    for error in (ValueError("bad"), TimeoutError("of the function")):

        def fail(error: Exception = error) -> None:
            raise error

        with pytest.raises(type(error), match=str(error)):
            await pool.run(fail)


async def test_an_exception_that_would_end_the_event_loop_is_replaced() -> None:
    """SystemExit, KeyboardInterrupt and panics of native libraries become RuntimeError. The thread is free again."""
    pool = threads()
    for kind in (SystemExit, KeyboardInterrupt, BaseException):

        def fail(kind: type[BaseException] = kind) -> None:
            raise kind("stop")

        with pytest.raises(RuntimeError, match=kind.__name__), anyio.fail_after(10):
            await pool.run(fail)
    assert await threads_free(pool) == 1


async def test_an_abandoned_function_that_has_not_begun_never_begins() -> None:
    """Its thread is not interrupted, because the interrupt would end the thread outside of a call."""
    ran, ended = list[int](), list[bool]()
    call = _Call(lambda: ran.append(1), asyncio.get_running_loop(), ended.append)
    call.interrupt(threading.main_thread())
    threading.Thread(target=call.run).start()
    with anyio.fail_after(10):
        await call.outcome
    assert (ran, ended) == ([], [False])


async def test_a_function_waits_for_a_free_thread() -> None:
    """Without one in time, NoThreadError. The thread is free again when its function has ended."""
    pool, gate = threads(wait_seconds=0.05), threading.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pool.run, gate.wait)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(NoThreadError):
            await pool.run(lambda: 1)
        gate.set()
    assert await threads_free(pool) == 1


async def test_a_function_beyond_its_time_limit_is_interrupted() -> None:
    """An endless loop ends, and its thread is free again."""
    pool, begun = threads(work_seconds=0.05), threading.Event()

    def endless() -> None:
        while True:
            begun.set()

    with pytest.raises(OvertimeError):
        await pool.run(endless)
    assert begun.is_set()
    assert await threads_free(pool) == 1


async def test_an_interrupt_without_effect_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python drops exceptions of finalizers, and a function can catch the interrupt."""
    pool, dropped, caught = threads(work_seconds=0.05), list[str](), list[str]()
    monkeypatch.setattr(sys, "unraisablehook", lambda report: dropped.append(report.exc_type.__name__))

    class Endless:
        def __del__(self) -> None:
            while True:
                pass

    def endless() -> None:
        Endless()
        try:
            while True:
                pass
        except BaseException as error:
            caught.append(type(error).__name__)
        while True:
            pass

    with pytest.raises(OvertimeError):
        await pool.run(endless)
    assert await threads_free(pool) == 1
    assert dropped == caught == ["Interrupted"]


async def test_a_thread_runs_further_functions_unless_it_was_interrupted() -> None:
    """An exception of a function does not end its thread. Functions that run at once have threads of their own."""
    pool, both = threads(2), threading.Barrier(2)

    def meet() -> threading.Thread:
        both.wait(10)
        return threading.current_thread()

    async def collect() -> None:
        found.append(await pool.run(meet))

    first = await pool.run(threading.current_thread)
    with pytest.raises(ZeroDivisionError):
        await pool.run(lambda: 1 // 0)
    found = list[threading.Thread]()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(collect)
        tasks.start_soon(collect)
    assert first in found
    assert len(set(found)) == 2
    with anyio.move_on_after(0.01):
        await pool.run(endless)
    with anyio.fail_after(10):
        while sum(thread.is_alive() for thread in found) == 2:
            await anyio.lowlevel.checkpoint()
    (alive,) = [thread for thread in found if thread.is_alive()]
    assert await pool.run(threading.current_thread) is alive


def endless() -> None:
    """Run until an interrupt."""
    while True:
        pass


async def test_the_threads_of_a_pool_that_is_no_longer_used_end() -> None:
    """So that a process that starts many servers keeps no threads."""
    pool = threads()
    thread = await pool.run(threading.current_thread)
    assert thread.is_alive()
    del pool
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


async def test_a_cancelled_caller_interrupts_its_function() -> None:
    """The thread of an endless loop is free again."""
    pool, begun = threads(), threading.Event()

    def endless() -> None:
        while True:
            begun.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pool.run, endless)
        while not begun.is_set():
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    assert await threads_free(pool) == 1


async def threads_free(pool: DaemonThreads) -> int:
    """Wait until a thread is free, and return its result, 1."""
    with anyio.fail_after(10):
        while True:
            with suppress(NoThreadError, OvertimeError):
                return await pool.run(lambda: 1)


def test_a_hanging_function_does_not_keep_the_process_alive() -> None:
    """The process exits while a function waits for ever inside a C call."""
    program = """
import asyncio, threading
from clotho.lanes.daemon_threads import DaemonThreads, OvertimeError

async def main():
    try:
        await DaemonThreads("test", 1, wait_seconds=1, work_seconds=0.05).run(hang)
    except OvertimeError:
        print("left")

def hang():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

asyncio.run(main())
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "left\n", "")
