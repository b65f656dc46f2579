"""Group accounting: the numbers of groups that were prompted, trained on, discarded and carried over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from msgspec import Struct


class SourceCounts(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Outcomes of groups. trained: number of groups. discarded: number of groups per reason."""

    trained: int = 0
    discarded: dict[str, int] = {}

    @property
    def ended(self) -> int:
        """Number of groups that have ended."""
        return self.trained + sum(self.discarded.values())


class LedgerState(SourceCounts, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Learner -> checkpoint. The group accounting after one batch: the counts of all groups since the run began.

    all_ended_below: every group with a smaller id has ended.
    ended_above: ids of the other groups that have ended, ascending.
    sources: the counts of each environment. Groups of the run's own dataset are not included.
    """

    all_ended_below: int = 0
    ended_above: tuple[int, ...] = ()
    sources: dict[str, SourceCounts] = {}


class Balance(Struct, frozen=True, kw_only=True):
    """Run -> summary. The conservation equation: prompted = trained + discarded + carried over.

    by_reason: number of discarded groups per reason. sources: the balance of each environment.
    """

    prompted: int
    trained: int
    by_reason: dict[str, int]
    carried_over: int
    sources: dict[str, Balance] = {}

    @property
    def discarded(self) -> int:
        """Number of groups that were discarded."""
        return sum(self.by_reason.values())

    @property
    def holds(self) -> bool:
        """Whether every group is counted exactly once, in total and per environment."""
        own = self.prompted == self.trained + self.discarded + self.carried_over
        return own and all(source.holds for source in self.sources.values())

    def __str__(self) -> str:
        return self.in_words("prompted")

    def in_words(self, verb: str) -> str:
        """Format the equation. verb: how the groups entered the run (`prompted`, `received`)."""
        sign = "=" if self.holds else "≠"
        return (
            f"{verb} {self.prompted} {sign} trained {self.trained} + discarded {self.discarded} "
            f"+ carried over {self.carried_over}"
        )


@runtime_checkable
class GroupSource(Protocol):
    """The actor that starts groups: the prompter, or the fetcher of groups from environments."""

    @property
    def prompted_until(self) -> int:
        """Every group with a smaller id has been prompted since the run began."""

    @property
    def sent_until(self) -> int:
        """Every group with a smaller id has ended, or was sent since the last start."""

    def drain(self) -> None:
        """Send no new groups after the current batch."""


@runtime_checkable
class EnvironmentGroupSource(GroupSource, Protocol):
    """A source of groups from environments."""

    @property
    def received(self) -> Mapping[str, int]:
        """Number of groups received from each environment since the run began."""

    @property
    def in_flight(self) -> Mapping[int, str]:
        """Environment of the latest groups, by group id; groups that have ended may be included."""
