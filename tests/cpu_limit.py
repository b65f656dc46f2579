"""A limit of CPU time for one call, which other programs on the machine do not influence."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

CPU_SECONDS = 5.0
"""Far above the cost of any call that ends, and far below the cost of one that grows with the square of its input."""


@contextmanager
def cpu_limit(seconds: float = CPU_SECONDS) -> Iterator[None]:
    """Fail if the block computes for longer than this in the main thread. Regular expressions are interrupted too."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"it computes for more than {seconds:g} seconds")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)
