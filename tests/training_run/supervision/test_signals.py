"""Signals of the operating system drain or stop a run."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from anyio import create_task_group, fail_after, to_thread, wait_all_tasks_blocked

from tests.training_run.supervision.scripted_actors import RecordedSupervisor, ScriptedActor
from training_run.supervision.signals import (
    MIN_WAIT_SECONDS,
    SIGNALS,
    STOP_SECONDS,
    SignalWatch,
    handle_signals,
    reinstall_handlers,
)
from training_run.supervision.supervisor import transient


def _send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", SIGNALS)
async def test_the_first_signal_drains_the_run(number: signal.Signals) -> None:
    """The source ends, the queued work completes, and the exit status is 0."""
    actor = ScriptedActor("actor", [])
    recorded = RecordedSupervisor(transient(actor))
    with fail_after(5):
        async with handle_signals(recorded.supervisor) as watch, create_task_group() as group:
            group.start_soon(recorded.run)
            await wait_all_tasks_blocked()
            _send(number)
            await recorded.drained.wait()
            await wait_all_tasks_blocked()
            assert (recorded.drains, recorded.states()) == (1, {"actor": "running"})
            actor.finish()
    assert (recorded.ending, watch.received, watch.exit_status) == ("drained", [number], 0)


@pytest.mark.parametrize(("second", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
async def test_the_second_signal_stops_the_run_at_once(second: signal.Signals, status: int) -> None:
    """Any two signals. The exit status follows the shell convention."""
    recorded = RecordedSupervisor(transient(ScriptedActor("actor", [])))
    with fail_after(5):
        async with handle_signals(recorded.supervisor) as watch, create_task_group() as group:
            group.start_soon(recorded.run)
            await wait_all_tasks_blocked()
            _send(signal.SIGINT)
            await recorded.drained.wait()
            await wait_all_tasks_blocked()
            assert recorded.ending is None
            _send(second)
    assert (recorded.ending, watch.exit_status) == ("stopped", status)


async def test_a_computation_has_ten_seconds_after_the_second_signal() -> None:
    """Without a limit before the second signal. At least half a second, if the actors took longer to stop."""
    times = iter([100.0, 100.0, 104.0, 164.0])
    watch = SignalWatch(RecordedSupervisor().supervisor, clock=lambda: next(times))
    watch._on_signal(signal.SIGTERM)
    assert watch.seconds_left is None
    watch._on_signal(signal.SIGTERM)
    left = [watch.seconds_left for _ in range(3)]
    assert left == [STOP_SECONDS, STOP_SECONDS - 4.0, MIN_WAIT_SECONDS]


async def test_a_repeated_hang_up_does_not_stop_the_run() -> None:
    """A shell and the system both send SIGHUP when a terminal closes. A SIGTERM after it stops the run."""
    recorded = RecordedSupervisor(transient(ScriptedActor("actor", [])))
    with fail_after(5):
        async with handle_signals(recorded.supervisor) as watch, create_task_group() as group:
            group.start_soon(recorded.run)
            await wait_all_tasks_blocked()
            for count in range(1, 4):
                _send(signal.SIGHUP)
                while len(watch.received) < count:
                    await wait_all_tasks_blocked()
            assert (recorded.drains, recorded.ending, watch.exit_status) == (1, None, 0)
            _send(signal.SIGTERM)
    assert (recorded.ending, watch.exit_status) == ("stopped", 143)


async def test_previous_handlers_are_restored() -> None:
    """After the block, and already after the second signal, so that a third one ends the process."""
    before = [signal.getsignal(number) for number in SIGNALS]
    heard = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: heard.set())
    try:
        mine = signal.getsignal(signal.SIGTERM)
        recorded = RecordedSupervisor(transient(ScriptedActor("actor", [])))
        async with handle_signals(recorded.supervisor):
            assert signal.getsignal(signal.SIGTERM) is not mine
        assert signal.getsignal(signal.SIGTERM) is mine
        with fail_after(5):
            async with handle_signals(recorded.supervisor), create_task_group() as group:
                group.start_soon(recorded.run)
                _send(signal.SIGINT)
                await recorded.drained.wait()
                _send(signal.SIGINT)
                await recorded.ended.wait()
                assert signal.getsignal(signal.SIGTERM) is mine
                _send(signal.SIGTERM)
                assert heard.is_set()
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before[1])
    assert [signal.getsignal(number) for number in SIGNALS] == before


async def test_a_handler_of_native_code_is_replaced_by_those_of_the_run() -> None:
    """A library has installed it behind Python's back, with `signal` of the C library."""
    ignored = 1
    recorded = RecordedSupervisor(transient(ScriptedActor("actor", [])))
    with fail_after(5):
        async with handle_signals(recorded.supervisor) as watch, create_task_group() as group:
            group.start_soon(recorded.run)
            await wait_all_tasks_blocked()
            ctypes.CDLL(None).signal(int(signal.SIGTERM), ctypes.c_void_p(ignored))
            reinstall_handlers()
            _send(signal.SIGTERM)
            _send(signal.SIGINT)
            await recorded.ended.wait()
    assert watch.received == [signal.SIGTERM, signal.SIGINT]


PROGRAM = """
import sys
import anyio
from training_run.supervision.signals import handle_signals
from tests.training_run.supervision.scripted_actors import RecordedSupervisor, ScriptedActor
from training_run.supervision.supervisor import transient

class StubActor(ScriptedActor):
    async def run(self):
        sys.stdout.write("running\\n")
        sys.stdout.flush()
        await super().run()

class SignalledSupervisor(RecordedSupervisor):
    def _on_drain(self):
        sys.stdout.write("draining\\n")
        sys.stdout.flush()

async def main():
    recorded = SignalledSupervisor(transient(StubActor("actor", [])))
    async with handle_signals(recorded.supervisor) as watch:
        await recorded.run()
    sys.stdout.write(f"{recorded.ending}\\n")
    return watch.exit_status

sys.exit(anyio.run(main))
"""


async def test_a_process_with_two_signals_exits_with_the_status_of_a_shell() -> None:
    """From the signal to the exit status of a real process."""
    root = Path(__file__).parents[3]

    def interrupt_twice() -> tuple[int, str]:
        with subprocess.Popen([sys.executable, "-c", PROGRAM], cwd=root, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for expected in ("running\n", "draining\n"):
                assert process.stdout.readline() == expected
                process.send_signal(signal.SIGINT)
            rest = process.stdout.read()
            return process.wait(30), rest

    with fail_after(60):
        assert await to_thread.run_sync(interrupt_twice) == (130, "stopped\n")


def test_a_run_without_signals_keeps_its_exit_status() -> None:
    """The watch has received no signal."""
    assert SignalWatch(RecordedSupervisor().supervisor).exit_status == 0
