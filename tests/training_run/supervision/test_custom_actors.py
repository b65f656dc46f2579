"""Custom actors receive the ends of their place, and their mistakes block no other actor.

Channels have inserted actors and taps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio
import pytest
from msgspec import convert

from actors.prompter import Prompter
from protocols.errors import ProfileError
from protocols.queues import EndOfStream, Inbox, Outbox, QueueClosed
from protocols.step import WeightsReady
from tests.actors.actor_helpers import cancel_when_blocked, filled_queue, prompt, receive_all
from tests.training_run.built_context import lost_groups
from training_run.profile.schema import ActorSection
from training_run.supervision.custom_actors import Channel, CustomActors, Services, Tee, load_factory
from training_run.supervision.latest import Latest
from training_run.supervision.lost_groups import LostGroups
from training_run.supervision.queues import Queue
from training_run.supervision.supervisor import Child, Restart, Supervisor, temporary, transient


class RecordingActor:
    """Keeps what it was made with."""

    def __init__(self, *, name: str, services: Services, **parts: Any) -> None:
        self.name, self.services, self.parts = name, services, parts

    async def run(self) -> None:
        """Return, and leave every end open."""


class Needy(RecordingActor):
    def __init__(self, *, name: str, services: Services, target: int) -> None:
        super().__init__(name=name, services=services)


class Raising(RecordingActor):
    def __init__(self, **parts: Any) -> None:
        raise LookupError("no such table")


class Renamed(RecordingActor):
    def __init__(self, **parts: Any) -> None:
        super().__init__(**{**parts, "name": "somebody else"})


class Idle(RecordingActor):
    run = None  # type: ignore[assignment]


class Immediate(RecordingActor):
    def run(self) -> None:  # type: ignore[override]
        """Return, and be no coroutine."""


class Deaf(RecordingActor):
    """Waits for something else, and never looks at its inbox, until it fails."""

    async def run(self) -> None:
        """Fail."""
        await anyio.lowlevel.checkpoint()
        raise LookupError("deaf")


def reversed_prompter(*, name: str, services: Services, outbox: Any) -> Prompter:
    """Return the default prompter with its groups in reverse order."""
    assert services.replaced is not None
    group_ids = reversed(list(services.replaced.arguments["group_ids"]))
    prompter: Prompter = services.replaced.construct(outbox=outbox, group_ids=group_ids)
    prompter.name = name
    return prompter


NOTHING: Any = None
SERVICES = Services(
    profile=NOTHING, directory=Path(), sampler=NOTHING, tokenizer=NOTHING, weights=Latest[WeightsReady]("weights")
)


def actor_section(
    mode: str, factory: str = "RecordingActor", *, at: str = "", name: str = "mine", **keys: Any
) -> ActorSection:
    """Return an [[actors]] table whose `factory` is a class of this module."""
    table = {"name": name, "factory": f"{__name__}:{factory}", "mode": mode, "at": at, **keys}
    return convert(table, ActorSection)


def custom(*sections: ActorSection, lost: LostGroups | None = None) -> CustomActors:
    """Return the custom actors of these tables. lost: their custodians."""
    return CustomActors(sections, SERVICES, lost or lost_groups())


def as_recording(child: Child) -> RecordingActor:
    """Return the actor with its own type."""
    assert isinstance(child.actor, RecordingActor)
    return child.actor


def test_each_actor_gets_the_ends_of_its_place_and_its_options() -> None:
    """Inserted actors get `inbox` and `outbox`, taps get `inbox`, and a replacement gets the ends of the replaced
    actor.
    """
    made = custom(
        actor_section("insert", at="scored", name="stage", options={"scale": 2}),
        actor_section("tap", at="scored", name="tap"),
        actor_section("add", name="free"),
        actor_section("replace", at="learner", name="replacement"),
    )
    stage, tee, tap = made.channel("scored", 3).children
    assert tee.name == "scored tee"
    [free] = made.added()
    inbox, reports = Queue[int]("in", capacity=1).inbox(), Queue[int]("out", capacity=1).outbox()
    updates = [Queue[int]("one", capacity=1).outbox(), Queue[int]("other", capacity=1).outbox()]
    replacement = made.actor(
        "learner",
        RecordingActor,
        name="learner",
        services=SERVICES,
        inbox=inbox,
        updates=updates,
        reports=reports,
        steps=3,
    )
    assert sorted(as_recording(stage).parts) == ["inbox", "outbox", "scale"]
    assert sorted(as_recording(tap).parts) == ["inbox"]
    assert as_recording(free).parts == {}
    assert as_recording(replacement).parts == {"inbox": inbox, "updates": updates, "reports": reports}
    assert replacement.held_ends == (inbox, *updates, reports)
    assert made.channel("rollouts", 3).children == [], "a channel that no actor_section names"
    assert [child.restart for child in (stage, tap, free, replacement)] == [
        Restart.TRANSIENT, Restart.TEMPORARY, Restart.TEMPORARY, Restart.TRANSIENT
    ]  # fmt: skip


async def test_a_replacement_can_construct_the_replaced_actor() -> None:
    """`services.replaced` has its arguments. It is None for custom actors in other modes."""
    queue = Queue[Any]("prompts", capacity=9)
    made = custom(
        actor_section("replace", "reversed_prompter", at="prompter", name="backwards"),
        actor_section("add", name="free"),
    )
    replacements = Latest[int]("replacements")
    replacements.put(0)
    inbox = queue.inbox()
    child = made.actor(
        "prompter", Prompter, outbox=queue.outbox(), make=prompt, group_ids=range(4), batch_size=2,
        replacements=replacements,
    )  # fmt: skip
    assert child.name == "backwards"
    await child.actor.run()
    assert [one.group_id for one in await receive_all(inbox)] == [3, 2, 1, 0]
    [free] = made.added()
    assert as_recording(free).services.replaced is None


def test_an_observer_is_temporary_and_an_actor_is_transient() -> None:
    """The run waits for a transient actor and does not depend on an observer."""
    made = custom()
    assert made.observer("monitor", RecordingActor, name="x", services=SERVICES).restart is Restart.TEMPORARY
    assert made.actor("evaluator", RecordingActor, name="x", services=SERVICES).restart is Restart.TRANSIENT


def test_temporary_actors_with_an_inbox_read_it_to_the_end() -> None:
    """The monitor and taps receive all messages sent before the run ended. An added actor is cancelled."""
    made = custom(
        actor_section("tap", at="scored", name="tap"),
        actor_section("tap", at="scored", name="own", restart="transient"),
    )
    _, tap, own = made.channel("scored", 3).children
    [free] = custom(actor_section("add", name="free")).added()
    inbox = Queue[int]("in", capacity=1).inbox()
    monitor = custom().observer("monitor", RecordingActor, name="monitor", services=SERVICES, inbox=inbox)
    replaced = custom(actor_section("replace", at="monitor")).observer(
        "monitor", RecordingActor, name="", services=SERVICES, inbox=inbox
    )
    assert [child.ends_with_input for child in (tap, own, free, monitor, replaced)] == [True, False, False, True, True]


@pytest.mark.parametrize("restart", ["permanent", "transient", "temporary"])
def test_the_restart_policy_is_that_of_the_profile(restart: str) -> None:
    """A permanent actor has three restarts in a row."""
    [child] = custom(actor_section("add", restart=restart)).added()
    assert child.restart.value == restart
    assert child.policy.max_restarts == (3 if restart == "permanent" else 0)


@pytest.mark.parametrize(
    ("factory", "complaint"),
    [
        ("Needy", "Needy cannot be called with the arguments name, services ("),
        ("Raising", "failed: LookupError: no such table"),
        (
            "Renamed",
            "returned a 'Renamed', which is not an actor: an actor has the attribute name = 'mine' and an async run()",
        ),
        ("Idle", "returned a 'Idle', which is not an actor"),
        ("Immediate", "returned a 'Immediate', which is not an actor"),
        ("prompt", "cannot be called with the arguments"),
        ("SERVICES", "SERVICES is a Services, not a class"),
        ("Missing", "Missing cannot be imported: no"),
    ],
)
def test_a_factory_without_an_actor_is_refused(factory: str, complaint: str) -> None:
    """The message names the factory and the missing method or argument."""
    with pytest.raises(ProfileError, match=r"^actors: ") as caught:
        custom(actor_section("add", factory)).added()
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_module_that_fails_on_import_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For any exception, SystemExit included. Modules in the working directory are found."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "leaving_module.py").write_text("import sys\nsys.exit(3)\n")
    (tmp_path / "own_module.py").write_text("class Mine: ...\n")
    section = {"name": "mine", "mode": "add"}
    with pytest.raises(ProfileError, match=r"leaving_module:Mine cannot be imported: SystemExit: 3"):
        load_factory(convert({**section, "factory": "leaving_module:Mine"}, ActorSection))
    found: Any = load_factory(convert({**section, "factory": "own_module:Mine"}, ActorSection))
    assert found.__name__ == "Mine"
    module: ModuleType = sys.modules.pop("own_module")
    assert module.Mine is found


def test_a_permanent_tap_is_refused() -> None:
    """It would be restarted after every run."""
    with pytest.raises(ProfileError, match="'mine' is a tap and ends with its queue: restart must be 'temporary'"):
        custom(actor_section("tap", at="scored", restart="permanent"))


async def supervised(children: Sequence[Child], source: Queue[int], reader: Inbox[int]) -> tuple[list[int], list[str]]:
    """Run children under a supervisor, and return the received messages and the failed children."""
    failures: list[str] = []
    received: list[int] = []
    supervisor = Supervisor(on_failure=lambda name, error: failures.append(f"{name}: {error}"))
    assert source.depth
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(supervisor.run, children, on_drain=lambda: None))
            received += await receive_all(reader)
    return received, failures


@pytest.mark.parametrize("factory", ["RecordingActor", "Deaf"])
async def test_a_tap_that_leaves_its_inbox_open_blocks_no_actor(factory: str) -> None:
    """After a return and after a failure. The channel does not wait for the tap's full queue."""
    channel = custom(actor_section("tap", factory, at="scored")).channel("scored", 1)
    writer, reader = channel.outbox(), channel.inbox()
    numbers = filled_queue("numbers", range(9))

    class Pump:
        name = "pump"

        async def run(self) -> None:
            async with numbers.inbox() as inbox, writer:
                async for number in inbox:
                    await writer.send(number)

    pump = Child(actor=Pump(), restart=Restart.TRANSIENT)
    received, failures = await supervised([*channel.children, pump], numbers, reader)
    assert received == list(range(9))
    assert failures == (["mine: deaf"] if factory == "Deaf" else [])


