"""Restarts: which children are restarted, how often, and what they keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from anyio import create_task_group, fail_after, wait_all_tasks_blocked

from protocols.queues import Inbox, Outbox
from tests.training_run.supervision.scripted_actors import RecordedSupervisor, ScriptedActor, ScriptedServer
from training_run.supervision.queues import Queue
from training_run.supervision.supervisor import Child, Restart, RestartCounter, RestartPolicy, permanent, transient


async def test_a_transient_child_is_restarted_after_a_failure_only() -> None:
    """A return is a success."""
    actor = ScriptedActor("actor", [])
    recorded = RecordedSupervisor(transient(actor, RestartPolicy(max_restarts=3)))
    with fail_after(5):
        async with create_task_group() as group:
            group.start_soon(recorded.run)
            for _ in range(2):
                await wait_all_tasks_blocked()
                actor.fail()
            await wait_all_tasks_blocked()
            status = recorded.supervisor.status()["actor"]
            assert (status.state, status.restarts, status.error) == ("running", 2, "ValueError: failed by the test")
            actor.finish()
    assert (recorded.ending, actor.starts) == ("finished", 3)
    assert recorded.reported_failures() == ["actor: failed by the test"] * 2


async def test_a_permanent_child_is_restarted_after_a_return() -> None:
    """It has to serve until the run ends."""
    server, actor = ScriptedActor("server", []), ScriptedActor("actor", [])
    recorded = RecordedSupervisor(permanent(server, RestartPolicy(max_restarts=1)), transient(actor))
    async with recorded.running():
        server.finish()
        await wait_all_tasks_blocked()
        assert (server.starts, recorded.states()["server"]) == (2, "running")
        server.finish()
    assert str(recorded.error) == (
        "actor 'server' failed: RuntimeError: returned, but it must run as long as the run goes on"
    )


async def test_a_failure_after_max_restarts_ends_the_run() -> None:
    """Two restarts are allowed. The third failure is raised with the last error as its cause."""
    actor = ScriptedActor("actor", [])
    recorded = RecordedSupervisor(transient(actor, RestartPolicy(max_restarts=2)))
    last = KeyError("the third")
    with fail_after(5):
        async with create_task_group() as group:
            group.start_soon(recorded.run)
            for error in (ValueError("the first"), ValueError("the second"), last):
                await wait_all_tasks_blocked()
                actor.fail(error)
    assert recorded.error is not None
    assert recorded.error.__cause__ is last
    assert (actor.starts, len(recorded.failures)) == (3, 2)


async def test_a_restarted_child_repeats_its_handshake() -> None:
    """Its state is `restarting` until then. The children after it continue."""
    server, actor = ScriptedServer("server", []), ScriptedActor("actor", [])
    server.ready_allowed.set()
    recorded = RecordedSupervisor(permanent(server, RestartPolicy(max_restarts=1)), transient(actor))
    async with recorded.running():
        server.ready_allowed = type(server.ready_allowed)()
        server.fail()
        await wait_all_tasks_blocked()
        assert recorded.states() == {"server": "restarting", "actor": "running"}
        server.ready_allowed.set()
        await wait_all_tasks_blocked()
        assert recorded.states()["server"] == "running"
        actor.finish()


class _SquaringActor:
    """Squares numbers, and fails once, at the number 2."""

    name = "square"

    def __init__(self, inbox: Callable[[], Inbox[int]], outbox: Callable[[], Outbox[int]]) -> None:
        self._inbox, self._outbox = inbox, outbox

    async def run(self) -> None:
        async with self._inbox() as inbox, self._outbox() as outbox:
            async for number in inbox:
                if number == 2:
                    raise ValueError("two")
                await outbox.send(number**2)


async def test_held_ends_keep_queues_open_during_a_restart() -> None:
    """A failed actor closes its ends. Held ends keep its neighbours running and are closed when the child ends."""
    numbers: Queue[int] = Queue("numbers", capacity=4)
    squares: Queue[int] = Queue("squares", capacity=4)
    source, result = numbers.outbox(), squares.inbox()
    child = Child(
        actor=_SquaringActor(numbers.inbox, squares.outbox),
        restart=Restart.TRANSIENT,
        policy=RestartPolicy(max_restarts=1),
        held_ends=(numbers.inbox(), squares.outbox()),
    )
    recorded = RecordedSupervisor(child)
    with fail_after(5):
        async with create_task_group() as group:
            group.start_soon(recorded.run)
            for number in (1, 2, 3):
                await source.send(number)
            source.close()
            assert [square async for square in result] == [1, 9]
    assert (recorded.ending, recorded.reported_failures()) == ("finished", ["square: two"])


def test_a_stable_period_resets_the_count_of_restarts() -> None:
    """At most `max_restarts` in a row. The delay doubles up to its maximum."""
    policy = RestartPolicy(max_restarts=4, stable_seconds=60.0, first_pause_seconds=0.5, longest_pause_seconds=2.0)
    counter = RestartCounter(policy)
    assert [counter.next_pause(ran) for ran in (1.0, 1.0, 1.0, 1.0, 59.0)] == [0.5, 1.0, 2.0, 2.0, None]
    assert [counter.next_pause(ran) for ran in (60.0, 1.0)] == [0.5, 1.0]
    assert RestartCounter(RestartPolicy()).next_pause(3600.0) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"restart": Restart.TEMPORARY, "policy": RestartPolicy(max_restarts=1)},
        {"restart": Restart.TRANSIENT, "ends_with_input": True},
    ],
)
def test_contradictory_children_are_refused(fields: dict[str, Any]) -> None:
    """A temporary child is not restarted. Only a temporary child may end with its input."""
    with pytest.raises(ValueError, match="'actor'"):
        Child(actor=ScriptedActor("actor", []), **fields)
