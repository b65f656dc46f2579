"""The prompter: every group asked exactly once, and an end that comes after a whole batch."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

import anyio
import pytest

from actors.prompter import Prompter
from clotho.runtime.latest import Latest
from clotho.runtime.queues import Queue
from protocols.prompt import Prompt
from protocols.queues import EndOfStream
from tests.actors.boxes import cancelled_midway, everything, prompt, run_and_receive


def refilled(replacements: int = 0) -> Latest[int]:
    """A cell that says so many groups are replaced."""
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
) -> Prompter:
    """A prompter of these groups."""
    return Prompter(
        outbox=prompts.outbox(),
        make=prompt,
        group_ids=group_ids,
        batch_size=batch_size,
        replacements=replacements or refilled(),
        ended=ended,
        groups=groups,
        prompted_until=prompted_until,
    )


async def asked(box: Prompter, prompts: Queue[Prompt]) -> list[int]:
    """Run it; the groups it asked."""
    return [one.group_id for one in await run_and_receive(box.run, prompts.inbox())]


async def test_every_group_is_asked_once_and_in_order() -> None:
    """Then the arrow ends, and `prompted_until` lies behind the last."""
    prompts = Queue[Prompt]("prompts", capacity=2)
    box = prompter(prompts, range(10))
    assert await asked(box, prompts) == list(range(10))
    assert (box.prompted_until, box.sent_until) == (10, 10)


async def test_a_full_mailbox_makes_it_wait() -> None:
    """It makes no prompt ahead of the one that waits for room."""
    prompts = Queue[Prompt]("prompts", capacity=2)
    reader, box = prompts.inbox(), prompter(prompts, range(100))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(box.run)
        await anyio.wait_all_tasks_blocked()
        assert (prompts.depth, box.prompted_until) == (2, 3)
        assert [one.group_id for one in await everything(reader)] == list(range(100))


async def test_drained_it_still_asks_the_rest_of_the_batch() -> None:
    """So that the last update is as large as any other."""
    prompts = Queue[Prompt]("prompts", capacity=1)
    reader, box = prompts.inbox(), prompter(prompts, range(100))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(box.run)
        assert [(await reader.receive()).group_id for _ in range(5)] == list(range(5))
        box.drain()
        assert [one.group_id for one in await everything(reader)] == [5, 6, 7]
    assert box.prompted_until == 8


async def test_drained_before_it_began_it_asks_nothing() -> None:
    """And ends its arrow all the same."""
    prompts = Queue[Prompt]("prompts", capacity=1)
    box = prompter(prompts, range(100))
    box.drain()
    assert await asked(box, prompts) == []
    assert box.prompted_until == 0


async def test_drained_after_a_resume_it_first_asks_again_what_had_not_ended() -> None:
    """Groups below `prompted_until` were asked in an earlier life: they end in this one, whole batches as ever."""
    prompts = Queue[Prompt]("prompts", capacity=1)
    box = prompter(prompts, [2, 3, 5, 6, 7, 8, 9], batch_size=2, prompted_until=6)
    box.drain()
    assert await asked(box, prompts) == [2, 3, 5, 6]
    assert box.prompted_until == 7


async def test_groups_asked_in_an_earlier_life_stay_asked() -> None:
    """A resumed run that asks the groups left over does not count back."""
    prompts = Queue[Prompt]("prompts", capacity=1)
    box = prompter(prompts, [3, 5], prompted_until=9)
    assert await asked(box, prompts) == [3, 5]
    assert (box.prompted_until, box.sent_until) == (9, 6)


async def test_with_a_bound_it_asks_one_more_for_each_refill_until_no_more_can_come() -> None:
    """It waits for replacements, not for the end of the groups; the learner's close is its end."""
    prompts, replacements = Queue[Prompt]("prompts", capacity=100), refilled()
    box = prompter(prompts, count(), replacements=replacements, groups=8)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(box.run)
        for total in (0, 1, 4):
            replacements.put(total)
            await anyio.wait_all_tasks_blocked()
            assert (prompts.depth, box.prompted_until, box.sent_until) == (8 + total, 8 + total, 8 + total)
        replacements.close()
    assert [one.group_id for one in await everything(prompts.inbox())] == list(range(12))


async def test_a_resumed_run_asks_what_is_left_of_the_bound() -> None:
    """9 of 12 groups had ended, 1 of them replaced: 4 are left, the first that have not ended."""
    prompts, replacements = Queue[Prompt]("prompts", capacity=100), refilled(1)
    replacements.close()
    box = prompter(prompts, (g for g in count() if g not in {0, 1, 2, 4, 5, 6, 7, 9, 10}), replacements=replacements,
                   ended=9, groups=12, prompted_until=14)  # fmt: skip
    assert await asked(box, prompts) == [3, 8, 11, 12]
    assert (box.prompted_until, box.sent_until) == (14, 13)


async def test_drained_while_it_waits_for_refills_it_ends() -> None:
    """What is in flight then is the last of the run."""
    prompts = Queue[Prompt]("prompts", capacity=100)
    box = prompter(prompts, count(), groups=8)
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(box.run)
            await anyio.wait_all_tasks_blocked()
            box.drain()
    assert (prompts.depth, box.prompted_until) == (8, 8)


async def test_drained_it_still_asks_the_refills_of_the_batch_that_are_due() -> None:
    """Whole batches count without what was replaced: 4 groups and 2 more in place of lost ones."""
    prompts, replacements = Queue[Prompt]("prompts", capacity=1), refilled()
    reader, box = prompts.inbox(), prompter(prompts, count(), replacements=replacements, groups=40)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(box.run)
        for _ in range(2):
            await reader.receive()
        replacements.put(2)
        box.drain()
        assert [one.group_id for one in await everything(reader)] == [2, 3, 4, 5]


@pytest.mark.parametrize("end", ["cancelled", "failed"])
async def test_however_it_ends_it_closes_its_arrow(end: str) -> None:
    """The next box gets what was sent, then the end."""

    def broken(group_id: int) -> Prompt:
        if group_id == 1 and end == "failed":
            raise LookupError("no such problem")
        return prompt(group_id)

    prompts = Queue[Prompt]("prompts", capacity=1)
    reader = prompts.inbox()
    box = Prompter(outbox=prompts.outbox(), make=broken, group_ids=range(5), batch_size=4, replacements=refilled())
    if end == "failed":
        with pytest.raises(LookupError, match="no such problem"):
            await box.run()
    else:
        await cancelled_midway(box.run)
    assert (await reader.receive()).group_id == 0
    with pytest.raises(EndOfStream):
        await reader.receive()
