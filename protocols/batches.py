"""Where groups from outside come from, and how they are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from msgspec import Struct

from protocols.rollout import GroupOutcome

Group = TypeVar("Group")
Given = TypeVar("Given", covariant=True)
Taken = TypeVar("Taken", contravariant=True)


class BatchSource(Protocol[Given]):
    """An Atropos API server, its mock, or the rewarded sessions of clients."""

    async def open(self, *, step: int) -> None:
        """Register a trainer that has completed `step` steps; wait until the source is available.

        Raises ProfileError for errors that the user has to correct.
        """

    async def batch(self, *, step: int) -> Sequence[Given] | None:
        """Return the next groups; None if there is no batch yet. Waits while the source is unavailable."""

    async def waiting_for(self) -> str:
        """Return one line for the log that says why there is no batch."""

    async def close(self) -> None:
        """Close the connections."""


class Reader(Protocol[Taken]):
    """Converts the groups of a source to messages, as `attachments.atropos.reader.GroupReader` does."""

    async def read(self, group: Taken, /, *, group_id: int, version: int) -> GroupOutcome:
        """Read one group. version: policy version that serves now. Never raises because of the contents of `group`."""


class GroupSupply(Struct, Generic[Group], frozen=True, kw_only=True, eq=False):
    """Attachment -> atropos_fetcher: groups from outside, in the place of those of prompter, generator and scorer.

    poll_seconds: longest pause between two questions for groups. patience_seconds: time without a group until a warning
    says what the source waits for.
    """

    source: BatchSource[Group]
    reader: Reader[Group]
    poll_seconds: float
    patience_seconds: float
