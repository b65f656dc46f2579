"""Actors of the user's own: they get the ends of their place, and whatever they forget, nobody waits for them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio
import pytest
from msgspec import convert

from actors.prompter import Prompter
from clotho.config.schema import ActorSection
from clotho.run.custom_actors import CustomActors, Services, load_factory
from clotho.runtime.latest import Latest
from clotho.runtime.queues import Queue
from clotho.runtime.supervisor import Child, Restart, Supervisor
from protocols.errors import ProfileError
from protocols.queues import Inbox
from protocols.step import WeightsReady
from tests.actors.boxes import everything, filled, prompt


class Made:
    """Keeps what it was made with."""

    def __init__(self, *, name: str, services: Services, **parts: Any) -> None:
        self.name, self.services, self.parts = name, services, parts

    async def run(self) -> None:
        """Return, and leave every end open."""


class Needy(Made):
    def __init__(self, *, name: str, services: Services, target: int) -> None:
        super().__init__(name=name, services=services)


class Raising(Made):
    def __init__(self, **parts: Any) -> None:
        raise LookupError("no such table")


class Renamed(Made):
    def __init__(self, **parts: Any) -> None:
        super().__init__(**{**parts, "name": "somebody else"})


class Idle(Made):
    run = None  # type: ignore[assignment]


class Immediate(Made):
    def run(self) -> None:  # type: ignore[override]
        """Return, and be no coroutine."""


class Deaf(Made):
    """Waits for something else, and never looks at its inbox, until it fails."""

    async def run(self) -> None:
        """Fail."""
        await anyio.lowlevel.checkpoint()
        raise LookupError("deaf")


def reversed_prompter(*, name: str, services: Services, outbox: Any) -> Prompter:
    """The default prompter with its groups in reverse order."""
    assert services.replaced is not None
    group_ids = reversed(list(services.replaced.arguments["group_ids"]))
    prompter: Prompter = services.replaced.construct(outbox=outbox, group_ids=group_ids)
    prompter.name = name
    return prompter


NOTHING: Any = None
SERVICES = Services(
    profile=NOTHING, directory=Path(), sampler=NOTHING, tokenizer=NOTHING, weights=Latest[WeightsReady]("weights")
)


def stanza(mode: str, factory: str = "Made", *, at: str = "", name: str = "mine", **keys: Any) -> ActorSection:
    """A stanza of a profile; `factory` is one of this module."""
    table = {"name": name, "factory": f"{__name__}:{factory}", "mode": mode, "at": at, **keys}
    return convert(table, ActorSection)


def custom(*sections: ActorSection) -> CustomActors:
    """The actors of these stanzas."""
    return CustomActors(sections, SERVICES)


def the_made(child: Child) -> Made:
    """The actor, as what it is."""
    assert isinstance(child.actor, Made)
    return child.actor


def test_each_actor_gets_the_ends_of_its_place_and_its_options() -> None:
    """Stages get `inbox` and `outbox`, taps get `inbox`, replacements get the ends of the actor that they replace."""
    made = custom(
        stanza("insert", at="scored", name="stage", options={"scale": 2}),
        stanza("tap", at="scored", name="tap"),
        stanza("add", name="free"),
        stanza("replace", at="learner", name="box"),
    )
    stage, tee, tap = made.channel("scored", 3).children
    assert tee.name == "scored tee"
    [free] = made.added()
    inbox, reports = Queue[int]("in", capacity=1).inbox(), Queue[int]("out", capacity=1).outbox()
    updates = [Queue[int]("one", capacity=1).outbox(), Queue[int]("other", capacity=1).outbox()]
    box = made.actor(
        "learner", Made, name="learner", services=SERVICES, inbox=inbox, updates=updates, reports=reports, steps=3
    )
    assert sorted(the_made(stage).parts) == ["inbox", "outbox", "scale"]
    assert sorted(the_made(tap).parts) == ["inbox"]
    assert the_made(free).parts == {}
    assert the_made(box).parts == {"inbox": inbox, "updates": updates, "reports": reports}
    assert box.held_ends == (inbox, *updates, reports)
    assert made.channel("rollouts", 3).children == [], "a channel that no stanza names"
    assert [child.restart for child in (stage, tap, free, box)] == [
        Restart.TRANSIENT, Restart.TEMPORARY, Restart.TEMPORARY, Restart.TRANSIENT
    ]  # fmt: skip


async def test_a_replacement_can_construct_the_actor_that_it_replaces() -> None:
    """`services.replaced` has its arguments; custom actors in other modes have none."""
    queue = Queue[Any]("prompts", capacity=9)
    made = custom(stanza("replace", "reversed_prompter", at="prompter", name="backwards"), stanza("add", name="free"))
    replacements = Latest[int]("replacements")
    replacements.put(0)
    inbox = queue.inbox()
    child = made.actor(
        "prompter", Prompter, outbox=queue.outbox(), make=prompt, group_ids=range(4), batch_size=2,
        replacements=replacements,
    )  # fmt: skip
    assert child.name == "backwards"
    await child.actor.run()
    assert [one.group_id for one in await everything(inbox)] == [3, 2, 1, 0]
    [free] = made.added()
    assert the_made(free).services.replaced is None


def test_an_observer_is_temporary_and_an_actor_is_transient() -> None:
    """The run ends with an actor of the flow, and does not depend on an observer."""
    made = custom()
    assert made.observer("monitor", Made, name="x", services=SERVICES).restart is Restart.TEMPORARY
    assert made.actor("evaluator", Made, name="x", services=SERVICES).restart is Restart.TRANSIENT


def test_temporary_actors_with_an_inbox_read_it_to_the_end() -> None:
    """The monitor and taps get the messages that were sent before the run ended; an added actor is cancelled."""
    made = custom(stanza("tap", at="scored", name="tap"), stanza("tap", at="scored", name="own", restart="transient"))
    _, tap, own = made.channel("scored", 3).children
    [free] = custom(stanza("add", name="free")).added()
    inbox = Queue[int]("in", capacity=1).inbox()
    monitor = custom().observer("monitor", Made, name="monitor", services=SERVICES, inbox=inbox)
    replaced = custom(stanza("replace", at="monitor")).observer(
        "monitor", Made, name="", services=SERVICES, inbox=inbox
    )
    assert [child.ends_with_input for child in (tap, own, free, monitor, replaced)] == [True, False, False, True, True]


@pytest.mark.parametrize("restart", ["permanent", "transient", "temporary"])
def test_the_restart_policy_is_the_stanzas(restart: str) -> None:
    """A permanent actor has three restarts in a row."""
    [child] = custom(stanza("add", restart=restart)).added()
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
def test_what_is_no_actor_is_refused_in_one_line(factory: str, complaint: str) -> None:
    """It names the stanza's factory, and says what it lacks."""
    with pytest.raises(ProfileError, match=r"^actors: ") as caught:
        custom(stanza("add", factory)).added()
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_module_that_breaks_while_it_is_imported_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it raises, exit included; a module beside the profile is found where the program was started."""
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


def test_a_tap_cannot_outlive_its_channel() -> None:
    """A permanent tap would be restarted when the run is simply over."""
    with pytest.raises(ProfileError, match="'mine' is a tap and ends with its queue: restart must be 'temporary'"):
        custom(stanza("tap", at="scored", restart="permanent"))


async def supervised(children: Sequence[Child], source: Queue[int], reader: Inbox[int]) -> tuple[list[int], list[str]]:
    """Run children under a supervisor beside the reader of what they pass on; what came, and who failed."""
    failures: list[str] = []
    received: list[int] = []
    supervisor = Supervisor(on_failure=lambda name, error: failures.append(f"{name}: {error}"))
    assert source.depth
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(supervisor.run, children, on_drain=lambda: None))
            received += await everything(reader)
    return received, failures


@pytest.mark.parametrize("factory", ["Made", "Deaf"])
async def test_a_tap_that_ends_without_closing_its_inbox_stops_nobody(factory: str) -> None:
    """By returning or by failing; the channel does not wait for it when its copies are full."""
    channel = custom(stanza("tap", factory, at="scored")).channel("scored", 1)
    writer, reader = channel.outbox(), channel.inbox()
    numbers = filled("numbers", range(9))

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


async def test_a_stage_that_ends_without_closing_its_ends_is_not_waited_for() -> None:
    """The box behind it reaches its end."""
    made = custom(stanza("insert", at="scored"))
    channel = made.channel("scored", 9)
    channel.outbox().send_nowait(1)
    received, failures = await supervised(channel.children, channel.queues[0], channel.inbox())
    assert (received, failures) == ([], [])
