"""The ledger: the outcome of each group of the run. Every group ends exactly once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count

from msgspec.structs import replace

from protocols.accounting import Balance, LedgerState, SourceCounts


class Ledger:
    """Counts the outcomes of groups. Memory is bounded by the number of groups that ended before an older group."""

    def __init__(self, state: LedgerState | None = None) -> None:
        state = state or LedgerState()
        self._below = state.all_ended_below
        self._above = set(state.ended_above)
        self._trained = state.trained
        self._discarded = dict(state.discarded)
        self._sources = dict(state.sources)

    def train(self, group_id: int, *, source: str = "") -> None:
        """Record that a group was trained on. Raises ValueError if the group has already ended."""
        self._end(group_id)
        self._trained += 1
        if source:
            counts = self._sources.get(source, SourceCounts())
            self._sources[source] = replace(counts, trained=counts.trained + 1)

    def discard(self, group_id: int, reason: str, *, source: str = "") -> None:
        """Record that a group was discarded. Raises ValueError if the group has already ended."""
        self._end(group_id)
        self._discarded = _increment(self._discarded, reason)
        if source:
            counts = self._sources.get(source, SourceCounts())
            self._sources[source] = replace(counts, discarded=_increment(counts.discarded, reason))

    @property
    def ended(self) -> int:
        """Number of groups that have ended since the run began."""
        return self._trained + sum(self._discarded.values())

    def unended(self, until: int | None = None) -> Iterator[int]:
        """Ids below `until` of groups that have not ended, ascending. None: without an upper limit."""
        groups = count(self._below) if until is None else range(self._below, until)
        return (group_id for group_id in groups if group_id not in self._above)

    def state(self) -> LedgerState:
        """Snapshot for a checkpoint."""
        return LedgerState(
            all_ended_below=self._below,
            ended_above=tuple(sorted(self._above)),
            trained=self._trained,
            discarded=dict(self._discarded),
            sources=dict(self._sources),
        )

    def balance(
        self,
        prompted: int,
        carried_over: int,
        *,
        received: Mapping[str, int] = {},
        waiting: Mapping[str, int] = {},
    ) -> Balance:
        """The conservation equation.

        prompted: groups prompted since the run began. carried_over: groups that are known not to have ended.
        received, waiting: the same two numbers per environment.
        """
        return Balance(
            prompted=prompted,
            trained=self._trained,
            discarded=sum(self._discarded.values()),
            by_reason=dict(self._discarded),
            carried_over=carried_over,
            sources={
                source: _source_balance(self._sources.get(source), received.get(source, 0), waiting.get(source, 0))
                for source in sorted({*received, *self._sources})
            },
        )

    def _end(self, group_id: int) -> None:
        if group_id < self._below or group_id in self._above:
            raise ValueError(f"group {group_id} has already ended")
        self._above.add(group_id)
        while self._below in self._above:
            self._above.remove(self._below)
            self._below += 1


def _increment(counts: dict[str, int], key: str) -> dict[str, int]:
    return {**counts, key: counts.get(key, 0) + 1}


def _source_balance(counts: SourceCounts | None, received: int, waiting: int) -> Balance:
    counts = counts or SourceCounts()
    return Balance(
        prompted=received,
        trained=counts.trained,
        discarded=sum(counts.discarded.values()),
        by_reason=counts.discarded,
        carried_over=waiting,
    )
