"""Prompter: turns a dataset into prompts, each of them asked exactly once."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from actors.runtime.ends import Outbox
from protocols.prompt import Prompt


class Prompter:
    """The first box. Asks the groups it is given, in order; ends when they are asked, or when told to stop.

    make: group_id -> Prompt, a pure function, so that a resumed run asks the very same prompts.
    group_ids: those still to be asked; on resume this includes the ones that were in flight when the run ended.
    batch_size: a run that is drained still asks the rest of a batch, so that its last update is like any other.
    asked_until: all groups below have been asked, in this life of the run or in an earlier one.
    """

    name = "prompter"

    def __init__(
        self,
        *,
        outbox: Outbox[Prompt],
        make: Callable[[int], Prompt],
        group_ids: Iterable[int],
        batch_size: int,
        asked_until: int = 0,
    ) -> None:
        self._outbox = outbox
        self._make = make
        self._group_ids = iter(group_ids)
        self._batch_size = batch_size
        self._draining = False
        self._asked_before = asked_until
        self.asked_until = asked_until

    async def run(self) -> None:
        """Ask until there is nothing left to ask."""
        async with self._outbox:
            for count, group_id in enumerate(self._group_ids):
                if self._draining and count % self._batch_size == 0 and group_id >= self._asked_before:
                    return
                prompt = self._make(group_id)
                self.asked_until = max(self.asked_until, group_id + 1)
                await self._outbox.send(prompt)

    def drain(self) -> None:
        """Ask nothing new after this batch. What has been asked is still answered, scored and learnt from.

        What an earlier life of the run had asked and not ended is asked again first.
        """
        self._draining = True