async def test_an_inserted_actor_that_leaves_its_ends_open_blocks_no_actor() -> None:
    """The next actor receives the end."""
    lost = lost_groups()
    channel = custom(actor_section("insert", at="scored"), lost=lost).channel("scored", 9)
    channel.outbox().send_nowait(1)
    children = [*channel.children, *lost.children]
    received, failures = await supervised(children, channel.queues[0], channel.inbox())
    assert (received, failures) == ([], [])


class Adding:
    """Adds a letter to every message."""

    def __init__(self, name: str, inbox: Inbox[str], outbox: Outbox[str]) -> None:
        self.name, self._inbox, self._outbox = name, inbox, outbox

    async def run(self) -> None:
        """Process all messages."""
        async with self._inbox, self._outbox:
            async for message in self._inbox:
                await self._outbox.send(message + self.name)


class Listening:
    """Keeps what it hears; with a limit, it stops listening after so many."""

    def __init__(self, name: str, inbox: Inbox[str], *, limit: int = 10**9) -> None:
        self.name, self.heard = name, list[str]()
        self._inbox, self._limit = inbox, limit

    async def run(self) -> None:
        """Listen."""
        async with self._inbox:
            async for message in self._inbox:
                self.heard.append(message)
                if len(self.heard) == self._limit:
                    return


