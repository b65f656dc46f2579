"""Signals during training: the first drains the run, the second stops it, the third ends the process at once.

SIGHUP, which a closed terminal sends once or twice, only drains; an ignored SIGHUP (`nohup`) stays ignored.
"""

from __future__ import annotations

import asyncio
import math
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from training_run.supervision.supervisor import Supervisor

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

STOP_SECONDS = 10.0
"""Time from the second signal until a computation that has not ended is abandoned."""

MIN_WAIT_SECONDS = 0.5
"""Minimum time that a computation has, if the actors needed the time above to stop."""


class SignalWatch:
    """Handles the signals; `received` lists them in order."""

    def __init__(self, target: Supervisor, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.received: list[signal.Signals] = []
        self._stopped_by: signal.Signals | None = None
        self._deadline = math.inf
        self._clock = clock
        self._target = target
        self._previous = {number: signal.getsignal(number) for number in SIGNALS}

    @property
    def exit_status(self) -> int:
        """0 without a stop; after a stop 128 + the signal number (130 or 143), as in shells."""
        return 128 + self._stopped_by if self._stopped_by else 0

    @property
    def seconds_left(self) -> float | None:
        """Time for a computation that is still running; None without a stop."""
        return max(MIN_WAIT_SECONDS, self._deadline - self._clock()) if self._stopped_by else None

    def install(self) -> None:
        """Install the handlers in the running event loop. Raises RuntimeError outside the main thread."""
        loop = asyncio.get_running_loop()
        if self._previous[signal.SIGHUP] == signal.SIG_IGN:
            del self._previous[signal.SIGHUP]
        for number in self._previous:
            loop.add_signal_handler(number, self._on_signal, number)

    def restore(self) -> None:
        """Restore the previous handlers. Calling it again has no effect."""
        loop = asyncio.get_running_loop()
        while self._previous:
            number, handler = self._previous.popitem()
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _on_signal(self, number: signal.Signals) -> None:
        self.received.append(number)
        if len(self.received) == 1:
            self._target.drain()
        elif number != signal.SIGHUP:
            self._stopped_by, self._deadline = number, self._clock() + STOP_SECONDS
            self.restore()  # a third signal ends the process at once
            self._target.stop()


def reinstall_handlers() -> None:
    """Make Python's handlers effective again, after a library has installed handlers of its own in native code.

    Raises ValueError outside the main thread.
    """
    for number in SIGNALS:
        if (handler := signal.getsignal(number)) is not None:
            signal.signal(number, handler)
            signal.siginterrupt(number, False)  # as asyncio installs its handlers


@asynccontextmanager
async def handle_signals(target: Supervisor) -> AsyncIterator[SignalWatch]:
    """Within the block, the first signal drains `target`, and a further SIGINT or SIGTERM stops it."""
    watch = SignalWatch(target)
    watch.install()
    try:
        yield watch
    finally:
        watch.restore()
