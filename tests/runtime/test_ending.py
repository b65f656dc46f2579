"""The end of a run: clean-ups, their limits, and failures on the way out."""

from __future__ import annotations

import anyio
import pytest
from anyio import CancelScope, create_task_group, fail_after, sleep_forever, wait_all_tasks_blocked

from clotho.runtime.queues import Queue
from clotho.runtime.supervisor import RestartPolicy, Supervisor, permanent, temporary, transient
from protocols.errors import ActorError
from protocols.queues import Inbox, Outbox, QueueClosed
from tests.runtime.scene import Scene, Script


class _Tidy(Script):
    """An actor with a clean-up that it shields from cancellation."""

    def __init__(self, name: str, diary: list[str]) -> None:
        super().__init__(name, diary)
        self.tidied = anyio.Event()

    async def run(self) -> None:
        try:
            await sleep_forever()
        finally:
            with CancelScope(shield=True):
                self.diary.append(f"tidy {self.name}")
                await self.tidied.wait()
            self.diary.append(f"stop {self.name}")


class _Clumsy(Script):
    """An actor that fails in its clean-up."""

    async def run(self) -> None:
        self.lives += 1
        try:
            await sleep_forever()
        finally:
            raise OSError("disk full")


class _Speaking(Script):
    """Sends three messages and returns."""

    def __init__(self, name: str, outbox: Outbox[str]) -> None:
        super().__init__(name, [])
        self._outbox = outbox

    async def run(self) -> None:
        async with self._outbox:
            for word in ("first", "second", "last"):
                await self._outbox.send(word)


class _Writing(Script):
    """Reads to the end of its input, and writes each message down when it may."""

    def __init__(self, name: str, inbox: Inbox[str]) -> None:
        super().__init__(name, [])
        self.may_write = anyio.Event()
        self._inbox = inbox

    async def run(self) -> None:
        async with self._inbox:
            async for word in self._inbox:
                await self.may_write.wait()
                self.diary.append(word)


def _spoken_and_written() -> tuple[_Speaking, _Writing]:
    mailbox: Queue[str] = Queue("words", capacity=3)
    return _Speaking("speaking", mailbox.outbox()), _Writing("writing", mailbox.inbox())


async def test_what_was_sent_before_the_flow_ended_is_read_before_the_run_ends() -> None:
    """Who writes slowly loses nothing, and those after it are stopped only then."""
    speaking, writing = _spoken_and_written()
    scene = Scene(permanent(Script("disk", [])), temporary(writing, ends_with_input=True), transient(speaking))
    with fail_after(5):
        async with create_task_group() as group:
            group.start_soon(scene.run)
            await wait_all_tasks_blocked()
            assert scene.states() == {"disk": "running", "writing": "running", "speaking": "done"}
            assert writing.diary == []
            writing.may_write.set()
    assert writing.diary == ["first", "second", "last"]
    assert (scene.ending, scene.failures) == ("finished", [])
    assert scene.states() == {"disk": "stopped", "writing": "done", "speaking": "done"}


async def test_who_does_not_come_to_the_end_of_its_input_is_cut_off_and_reported() -> None:
    """A run always ends, and what may be missing is said."""
    speaking, writing = _spoken_and_written()
    scene = Scene(temporary(writing, ends_with_input=True), transient(speaking), grace_seconds=0.02)
    with fail_after(5):
        await scene.run()
    assert (scene.ending, scene.states()) == ("finished", {"writing": "stopped", "speaking": "done"})
    assert scene.reported() == [
        "writing: did not finish reading its inbox within 0.02 s after the other actors had ended"
    ]


async def test_a_stop_ends_also_the_reading() -> None:
    """At once means at once; how the run ended was settled before."""
    speaking, writing = _spoken_and_written()
    scene = Scene(temporary(writing, ends_with_input=True), transient(speaking), grace_seconds=60)
    with fail_after(5):
        async with create_task_group() as group:
            group.start_soon(scene.run)
            await wait_all_tasks_blocked()
            scene.supervisor.stop()
    assert (scene.ending, scene.failures, writing.diary) == ("finished", [], [])


async def test_nobody_waits_for_a_temporary_child_that_reads_nothing() -> None:
    """It may go on forever, and is cancelled when the others have returned."""
    box = Script("box", [])
    box.returns()
    scene = Scene(temporary(Script("free", [])), transient(box), grace_seconds=60)
    with fail_after(5):
        await scene.run()
    assert scene.states() == {"free": "stopped", "box": "done"}


async def test_a_stopped_child_may_finish_its_clean_up_before_the_one_before_it_is_stopped() -> None:
    """Reverse order means one after the other: what a clean-up leans on is still there."""
    diary: list[str] = []
    box, disk, files = Script("box", diary), Script("disk", diary), _Tidy("files", diary)
    scene = Scene(transient(box), permanent(disk), permanent(files))
    with fail_after(5):
        async with create_task_group() as group:
            group.start_soon(scene.run)
            await wait_all_tasks_blocked()
            box.returns()
            await wait_all_tasks_blocked()
            assert diary[-1] == "tidy files"
            assert scene.states()["disk"] == "running"
            files.tidied.set()
    assert diary[-3:] == ["tidy files", "stop files", "stop disk"]
    assert scene.failures == []


