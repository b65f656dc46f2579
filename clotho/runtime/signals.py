"""Ctrl-C and SIGTERM: the first drains, the second stops at once, the third is Python's own."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stoppable(Protocol):
    """What signals can end: a supervisor."""

    def drain(self) -> None:
        """End gracefully."""

    def stop(self) -> None:
        """End at once."""


class SignalWatch:
    """The signals that came, in order."""

    def __init__(self, target: Stoppable) -> None:
        self.received: list[signal.Signals] = []
        self._target = target
        self._previous = {number: signal.getsignal(number) for number in SIGNALS}

    @property
    def exit_status(self) -> int:
        """0 if at most a drain was asked for; after a stop, as shells have it, 128 + the signal's number: 130, 143."""
        return 128 + self.received[-1] if len(self.received) > 1 else 0

    def install(self) -> None:
        """Listen, in the running loop. RuntimeError outside the main thread, where Python cannot."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._hear, number)

    def restore(self) -> None:
        """Put the handlers from before back. The second time does nothing."""
        loop = asyncio.get_running_loop()
        while self._previous:
            number, handler = self._previous.popitem()
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _hear(self, number: signal.Signals) -> None:
        self.received.append(number)
        if len(self.received) == 1:
            self._target.drain()
        else:
            self.restore()  # whatever hangs now, a third signal ends
            self._target.stop()


@asynccontextmanager
async def handle_signals(target: Stoppable) -> AsyncIterator[SignalWatch]:
    """Within the block, SIGINT and SIGTERM drain `target`, then stop it. The handlers from before return at the end."""
    watch = SignalWatch(target)
    watch.install()
    try:
        yield watch
    finally:
        watch.restore()
