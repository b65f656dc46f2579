"""Where groups from environments come from, as the fetcher sees it: shapes, not classes.

How long to wait between two looks at something that cannot call back.
"""

from __future__ import annotations

from typing import Protocol

from msgspec import Raw

from protocols.rollout import GroupOutcome


class GroupSource(Protocol):
    """An Atropos API server, or what stands in for one."""

    async def open(self, *, step: int) -> None:
        """Make it ready for a trainer that has made `step` updates; wait as long as that takes.

        Raises ProfileError for what its user must mend.
        """

    async def batch(self, *, step: int) -> list[Raw] | None:
        """Take the groups that it hands out next, JSON each; None: nothing yet. What is away is waited for."""

    async def waiting_for(self) -> str:
        """Say on one line, for the log, why there is nothing."""

    async def close(self) -> None:
        """Give up its connections."""


class Reader(Protocol):
    """Turns what a source hands out into messages; `clotho.atropos.reader.GroupReader` does."""

    async def read(self, raw: Raw, *, group_id: int, version: int) -> GroupOutcome:
        """Read one group; version: of the weights that serve. Never raises for what is in `raw`."""


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
