"""Signals, real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from anyio import create_task_group, fail_after, to_thread, wait_all_tasks_blocked

from clotho.runtime.signals import SIGNALS, SignalWatch, handle_signals
from clotho.runtime.supervisor import transient
from tests.runtime.scene import Scene, Script


def _send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", SIGNALS)
async def test_the_first_signal_drains(number: signal.Signals) -> None:
    """The source ends, the rest finishes, and the exit status is nobody's failure."""
    box = Script("box", [])
    scene = Scene(transient(box))
    with fail_after(5):
        async with handle_signals(scene.supervisor) as watch, create_task_group() as group:
            group.start_soon(scene.run)
            await wait_all_tasks_blocked()
            _send(number)
            await scene.drained.wait()
            await wait_all_tasks_blocked()
            assert (scene.drains, scene.states()) == (1, {"box": "running"})
            box.returns()
    assert (scene.ending, watch.received, watch.exit_status) == ("drained", [number], 0)


@pytest.mark.parametrize(("second", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
async def test_the_second_signal_stops_at_once(second: signal.Signals, status: int) -> None:
    """Whichever two they are; the exit status is what a shell expects of the second."""
    scene = Scene(transient(Script("box", [])))
    with fail_after(5):
        async with handle_signals(scene.supervisor) as watch, create_task_group() as group:
            group.start_soon(scene.run)
            await wait_all_tasks_blocked()
            _send(signal.SIGINT)
            await scene.drained.wait()
            await wait_all_tasks_blocked()
            assert scene.ending is None
            _send(second)
    assert (scene.ending, watch.exit_status) == ("stopped", status)


async def test_the_handlers_from_before_are_put_back() -> None:
    """After the block, and already after the second signal, so that a third always ends the process."""
    before = [signal.getsignal(number) for number in SIGNALS]
    heard = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: heard.set())
    try:
        mine = signal.getsignal(signal.SIGTERM)
        scene = Scene(transient(Script("box", [])))
        with fail_after(5):
            async with handle_signals(scene.supervisor), create_task_group() as group:
                assert signal.getsignal(signal.SIGTERM) is not mine
                group.start_soon(scene.run)
                _send(signal.SIGINT)
                await scene.drained.wait()
                _send(signal.SIGINT)
                await scene.ended.wait()
                assert signal.getsignal(signal.SIGTERM) is mine
                _send(signal.SIGTERM)
                assert heard.is_set()
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before[1])
    assert [signal.getsignal(number) for number in SIGNALS] == before


PROGRAM = """
import sys
import anyio
from clotho.runtime.signals import handle_signals
from tests.runtime.scene import Scene, Script
from clotho.runtime.supervisor import transient

class Box(Script):
    async def run(self):
        sys.stdout.write("running\\n")
        sys.stdout.flush()
        await super().run()

class Told(Scene):
    def _on_drain(self):
        sys.stdout.write("draining\\n")
        sys.stdout.flush()

async def main():
    scene = Told(transient(Box("box", [])))
    async with handle_signals(scene.supervisor) as watch:
        await scene.run()
    sys.stdout.write(f"{scene.ending}\\n")
    return watch.exit_status

sys.exit(anyio.run(main))
"""


async def test_a_process_told_twice_to_end_exits_as_shells_expect() -> None:
    """Ctrl-C, and again: the whole way from the signal to the exit status."""
    root = Path(__file__).parents[2]

    def play() -> tuple[int, str]:
        with subprocess.Popen([sys.executable, "-c", PROGRAM], cwd=root, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for expected in ("running\n", "draining\n"):
                assert process.stdout.readline() == expected
                process.send_signal(signal.SIGINT)
            rest = process.stdout.read()
            return process.wait(30), rest

    with fail_after(60):
        assert await to_thread.run_sync(play) == (130, "stopped\n")


def test_a_watch_without_signals_leaves_the_exit_status_alone() -> None:
    """Nothing was asked."""
    assert SignalWatch(Scene().supervisor).exit_status == 0
