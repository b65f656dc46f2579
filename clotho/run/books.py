"""The books of a run: how many groups there were, and where each of them is."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from clotho.runtime.queues import Mailbox
from protocols.checkpoint import RunState
from protocols.ledger import Balance, Ledger

ON_THE_WAY = re.compile(r"(prompts|rollouts|scored)(\.(\d+|tapped))?")
"""Mailboxes that groups lie in on their way to the learner; a tap's are no such, for it is given copies."""


class Books:
    """What the box at which groups begin says of them, the learner's ledger, and the mailboxes between the two.

    That box is the prompter, or the fetcher of what environments send; a user's own in its place may say less, and is
    taken at as much as it says.
    """

    def __init__(self, ledger: Ledger, state: RunState | None, *, groups: int) -> None:
        """state: what the run resumes from; groups: of the whole run."""
        self._ledger, self._state, self._groups = ledger, state, groups
        self._source: Any = None
        self._mailboxes: Sequence[Mailbox[Any]] = ()

    def look_at(self, source: Any, mailboxes: Sequence[Mailbox[Any]]) -> None:
        """source: the box at which groups begin."""
        self._source, self._mailboxes = source, mailboxes

    def asked(self) -> int:
        """Groups asked so far, over all lives of the run; of a box that does not say, those it has sent on."""
        asked: int | None = getattr(self._source, "asked_until", None)
        if asked is not None:
            return asked
        state = self._state
        ended_before = state.ledger.trained + sum(state.ledger.discarded.values()) if state else 0
        return ended_before + sum(box.stats().sent for box in self._mailboxes if box.name == "prompts")

    def received(self) -> dict[str, int]:
        """Groups so far from each environment."""
        return dict(getattr(self._source, "received", {}))

    def under_way(self, ledger: Ledger) -> dict[int, str]:
        """Groups from environments that have not ended by these books, with where each came from."""
        sources: dict[int, str] = getattr(self._source, "under_way", {})
        if not sources:
            return {}
        unended = list(ledger.unended(self.asked()))
        forgotten = Counter(self.received())
        forgotten.subtract({name: books.ended for name, books in ledger.state().sources.items()})
        forgotten.subtract(sources[number] for number in unended if number in sources)
        names = forgotten.elements()
        return {number: sources[number] if number in sources else next(names, "") for number in unended}

    def balance(self, *, complete: bool) -> Balance:
        """Close the books.

        complete: every actor has ended by itself. What is left then lies in mailboxes, to be counted, or was asked by
        an earlier life of the run and is not part of this one, which has fewer steps.
        Of a run that was cut short the rest is carried over: exactly those groups that a resumed run asks again, or,
        where they came from environments, counts as lost.
        """
        asked = self.asked()
        waiting = sum(box.depth for box in self._mailboxes if ON_THE_WAY.fullmatch(box.name))
        unended = self._ledger.unended(asked)
        reached = getattr(self._source, "reached", self._groups)
        held = waiting + sum(group_id >= reached for group_id in unended) if complete else sum(1 for _ in unended)
        carried = Counter(() if complete else self.under_way(self._ledger).values())
        ended = {name: books.ended for name, books in self._ledger.state().sources.items()}
        received = ended | self.received()
        return self._ledger.balance(asked=asked, held=held, received=received, waiting=carried)
