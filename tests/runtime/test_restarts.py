"""Restarts: who gets another life, how often, and what it takes along."""

from __future__ import annotations

from anyio import create_task_group, fail_after, wait_all_tasks_blocked

from clotho.runtime.actor import Actor
from clotho.runtime.child import permanent, transient
from clotho.runtime.queues import Queue
from tests.runtime.scene import Ready, Scene, Script


async def test_a_transient_child_is_restarted_when_it_fails_and_not_when_it_returns() -> None:
    """Success is to return."""
    box = Script("box", [])
    scene = Scene(transient(box, max_restarts=3))
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
    scene = Scene(permanent(server, max_restarts=1), transient(box))
    with fail_after(5):
        async with create_task_group() as group:
            group.start_soon(scene.run)
            await wait_all_tasks_blocked()
            server.returns()
            await wait_all_tasks_blocked()
            assert (server.lives, scene.states()["server"]) == (2, "running")
            server.returns()
    assert str(scene.error) == (
        "actor 'server' failed: RuntimeError: returned, but it must serve as long as the run goes on"
    )


async def test_one_failure_more_than_the_intensity_rises() -> None:
    """Two restarts are forgiven; the third failure ends the run, caused by the last error."""
    box = Script("box", [])
    scene = Scene(transient(box, max_restarts=2, within_seconds=3600))
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


async def test_a_child_restarted_by_its_factory_is_a_fresh_instance() -> None:
    """State of the failed one is gone; an error of the factory is a failure like any other."""
    made: list[Script] = []

    def make() -> Script:
        if len(made) == 2:
            raise OSError("no more")
        made.append(Script("box", []))
        return made[-1]

    first = Script("box", [])
    first.fails()
    scene = Scene(transient(first, max_restarts=4, make=make))
    with fail_after(5):
        async with create_task_group() as group:
            group.start_soon(scene.run)
            for index in range(2):
                await wait_all_tasks_blocked()
                made[index].fails()
    assert [script.lives for script in (first, *made)] == [1, 1, 1]
    assert str(scene.error) == "actor 'box' failed: OSError: no more"
    assert scene.reported() == ["box: as told"] * 3 + ["box: no more"]


async def test_a_restarted_child_shakes_hands_again() -> None:
    """Until it is ready it is shown as restarting; the children after it go on."""
    gateway, box = Ready("gateway", []), Script("box", [])
    gateway.may_be_ready.set()
    scene = Scene(permanent(gateway, max_restarts=1), transient(box))
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


class _Square(Actor[int, int]):
    async def handle(self, message: int) -> int:
        if message == 2:
            raise ValueError("two")
        return message**2


async def test_kept_ends_carry_the_mailboxes_over_a_restart() -> None:
    """A failed actor closes its ends; the spare ones keep its neighbours going, and close with its last life."""
    numbers: Queue[int] = Queue("numbers", capacity=4)
    squares: Queue[int] = Queue("squares", capacity=4)
    source, result = numbers.writer(), squares.reader()

    def make() -> _Square:
        return _Square("square", numbers.reader(), squares.writer())

    child = transient(make(), max_restarts=1, make=make, keeps=(numbers.reader(), squares.writer()))
    scene = Scene(child)
    with fail_after(5):
        async with create_task_group() as group:
            group.start_soon(scene.run)
            for number in (1, 2, 3):
                await source.send(number)
            source.close()
            assert [square async for square in result] == [1, 9]
    assert (scene.ending, scene.reported()) == ("finished", ["square: two"])
