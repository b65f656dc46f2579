"""Turns of a computation that is alone: their number and the longest one, within a limit on the time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

T = TypeVar("T")


class TimeOver(Exception):
    """The computation took longer than its limit."""


class MeasuredTurns:
    """The lane of a computation, which measures its turns.

    number: of the turns of the last run, in which longest and seconds are durations in seconds.
    """

    def __init__(self) -> None:
        self.number, self.longest, self.seconds = 0, 0.0, 0.0
        self._began = self._before = 0.0
        self._limit = math.inf

    def pause(self) -> None:
        """End a turn and begin the next one. Raises TimeOver after the limit."""
        now = time.perf_counter()
        self.number, self.longest = self.number + 1, max(self.longest, now - self._before)
        self._before, self.seconds = now, now - self._began
        if self.seconds >= self._limit:
            raise TimeOver

    def outside(self) -> AbstractContextManager[None]:
        """Return a context without effect."""
        return nullcontext()

    def run(self, work: Callable[[], T], *, limit: float = math.inf) -> T | None:
        """Measure the turns of `work`. Returns its result; None if it has not ended after `limit` seconds."""
        self.number, self.longest, self._limit = 0, 0.0, limit
        self._began = self._before = time.perf_counter()
        try:
            result = work()
            self._limit = math.inf
            self.pause()
        except TimeOver:
            return None
        return result
