"""Prompter -> generator: sends each prompt of the run once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from anyio import CancelScope

from protocols.prompt import Prompt
from protocols.queues import EndOfStream, Outbox
from training_run.supervision.latest import Latest


class Prompter:
    """Sends the prompts of the given groups in order, and returns after the last one, or after `drain`.

    If `groups` is set, sends that many prompts, plus one per replaced group, on demand; returns when the learner closes
    `replacements`.

    make: builds the prompt of a group: a pure function unless an attachment chooses the problems, so that a resumed run
    sends the same prompts.
    group_ids: groups to prompt. After a resume this includes groups that were in flight.
    batch_size: a drained run completes its last batch.
    replacements: number of groups that are replaced by others, since the run began.
    ended: number of groups that had ended at the start. groups: number of groups that count towards batches.
    prompted_until: every group with a smaller id has been prompted since the run began.
    sent_until: every group with a smaller id has ended, or was sent since the last start.
    may_start: waits until a group may start, given the number of groups before it; the prompt is built only then. None
    unless the choice of a problem depends on the groups that have ended.
    """

    name = "prompter"

    def __init__(
        self,
        *,
        outbox: Outbox[Prompt],
        make: Callable[[int], Prompt],
        group_ids: Iterable[int],
        batch_size: int,
        replacements: Latest[int],
        ended: int = 0,
        groups: int | None = None,
        prompted_until: int = 0,
        may_start: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        self._outbox = outbox
        self._make = make
        self._group_ids = iter(group_ids)
        self._batch_size = batch_size
        self._replacements, self._ended, self._groups = replacements, ended, groups
        self._may_start = may_start
        self._draining = False
        self._demand_wait: CancelScope | None = None
        self._prompted_before = prompted_until
        self.prompted_until = prompted_until
        self.sent_until = 0

    async def run(self) -> None:
        """Send prompts until all prompts are sent or no more are needed."""
        async with self._outbox:
            for count, group_id in enumerate(self._group_ids, start=self._ended):
                self.sent_until = group_id
                if not await self._is_needed(count):
                    return
                if not await self._is_admitted(count) or self._is_drained(count, group_id):
                    return
                prompt = self._make(group_id)
                self.sent_until = group_id + 1
                self.prompted_until = max(self.prompted_until, group_id + 1)
                await self._outbox.send(prompt)

    def drain(self) -> None:
        """Send no new groups after the current batch. Groups in flight are still trained on.

        Groups that were in flight before a resume are sent first if they are needed.
        """
        self._draining = True
        if self._demand_wait is not None:
            self._demand_wait.cancel()

    async def _is_needed(self, count: int) -> bool:
        """Wait until more than `count` groups are needed. False if no more than `count` will be needed."""
        groups = self._groups
        if groups is None:
            return True
        with CancelScope() as self._demand_wait:
            if self._draining:
                self._demand_wait.cancel()
            try:
                await self._replacements.wait_until(lambda replaced: count < groups + replaced)
            except EndOfStream:
                return False
            return True
        return False

    async def _is_admitted(self, count: int) -> bool:
        """Wait until a group after `count` others may start. False if that cannot happen any more."""
        if self._may_start is not None:
            try:
                await self._may_start(count)
            except EndOfStream:
                return False
        return True

    def _is_drained(self, count: int, group_id: int) -> bool:
        """Whether a draining run has sent whole batches, and all groups that were in flight before a resume."""
        whole_batches = (count - self._replacements.value) % self._batch_size == 0
        return self._draining and whole_batches and group_id >= self._prompted_before