async def test_a_clean_up_beyond_the_grace_is_cut_off_and_reported() -> None:
    """A run always ends."""
    diary: list[str] = []
    scene = Scene(permanent(_Tidy("files", diary)), grace_seconds=0.02)
    with fail_after(5):
        async with create_task_group() as group:
            group.start_soon(scene.run)
            await wait_all_tasks_blocked()
            scene.supervisor.stop()
    assert (scene.ending, diary) == ("stopped", ["tidy files"])
    assert scene.reported() == ["files: its clean-up was cut off after 0.02 s"]


async def test_a_failure_while_the_run_is_ending_is_noted_on_the_first_one() -> None:
    """The first failure is the culprit; none is swallowed."""
    box, files = Script("box", []), _Clumsy("files", [])
    scene = Scene(permanent(files, RestartPolicy(max_restarts=3)), transient(box))
    with fail_after(5):
        async with create_task_group() as group:
            group.start_soon(scene.run)
            await wait_all_tasks_blocked()
            box.fails()
    assert str(scene.error) == "actor 'box' failed: ValueError: as told"
    assert getattr(scene.error, "__notes__", []) == [
        "while the run was ending, actor 'files' failed too: OSError: disk full"
    ]
    assert (scene.reported(), files.lives) == (["files: disk full"], 1)


async def test_a_producer_whose_reader_was_stopped_first_has_not_failed() -> None:
    """In reverse order consumers go first; that their producers notice is no news."""
    mailbox: Queue[int] = Queue("numbers", capacity=1)
    inbox, outbox = mailbox.inbox(), mailbox.outbox()

    class Producer(Script):
        async def run(self) -> None:
            async with outbox:
                with CancelScope(shield=True):
                    while True:
                        await outbox.send(1)

    class Consumer(Script):
        async def run(self) -> None:
            async with inbox:
                await inbox.receive()
                await super().run()

    consumer = Consumer("consumer", [])
    scene = Scene(transient(Producer("producer", [])), transient(consumer), transient(box := Script("box", [])))
    with fail_after(5):
        async with create_task_group() as group:
            group.start_soon(scene.run)
            await wait_all_tasks_blocked()
            box.fails()
    assert scene.states() == {"producer": "stopped", "consumer": "stopped", "box": "failed"}
    assert scene.failures == []
    with pytest.raises(QueueClosed):
        mailbox.inbox()


async def test_a_drain_or_a_report_that_fails_ends_the_run() -> None:
    """Callbacks are code too: their errors rise, they do not disappear in a handler."""

    def refuse(*_: object) -> None:
        raise OSError("cannot")

    box = Script("box", [])
    draining = Supervisor(on_failure=refuse)
    draining.drain()
    with fail_after(5), pytest.raises(ActorError, match="draining failed: OSError: cannot"):
        await draining.run([transient(box)], on_drain=refuse)
    monitor = Script("monitor", [])
    monitor.fails()
    reporting = Supervisor(on_failure=refuse)
    with fail_after(5), pytest.raises(ActorError, match="'monitor' could not be reported: OSError: cannot"):
        await reporting.run([temporary(monitor), transient(box)], on_drain=refuse)


async def test_stop_asks_everybody_before_it_waits_for_anybody() -> None:
    """At once: the clean-ups of all run side by side, within one grace."""
    diary: list[str] = []
    first, second = _Tidy("first", diary), _Tidy("second", diary)
    scene = Scene(permanent(first), permanent(second))
    with fail_after(5):
        async with create_task_group() as group:
            group.start_soon(scene.run)
            await wait_all_tasks_blocked()
            scene.supervisor.stop()
            await wait_all_tasks_blocked()
            assert sorted(diary) == ["tidy first", "tidy second"]
            first.tidied.set()
            second.tidied.set()
    assert scene.failures == []


async def test_cancelling_the_supervisor_grants_the_same_grace_and_no_new_life() -> None:
    """From outside or from inside, an end is an end."""
    diary: list[str] = []
    files = _Clumsy("files", diary)
    scene = Scene(permanent(files, RestartPolicy(max_restarts=3)), permanent(_Tidy("disk", diary)), grace_seconds=0.02)
    with fail_after(5):
        async with create_task_group() as group:
            group.start_soon(scene.run)
            await wait_all_tasks_blocked()
            group.cancel_scope.cancel()
    assert (files.lives, scene.states()) == (1, {"files": "failed", "disk": "stopped"})
    assert sorted(scene.reported()) == ["disk: its clean-up was cut off after 0.02 s", "files: disk full"]
