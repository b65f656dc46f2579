"""Turns of a thread that computes alone, for tests that look at a computation between two of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext


class RecordedTurns:
    """Counts the pauses, and calls `between` in each with its number, from 1. An exception ends the computation."""

    def __init__(self, between: Callable[[int], object] = lambda number: None) -> None:
        self.pauses, self._between = 0, between

    def pause(self) -> None:
        """Count a pause."""
        self.pauses += 1
        self._between(self.pauses)

    def outside(self) -> AbstractContextManager[None]:
        """Return a context without effect."""
        return nullcontext()
