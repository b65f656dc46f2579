"""Scorer -> learner: computes the rewards of each group."""

from __future__ import annotations

import asyncio

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream

from protocols.queues import Inbox, Outbox
from protocols.rollout import Discarded, GroupOutcome, GroupRewards, RolloutGroup

Outcome = asyncio.Future[GroupOutcome]
"""A position in the order of sending, with an outcome when it is known."""


class Scorer:
    """Sends one outcome per message, in the order of arrival. Discarded groups pass unchanged.

    concurrency: number of groups scored at the same time. The fixed order makes runs reproducible; a slow reward delays
    the groups behind it, at most for its time limit.
    working_on: number of groups that are being scored or sent.
    """

    name = "scorer"

    def __init__(
        self,
        *,
        inbox: Inbox[RolloutGroup | Discarded],
        outbox: Outbox[GroupOutcome],
        rewards: GroupRewards,
        concurrency: int,
    ) -> None:
        self._inbox = inbox
        self._outbox = outbox
        self._rewards = rewards
        self._concurrency = concurrency
        self.working_on = 0

    async def run(self) -> None:
        """Score until the inbox ends."""
        slots, in_order = anyio.create_memory_object_stream[Outcome](self._concurrency - 1)
        async with self._inbox, self._outbox, in_order, anyio.create_task_group() as tasks, slots:
            tasks.start_soon(self._send_in_order, in_order)
            async for message in self._inbox:
                self.working_on += 1
                slot: Outcome = asyncio.get_running_loop().create_future()
                await slots.send(slot)  # waits while `concurrency` groups are ahead
                if isinstance(message, Discarded):
                    slot.set_result(message)
                else:
                    tasks.start_soon(self._score, message, slot)

    async def _score(self, group: RolloutGroup, slot: Outcome) -> None:
        outcome = await self._rewards.score(group)
        if not slot.cancelled():  # the run is being stopped
            slot.set_result(outcome)

    async def _send_in_order(self, in_order: MemoryObjectReceiveStream[Outcome]) -> None:
        async for slot in in_order:
            await self._outbox.send(await slot)
            self.working_on -= 1
