"""Ctrl-C and SIGTERM: the first signal drains the run, the second stops it at once, the third ends the process."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stoppable(Protocol):
    """A supervisor, as the signal handlers see it."""

    def drain(self) -> None:
        """Finish the current batch, then end."""

    def stop(self) -> None:
        """End at once."""


class SignalWatch:
    """Handles the signals; `received` lists them in order."""

    def __init__(self, target: Stoppable) -> None:
        self.received: list[signal.Signals] = []
        self._target = target
        self._previous = {number: signal.getsignal(number) for number in SIGNALS}

    @property
    def exit_status(self) -> int:
        """0 without a stop; after a stop 128 + the signal number (130 or 143), as in shells."""
        return 128 + self.received[-1] if len(self.received) > 1 else 0

    def install(self) -> None:
        """Install the handlers in the running event loop. Raises RuntimeError outside the main thread."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
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
        else:
            self.restore()  # a third signal ends the process at once
            self._target.stop()


@asynccontextmanager
async def handle_signals(target: Stoppable) -> AsyncIterator[SignalWatch]:
    """Within the block, the first SIGINT or SIGTERM drains `target`, and the second one stops it."""
    watch = SignalWatch(target)
    watch.install()
    try:
        yield watch
    finally:
        watch.restore()
