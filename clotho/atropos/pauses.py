"""How long to wait between two looks at something that cannot call back."""

from __future__ import annotations

FIRST, FACTOR = 0.05, 1.5


class Pauses:
    """Seconds that grow from `FIRST` by `FACTOR` up to the longest, until something came and they begin anew."""

    def __init__(self, *, longest: float) -> None:
        self._longest = longest
        self._next = min(FIRST, longest)

    def next(self) -> float:
        """Return the length of the next pause."""
        pause, self._next = self._next, min(self._next * FACTOR, self._longest)
        return pause

    def reset(self) -> None:
        """Begin anew."""
        self._next = min(FIRST, self._longest)
