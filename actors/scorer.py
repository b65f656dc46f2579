"""Generator -> scorer -> learner: what each completion is worth."""

from __future__ import annotations

from typing import Protocol

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream

from protocols.queues import Inbox, Outbox
from protocols.rollout import Discarded, GroupOutcome, RolloutGroup


class Rewards(Protocol):
    """Turns a group into its outcome; `clotho.rewards.runner.RewardRunner` does."""

    async def score(self, group: RolloutGroup) -> GroupOutcome:
        """Judge every completion; raise only what should end the run."""


class Scorer:
    """Rewards groups and passes on those that ended before: one outcome for each message, in the order of arrival.

    concurrency: groups looked at at once. Order makes a run repeatable; a slow reward holds back those behind it, at
    most for its time limit. Owns both ends: `run` closes them, however it ends.
    """

    name = "scorer"

    def __init__(
        self,
        inbox: Inbox[RolloutGroup | Discarded],
        outbox: Outbox[GroupOutcome],
        rewards: Rewards,
        *,
        concurrency: int = 8,
    ) -> None:
        self._inbox = inbox
        self._outbox = outbox
        self._rewards = rewards
        self._concurrency = concurrency

    async def run(self) -> None:
        """Score until the inbox ends."""
        slots, in_order = anyio.create_memory_object_stream[_Slot](self._concurrency - 1)
        async with self._inbox, self._outbox, in_order, anyio.create_task_group() as tasks, slots:
            tasks.start_soon(self._emit, in_order)
            async for message in self._inbox:
                slot = _Slot()
                await slots.send(slot)  # waits while `concurrency` groups are ahead of this one
                if isinstance(message, Discarded):
                    slot.fill(message)
                else:
                    tasks.start_soon(self._score, message, slot)

    async def _score(self, group: RolloutGroup, slot: _Slot) -> None:
        slot.fill(await self._rewards.score(group))

    async def _emit(self, in_order: MemoryObjectReceiveStream[_Slot]) -> None:
        async for slot in in_order:
            await self._outbox.send(await slot.outcome())


class _Slot:
    """A place in the order of emission, filled when its outcome is known."""

    def __init__(self) -> None:
        self._known = anyio.Event()
        self._outcome: GroupOutcome | None = None

    def fill(self, outcome: GroupOutcome) -> None:
        self._outcome = outcome
        self._known.set()

    async def outcome(self) -> GroupOutcome:
        await self._known.wait()
        if self._outcome is None:
            raise RuntimeError("a slot was announced before it was filled")
        return self._outcome
