"""Signals before and after training end the process at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import NoReturn

import anyio
import pytest
from structlog.testing import capture_logs

from clotho.lanes.compute_thread import Compute
from training_run.supervision import signals
from training_run.supervision.process_signals import SIGNALS, finish_computation
from training_run.supervision.supervisor import Supervisor

ROOT = Path(__file__).parents[3]
PROGRAM = """
import os, signal, sys, time
from training_run.supervision.process_signals import process_signals

def say(text):
    os.write(1, (text + "\\n").encode())

{before}
process_signals.install()
process_signals.before_exit(lambda: say("first registered"))
process_signals.before_exit(lambda: 1 / 0)
process_signals.before_exit(lambda: say("last registered"))
{code}
"""
WAIT = "say('ready')\nwhile True: time.sleep(60)"


def run_program(code: str, number: signal.Signals, *, before: str = "") -> tuple[int, list[str], str]:
    """Start the program, send the signal after its first line, and return exit status, further lines and stderr."""
    program = PROGRAM.format(code=code, before=before)
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        lines = process.stdout.read().splitlines()
        return process.wait(), lines, process.stderr.read()


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_the_process_after_the_clean_up(number: signal.Signals) -> None:
    """The newest clean-up first; one that fails does not prevent the others."""
    ended = run_program(WAIT, number)
    assert ended == (128 + number, ["last registered", "first registered"], "")


def test_code_that_swallows_every_exception_ends_too() -> None:
    """A KeyboardInterrupt would be caught here."""
    code = "say('ready')\nwhile True:\n  try: time.sleep(60)\n  except BaseException: pass"
    assert run_program(code, signal.SIGINT)[0] == 130


def test_a_signal_waits_for_the_end_of_a_postponed_block() -> None:
    """As for the creation of the run directory, so that the clean-up knows the directory."""
    code = """
with process_signals.postponed():
    say("ready")
    while process_signals._received is None:
        time.sleep(0.001)
    say("block has ended")
say("never reached")
"""
    status, lines, err = run_program(code, signal.SIGTERM)
    assert (status, lines, err) == (143, ["block has ended", "last registered", "first registered"], "")


def test_an_ignored_hang_up_stays_ignored() -> None:
    """As under `nohup`."""
    code = "os.kill(os.getpid(), signal.SIGHUP)\n" + WAIT
    status, _, _ = run_program(code, signal.SIGTERM, before="signal.signal(signal.SIGHUP, signal.SIG_IGN)")
    assert status == 143


class Exited(Exception):
    """Raised instead of the end of the process."""


async def test_a_computation_that_hangs_after_the_second_signal_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends with the status of the signal. Without a second signal, the computation may continue."""

    def leave(status: int) -> NoReturn:
        raise Exited(status)

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(signals, "STOP_SECONDS", 0.0)
    monkeypatch.setattr(signals, "MIN_WAIT_SECONDS", 0.01)
    compute, begun, gate = Compute(decode_share=0.5, slots=2), threading.Event(), threading.Event()
    compute.start()
    try:

        def hang() -> None:
            begun.set()
            gate.wait()

        compute.decode.submit(hang)
        begun.wait()
        async with signals.handle_signals(Supervisor(on_failure=lambda name, error: None)) as watch:
            for expected in (0, 128 + signal.SIGTERM):
                finish_computation(compute, watch)
                signal.raise_signal(signal.SIGTERM)
                with anyio.fail_after(10):
                    while len(watch.received) < 1 + bool(expected):
                        await anyio.lowlevel.checkpoint()
                assert watch.exit_status == expected
        with capture_logs() as logged, pytest.raises(Exited, match=str(128 + signal.SIGTERM)):
            finish_computation(compute, watch)
        assert [line["event"] for line in logged] == ["computation_abandoned"]
    finally:
        gate.set()
    assert compute.stop(timeout=10.0)
    finish_computation(compute, watch)
