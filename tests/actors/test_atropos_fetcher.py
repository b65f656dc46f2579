"""The fetcher numbers groups in the order of arrival, within the staleness bound."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest
from structlog.testing import capture_logs

from actors.atropos_fetcher import IN_FLIGHT_KEPT
from clotho.atropos.api import AtroposApi
from clotho.atropos.client import Registration
from clotho.config.schema import AtroposSection
from protocols.errors import ProfileError
from protocols.queues import EndOfStream, QueueClosed
from protocols.rollout import Discarded, ScoredGroup
from tests.actors.boxes import cancelled_midway, everything, run_and_receive
from tests.atropos.environment_groups import ReaderHarness, group
from tests.atropos.fake_api import FakeApi
from tests.atropos.fetcher_harness import FetcherHarness, Source, fetched, numbers


async def test_every_group_gets_the_next_number_and_is_counted() -> None:
    """Those that are refused too: what has come must end."""
    harness = FetcherHarness([["a", "b!"], ["a"]], first_group=7, received={"a": 5, "c": 1}, ended=7)
    outcomes = await fetched(harness, steps=harness.refills.close)
    assert numbers(outcomes) == [7, 8, 9]
    assert [isinstance(one, Discarded) for one in outcomes] == [False, True, False]
    assert (harness.box.prompted_until, harness.box.sent_until) == (10, 10)
    assert harness.box.received == {"a": 7, "b": 1, "c": 1}
    assert harness.box.in_flight == {7: "a", 8: "b", 9: "a"}
    assert harness.reader.versions == [10, 10, 10]
    assert (harness.source.opened, harness.source.closed) == ([0], 1)


async def test_what_an_earlier_life_had_received_is_told_first() -> None:
    """Environments do not send it again; it counts as asked, and was counted as received before."""
    harness = FetcherHarness(
        [["a"], ["a"]], lost={3: "b", 5: "a"}, first_group=6, received={"a": 4, "b": 2}, ended=4, ahead=2
    )
    outcomes = await fetched(harness, steps=harness.refills.close)
    assert numbers(outcomes) == [3, 5], "6 are asked, which is as far ahead as is allowed"
    assert {(one.reason, one.prompt.source) for one in outcomes if isinstance(one, Discarded)} == {
        ("lost", "a"),
        ("lost", "b"),
    }
    assert harness.box.received == {"a": 4, "b": 2}
    assert harness.box.in_flight == {3: "b", 5: "a"}


@pytest.mark.parametrize(("ahead", "allowed"), [(0, 2), (1, 4), (2, 6)])
async def test_the_law_of_lag(ahead: int, allowed: int) -> None:
    """No batch is taken before the weights of step s - max_batches_ahead serve."""
    harness = FetcherHarness([["a"]] * 20, ahead=ahead)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(harness.box.run)
        await anyio.wait_all_tasks_blocked()
        assert len(harness.source.steps) == allowed
        harness.serve(1)
        await anyio.wait_all_tasks_blocked()
        assert len(harness.source.steps) == allowed + 2
        harness.refills.put(1)
        await anyio.wait_all_tasks_blocked()
        assert harness.source.steps == [0] * allowed + [1] * 3
        tasks.cancel_scope.cancel()


async def test_a_batch_of_the_server_is_sent_whole() -> None:
    """However large: what has been taken is in no other hands."""
    harness = FetcherHarness([["a"] * 9, ["b"]], ahead=0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(harness.box.run)
        await anyio.wait_all_tasks_blocked()
        assert harness.scored.depth == 9
        harness.serve(3)
        await anyio.wait_all_tasks_blocked()
        assert harness.scored.depth == 9, "it is four batches ahead"
        harness.serve(4)
        await anyio.wait_all_tasks_blocked()
        assert harness.scored.depth == 10
        tasks.cancel_scope.cancel()


async def test_no_more_is_taken_than_the_run_needs() -> None:
    """Refills apart; it stays ready for those until the learner closes them."""
    harness = FetcherHarness([["a"]] * 20, groups=3)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(harness.box.run)
        await anyio.wait_all_tasks_blocked()
        assert len(harness.source.steps) == 3
        harness.refills.put(2)
        await anyio.wait_all_tasks_blocked()
        assert len(harness.source.steps) == 5
        harness.refills.close()
        assert numbers(await everything(harness.outcomes)) == [0, 1, 2, 3, 4]
    assert harness.source.closed == 1


@pytest.mark.parametrize("end", ["drained", "closed"])
@pytest.mark.parametrize("where", ["opening", "asking", "pausing", "held back"])
async def test_it_ends_wherever_it_waits(where: str, end: str) -> None:
    """Told to stop, or no longer needed: nothing keeps the run waiting."""
    scenes: dict[str, Callable[[], FetcherHarness]] = {
        "opening": lambda: FetcherHarness(source=Source([], reachable=False)),
        "asking": FetcherHarness,
        "pausing": lambda: FetcherHarness([None] * 10_000, settings=AtroposSection(poll_seconds=60.0)),
        "held back": lambda: FetcherHarness([["a", "a"], ["a"]], ahead=0),
    }
    harness = scenes[where]()
    steps = harness.box.drain if end == "drained" else harness.refills.close
    outcomes = await fetched(harness, steps=steps)
    assert len(outcomes) == (2 if where == "held back" else 0)
    assert harness.source.closed == 1


async def test_told_to_stop_before_it_began_it_only_tells_what_was_lost() -> None:
    """The books of the run close all the same."""
    harness = FetcherHarness([["a"]], lost={0: "a"}, first_group=1)
    harness.box.drain()
    assert numbers(await run_and_receive(harness.box.run, harness.outcomes)) == [0]
    assert harness.source.opened == []


@pytest.mark.parametrize("end", ["drained", "closed"])
async def test_what_has_been_taken_is_still_sent(end: str) -> None:
    """Also while there is no room for it."""
    harness = FetcherHarness([["a"] * 5, ["b"]], capacity=1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(harness.box.run)
        await anyio.wait_all_tasks_blocked()
        assert harness.scored.depth == 1
        (harness.box.drain if end == "drained" else harness.refills.close)()
        await anyio.wait_all_tasks_blocked()
        assert numbers(await everything(harness.outcomes)) == [0, 1, 2, 3, 4]


async def test_a_long_wait_is_reported_with_its_reason() -> None:
    """Once for each time that patience ran out."""
    settings = AtroposSection(poll_seconds=0.05, patience_seconds=1e-9)
    harness = FetcherHarness([None, None, ["a"]], settings=settings)
    with capture_logs() as logs:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(harness.box.run)
            await harness.outcomes.receive()
            tasks.cancel_scope.cancel()
    assert [entry["waiting_for"] for entry in logs] == ["Godot", "Godot"]


async def test_it_is_ready_when_the_source_is() -> None:
    """Environments that start then find a trainer."""
    harness = FetcherHarness(source=Source([], reachable=False))
    with anyio.move_on_after(0.1) as scope:
        async with anyio.create_task_group() as tasks:
            await tasks.start(harness.box.run)
    assert scope.cancelled_caught
    harness = FetcherHarness()
    async with anyio.create_task_group() as tasks:
        await tasks.start(harness.box.run)
        assert harness.source.opened == [0]
        tasks.cancel_scope.cancel()


async def test_what_the_user_must_mend_ends_it() -> None:
    """The error comes out, and everything it holds is closed."""
    harness = FetcherHarness(source=Source([], refusal=ProfileError("not a server")))
    with pytest.raises(ExceptionGroup) as caught:
        await harness.box.run()
    assert caught.group_contains(ProfileError, match="not a server")
    with pytest.raises(EndOfStream):
        await harness.outcomes.receive()
    assert harness.source.closed == 1


async def test_cancelled_it_closes_what_it_holds() -> None:
    """As every box does."""
    harness = FetcherHarness()
    await cancelled_midway(harness.box.run)
    with pytest.raises(EndOfStream):
        await harness.outcomes.receive()
    assert harness.source.closed == 1


async def test_without_a_reader_it_fails() -> None:
    """NullSampleLog goes on fetching for nobody; what could not be sent has its number."""
    harness = FetcherHarness([["a", "b"]])
    harness.outcomes.close()
    with pytest.raises(ExceptionGroup) as caught:
        await harness.box.run()
    assert caught.group_contains(QueueClosed)
    assert (harness.box.prompted_until, harness.box.in_flight) == (1, {0: "a"})


async def test_it_remembers_where_the_latest_numbers_came_from() -> None:
    """Within a bound: only those that have not ended matter, and they are among the latest."""
    harness = FetcherHarness([["a"] * (IN_FLIGHT_KEPT + 5)], groups=10**6, ahead=10**6)
    await fetched(harness, steps=harness.refills.close)
    assert list(harness.box.in_flight) == list(range(5, IN_FLIGHT_KEPT + 5))
    assert harness.box.received == {"a": IN_FLIGHT_KEPT + 5}


async def test_from_the_server_to_the_learner() -> None:
    """With the real source and the real reader: a group that is sent arrives, a malformed one beside it is refused."""
    fake, reading = FakeApi(), ReaderHarness()
    registration = Registration(
        batch_size=4, max_token_len=64, checkpoint_dir="", save_checkpoint_interval=1, num_steps=1
    )
    api = AtroposApi("http://fake", registration=registration, reset=True, poll_seconds=0.05, transport=fake)
    harness = FetcherHarness(source=api, reader=reading.reader)
    fields = group((40,), (41,)) | {"env_id": 0}
    async with anyio.create_task_group() as tasks:
        await tasks.start(harness.box.run)
        fake.state["queue"] += [fields, fields | {"scores": [1.0]}]
        good, bad = await harness.outcomes.receive(), await harness.outcomes.receive()
        assert isinstance(good, ScoredGroup)
        assert isinstance(bad, Discarded)
        assert (good.group.prompt.group_id, bad.prompt.group_id, bad.reason) == (0, 1, "invalid")
        assert harness.box.received == {"environment 0": 2}
        harness.refills.close()
