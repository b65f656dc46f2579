"""Supervision: order of start and stop, endings, and whose failure ends the run."""

from __future__ import annotations

import asyncio

from anyio import create_task_group, fail_after, wait_all_tasks_blocked

from clotho.runtime.supervisor import permanent, temporary, transient
from protocols.errors import ActorError, ServerError
from tests.runtime.scene import Ready, Scene, Script


async def test_children_start_in_order_and_stop_in_reverse() -> None:
    """The last to come leans on the first, so it goes first."""
    diary: list[str] = []
    first, box, last = Script("first", diary), Script("box", diary), Script("last", diary)
    scene = Scene(permanent(first), transient(box), permanent(last))
    with fail_after(5):
        async with create_task_group() as group:
            group.start_soon(scene.run)
            await wait_all_tasks_blocked()
            box.returns()
    assert diary == ["start first", "start box", "start last", "stop box", "stop last", "stop first"]
    assert (scene.ending, scene.error) == ("finished", None)
    assert scene.states() == {"first": "stopped", "box": "done", "last": "stopped"}


async def test_a_child_with_a_handshake_holds_back_those_after_it() -> None:
    """Readiness is said, not guessed."""
    diary: list[str] = []
    gateway, box = Ready("gateway", diary), Script("box", diary)
    scene = Scene(permanent(gateway), transient(box))
    with fail_after(5):
        async with create_task_group() as group:
            group.start_soon(scene.run)
            await wait_all_tasks_blocked()
            assert diary == ["start gateway"]
            assert scene.states() == {"gateway": "starting", "box": "waiting"}
            gateway.may_be_ready.set()
            await wait_all_tasks_blocked()
            assert diary[1:] == ["ready gateway", "start box"]
            box.returns()
    assert scene.ending == "finished"


async def test_a_failure_before_the_handshake_ends_the_run_without_starting_the_rest() -> None:
    """Nothing is built on what did not come up; the exit status is the error's own."""
    diary: list[str] = []

    class PortTaken(Ready):
        async def run(self, *, task_status: object = None) -> None:
            raise ServerError("port 8000 is in use: choose another with --server.port")

    scene = Scene(permanent(PortTaken("gateway", diary)), transient(Script("box", diary)))
    with fail_after(5):
        await scene.run()
    assert isinstance(scene.error, ActorError)
    assert str(scene.error) == "actor 'gateway' failed: port 8000 is in use: choose another with --server.port"
    assert scene.error.exit_status == 2
    assert diary == []
    assert scene.states() == {"gateway": "failed", "box": "waiting"}


async def test_a_failure_while_another_child_is_starting_ends_the_run() -> None:
    """NullSampleLog waits for a handshake in a run that is over."""
    diary: list[str] = []
    box, gateway = Script("box", diary), Ready("gateway", diary)
    scene = Scene(transient(box), permanent(gateway), transient(Script("last", diary)))
    with fail_after(5):
        async with create_task_group() as group:
            group.start_soon(scene.run)
            await wait_all_tasks_blocked()
            box.fails()
    assert str(scene.error) == "actor 'box' failed: ValueError: as told"
    assert diary == ["start box", "start gateway", "stop box", "stop gateway"]


async def test_a_failure_ends_the_run_with_the_name_of_the_actor_and_the_cause_chained() -> None:
    """The caller gets the one culprit, out of every exception group; everybody else is stopped in reverse."""
    diary: list[str] = []
    before, box, after = Script("before", diary), Script("box", diary), Script("after", diary)
    scene = Scene(transient(before), transient(box), transient(after))
    cause = ZeroDivisionError("a zero")
    with fail_after(5):
        async with create_task_group() as group:
            group.start_soon(scene.run)
            await wait_all_tasks_blocked()
            box.fails(ExceptionGroup("unhandled", [ExceptionGroup("inner", [cause])]))
    assert isinstance(scene.error, ActorError)
    assert str(scene.error) == "actor 'box' failed: ZeroDivisionError: a zero"
    assert scene.error.__cause__ is cause
    assert scene.error.exit_status == 1
    assert diary[-3:] == ["stop box", "stop after", "stop before"]
    assert scene.supervisor.status()["box"].error == "ZeroDivisionError: a zero"


