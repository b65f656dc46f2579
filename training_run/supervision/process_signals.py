"""SIGINT, SIGTERM and SIGHUP before and after training end the process at once, without a traceback.

During training, `training_run.supervision.signals` handles them instead. This module imports almost nothing, because
the program installs the handlers before its other imports, which take a second.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from clotho.lanes.compute_thread import Compute
    from training_run.supervision.signals import SignalWatch

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ProcessSignals:
    """Ends the process with status 128 + number of the signal, after the registered clean-up.

    `os._exit` instead of an exception: an exception would appear inside whichever code runs, also inside callbacks that
    print and drop it. Files need no clean-up, because every write is atomic or can be repaired.

    installed: whether the handlers are, which is so in the process of the program only.
    """

    def __init__(self) -> None:
        self._clean_up: list[Callable[[], object]] = []
        self.installed = False
        self._postponed = False
        self._received: int | None = None

    def install(self) -> None:
        """Handle the signals from now on. An ignored SIGHUP (`nohup`) stays ignored."""
        self.installed = True
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._end)

    def before_exit(self, clean_up: Callable[[], object]) -> None:
        """Call `clean_up` before a signal ends the process; the newest function first."""
        self._clean_up.append(clean_up)

    @contextmanager
    def postponed(self) -> Iterator[None]:
        """Within the block, a signal waits for the end of the block."""
        self._postponed = True
        try:
            yield
        finally:
            self._postponed = False
            if self._received is not None:
                self._end(self._received, None)

    def _end(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        if self._postponed:
            return
        for handled in SIGNALS:
            signal.signal(handled, signal.SIG_IGN)
        self.exit(128 + number)

    def exit(self, status: int) -> NoReturn:
        """End the process after the registered clean-up, without waiting for any thread."""
        for clean_up in reversed(self._clean_up):
            with suppress(Exception):
                clean_up()
        os._exit(status)


process_signals = ProcessSignals()
"""The handlers of this process; without `install`, they have no effect."""


def finish_computation(compute: Compute, signals: SignalWatch) -> None:
    """After a second signal, end the computation, or end the process without it.

    The computation has `signals.seconds_left` for its current turn. Without a second signal, nothing is done.
    """
    seconds = signals.seconds_left
    if seconds is None or compute.stop(timeout=seconds):
        return
    import structlog

    log = structlog.get_logger(actor="pipeline")
    log.error("computation_abandoned", hint="it did not end in time, so the process ends without it")
    process_signals.exit(signals.exit_status)