def adding(letter: str) -> Callable[[Inbox[str], Outbox[str]], Child]:
    """Return an inserted actor of the channel."""
    return lambda inbox, outbox: transient(Adding(letter, inbox, outbox))


def listening(name: str, **options: int) -> Callable[[Inbox[str]], Child]:
    """Return a tap of the channel."""
    return lambda inbox: temporary(Listening(name, inbox, **options))


async def through(channel: Channel[str], messages: list[str]) -> list[str]:
    """Send messages into the channel and return what leaves it."""
    writer, reader = channel.outbox(), channel.inbox()

    async def send() -> None:
        async with writer:
            for message in messages:
                await writer.send(message)

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            for child in channel.children:
                tasks.start_soon(child.actor.run)
            tasks.start_soon(send)
            received = await receive_all(reader)
    return received


async def test_a_channel_without_custom_actors_is_one_queue() -> None:
    """It has no additional queue and no child."""
    channel = Channel[str]("plain", capacity=3)
    assert ([queue.name for queue in channel.queues], channel.children) == (["plain"], [])
    assert await through(channel, ["1", "2", "3", "4"]) == ["1", "2", "3", "4"]


async def test_inserted_actors_run_in_order_and_taps_receive_their_output() -> None:
    """Each message passes every inserted actor and is then copied to every tap.

    The end of the input is forwarded too.
    """
    taps = [listening("x"), listening("y")]
    channel = Channel[str]("busy", capacity=2)
    channel.insert(adding("a"))
    channel.insert(adding("b"))
    channel.tap(taps)
    messages = [str(number) for number in range(20)]
    assert await through(channel, messages) == [message + "ab" for message in messages]
    heard = [child.actor.heard for child in channel.children if isinstance(child.actor, Listening)]
    assert heard == [[message + "ab" for message in messages]] * 2
    assert [queue.name for queue in channel.queues] == ["busy", "busy.1", "busy.2", "busy.tapped"]
    assert [(queue.name, queue.capacity) for queue in channel.copies] == [("busy.tap1", 2), ("busy.tap2", 2)]
    assert {child.restart for child in channel.children} == {Restart.TRANSIENT, Restart.TEMPORARY}


