"""The fetcher: groups in the order they come, each with a number, no further ahead than the distribution of lag allows."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest
from structlog.testing import capture_logs

from actors.atropos_fetcher import REMEMBERED
from clotho.atropos.api import AtroposApi
from clotho.atropos.client import Registration
from clotho.config.schema import AtroposSection
from protocols.errors import ProfileError
from protocols.queues import EndOfStream, QueueClosed
from protocols.rollout import Discarded, ScoredGroup
from tests.actors.boxes import cancelled_midway, everything, run_and_receive
from tests.atropos.fake_api import FakeApi
from tests.atropos.fetching import Scene, Source, fetched, numbers
from tests.atropos.groups import Scene as ReaderScene
from tests.atropos.groups import group


async def test_every_group_gets_the_next_number_and_is_counted() -> None:
    """Those that are refused too: what has come must end."""
    scene = Scene([["a", "b!"], ["a"]], first_group=7, received={"a": 5, "c": 1}, ended=7)
    outcomes = await fetched(scene, steps=scene.refills.close)
    assert numbers(outcomes) == [7, 8, 9]
    assert [isinstance(one, Discarded) for one in outcomes] == [False, True, False]
    assert (scene.box.prompted_until, scene.box.reached) == (10, 10)
    assert scene.box.received == {"a": 7, "b": 1, "c": 1}
    assert scene.box.under_way == {7: "a", 8: "b", 9: "a"}
    assert scene.reader.versions == [10, 10, 10]
    assert (scene.source.opened, scene.source.closed) == ([0], 1)


async def test_what_an_earlier_life_had_received_is_told_first() -> None:
    """Environments do not send it again; it counts as asked, and was counted as received before."""
    scene = Scene([["a"], ["a"]], lost={3: "b", 5: "a"}, first_group=6, received={"a": 4, "b": 2}, ended=4, ahead=2)
    outcomes = await fetched(scene, steps=scene.refills.close)
    assert numbers(outcomes) == [3, 5], "6 are asked, which is as far ahead as is allowed"
    assert {(one.reason, one.prompt.source) for one in outcomes if isinstance(one, Discarded)} == {
        ("lost", "a"),
        ("lost", "b"),
    }
    assert scene.box.received == {"a": 4, "b": 2}
    assert scene.box.under_way == {3: "b", 5: "a"}


@pytest.mark.parametrize(("ahead", "allowed"), [(0, 2), (1, 4), (2, 6)])
async def test_the_law_of_lag(ahead: int, allowed: int) -> None:
    """No batch is taken before the weights of step s - max_batches_ahead serve."""
    scene = Scene([["a"]] * 20, ahead=ahead)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(scene.box.run)
        await anyio.wait_all_tasks_blocked()
        assert len(scene.source.steps) == allowed
        scene.serve(1)
        await anyio.wait_all_tasks_blocked()
        assert len(scene.source.steps) == allowed + 2
        scene.refills.put(1)
        await anyio.wait_all_tasks_blocked()
        assert scene.source.steps == [0] * allowed + [1] * 3
        tasks.cancel_scope.cancel()


async def test_a_batch_of_the_server_is_sent_whole() -> None:
    """However large: what has been taken is in no other hands."""
    scene = Scene([["a"] * 9, ["b"]], ahead=0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(scene.box.run)
        await anyio.wait_all_tasks_blocked()
        assert scene.scored.depth == 9
        scene.serve(3)
        await anyio.wait_all_tasks_blocked()
        assert scene.scored.depth == 9, "it is four batches ahead"
        scene.serve(4)
        await anyio.wait_all_tasks_blocked()
        assert scene.scored.depth == 10
        tasks.cancel_scope.cancel()


async def test_no_more_is_taken_than_the_run_needs() -> None:
    """Refills apart; it stays ready for those until the learner closes them."""
    scene = Scene([["a"]] * 20, groups=3)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(scene.box.run)
        await anyio.wait_all_tasks_blocked()
        assert len(scene.source.steps) == 3
        scene.refills.put(2)
        await anyio.wait_all_tasks_blocked()
        assert len(scene.source.steps) == 5
        scene.refills.close()
        assert numbers(await everything(scene.outcomes)) == [0, 1, 2, 3, 4]
    assert scene.source.closed == 1


@pytest.mark.parametrize("end", ["drained", "closed"])
@pytest.mark.parametrize("where", ["opening", "asking", "pausing", "held back"])
async def test_it_ends_wherever_it_waits(where: str, end: str) -> None:
    """Told to stop, or no longer needed: nothing keeps the run waiting."""
    scenes: dict[str, Callable[[], Scene]] = {
        "opening": lambda: Scene(source=Source([], reachable=False)),
        "asking": Scene,
        "pausing": lambda: Scene([None] * 10_000, settings=AtroposSection(poll_seconds=60.0)),
        "held back": lambda: Scene([["a", "a"], ["a"]], ahead=0),
    }
    scene = scenes[where]()
    steps = scene.box.drain if end == "drained" else scene.refills.close
    outcomes = await fetched(scene, steps=steps)
    assert len(outcomes) == (2 if where == "held back" else 0)
    assert scene.source.closed == 1


async def test_told_to_stop_before_it_began_it_only_tells_what_was_lost() -> None:
    """The books of the run close all the same."""
    scene = Scene([["a"]], lost={0: "a"}, first_group=1)
    scene.box.drain()
    assert numbers(await run_and_receive(scene.box.run, scene.outcomes)) == [0]
    assert scene.source.opened == []


@pytest.mark.parametrize("end", ["drained", "closed"])
async def test_what_has_been_taken_is_still_sent(end: str) -> None:
    """Also while there is no room for it."""
    scene = Scene([["a"] * 5, ["b"]], capacity=1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(scene.box.run)
        await anyio.wait_all_tasks_blocked()
        assert scene.scored.depth == 1
        (scene.box.drain if end == "drained" else scene.refills.close)()
        await anyio.wait_all_tasks_blocked()
        assert numbers(await everything(scene.outcomes)) == [0, 1, 2, 3, 4]


async def test_a_long_wait_is_reported_with_its_reason() -> None:
    """Once for each time that patience ran out."""
    settings = AtroposSection(poll_seconds=0.05, patience_seconds=1e-9)
    scene = Scene([None, None, ["a"]], settings=settings)
    with capture_logs() as logs:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(scene.box.run)
            await scene.outcomes.receive()
            tasks.cancel_scope.cancel()
    assert [entry["waiting_for"] for entry in logs] == ["Godot", "Godot"]


async def test_it_is_ready_when_the_source_is() -> None:
    """Environments that start then find a trainer."""
    scene = Scene(source=Source([], reachable=False))
    with anyio.move_on_after(0.1) as scope:
        async with anyio.create_task_group() as tasks:
            await tasks.start(scene.box.run)
    assert scope.cancelled_caught
    scene = Scene()
    async with anyio.create_task_group() as tasks:
        await tasks.start(scene.box.run)
        assert scene.source.opened == [0]
        tasks.cancel_scope.cancel()


async def test_what_the_user_must_mend_ends_it() -> None:
    """The error comes out, and everything it holds is closed."""
    scene = Scene(source=Source([], refusal=ProfileError("not a server")))
    with pytest.raises(ExceptionGroup) as caught:
        await scene.box.run()
    assert caught.group_contains(ProfileError, match="not a server")
    with pytest.raises(EndOfStream):
        await scene.outcomes.receive()
    assert scene.source.closed == 1


async def test_cancelled_it_closes_what_it_holds() -> None:
    """As every box does."""
    scene = Scene()
    await cancelled_midway(scene.box.run)
    with pytest.raises(EndOfStream):
        await scene.outcomes.receive()
    assert scene.source.closed == 1


async def test_without_a_reader_it_fails() -> None:
    """NullSampleLog goes on fetching for nobody; what could not be sent has its number."""
    scene = Scene([["a", "b"]])
    scene.outcomes.close()
    with pytest.raises(ExceptionGroup) as caught:
        await scene.box.run()
    assert caught.group_contains(QueueClosed)
    assert (scene.box.prompted_until, scene.box.under_way) == (1, {0: "a"})


async def test_it_remembers_where_the_latest_numbers_came_from() -> None:
    """Within a bound: only those that have not ended matter, and they are among the latest."""
    scene = Scene([["a"] * (REMEMBERED + 5)], groups=10**6, ahead=10**6)
    await fetched(scene, steps=scene.refills.close)
    assert list(scene.box.under_way) == list(range(5, REMEMBERED + 5))
    assert scene.box.received == {"a": REMEMBERED + 5}


async def test_from_the_server_to_the_learner() -> None:
    """With the real source and the real reader: a group that is sent arrives, a malformed one beside it is refused."""
    fake, reading = FakeApi(), ReaderScene()
    registration = Registration(
        batch_size=4, max_token_len=64, checkpoint_dir="", save_checkpoint_interval=1, num_steps=1
    )
    api = AtroposApi("http://fake", registration=registration, reset=True, poll_seconds=0.05, transport=fake)
    scene = Scene(source=api, reader=reading.reader)
    fields = group((40,), (41,)) | {"env_id": 0}
    async with anyio.create_task_group() as tasks:
        await tasks.start(scene.box.run)
        fake.state["queue"] += [fields, fields | {"scores": [1.0]}]
        good, bad = await scene.outcomes.receive(), await scene.outcomes.receive()
        assert isinstance(good, ScoredGroup)
        assert isinstance(bad, Discarded)
        assert (good.group.prompt.group_id, bad.prompt.group_id, bad.reason) == (0, 1, "invalid")
        assert scene.box.received == {"environment 0": 2}
        scene.refills.close()
