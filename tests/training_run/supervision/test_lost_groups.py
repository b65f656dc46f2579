"""Custodians: which groups inside a custom actor are lost, and when."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from anyio import create_task_group, wait_all_tasks_blocked
from msgspec import convert

from protocols.finding import Finding
from protocols.prompt import Prompt
from protocols.rollout import Discarded
from tests.actors.actor_helpers import prompt, receive_all
from tests.training_run.supervision.scripted_actors import ScriptedActor
from training_run.groups.progress import LearnerProgress
from training_run.profile.schema import ActorSection
from training_run.supervision.lost_groups import MAX_NAMED, WHILE_DRAINING, Flow, LostGroups
from training_run.supervision.queues import Queue
from training_run.supervision.supervisor import temporary

LIMIT = 100.0


class Busy(ScriptedActor):
    """A built-in actor that works on a group, or does not."""

    working_on = 0


class Stage:
    """An actor that is inserted into a queue, with its custodian, as the test plays it."""

    def __init__(self, at: str = "prompts", *, run: Stage | None = None) -> None:
        """run: another actor of the same run."""
        self.now, self.findings, self.drains = 0.0, list[Finding](), 0
        self.before, self.behind = (
            Queue[Prompt]("before", capacity=50),
            Queue[Prompt | Discarded]("behind", capacity=50),
        )
        self.progress, self.draining, self.other = LearnerProgress(), False, Busy("scorer", [])
        own = LostGroups(limit_seconds=LIMIT, report=self.findings.append, end=self._end, clock=lambda: self.now)
        self.lost: LostGroups = run.lost if run else own
        self.source, self.inbox, self.outbox = self.before.outbox(), self.before.inbox(), self.behind.outbox()
        self.reader = self.behind.inbox()
        section = convert({"name": f"mine at {at}", "factory": "a:b", "mode": "insert", "at": at}, ActorSection)
        ends: Any = self.inbox, self.outbox
        self.returned = self.lost.watch(section, *ends)
        self.custodian = self.lost.custodians[-1]
        self.lost.flow = Flow(
            self.progress, [self.before, self.behind], [temporary(self.other)], is_draining=lambda: self.draining
        )

    def _end(self) -> None:
        self.drains += 1

    async def receive(self, *group_ids: int) -> None:
        """Let the actor receive groups."""
        for group_id in group_ids:
            await self.source.send(prompt(group_id))
            await self.inbox.receive()

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """Let the actor wait for its next message during the block; the custodian has seen the flow."""
        async with create_task_group() as tasks:
            tasks.start_soon(self.inbox.receive)
            await wait_all_tasks_blocked()
            assert not self.custodian.is_still()
            assert not self.custodian.is_still()
            yield
            tasks.cancel_scope.cancel()


async def test_groups_inside_an_actor_that_has_returned_are_lost() -> None:
    """They follow in its outbox as discarded groups. The run is at its end anyway, so that nothing is drained."""
    stage = Stage()
    await stage.receive(0, 1, 2)
    await stage.outbox.send(prompt(1))
    stage.outbox.close()
    stage.returned()
    await stage.custodian.run()
    sent = await receive_all(stage.reader)
    assert [type(message).__name__ for message in sent] == ["Prompt", "Discarded", "Discarded"]
    assert [(one.prompt.group_id, one.reason) for one in sent if isinstance(one, Discarded)] == [
        (0, "lost"),
        (2, "lost"),
    ]
    assert (stage.lost.count, stage.drains) == (2, 0)
    assert "mine at prompts (insert at prompts): groups 0, 2" in stage.findings[-1].fact


async def test_an_actor_that_sends_everything_on_loses_nothing() -> None:
    """A group that it sends on as discarded, too."""
    stage = Stage()
    await stage.receive(0, 1)
    await stage.outbox.send(prompt(0))
    await stage.outbox.send(Discarded(prompt=prompt(1), reason="invalid", detail=""))
    stage.returned()
    await stage.custodian.run()
    assert (stage.lost.count, stage.findings) == (0, [])


async def test_groups_inside_an_actor_are_lost_when_nothing_moves_for_the_limit() -> None:
    """The run then ends after the groups in flight."""
    stage = Stage()
    stage.now = began = 2 * LIMIT
    await stage.receive(7)
    async with stage.waiting():
        stage.now = began + LIMIT - 1
        assert not stage.custodian.is_still()
        stage.now = began + LIMIT
        assert stage.custodian.is_still()
        await stage.custodian._discard()
    (lost,) = [stage.reader.receive_nowait()]
    assert isinstance(lost, Discarded)
    assert (lost.prompt.group_id, stage.custodian.lost, stage.drains) == (7, [7], 1)


@pytest.mark.parametrize("what", ["a message", "a step", "an actor works", "an update"])
async def test_what_moves_begins_the_limit_anew(what: str) -> None:
    """And while an actor says that it works on a group, it does not begin."""
    stage = Stage()
    await stage.receive(7)
    async with stage.waiting():
        stage.now = LIMIT
        match what:
            case "a message":
                await stage.outbox.send(prompt(8))
            case "a step":
                stage.progress.step += 1
            case "an actor works":
                stage.other.working_on = 1
            case "an update":
                stage.progress.updating = True
        assert not stage.custodian.is_still()
        stage.now = 2 * LIMIT
        assert stage.custodian.is_still() == (what in ("a message", "a step"))


async def test_an_actor_that_does_not_wait_for_a_message_works() -> None:
    """However long it takes; a drain has a limit of its own."""
    stage = Stage()
    await stage.receive(7)
    for stage.now in (0.0, LIMIT, 2 * LIMIT):
        assert not stage.custodian.is_still()


async def test_while_the_run_drains_a_part_of_the_limit_suffices() -> None:
    """Because nobody waits for more groups."""
    stage = Stage()
    await stage.receive(7)
    async with stage.waiting():
        stage.now, stage.draining = LIMIT * WHILE_DRAINING, True
        assert stage.custodian.is_still()


async def test_an_actor_behind_one_that_holds_groups_waits_for_these() -> None:
    """A group inside the first actor is lost; the second one may need it to send its own on."""
    first = Stage("prompts")
    second = Stage("rollouts", run=first)
    await first.receive(7)
    await second.receive(6)
    async with second.waiting():
        first.now = LIMIT
        assert not second.custodian.is_still()


async def test_a_finding_names_a_bounded_number_of_groups() -> None:
    """And how many more there are."""
    stage = Stage()
    await stage.receive(*range(MAX_NAMED + 5))
    stage.returned()
    await stage.custodian.run()
    assert stage.findings[-1].fact.endswith("18, 19 and 5 more")
