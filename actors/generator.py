"""Generator -> scorer: makes a group of rollouts for each prompt."""

from __future__ import annotations

from contextlib import aclosing, suppress

import anyio

from protocols.prompt import Prompt
from protocols.queues import EndOfStream, Inbox, Outbox
from protocols.rollout import Discarded, RolloutGroup
from training_run.groups.progress import StalenessRule
from training_run.groups.rollout_source import RolloutSource


class Generator:
    """Receives prompts and sends groups of completions by the staleness rule. Discarded groups pass unchanged.

    Prompts that may start at the same time are submitted in one call, at most `batch_size`. The engine then prefills
    them together, and the composition of its batches does not depend on timing. With `one_by_one`, a batch starts when
    the batch before it has been sampled, so that this also holds with batches ahead.
    """

    name = "generator"

    def __init__(
        self,
        *,
        inbox: Inbox[Prompt | Discarded],
        outbox: Outbox[RolloutGroup | Discarded],
        rule: StalenessRule,
        source: RolloutSource,
        ended: int = 0,
        groups: int | None = None,
        one_by_one: bool = False,
    ) -> None:
        """ended: number of groups that had ended at the start; `started` counts from it.

        groups: number of groups that count towards batches; None: until the inbox ends.
        one_by_one: sample one batch at a time.

        working_on: number of groups that are being sampled or sent.
        """
        self._inbox, self._outbox = inbox, outbox
        self._rule, self._source = rule, source
        self._started, self._groups, self._one_by_one = ended, groups, one_by_one
        self.working_on = 0

    async def run(self) -> None:
        """Sample until the inbox ends and the last group is sent."""
        async with self._inbox, self._outbox, anyio.create_task_group() as tasks:
            async for first in self._inbox:
                await self._rule.wait(self._started)
                prompts = await self._receive_batch(first)
                if prompts and self._one_by_one:
                    await self._sample(prompts)
                elif prompts:
                    await tasks.start(self._sample, prompts)

    async def _receive_batch(self, first: Prompt | Discarded) -> list[Prompt]:
        """The prompts that start together, once all have arrived. Discarded groups count as prompts."""
        size = min(self._rule.capacity(self._started), self._rule.batch_size)
        if self._groups is not None:
            size = min(size, self._groups + self._rule.replacements.value - self._started)
        prompts = await self._start(first)
        with suppress(EndOfStream):
            for _ in range(size - 1):
                prompts += await self._start(await self._inbox.receive())
        return prompts

    async def _start(self, message: Prompt | Discarded) -> list[Prompt]:
        self._started += 1
        if isinstance(message, Discarded):
            await self._outbox.send(message)
            return []
        return [message]

    async def _sample(
        self, batch: list[Prompt], *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        self.working_on += len(batch)
        task_status.started()
        async with aclosing(self._source.groups(batch)) as groups:  # cancellation aborts the rollouts
            async for group in groups:
                await self._outbox.send(group)
                self.working_on -= 1
