"""Supervision: start and stop order, handshakes, endings, and failures."""

from __future__ import annotations

import asyncio
from functools import partial

from anyio import create_task_group, fail_after, wait_all_tasks_blocked
from msgspec.structs import replace

from protocols.errors import ActorError, ServerError
from tests.training_run.supervision.scripted_actors import RecordedSupervisor, ScriptedActor, ScriptedServer
from training_run.supervision.supervisor import permanent, temporary, transient


async def test_children_start_in_order_and_stop_in_reverse() -> None:
    """Later children use earlier ones."""
    events: list[str] = []
    first, actor, last = ScriptedActor("first", events), ScriptedActor("actor", events), ScriptedActor("last", events)
    recorded = RecordedSupervisor(permanent(first), transient(actor), permanent(last))
    async with recorded.running():
        actor.finish()
    assert events == ["start first", "start actor", "start last", "stop actor", "stop last", "stop first"]
    assert (recorded.ending, recorded.error) == ("finished", None)
    assert recorded.states() == {"first": "stopped", "actor": "done", "last": "stopped"}


async def test_a_child_with_a_handshake_delays_the_children_after_it() -> None:
    """They start when it reports readiness."""
    events: list[str] = []
    server, actor = ScriptedServer("server", events), ScriptedActor("actor", events)
    recorded = RecordedSupervisor(permanent(server), transient(actor))
    async with recorded.running():
        assert events == ["start server"]
        assert recorded.states() == {"server": "starting", "actor": "waiting"}
        server.ready_allowed.set()
        await wait_all_tasks_blocked()
        assert events[1:] == ["ready server", "start actor"]
        actor.finish()
    assert recorded.ending == "finished"


async def test_a_failure_before_the_handshake_ends_the_run() -> None:
    """The children after it never start. The exit status is that of the error."""
    events: list[str] = []

    class PortTaken(ScriptedServer):
        async def run(self, *, task_status: object = None) -> None:
            raise ServerError("port 8000 is in use: choose another with --server.port")

    recorded = RecordedSupervisor(permanent(PortTaken("server", events)), transient(ScriptedActor("actor", events)))
    with fail_after(5):
        await recorded.run()
    assert isinstance(recorded.error, ActorError)
    assert str(recorded.error) == "actor 'server' failed: port 8000 is in use: choose another with --server.port"
    assert recorded.error.exit_status == 2
    assert events == []
    assert recorded.states() == {"server": "failed", "actor": "waiting"}


async def test_a_failure_ends_a_run_that_waits_for_a_handshake() -> None:
    """The wait is cancelled."""
    events: list[str] = []
    actor, server = ScriptedActor("actor", events), ScriptedServer("server", events)
    recorded = RecordedSupervisor(transient(actor), permanent(server), transient(ScriptedActor("last", events)))
    async with recorded.running():
        actor.fail()
    assert str(recorded.error) == "actor 'actor' failed: ValueError: failed by the test"
    assert events == ["start actor", "start server", "stop actor", "stop server"]


async def test_a_failure_ends_the_run_with_the_name_of_the_actor() -> None:
    """The error is raised without an exception group and with its cause. The other children stop in reverse order."""
    events: list[str] = []
    before, actor, after = (
        ScriptedActor("before", events),
        ScriptedActor("actor", events),
        ScriptedActor("after", events),
    )
    recorded = RecordedSupervisor(transient(before), transient(actor), transient(after))
    cause = ZeroDivisionError("a zero")
    async with recorded.running():
        actor.fail(ExceptionGroup("unhandled", [ExceptionGroup("inner", [cause])]))
    assert isinstance(recorded.error, ActorError)
    assert str(recorded.error) == "actor 'actor' failed: ZeroDivisionError: a zero"
    assert recorded.error.__cause__ is cause
    assert recorded.error.exit_status == 1
    assert events[-3:] == ["stop actor", "stop after", "stop before"]
    assert recorded.supervisor.status()["actor"].error == "ZeroDivisionError: a zero"


class SilentError(Exception):
    """An exception whose str() fails."""

    def __str__(self) -> str:
        raise ValueError("no text")


async def test_a_failure_without_text_ends_the_run_with_the_name_of_the_actor() -> None:
    """`str()` of the exception fails; the class is named."""
    actor = ScriptedActor("learner", [])
    recorded = RecordedSupervisor(transient(actor))
    actor.fail(SilentError())
    with fail_after(5):
        await recorded.run()
    assert isinstance(recorded.error, ActorError)
    assert isinstance(recorded.error.__cause__, SilentError)
    assert "'learner' failed: SilentError" in str(recorded.error)
    assert recorded.states() == {"learner": "failed"}


async def test_a_cancellation_from_elsewhere_is_a_failure() -> None:
    """An actor that awaits a cancelled future must not end silently."""
    foreign: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    foreign.cancel()

    class StubActor(ScriptedActor):
        async def run(self) -> None:
            await foreign

    recorded = RecordedSupervisor(transient(StubActor("actor", [])))
    with fail_after(5):
        await recorded.run()
    assert "actor 'actor' failed" in str(recorded.error)
    assert "the actor was not" in str(recorded.error)


