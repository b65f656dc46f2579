"""The prompter: every group asked exactly once, and an end that comes after a whole batch."""

from __future__ import annotations

from collections.abc import Iterable

import anyio
import pytest

from actors.prompter import Prompter
from actors.runtime.ends import EndOfMail
from actors.runtime.mailbox import Mailbox
from protocols.prompt import Prompt
from tests.boxes import cancelled_midway, everything, prompt, run_and_receive


def prompter(
    prompts: Mailbox[Prompt], group_ids: Iterable[int], *, batch_size: int = 4, asked_until: int = 0
) -> Prompter:
    """A prompter of these groups."""
    return Prompter(
        outbox=prompts.writer(), make=prompt, group_ids=group_ids, batch_size=batch_size, asked_until=asked_until
    )


async def asked(box: Prompter, prompts: Mailbox[Prompt]) -> list[int]:
    """Run it; the groups it asked."""
    return [one.group_id for one in await run_and_receive(box.run, prompts.reader())]


async def test_every_group_is_asked_once_and_in_order() -> None:
    """Then the arrow ends, and `asked_until` lies behind the last."""
    prompts = Mailbox[Prompt]("prompts", capacity=2)
    box = prompter(prompts, range(10))
    assert await asked(box, prompts) == list(range(10))
    assert box.asked_until == 10


async def test_a_full_mailbox_makes_it_wait() -> None:
    """It makes no prompt ahead of the one that waits for room."""
    prompts = Mailbox[Prompt]("prompts", capacity=2)
    reader, box = prompts.reader(), prompter(prompts, range(100))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(box.run)
        await anyio.wait_all_tasks_blocked()
        assert (prompts.depth, box.asked_until) == (2, 3)
        assert [one.group_id for one in await everything(reader)] == list(range(100))


async def test_drained_it_still_asks_the_rest_of_the_batch() -> None:
    """So that the last update is as large as any other."""
    prompts = Mailbox[Prompt]("prompts", capacity=1)
    reader, box = prompts.reader(), prompter(prompts, range(100))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(box.run)
        assert [(await reader.receive()).group_id for _ in range(5)] == list(range(5))
        box.drain()
        assert [one.group_id for one in await everything(reader)] == [5, 6, 7]
    assert box.asked_until == 8


async def test_drained_before_it_began_it_asks_nothing() -> None:
    """And ends its arrow all the same."""
    prompts = Mailbox[Prompt]("prompts", capacity=1)
    box = prompter(prompts, range(100))
    box.drain()
    assert await asked(box, prompts) == []
    assert box.asked_until == 0


async def test_drained_after_a_resume_it_first_asks_again_what_had_not_ended() -> None:
    """Groups below `asked_until` were asked in an earlier life: they end in this one, whole batches as ever."""
    prompts = Mailbox[Prompt]("prompts", capacity=1)
    box = prompter(prompts, [2, 3, 5, 6, 7, 8, 9], batch_size=2, asked_until=6)
    box.drain()
    assert await asked(box, prompts) == [2, 3, 5, 6]
    assert box.asked_until == 7


async def test_groups_asked_in_an_earlier_life_stay_asked() -> None:
    """A resumed run that asks the groups left over does not count back."""
    prompts = Mailbox[Prompt]("prompts", capacity=1)
    box = prompter(prompts, [3, 5], asked_until=9)
    assert await asked(box, prompts) == [3, 5]
    assert box.asked_until == 9


@pytest.mark.parametrize("end", ["cancelled", "failed"])
async def test_however_it_ends_it_closes_its_arrow(end: str) -> None:
    """The next box gets what was sent, then the end."""

    def broken(group_id: int) -> Prompt:
        if group_id == 1 and end == "failed":
            raise LookupError("no such problem")
        return prompt(group_id)

    prompts = Mailbox[Prompt]("prompts", capacity=1)
    reader = prompts.reader()
    box = Prompter(outbox=prompts.writer(), make=broken, group_ids=range(5), batch_size=4)
    if end == "failed":
        with pytest.raises(LookupError, match="no such problem"):
            await box.run()
    else:
        await cancelled_midway(box.run)
    assert (await reader.receive()).group_id == 0
    with pytest.raises(EndOfMail):
        await reader.receive()
