"""Prompter: turns a dataset into prompts, each of them asked exactly once."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from anyio import CancelScope

from clotho.runtime.latest import Latest
from protocols.prompt import Prompt
from protocols.queues import EndOfStream, Outbox


class Prompter:
    """The first box. Asks the groups it is given, in order; ends when they are asked, or when told to stop.

    With a bound on the `groups` that count towards a batch, it asks so many and one more for each refill, as they come
    to be needed, and ends when no more will be: then the learner closes `refills`.

    make: group_id -> Prompt, a pure function, so that a resumed run asks the very same prompts.
    group_ids: those still to be asked; on resume this includes the ones that were in flight when the run ended.
    batch_size: a run that is drained still asks the rest of a batch, so that its last update is like any other.
    refills: groups so far that are replaced by others. ended: groups that had ended when this life of the run began.
    groups: how many count towards a batch over all lives of the run; None: ask all of `group_ids`.
    prompted_until: all groups below have been asked, in this life of the run or in an earlier one.
    reached: all groups below have ended, or were asked in this life of the run.
    """

    name = "prompter"

    def __init__(
        self,
        *,
        outbox: Outbox[Prompt],
        make: Callable[[int], Prompt],
        group_ids: Iterable[int],
        batch_size: int,
        refills: Latest[int],
        ended: int = 0,
        groups: int | None = None,
        prompted_until: int = 0,
    ) -> None:
        self._outbox = outbox
        self._make = make
        self._group_ids = iter(group_ids)
        self._batch_size = batch_size
        self._refills, self._ended, self._groups = refills, ended, groups
        self._draining = False
        self._patience: CancelScope | None = None
        self._asked_before = prompted_until
        self.prompted_until = prompted_until
        self.reached = 0

    async def run(self) -> None:
        """Ask until there is nothing left to ask."""
        async with self._outbox:
            for asked, group_id in enumerate(self._group_ids, start=self._ended):
                self.reached = group_id
                if not await self._is_wanted(asked) or self._is_enough(asked, group_id):
                    return
                prompt = self._make(group_id)
                self.reached = group_id + 1
                self.prompted_until = max(self.prompted_until, group_id + 1)
                await self._outbox.send(prompt)

    def drain(self) -> None:
        """Ask nothing new after this batch. What has been asked is still answered, scored and learned from.

        What an earlier life of the run had asked and not ended is asked again first, as far as it is wanted.
        """
        self._draining = True
        if self._patience is not None:
            self._patience.cancel()

    async def _is_wanted(self, asked: int) -> bool:
        """Wait until one more group is needed beyond those asked so far; False if it never will be."""
        groups = self._groups
        if groups is None:
            return True
        with CancelScope() as self._patience:
            if self._draining:
                self._patience.cancel()
            try:
                await self._refills.wait_until(lambda refills: asked < groups + refills)
            except EndOfStream:
                return False
            return True
        return False

    def _is_enough(self, asked: int, group_id: int) -> bool:
        """Whether a run that is drained has asked whole batches, refills apart, and what was asked before."""
        whole = (asked - self._refills.value) % self._batch_size == 0
        return self._draining and whole and group_id >= self._asked_before