async def test_a_stray_cancellation_is_a_failure() -> None:
    """An actor that awaits something cancelled elsewhere must not vanish in silence."""
    foreign: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    foreign.cancel()

    class Box(Script):
        async def run(self) -> None:
            await foreign

    scene = Scene(transient(Box("box", [])))
    with fail_after(5):
        await scene.run()
    assert "actor 'box' failed" in str(scene.error)
    assert "the actor was not" in str(scene.error)


async def test_the_failure_of_a_temporary_child_is_reported_and_forgiven() -> None:
    """A broken terminal never stops training, and is never restarted."""
    diary: list[str] = []
    monitor, box = Script("monitor", diary), Script("box", diary)
    scene = Scene(temporary(monitor), transient(box))
    with fail_after(5):
        async with create_task_group() as group:
            group.start_soon(scene.run)
            await wait_all_tasks_blocked()
            monitor.fails()
            await wait_all_tasks_blocked()
            assert scene.states() == {"monitor": "failed", "box": "running"}
            assert scene.reported() == ["monitor: as told"]
            box.returns()
    assert (scene.ending, monitor.lives) == ("finished", 1)


async def test_the_run_lasts_until_every_transient_child_has_returned() -> None:
    """Temporary and permanent children neither prolong nor shorten it."""
    diary: list[str] = []
    first, second, monitor = Script("first", diary), Script("second", diary), Script("monitor", diary)
    scene = Scene(transient(first), temporary(monitor), transient(second))
    with fail_after(5):
        async with create_task_group() as group:
            group.start_soon(scene.run)
            await wait_all_tasks_blocked()
            monitor.returns()
            second.returns()
            await wait_all_tasks_blocked()
            assert scene.ending is None
            first.returns()
    assert scene.ending == "finished"


async def test_drain_ends_the_source_once_and_lets_everything_finish() -> None:
    """Asked twice it drains once; nothing is cancelled."""
    diary: list[str] = []
    box = Script("box", diary)
    scene = Scene(transient(box))
    with fail_after(5):
        async with create_task_group() as group:
            group.start_soon(scene.run)
            await wait_all_tasks_blocked()
            scene.supervisor.drain()
            scene.supervisor.drain()
            await wait_all_tasks_blocked()
            assert (scene.drains, scene.states()) == (1, {"box": "running"})
            box.returns()
    assert (scene.ending, scene.states()) == ("drained", {"box": "done"})


async def test_stop_cancels_everybody_at_once() -> None:
    """Also while a child is still starting, and after a drain that takes too long."""
    diary: list[str] = []
    scene = Scene(transient(Script("box", diary)), permanent(Ready("gateway", diary)), transient(Script("last", diary)))
    with fail_after(5):
        async with create_task_group() as group:
            group.start_soon(scene.run)
            await wait_all_tasks_blocked()
            scene.supervisor.drain()
            scene.supervisor.stop()
    assert (scene.ending, scene.failures) == ("stopped", [])
    assert scene.states() == {"box": "stopped", "gateway": "stopped", "last": "waiting"}


async def test_a_stop_before_the_start_starts_nothing() -> None:
    """A signal may come first."""
    diary: list[str] = []
    scene = Scene(transient(Script("box", diary)))
    scene.supervisor.stop()
    with fail_after(5):
        await scene.run()
    assert (scene.ending, diary) == ("stopped", [])


async def test_cancelling_the_supervisor_stops_its_children() -> None:
    """Structured: nothing outlives the scope in which it ran."""
    diary: list[str] = []
    scene = Scene(transient(Script("box", diary)), permanent(Script("gateway", diary)))
    with fail_after(5):
        async with create_task_group() as group:
            group.start_soon(scene.run)
            await wait_all_tasks_blocked()
            group.cancel_scope.cancel()
    assert scene.ending is None
    assert sorted(diary[2:]) == ["stop box", "stop gateway"]


async def test_two_children_of_one_name_are_refused() -> None:
    """Errors and /health name children."""
    scene = Scene(transient(Script("box", [])), transient(Script("box", [])))
    await scene.run()
    assert isinstance(scene.error, ValueError)


async def test_a_supervisor_runs_once() -> None:
    """A second call is an error."""
    scene = Scene(transient(Script("box", [])))
    scene.supervisor.stop()
    await scene.run()
    await scene.run()
    assert isinstance(scene.error, RuntimeError)
