"""Restarts: who gets another life, how often, and what it takes along."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from anyio import create_task_group, fail_after, wait_all_tasks_blocked

from clotho.runtime.queues import Queue
from clotho.runtime.supervisor import Child, Restart, RestartCounter, RestartPolicy, permanent, transient
from protocols.queues import Inbox, Outbox
from tests.runtime.scene import Ready, Scene, Script


async def test_a_transient_child_is_restarted_when_it_fails_and_not_when_it_returns() -> None:
    """Success is to return."""
    box = Script("box", [])
    scene = Scene(transient(box, RestartPolicy(max_restarts=3)))
    with fail_after(5):
        async with create_task_group() as group:
            group.start_soon(scene.run)
            for _ in range(2):
                await wait_all_tasks_blocked()
                box.fails()
            await wait_all_tasks_blocked()
            status = scene.supervisor.status()["box"]
            assert (status.state, status.restarts, status.error) == ("running", 2, "ValueError: as told")
            box.returns()
    assert (scene.ending, box.lives) == ("finished", 3)
    assert scene.reported() == ["box: as told"] * 2


async def test_a_permanent_child_is_restarted_also_when_it_returns() -> None:
    """While the run goes on it must serve."""
    server, box = Script("server", []), Script("box", [])
    scene = Scene(permanent(server, RestartPolicy(max_restarts=1)), transient(box))
    with fail_after(5):
        async with create_task_group() as group:
            group.start_soon(scene.run)
            await wait_all_tasks_blocked()
            server.returns()
            await wait_all_tasks_blocked()
            assert (server.lives, scene.states()["server"]) == (2, "running")
            server.returns()
    assert str(scene.error) == (
        "actor 'server' failed: RuntimeError: returned, but it must run as long as the run goes on"
    )


async def test_one_failure_more_than_the_intensity_rises() -> None:
    """Two restarts are forgiven; the third failure ends the run, caused by the last error."""
    box = Script("box", [])
    scene = Scene(transient(box, RestartPolicy(max_restarts=2)))
    last = KeyError("the third")
    with fail_after(5):
        async with create_task_group() as group:
            group.start_soon(scene.run)
            for error in (ValueError("the first"), ValueError("the second"), last):
                await wait_all_tasks_blocked()
                box.fails(error)
    assert scene.error is not None
    assert scene.error.__cause__ is last
    assert (box.lives, len(scene.failures)) == (3, 2)


async def test_a_restarted_child_shakes_hands_again() -> None:
    """Until it is ready it is shown as restarting; the children after it go on."""
    gateway, box = Ready("gateway", []), Script("box", [])
    gateway.may_be_ready.set()
    scene = Scene(permanent(gateway, RestartPolicy(max_restarts=1)), transient(box))
    with fail_after(5):
        async with create_task_group() as group:
            group.start_soon(scene.run)
            await wait_all_tasks_blocked()
            gateway.may_be_ready = type(gateway.may_be_ready)()
            gateway.fails()
            await wait_all_tasks_blocked()
            assert scene.states() == {"gateway": "restarting", "box": "running"}
            gateway.may_be_ready.set()
            await wait_all_tasks_blocked()
            assert scene.states()["gateway"] == "running"
            box.returns()


class _Square:
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


async def test_held_ends_keep_the_queues_open_during_a_restart() -> None:
    """A failed actor closes its ends; the held ends keep its neighbours running, and are closed at its end."""
    numbers: Queue[int] = Queue("numbers", capacity=4)
    squares: Queue[int] = Queue("squares", capacity=4)
    source, result = numbers.outbox(), squares.inbox()
    child = Child(
        actor=_Square(numbers.inbox, squares.outbox),
        restart=Restart.TRANSIENT,
        policy=RestartPolicy(max_restarts=1),
        held_ends=(numbers.inbox(), squares.outbox()),
    )
    scene = Scene(child)
    with fail_after(5):
        async with create_task_group() as group:
            group.start_soon(scene.run)
            for number in (1, 2, 3):
                await source.send(number)
            source.close()
            assert [square async for square in result] == [1, 9]
    assert (scene.ending, scene.reported()) == ("finished", ["square: two"])


def test_a_stable_run_resets_the_count_of_restarts() -> None:
    """At most `max_restarts` in a row; pauses double up to the longest."""
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
    """A temporary child is never restarted; only a temporary one ends with its input."""
    with pytest.raises(ValueError, match="'box'"):
        Child(actor=Script("box", []), **fields)
