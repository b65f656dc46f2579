"""Scorer -> learner: computes the rewards of each group."""

from __future__ import annotations

from typing import Protocol

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream

from protocols.queues import Inbox, Outbox
from protocols.rollout import Discarded, GroupOutcome, RolloutGroup


class GroupRewards(Protocol):
    """Computes the rewards of a group; implemented by `training_run.rewards.runner.RewardRunner`."""

    async def score(self, group: RolloutGroup) -> GroupOutcome:
        """Score every completion. An exception ends the run."""


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
        slots, in_order = anyio.create_memory_object_stream[_Slot](self._concurrency - 1)
        async with self._inbox, self._outbox, in_order, anyio.create_task_group() as tasks, slots:
            tasks.start_soon(self._send_in_order, in_order)
            async for message in self._inbox:
                self.working_on += 1
                slot = _Slot()
                await slots.send(slot)  # waits while `concurrency` groups are ahead
                if isinstance(message, Discarded):
                    slot.fill(message)
                else:
                    tasks.start_soon(self._score, message, slot)

    async def _score(self, group: RolloutGroup, slot: _Slot) -> None:
        slot.fill(await self._rewards.score(group))

    async def _send_in_order(self, in_order: MemoryObjectReceiveStream[_Slot]) -> None:
        async for slot in in_order:
            await self._outbox.send(await slot.outcome())
            self.working_on -= 1


class _Slot:
    """A position in the order of sending, filled when its outcome is known."""

    def __init__(self) -> None:
        self._filled = anyio.Event()
        self._outcome: GroupOutcome | None = None

    def fill(self, outcome: GroupOutcome) -> None:
        """Set the outcome."""
        self._outcome = outcome
        self._filled.set()

    async def outcome(self) -> GroupOutcome:
        """Wait for the outcome."""
        await self._filled.wait()
        if self._outcome is None:
            raise RuntimeError("the slot was marked as filled without an outcome")
        return self._outcome
