"""The prompter sends every group exactly once and ends after a whole batch."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from itertools import count

import anyio
import pytest

from actors.prompter import Prompter
from protocols.prompt import Prompt
from protocols.queues import EndOfStream
from tests.actors.actor_helpers import cancel_when_blocked, prompt, receive_all, run_and_receive
from training_run.supervision.latest import Latest
from training_run.supervision.queues import Queue


def replacement_count(replacements: int = 0) -> Latest[int]:
    """Return a cell with this number of replaced groups."""
    cell = Latest[int]("replacements")
    cell.put(replacements)
    return cell


def prompter(
    prompts: Queue[Prompt],
    group_ids: Iterable[int],
    *,
    batch_size: int = 4,
    replacements: Latest[int] | None = None,
    ended: int = 0,
    groups: int | None = None,
    prompted_until: int = 0,
    may_start: Callable[[int], Awaitable[None]] | None = None,
) -> Prompter:
    """Return a prompter of these groups."""
    return Prompter(
        outbox=prompts.outbox(),
        make=prompt,
        group_ids=group_ids,
        batch_size=batch_size,
        replacements=replacements or replacement_count(),
        ended=ended,
        groups=groups,
        prompted_until=prompted_until,
        may_start=may_start,
    )


async def prompted_groups(actor: Prompter, prompts: Queue[Prompt]) -> list[int]:
    """Run the prompter and return the group ids it sent."""
    return [one.group_id for one in await run_and_receive(actor.run, prompts.inbox())]


@pytest.mark.parametrize(
    ("groups", "before", "drained", "sent", "after"),
    [
        (range(10), 0, False, [*range(10)], (10, 10)),
        ([3, 5], 9, False, [3, 5], (9, 6)),
        ([2, 3, 5, 6, 7, 8, 9], 6, True, [2, 3, 5, 6], (7, 7)),
    ],
    ids=["new", "resumed, and only earlier groups are sent again", "resumed and drained: whole batches"],
)
async def test_every_group_is_sent_once_and_in_order(
    groups: Iterable[int], before: int, drained: bool, sent: list[int], after: tuple[int, int]
) -> None:
    """Then the queue ends, and `prompted_until` is the last id plus one. It is never lower than at the start.

    Groups below it that have not ended are sent by a drained prompter too.
    """
    prompts = Queue[Prompt]("prompts", capacity=1)
    actor = prompter(prompts, groups, batch_size=2, prompted_until=before)
    if drained:
        actor.drain()
    assert await prompted_groups(actor, prompts) == sent
    assert (actor.prompted_until, actor.sent_until) == after


async def test_the_prompter_waits_for_a_full_queue() -> None:
    """It builds at most one prompt ahead of the queue."""
    prompts = Queue[Prompt]("prompts", capacity=2)
    reader, actor = prompts.inbox(), prompter(prompts, range(100))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(actor.run)
        await anyio.wait_all_tasks_blocked()
        assert (prompts.depth, actor.prompted_until) == (2, 3)
        assert [one.group_id for one in await receive_all(reader)] == list(range(100))


async def test_a_drained_prompter_completes_its_batch() -> None:
    """The last update has a full batch."""
    prompts = Queue[Prompt]("prompts", capacity=1)
    reader, actor = prompts.inbox(), prompter(prompts, range(100))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(actor.run)
        assert [(await reader.receive()).group_id for _ in range(5)] == list(range(5))
        actor.drain()
        assert [one.group_id for one in await receive_all(reader)] == [5, 6, 7]
    assert actor.prompted_until == 8


async def test_a_prompter_drained_before_its_start_sends_no_prompt() -> None:
    """The outbox is closed."""
    prompts = Queue[Prompt]("prompts", capacity=1)
    actor = prompter(prompts, range(100))
    actor.drain()
    assert await prompted_groups(actor, prompts) == []
    assert actor.prompted_until == 0


async def test_with_dynamic_sampling_one_group_is_sent_per_replacement() -> None:
    """The prompter waits for replacements until the learner closes the cell."""
    prompts, replacements = Queue[Prompt]("prompts", capacity=100), replacement_count()
    actor = prompter(prompts, count(), replacements=replacements, groups=8)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(actor.run)
        for total in (0, 1, 4):
            replacements.put(total)
            await anyio.wait_all_tasks_blocked()
            assert (prompts.depth, actor.prompted_until, actor.sent_until) == (8 + total, 8 + total, 8 + total)
        replacements.close()
    assert [one.group_id for one in await receive_all(prompts.inbox())] == list(range(12))


async def test_a_resumed_prompter_sends_the_remaining_groups() -> None:
    """9 of 12 groups had ended and 1 was replaced, so 4 remain: the first that have not ended."""
    prompts, replacements = Queue[Prompt]("prompts", capacity=100), replacement_count(1)
    replacements.close()
    actor = prompter(prompts, (g for g in count() if g not in {0, 1, 2, 4, 5, 6, 7, 9, 10}), replacements=replacements,
                   ended=9, groups=12, prompted_until=14)  # fmt: skip
    assert await prompted_groups(actor, prompts) == [3, 8, 11, 12]
    assert (actor.prompted_until, actor.sent_until) == (14, 13)


async def test_a_prompter_drained_in_its_wait_for_replacements_ends() -> None:
    """The groups in flight are the last of the run."""
    prompts = Queue[Prompt]("prompts", capacity=100)
    actor = prompter(prompts, count(), groups=8)
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(actor.run)
            await anyio.wait_all_tasks_blocked()
            actor.drain()
    assert (prompts.depth, actor.prompted_until) == (8, 8)


async def test_a_drained_prompter_sends_the_due_replacements() -> None:
    """A batch counts without its replaced groups: 4 groups and 2 replacements."""
    prompts, replacements = Queue[Prompt]("prompts", capacity=1), replacement_count()
    reader, actor = prompts.inbox(), prompter(prompts, count(), replacements=replacements, groups=40)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(actor.run)
        for _ in range(2):
            await reader.receive()
        replacements.put(2)
        actor.drain()
        assert [one.group_id for one in await receive_all(reader)] == [2, 3, 4, 5]


async def test_a_prompt_is_built_only_when_its_group_may_start() -> None:
    """The groups of an earlier start count. The prompter ends when no further group may start."""
    prompts, limit = Queue[Prompt]("prompts", capacity=100), Latest[int]("limit")

    async def may_start(count: int) -> None:
        await limit.wait_until(lambda allowed: count < allowed)

    actor = prompter(prompts, count(3), ended=3, may_start=may_start)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(actor.run)
        for allowed in (3, 5, 9):
            limit.put(allowed)
            await anyio.wait_all_tasks_blocked()
            assert (prompts.depth, actor.prompted_until) == (allowed - 3, allowed if allowed > 3 else 0)
        limit.close()
    assert [one.group_id for one in await receive_all(prompts.inbox())] == list(range(3, 9))


async def test_a_prompter_drained_in_its_wait_for_a_start_ends_with_its_batch() -> None:
    """The batch in training allows the next group; the drained prompter then sends none."""
    prompts, limit = Queue[Prompt]("prompts", capacity=100), Latest[int]("limit")

    async def may_start(count: int) -> None:
        await limit.wait_until(lambda allowed: count < allowed)

    actor = prompter(prompts, count(), may_start=may_start)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(actor.run)
        limit.put(4)
        await anyio.wait_all_tasks_blocked()
        actor.drain()
        limit.put(8)
    assert (prompts.depth, actor.prompted_until) == (4, 4)


@pytest.mark.parametrize("end", ["cancelled", "failed"])
async def test_a_failed_or_cancelled_prompter_closes_its_outbox(end: str) -> None:
    """The reader receives the sent prompts, then the end."""

    def broken(group_id: int) -> Prompt:
        if group_id == 1 and end == "failed":
            raise LookupError("no such problem")
        return prompt(group_id)

    prompts = Queue[Prompt]("prompts", capacity=1)
    reader = prompts.inbox()
    actor = Prompter(
        outbox=prompts.outbox(), make=broken, group_ids=range(5), batch_size=4, replacements=replacement_count()
    )
    if end == "failed":
        with pytest.raises(LookupError, match="no such problem"):
            await actor.run()
    else:
        await cancel_when_blocked(actor.run)
    assert (await reader.receive()).group_id == 0
    with pytest.raises(EndOfStream):
        await reader.receive()
