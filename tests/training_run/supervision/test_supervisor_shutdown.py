"""The end of a supervised run: clean-ups, the grace period, and failures during the shutdown."""

from __future__ import annotations

import anyio
import pytest
from anyio import CancelScope, create_task_group, fail_after, sleep_forever, wait_all_tasks_blocked

from protocols.errors import ActorError
from protocols.queues import Inbox, Outbox, QueueClosed
from tests.training_run.supervision.scripted_actors import RecordedSupervisor, ScriptedActor
from training_run.supervision.queues import Queue
from training_run.supervision.supervisor import RestartPolicy, Supervisor, permanent, temporary, transient


class _ShieldedCleanUp(ScriptedActor):
    """An actor with a clean-up that it shields from cancellation."""

    def __init__(self, name: str, events: list[str]) -> None:
        super().__init__(name, events)
        self.tidied = anyio.Event()

    async def run(self) -> None:
        try:
            await sleep_forever()
        finally:
            with CancelScope(shield=True):
                self.events.append(f"tidy {self.name}")
                await self.tidied.wait()
            self.events.append(f"stop {self.name}")


class _FailingCleanUp(ScriptedActor):
    """An actor that fails in its clean-up."""

    async def run(self) -> None:
        self.starts += 1
        try:
            await sleep_forever()
        finally:
            raise OSError("disk full")


class _Producer(ScriptedActor):
    """Sends three messages and returns."""

    def __init__(self, name: str, outbox: Outbox[str]) -> None:
        super().__init__(name, [])
        self._outbox = outbox

    async def run(self) -> None:
        async with self._outbox:
            for word in ("first", "second", "last"):
                await self._outbox.send(word)


class _Consumer(ScriptedActor):
    """Reads to the end of its input, and writes each message down when it may."""

    def __init__(self, name: str, inbox: Inbox[str]) -> None:
        super().__init__(name, [])
        self.may_write = anyio.Event()
        self._inbox = inbox

    async def run(self) -> None:
        async with self._inbox:
            async for word in self._inbox:
                await self.may_write.wait()
                self.events.append(word)


def _producer_and_consumer() -> tuple[_Producer, _Consumer]:
    queue: Queue[str] = Queue("words", capacity=3)
    return _Producer("speaking", queue.outbox()), _Consumer("writing", queue.inbox())


async def test_sent_messages_are_processed_before_the_run_ends() -> None:
    """A slow consumer loses nothing. The actors after it are stopped later."""
    speaking, writing = _producer_and_consumer()
    recorded = RecordedSupervisor(
        permanent(ScriptedActor("disk", [])), temporary(writing, ends_with_input=True), transient(speaking)
    )
    async with recorded.running():
        assert recorded.states() == {"disk": "running", "writing": "running", "speaking": "done"}
        assert writing.events == []
        writing.may_write.set()
    assert writing.events == ["first", "second", "last"]
    assert (recorded.ending, recorded.failures) == ("finished", [])
    assert recorded.states() == {"disk": "stopped", "writing": "done", "speaking": "done"}


async def test_a_consumer_that_does_not_reach_the_end_of_its_input_is_cancelled_and_reported() -> None:
    """The run always ends, and the report names the consumer."""
    speaking, writing = _producer_and_consumer()
    recorded = RecordedSupervisor(temporary(writing, ends_with_input=True), transient(speaking), grace_seconds=0.02)
    with fail_after(5):
        await recorded.run()
    assert (recorded.ending, recorded.states()) == ("finished", {"writing": "stopped", "speaking": "done"})
    assert recorded.reported_failures() == [
        "writing: did not finish reading its inbox within 0.02 s after the other actors had ended"
    ]


async def test_a_stop_cancels_consumers_at_once() -> None:
    """The ending of the run does not change."""
    speaking, writing = _producer_and_consumer()
    recorded = RecordedSupervisor(temporary(writing, ends_with_input=True), transient(speaking), grace_seconds=60)
    async with recorded.running():
        recorded.supervisor.stop()
    assert (recorded.ending, recorded.failures, writing.events) == ("finished", [], [])


async def test_a_temporary_child_without_input_is_not_waited_for() -> None:
    """It is cancelled when the other children have returned."""
    actor = ScriptedActor("actor", [])
    actor.finish()
    recorded = RecordedSupervisor(temporary(ScriptedActor("free", [])), transient(actor), grace_seconds=60)
    with fail_after(5):
        await recorded.run()
    assert recorded.states() == {"free": "stopped", "actor": "done"}


async def test_a_clean_up_completes_before_the_previous_child_is_stopped() -> None:
    """Children stop one after the other in reverse order, so that a clean-up can use earlier children."""
    events: list[str] = []
    actor, disk, files = (
        ScriptedActor("actor", events),
        ScriptedActor("disk", events),
        _ShieldedCleanUp("files", events),
    )
    recorded = RecordedSupervisor(transient(actor), permanent(disk), permanent(files))
    async with recorded.running():
        actor.finish()
        await wait_all_tasks_blocked()
        assert events[-1] == "tidy files"
        assert recorded.states()["disk"] == "running"
        files.tidied.set()
    assert events[-3:] == ["tidy files", "stop files", "stop disk"]
    assert recorded.failures == []


