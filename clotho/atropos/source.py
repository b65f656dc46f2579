"""Where groups from environments come from, as the fetcher sees it: shapes, not classes."""

from __future__ import annotations

from typing import Protocol

from msgspec import Raw

from protocols.score import GroupOutcome


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