async def test_the_failure_of_a_temporary_child_is_only_reported() -> None:
    """Training continues. The child is not restarted."""
    events: list[str] = []
    monitor, actor = ScriptedActor("monitor", events), ScriptedActor("actor", events)
    recorded = RecordedSupervisor(temporary(monitor), transient(actor))
    async with recorded.running():
        monitor.fail()
        await wait_all_tasks_blocked()
        assert recorded.states() == {"monitor": "failed", "actor": "running"}
        assert recorded.reported_failures() == ["monitor: failed by the test"]
        actor.finish()
    assert (recorded.ending, monitor.starts) == ("finished", 1)


async def test_the_run_lasts_until_every_transient_child_has_returned() -> None:
    """Temporary and permanent children do not extend or end it."""
    events: list[str] = []
    first, second, monitor = (
        ScriptedActor("first", events),
        ScriptedActor("second", events),
        ScriptedActor("monitor", events),
    )
    recorded = RecordedSupervisor(transient(first), temporary(monitor), transient(second))
    async with recorded.running():
        monitor.finish()
        second.finish()
        await wait_all_tasks_blocked()
        assert recorded.ending is None
        first.finish()
    assert recorded.ending == "finished"


async def test_a_drain_ends_the_source_once_and_lets_all_children_finish() -> None:
    """A second drain has no effect. No child is cancelled."""
    events: list[str] = []
    actor = ScriptedActor("actor", events)
    recorded = RecordedSupervisor(transient(actor))
    async with recorded.running():
        recorded.supervisor.drain()
        recorded.supervisor.drain()
        await wait_all_tasks_blocked()
        assert (recorded.drains, recorded.states()) == (1, {"actor": "running"})
        actor.finish()
    assert (recorded.ending, recorded.states()) == ("drained", {"actor": "done"})


async def test_a_stop_cancels_all_children_at_once() -> None:
    """Also during the start of a child, and during a drain."""
    events: list[str] = []
    recorded = RecordedSupervisor(
        transient(ScriptedActor("actor", events)),
        permanent(ScriptedServer("server", events)),
        transient(ScriptedActor("last", events)),
    )
    async with recorded.running():
        recorded.supervisor.drain()
        recorded.supervisor.stop()
    assert (recorded.ending, recorded.failures) == ("stopped", [])
    assert recorded.states() == {"actor": "stopped", "server": "stopped", "last": "waiting"}


async def test_a_stop_before_the_start_starts_no_child() -> None:
    """A signal may arrive before the start."""
    events: list[str] = []
    recorded = RecordedSupervisor(transient(ScriptedActor("actor", events)))
    recorded.supervisor.stop()
    with fail_after(5):
        await recorded.run()
    assert (recorded.ending, events) == ("stopped", [])


async def test_a_cancelled_supervisor_stops_its_children() -> None:
    """No child outlives the scope of the supervisor."""
    events: list[str] = []
    recorded = RecordedSupervisor(transient(ScriptedActor("actor", events)), permanent(ScriptedActor("server", events)))
    with fail_after(5):
        async with create_task_group() as group:
            group.start_soon(recorded.run)
            await wait_all_tasks_blocked()
            group.cancel_scope.cancel()
    assert recorded.ending is None
    assert sorted(events[2:]) == ["stop actor", "stop server"]


async def test_two_children_of_the_same_name_are_refused() -> None:
    """Errors and /health identify children by name."""
    recorded = RecordedSupervisor(transient(ScriptedActor("actor", [])), transient(ScriptedActor("actor", [])))
    await recorded.run()
    assert isinstance(recorded.error, ValueError)


async def test_a_supervisor_runs_only_once() -> None:
    """A second call raises an error."""
    recorded = RecordedSupervisor(transient(ScriptedActor("actor", [])))
    recorded.supervisor.stop()
    await recorded.run()
    await recorded.run()
    assert isinstance(recorded.error, RuntimeError)


async def test_a_run_goes_on_without_abandoned_children() -> None:
    """It ends when the other transient children have returned."""
    events: list[str] = []
    actor, stuck = ScriptedActor("actor", events), ScriptedActor("stuck", events)
    recorded = RecordedSupervisor(transient(actor), transient(stuck))
    async with recorded.running():
        recorded.supervisor.abandon(["stuck"])
        await wait_all_tasks_blocked()
        assert recorded.states() == {"actor": "running", "stuck": "stopped"}
        actor.finish()
    assert (recorded.ending, recorded.error) == ("finished", None)


async def test_the_return_of_a_child_is_told() -> None:
    """Not its failure, and not its end by cancellation."""
    events: list[str] = []
    actors = [ScriptedActor(name, events) for name in ("returns", "stopped", "fails")]
    returned: list[str] = []
    children = [replace(transient(actor), on_return=partial(returned.append, actor.name)) for actor in actors]
    recorded = RecordedSupervisor(*children)
    async with recorded.running():
        actors[0].finish()
        await wait_all_tasks_blocked()
        actors[2].fail()
    assert returned == ["returns"]
