"""Pauses between attempts."""

from __future__ import annotations

FIRST_SECONDS, FACTOR = 0.05, 1.5


class Backoff:
    """Exponential backoff: `FIRST_SECONDS`, multiplied by `FACTOR` after each delay, up to `max_seconds`."""

    def __init__(self, *, max_seconds: float) -> None:
        self._max_seconds = max_seconds
        self._next = min(FIRST_SECONDS, max_seconds)

    def next_seconds(self) -> float:
        """Return the next delay."""
        delay, self._next = self._next, min(self._next * FACTOR, self._max_seconds)
        return delay

    def reset(self) -> None:
        """Start again with the first delay."""
        self._next = min(FIRST_SECONDS, self._max_seconds)
