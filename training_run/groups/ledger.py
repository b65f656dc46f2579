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
        self._below, self._above = state.all_ended_below, set(state.ended_above)
        self._all = SourceCounts(trained=state.trained, discarded=state.discarded)
        self._sources = dict(state.sources)

    def train(self, group_id: int, *, source: str = "") -> None:
        """Record that a group was trained on. Raises ValueError if the group has already ended."""
        self._end(group_id, "", source)

    def discard(self, group_id: int, reason: str, *, source: str = "") -> None:
        """Record that a group was discarded. Raises ValueError if the group has already ended."""
        self._end(group_id, reason, source)

    @property
    def ended(self) -> int:
        """Number of groups that have ended since the run began."""
        return self._all.ended

    def unended(self, until: int | None = None) -> Iterator[int]:
        """Ids below `until` of groups that have not ended, ascending. None: without an upper limit."""
        groups = count(self._below) if until is None else range(self._below, until)
        return (group_id for group_id in groups if group_id not in self._above)

    def state(self) -> LedgerState:
        """Snapshot for a checkpoint."""
        return LedgerState(
            all_ended_below=self._below,
            ended_above=tuple(sorted(self._above)),
            trained=self._all.trained,
            discarded=self._all.discarded,
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
        sources = {
            name: _balance(self._sources.get(name, SourceCounts()), received.get(name, 0), waiting.get(name, 0))
            for name in sorted({*received, *self._sources})
        }
        return replace(_balance(self._all, prompted, carried_over), sources=sources)

    def _end(self, group_id: int, reason: str, source: str) -> None:
        if group_id < self._below or group_id in self._above:
            raise ValueError(f"group {group_id} has already ended")
        self._above.add(group_id)
        while self._below in self._above:
            self._above.remove(self._below)
            self._below += 1
        self._all = _counted(self._all, reason)
        if source:
            self._sources[source] = _counted(self._sources.get(source, SourceCounts()), reason)


def _counted(counts: SourceCounts, reason: str) -> SourceCounts:
    """Return the counts with one more group. reason: why it was discarded; empty: it was trained on."""
    if not reason:
        return replace(counts, trained=counts.trained + 1)
    return replace(counts, discarded={**counts.discarded, reason: counts.discarded.get(reason, 0) + 1})


def _balance(counts: SourceCounts, prompted: int, carried_over: int) -> Balance:
    return Balance(prompted=prompted, trained=counts.trained, by_reason=counts.discarded, carried_over=carried_over)
