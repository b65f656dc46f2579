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
from clotho.runtime.child import Child, Restart
from clotho.runtime.latest import Latest
from clotho.runtime.plugins import CustomActors, Services, load_factory
from clotho.runtime.queues import Queue
from clotho.runtime.supervisor import Supervisor
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


class Reversed(Prompter):
    """The default with its groups in another order."""

    def __init__(self, *, name: str, services: Services, outbox: Any) -> None:
        assert isinstance(services.default, partial)
        keywords = services.default.keywords
        super().__init__(outbox=outbox, **{**keywords, "group_ids": reversed(list(keywords["group_ids"]))})
        self.name = name


NOTHING: Any = None
SERVICES = Services(
    profile=NOTHING, directory=Path(), sampler=None, tokenizer=None, weights=Latest[WeightsReady]("weights")
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


def test_each_gets_the_ends_of_its_place_and_its_options() -> None:
    """`inbox` and `outbox` on an arrow, `inbox` at a tap, none beside, and those of the box it replaces."""
    made = custom(
        stanza("insert", at="scored", name="stage", options={"scale": 2}),
        stanza("tap", at="scored", name="tap"),
        stanza("add", name="free"),
        stanza("replace", at="learner", name="box"),
    )
    stage, tee, tap = made.arrow("scored", 3).children
    assert tee.name == "scored tee"
    [free] = made.free_standing()
    updates = [Queue[int]("one", capacity=1).writer(), Queue[int]("other", capacity=1).writer()]
    box = made.box("learner", Made, inbox="in", updates=updates, reports="out")
    assert sorted(the_made(stage).parts) == ["inbox", "outbox", "scale"]
    assert sorted(the_made(tap).parts) == ["inbox"]
    assert the_made(free).parts == {}
    assert the_made(box).parts == {"inbox": "in", "updates": updates, "reports": "out"}
    assert made.arrow("rollouts", 3).children == [], "an arrow that no stanza names"
    assert [child.restart for child in (stage, tap, free, box)] == [
        Restart.TRANSIENT, Restart.TEMPORARY, Restart.TEMPORARY, Restart.TRANSIENT
    ]  # fmt: skip


def test_the_boxes_are_known_by_their_place_whatever_stands_there() -> None:
    """A replacement has a name of its own; the run looks at boxes by theirs."""
    made = custom(stanza("replace", at="prompter", name="curriculum"))
    made.box("prompter", Made, outbox="out")
    made.box("monitor", partial(Made, name="monitor", services=SERVICES), inbox="in")
    assert {place: actor.name for place, actor in made.boxes.items()} == {
        "prompter": "curriculum", "monitor": "monitor"
    }  # fmt: skip


async def test_a_replacement_can_be_made_of_the_box_it_replaces() -> None:
    """`services.default` is that box but for its ends; nobody else is given one."""
    outbox = Queue[Any]("prompts", capacity=9)
    made = custom(stanza("replace", "Reversed", at="prompter", name="backwards"), stanza("add", name="free"))
    refills = Latest[int]("refills")
    refills.put(0)
    default = partial(Prompter, make=prompt, group_ids=range(4), batch_size=2, refills=refills)
    reader = outbox.reader()
    await made.box("prompter", default, outbox=outbox.writer()).actor.run()
    assert [one.group_id for one in await everything(reader)] == [3, 2, 1, 0]
    [free] = made.free_standing()
    assert the_made(free).services.default is None


def test_only_the_monitor_may_fail_by_itself() -> None:
    """Every other default box ends the run with it."""
    made, default = custom(), partial(Made, name="x", services=SERVICES)
    assert made.box("monitor", default).restart is Restart.TEMPORARY
    assert made.box("evaluator", default).restart is Restart.TRANSIENT


def test_who_may_fail_by_itself_and_has_an_inbox_reads_it_to_the_end() -> None:
    """The monitor and taps get what was sent before the run ended; a free-standing actor is cancelled."""
    made = custom(stanza("tap", at="scored", name="tap"), stanza("tap", at="scored", name="own", restart="transient"))
    _, tap, own = made.arrow("scored", 3).children
    [free] = custom(stanza("add", name="free")).free_standing()
    monitor = custom().box("monitor", partial(Made, name="monitor", services=SERVICES), inbox="in")
    replaced = custom(stanza("replace", at="monitor")).box("monitor", Made, inbox="in")
    assert [child.ends_with_input for child in (tap, own, free, monitor, replaced)] == [True, False, False, True, True]


@pytest.mark.parametrize("restart", ["permanent", "transient", "temporary"])
def test_the_restart_policy_is_the_stanzas(restart: str) -> None:
    """A permanent actor is given three restarts a minute."""
    [child] = custom(stanza("add", restart=restart)).free_standing()
    assert child.restart.value == restart
    assert (child.max_restarts, child.within_seconds) == (3 if restart == "permanent" else 0, 60.0)


@pytest.mark.parametrize(
    ("factory", "complaint"),
    [
        ("Needy", "Needy cannot be made with the arguments name, services ("),
        ("Raising", "cannot be made: LookupError: no such table"),
        ("Renamed", "made 'Renamed', which is no actor: it needs the name it is given, 'mine', and an async run()"),
        ("Idle", "made 'Idle', which is no actor"),
        ("Immediate", "made 'Immediate', which is no actor"),
        ("prompt", "cannot be made with the arguments"),
        ("SERVICES", "SERVICES is a Services, not a class"),
        ("NullSampleLog", "NullSampleLog cannot be imported: AttributeError"),
    ],
)
def test_what_is_no_actor_is_refused_in_one_line(factory: str, complaint: str) -> None:
    """It names the stanza's factory, and says what it lacks."""
    with pytest.raises(ProfileError, match=r"^actors: ") as caught:
        custom(stanza("add", factory)).free_standing()
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


def test_a_tap_cannot_outlive_its_arrow() -> None:
    """A permanent tap would be restarted when the run is simply over."""
    with pytest.raises(ProfileError, match="'mine' ends with the arrow it taps: restart must be 'temporary'"):
        custom(stanza("tap", at="scored", restart="permanent"))


async def supervised(children: Sequence[Child], source: Queue[int], reader: Inbox[int]) -> tuple[list[int], list[str]]:
    """Run children under a supervisor beside the reader of what they pass on; what came, and who failed."""
    failures: list[str] = []
    received: list[int] = []
    supervisor = Supervisor(
        children, on_failure=lambda name, error: failures.append(f"{name}: {error}"), on_drain=lambda: None
    )
    assert source.depth
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(supervisor.run)
            received += await everything(reader)
    return received, failures


@pytest.mark.parametrize("factory", ["Made", "Deaf"])
async def test_a_tap_that_ends_without_closing_its_inbox_stops_nobody(factory: str) -> None:
    """By returning or by failing; the arrow does not wait for it when its copies are full."""
    arrow = custom(stanza("tap", factory, at="scored")).arrow("scored", 1)
    writer, reader = arrow.writer(), arrow.reader()
    numbers = filled("numbers", range(9))

    class Pump:
        name = "pump"

        async def run(self) -> None:
            async with numbers.reader() as inbox, writer:
                async for number in inbox:
                    await writer.send(number)

    pump = Child(actor=Pump(), restart=Restart.TRANSIENT)
    received, failures = await supervised([*arrow.children, pump], numbers, reader)
    assert received == list(range(9))
    assert failures == (["mine: deaf"] if factory == "Deaf" else [])


async def test_a_stage_that_ends_without_closing_its_ends_is_not_waited_for() -> None:
    """The box behind it reaches its end."""
    made = custom(stanza("insert", at="scored"))
    arrow = made.arrow("scored", 9)
    arrow.writer().send_nowait(1)
    received, failures = await supervised(arrow.children, arrow.mailboxes[0], arrow.reader())
    assert (received, failures) == ([], [])
