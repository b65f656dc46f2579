from __future__ import annotations

from collections.abc import Sequence
from random import Random

import anyio
import pytest

from actors.scorer import Scorer
from protocols.rollout import Discarded, GroupOutcome, RolloutGroup, ScoredGroup
from tests.rewards.groups import group, problem
from training_run.profile.data import RewardSection
from training_run.rewards.runner import RewardRunner
from training_run.supervision.queues import Queue

Message = RolloutGroup | Discarded


class GatedRewards:
    """Rewards that score a group when its gate opens."""

    def __init__(self, count: int) -> None:
        self.gates = [anyio.Event() for _ in range(count)]
        self.begun: list[int] = []

    async def score(self, group: RolloutGroup) -> GroupOutcome:
        """Wait for the gate."""
        self.begun.append(group.prompt.group_id)
        await self.gates[group.prompt.group_id].wait()
        return ScoredGroup(group=group, rewards=(0.0, 1.0), parts={})


class BrokenRewards:
    """Rewards that fail with a bug of their own."""

    async def score(self, group: RolloutGroup) -> GroupOutcome:
        """Fail."""
        raise RuntimeError("a defect")


def group_id_of(outcome: GroupOutcome) -> int:
    """Return the group id of an outcome."""
    return (outcome.prompt if isinstance(outcome, Discarded) else outcome.group.prompt).group_id


async def outcomes_of(messages: Sequence[Message], rewards: RewardRunner, *, concurrency: int) -> list[GroupOutcome]:
    """Send the messages through a scorer between two small queues."""
    groups, scored = Queue[Message]("rollouts", capacity=2), Queue[GroupOutcome]("scored", capacity=2)
    scorer = Scorer(inbox=groups.inbox(), outbox=scored.outbox(), rewards=rewards, concurrency=concurrency)
    outcomes = []
    reader = scored.inbox()

    async def send() -> None:
        async with groups.outbox() as writer:
            for message in messages:
                await writer.send(message)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(send)
        tasks.start_soon(scorer.run)
        async for outcome in reader:
            outcomes.append(outcome)  # noqa: PERF401
    return outcomes


@pytest.mark.parametrize("concurrency", [1, 8])
async def test_every_message_has_exactly_one_outcome(concurrency: int) -> None:
    """Rewards raise, hang, exit, or return NaN, text or None, and some groups are already discarded.

    All outcomes arrive in order.
    """
    rng, messages = Random(concurrency), []
    for i in range(100):
        graded_problem = problem("42", prompt=f"{concurrency}.{i}")
        made = group("a", "b" * rng.randint(1, 2), of=graded_problem, group_id=i)
        discarded = Discarded(prompt=made.prompt, reason="generation_error", detail="lost")
        messages.append(made if rng.random() < 0.9 else discarded)
    section = RewardSection(name="tests.rewards.sample_rewards:unreliable", timeout_seconds=0.1)
    rewards = RewardRunner((section,), concurrency=concurrency)
    outcomes = await outcomes_of(messages, rewards, concurrency=concurrency)
    rewards.close()
    assert [group_id_of(outcome) for outcome in outcomes] == list(range(100))
    assert {outcome.reason for outcome in outcomes if isinstance(outcome, Discarded)} == {
        "zero_variance", "reward_error", "generation_error"
    }  # fmt: skip
    assert any(isinstance(outcome, ScoredGroup) for outcome in outcomes)
    for message, outcome in zip(messages, outcomes, strict=True):
        assert outcome is message or isinstance(message, RolloutGroup), "what was discarded before passes untouched"


async def test_groups_are_scored_concurrently_and_leave_in_order() -> None:
    """Up to `concurrency` groups are scored at once.

    A slow first group delays the sending of the others, but not their scoring.
    """
    groups, scored = Queue[Message]("rollouts", capacity=8), Queue[GroupOutcome]("scored", capacity=8)
    rewards, reader = GatedRewards(6), scored.inbox()
    writer, scorer = (
        groups.outbox(),
        Scorer(inbox=groups.inbox(), outbox=scored.outbox(), rewards=rewards, concurrency=3),
    )
    for i in range(6):
        await writer.send(group("a", "b", group_id=i))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(scorer.run)
        await anyio.wait_all_tasks_blocked()
        assert rewards.begun == [0, 1, 2]
        rewards.gates[1].set()
        rewards.gates[2].set()
        await anyio.wait_all_tasks_blocked()
        assert (scored.depth, rewards.begun) == (0, [0, 1, 2])
        rewards.gates[0].set()
        assert [group_id_of(await reader.receive()) for _ in range(3)] == [0, 1, 2]
        await anyio.wait_all_tasks_blocked()
        assert rewards.begun == [0, 1, 2, 3, 4, 5]
        for gate in rewards.gates:
            gate.set()
        writer.close()
        assert [group_id_of(outcome) async for outcome in reader] == [3, 4, 5]


async def test_a_full_outbox_stops_the_reading() -> None:
    """Backpressure: at most `concurrency` messages are received beyond those that were sent."""
    groups, scored = Queue[Message]("rollouts", capacity=20), Queue[GroupOutcome]("scored", capacity=1)
    rewards, reader = GatedRewards(20), scored.inbox()
    for gate in rewards.gates:
        gate.set()
    writer, scorer = (
        groups.outbox(),
        Scorer(inbox=groups.inbox(), outbox=scored.outbox(), rewards=rewards, concurrency=2),
    )
    for i in range(20):
        await writer.send(group("a", "b", group_id=i))
    writer.close()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(scorer.run)
        await anyio.wait_all_tasks_blocked()
        assert len(rewards.begun) == 3, "one in the outbox, two under way or done"
        assert [group_id_of(outcome) async for outcome in reader] == list(range(20))


async def test_as_many_groups_are_scored_at_once_as_the_settings_say() -> None:
    """A setting of the run, or by default the largest number of worker processes that a reward may have."""
    section = RewardSection(name="tests.rewards.sample_rewards:waits_for_twelve", run_in="thread")
    rewards = RewardRunner((section,), concurrency=12)
    groups: list[Message] = [group("a", group_id=number) for number in range(12)]
    scored = await outcomes_of(groups, rewards, concurrency=rewards.concurrency)
    rewards.close()
    assert {outcome.reason for outcome in scored if isinstance(outcome, Discarded)} == {"zero_variance"}
    assert rewards.full_seconds > 0
    workers = RewardSection(name="tests.rewards.sample_rewards:length", max_workers=32)
    assert [RewardRunner(found).concurrency for found in ((section,), (section, workers))] == [8, 32]


async def test_a_bug_outside_the_rewards_ends_the_scorer() -> None:
    """The scorer raises the error and closes its ends. Only errors inside a reward discard a group."""
    groups, scored = Queue[Message]("rollouts", capacity=2), Queue[GroupOutcome]("scored", capacity=2)
    writer, reader = groups.outbox(), scored.inbox()
    await writer.send(group("a", "b"))
    with pytest.raises(ExceptionGroup) as caught:
        await Scorer(inbox=groups.inbox(), outbox=scored.outbox(), rewards=BrokenRewards(), concurrency=1).run()
    assert caught.group_contains(RuntimeError, match="a defect")
    assert [outcome async for outcome in reader] == []