async def test_a_tap_that_has_ended_is_skipped() -> None:
    """The channel continues with the other taps."""
    channel = Channel[str]("tapped", capacity=1)
    channel.tap([listening("x", limit=2), listening("y")])
    messages = [str(number) for number in range(9)]
    assert await through(channel, messages) == messages
    heard = [child.actor.heard for child in channel.children if isinstance(child.actor, Listening)]
    assert heard == [messages[:2], messages]


async def test_a_slow_tap_delays_the_channel() -> None:
    """All queues are bounded, those of the copies too."""
    inbox = filled_queue("in", ["1", "2", "3", "4", "5"])
    outbox, copy = Queue[str]("out", capacity=10), Queue[str]("copy", capacity=2)
    slow, reader = copy.inbox(), outbox.inbox()
    tee = Tee("tee", inbox.inbox(), outbox.outbox(), [copy.outbox()])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tee.run)
        await anyio.wait_all_tasks_blocked()
        assert (inbox.depth, copy.depth, outbox.depth) == (2, 2, 2)
        assert await receive_all(slow) == ["1", "2", "3", "4", "5"]
    assert await receive_all(reader) == ["1", "2", "3", "4", "5"]


@pytest.mark.parametrize("end", ["cancelled", "deserted"])
async def test_a_tee_closes_all_its_ends_in_every_case(end: str) -> None:
    """Taps and the next actor receive the end, and writers get QueueClosed."""
    inbox = filled_queue("in", ["1", "2"], ended=False)
    outbox, copy = Queue[str]("out", capacity=1), Queue[str]("copy", capacity=9)
    tapped, reader = copy.inbox(), outbox.inbox()
    tee = Tee("tee", inbox.inbox(), outbox.outbox(), [copy.outbox()])
    if end == "deserted":
        reader.close()
        with pytest.raises(QueueClosed):
            await tee.run()
    else:
        await cancel_when_blocked(tee.run)
        assert await receive_all(reader) == ["1"]
    assert (await receive_all(tapped))[0] == "1"
    with pytest.raises(EndOfStream):
        await tapped.receive()
    with pytest.raises(QueueClosed):
        inbox.inbox()
