"""The books of conservation: every prompt that was asked ends exactly once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count

from msgspec import Struct
from msgspec.structs import replace


class SourceBooks(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the groups of one environment ended; discarded by reason."""

    trained: int = 0
    discarded: dict[str, int] = {}

    @property
    def ended(self) -> int:
        """Groups that have ended."""
        return self.trained + sum(self.discarded.values())


class LedgerState(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The books at one moment, as a checkpoint keeps them.

    Groups below `all_ended_below` have all ended; `ended_above` lists those beyond it that have, ascending.
    trained and discarded count groups; discarded by reason. sources: the same for each environment that groups came
    from; groups that the run asked itself are not in it.
    """

    all_ended_below: int = 0
    ended_above: tuple[int, ...] = ()
    trained: int = 0
    discarded: dict[str, int] = {}
    sources: dict[str, SourceBooks] = {}


class Ledger:
    """Counts how groups end. Bounded: it remembers only the groups that ended ahead of an older one."""

    def __init__(self, state: LedgerState | None = None) -> None:
        state = state or LedgerState()
        self._below = state.all_ended_below
        self._above = set(state.ended_above)
        self._trained = state.trained
        self._discarded = dict(state.discarded)
        self._sources = dict(state.sources)

    def train(self, group_id: int, *, source: str = "") -> None:
        """Record that a group was learned from. Raises ValueError if it has ended before."""
        self._end(group_id)
        self._trained += 1
        if source:
            books = self._sources.get(source, SourceBooks())
            self._sources[source] = replace(books, trained=books.trained + 1)

    def discard(self, group_id: int, reason: str, *, source: str = "") -> None:
        """Record that a group will never be learned from. Raises ValueError if it has ended before."""
        self._end(group_id)
        self._discarded = _one_more(self._discarded, reason)
        if source:
            books = self._sources.get(source, SourceBooks())
            self._sources[source] = replace(books, discarded=_one_more(books.discarded, reason))

    @property
    def ended(self) -> int:
        """How many groups have ended, over all lives of the run."""
        return self._trained + sum(self._discarded.values())

    def unended(self, until: int | None = None) -> Iterator[int]:
        """Groups below `until` that have not ended, ascending: what a resumed run asks (again). None: without end."""
        groups = count(self._below) if until is None else range(self._below, until)
        return (group_id for group_id in groups if group_id not in self._above)

    def state(self) -> LedgerState:
        """The books as they stand."""
        return LedgerState(
            all_ended_below=self._below,
            ended_above=tuple(sorted(self._above)),
            trained=self._trained,
            discarded=dict(self._discarded),
            sources=dict(self._sources),
        )

    def balance(
        self, asked: int, held: int, *, received: Mapping[str, int] = {}, waiting: Mapping[str, int] = {}
    ) -> Balance:
        """Close the books. asked: groups asked so far; held: groups counted, one by one, where they wait.

        received, waiting: the same for each environment that groups came from.
        """
        return Balance(
            asked=asked,
            trained=self._trained,
            discarded=sum(self._discarded.values()),
            by_reason=dict(self._discarded),
            carried_over=held,
            sources={
                source: _source_balance(self._sources.get(source), received.get(source, 0), waiting.get(source, 0))
                for source in sorted({*received, *self._sources})
            },
        )

    def _end(self, group_id: int) -> None:
        if group_id < self._below or group_id in self._above:
            raise ValueError(f"group {group_id} has ended twice")
        self._above.add(group_id)
        while self._below in self._above:
            self._above.remove(self._below)
            self._below += 1


class Balance(Struct, frozen=True, kw_only=True):
    """The conservation line: asked = trained + discarded + carried over. sources: the same of each environment."""

    asked: int
    trained: int
    discarded: int
    by_reason: dict[str, int]
    carried_over: int
    sources: dict[str, Balance] = {}

    @property
    def holds(self) -> bool:
        """Whether nothing was lost and nothing counted twice, of any environment."""
        own = self.asked == self.trained + self.discarded + self.carried_over
        return own and all(source.holds for source in self.sources.values())

    def __str__(self) -> str:
        return self.in_words("asked")

    def in_words(self, asked: str) -> str:
        """The line; `asked` says how the groups came to be."""
        sign = "=" if self.holds else "≠"
        return (
            f"{asked} {self.asked} {sign} trained {self.trained} + discarded {self.discarded} "
            f"+ carried over {self.carried_over}"
        )


def _one_more(counts: dict[str, int], key: str) -> dict[str, int]:
    return {**counts, key: counts.get(key, 0) + 1}


def _source_balance(books: SourceBooks | None, received: int, waiting: int) -> Balance:
    books = books or SourceBooks()
    return Balance(
        asked=received,
        trained=books.trained,
        discarded=sum(books.discarded.values()),
        by_reason=books.discarded,
        carried_over=waiting,
    )