async def test_a_clean_up_beyond_the_grace_period_is_cancelled_and_reported() -> None:
    """The run always ends."""
    events: list[str] = []
    recorded = RecordedSupervisor(permanent(_ShieldedCleanUp("files", events)), grace_seconds=0.02)
    async with recorded.running():
        recorded.supervisor.stop()
    assert (recorded.ending, events) == ("stopped", ["tidy files"])
    assert recorded.reported_failures() == ["files: its clean-up was cut off after 0.02 s"]


async def test_a_failure_during_the_shutdown_is_a_note_on_the_first_failure() -> None:
    """The first failure is raised. No failure is lost."""
    actor, files = ScriptedActor("actor", []), _FailingCleanUp("files", [])
    recorded = RecordedSupervisor(permanent(files, RestartPolicy(max_restarts=3)), transient(actor))
    async with recorded.running():
        actor.fail()
    assert str(recorded.error) == "actor 'actor' failed: ValueError: failed by the test"
    assert getattr(recorded.error, "__notes__", []) == [
        "while the run was ending, actor 'files' failed too: OSError: disk full"
    ]
    assert (recorded.reported_failures(), files.starts) == (["files: disk full"], 1)


async def test_a_producer_whose_reader_was_stopped_has_not_failed() -> None:
    """Consumers stop first in reverse order. QueueClosed in their producers is not reported."""
    queue: Queue[int] = Queue("numbers", capacity=1)
    inbox, outbox = queue.inbox(), queue.outbox()

    class Producer(ScriptedActor):
        async def run(self) -> None:
            async with outbox:
                with CancelScope(shield=True):
                    while True:
                        await outbox.send(1)

    class Consumer(ScriptedActor):
        async def run(self) -> None:
            async with inbox:
                await inbox.receive()
                await super().run()

    consumer = Consumer("consumer", [])
    recorded = RecordedSupervisor(
        transient(Producer("producer", [])), transient(consumer), transient(actor := ScriptedActor("actor", []))
    )
    async with recorded.running():
        actor.fail()
    assert recorded.states() == {"producer": "stopped", "consumer": "stopped", "actor": "failed"}
    assert recorded.failures == []
    with pytest.raises(QueueClosed):
        queue.inbox()


async def test_an_error_in_a_callback_ends_the_run() -> None:
    """Errors of `on_drain` and `on_failure` are raised."""

    def refuse(*_: object) -> None:
        raise OSError("cannot")

    actor = ScriptedActor("actor", [])
    draining = Supervisor(on_failure=refuse)
    draining.drain()
    with fail_after(5), pytest.raises(ActorError, match="draining failed: OSError: cannot"):
        await draining.run([transient(actor)], on_drain=refuse)
    monitor = ScriptedActor("monitor", [])
    monitor.fail()
    reporting = Supervisor(on_failure=refuse)
    with fail_after(5), pytest.raises(ActorError, match="'monitor' could not be reported: OSError: cannot"):
        await reporting.run([temporary(monitor), transient(actor)], on_drain=refuse)


async def test_a_stop_cancels_all_children_before_it_waits() -> None:
    """All clean-ups run at the same time, within one grace period."""
    events: list[str] = []
    first, second = _ShieldedCleanUp("first", events), _ShieldedCleanUp("second", events)
    recorded = RecordedSupervisor(permanent(first), permanent(second))
    async with recorded.running():
        recorded.supervisor.stop()
        await wait_all_tasks_blocked()
        assert sorted(events) == ["tidy first", "tidy second"]
        first.tidied.set()
        second.tidied.set()
    assert recorded.failures == []


async def test_a_cancelled_supervisor_grants_the_grace_period_and_restarts_no_child() -> None:
    """Both for a cancellation from outside and from inside."""
    events: list[str] = []
    files = _FailingCleanUp("files", events)
    recorded = RecordedSupervisor(
        permanent(files, RestartPolicy(max_restarts=3)), permanent(_ShieldedCleanUp("disk", events)), grace_seconds=0.02
    )
    with fail_after(5):
        async with create_task_group() as group:
            group.start_soon(recorded.run)
            await wait_all_tasks_blocked()
            group.cancel_scope.cancel()
    assert (files.starts, recorded.states()) == (1, {"files": "failed", "disk": "stopped"})
    assert sorted(recorded.reported_failures()) == ["disk: its clean-up was cut off after 0.02 s", "files: disk full"]


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_a_grace_period_is_above_zero(seconds: float) -> None:
    """Without one, every clean-up would be cancelled."""
    with pytest.raises(ValueError, match="grace_seconds"):
        Supervisor(on_failure=lambda name, error: None, grace_seconds=seconds)
