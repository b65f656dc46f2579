"""The fetcher numbers groups in the order of arrival, within the staleness bound."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest
from structlog.testing import capture_logs

from actors.atropos_fetcher import IN_FLIGHT_KEPT
from attachments.atropos.api import AtroposApi
from attachments.atropos.client import Registration
from attachments.atropos.tests.environment_groups import ReaderHarness, group
from attachments.atropos.tests.fake_api import FakeApi
from attachments.atropos.tests.fetcher_harness import FetcherHarness, Source, fetched, numbers
from protocols.errors import ProfileError
from protocols.queues import EndOfStream, QueueClosed
from protocols.rollout import Discarded, ScoredGroup
from tests.actors.actor_helpers import cancel_when_blocked, receive_all, run_and_receive


async def test_every_group_gets_the_next_number_and_is_counted() -> None:
    """Refused groups get a number and are counted too."""
    harness = FetcherHarness([["a", "b!"], ["a"]], first_group=7, received={"a": 5, "c": 1}, ended=7)
    outcomes = await fetched(harness, steps=harness.replacements.close)
    assert numbers(outcomes) == [7, 8, 9]
    assert [isinstance(one, Discarded) for one in outcomes] == [False, True, False]
    assert (harness.fetcher.prompted_until, harness.fetcher.sent_until) == (10, 10)
    assert harness.fetcher.received == {"a": 7, "b": 1, "c": 1}
    assert harness.fetcher.in_flight == {7: "a", 8: "b", 9: "a"}
    assert harness.reader.versions == [10, 10, 10]
    assert (harness.source.opened, harness.source.closed) == ([0], 1)


async def test_groups_of_an_earlier_start_are_reported_first() -> None:
    """The environments do not send these groups again. They count as prompted and as received."""
    harness = FetcherHarness(
        [["a"], ["a"]], lost={3: "b", 5: "a"}, first_group=6, received={"a": 4, "b": 2}, ended=4, ahead=2
    )
    outcomes = await fetched(harness, steps=harness.replacements.close)
    assert numbers(outcomes) == [3, 5], "6 prompted groups reach max_batches_ahead"
    assert {(one.reason, one.prompt.source) for one in outcomes if isinstance(one, Discarded)} == {
        ("lost", "a"),
        ("lost", "b"),
    }
    assert harness.fetcher.received == {"a": 4, "b": 2}
    assert harness.fetcher.in_flight == {3: "b", 5: "a"}


@pytest.mark.parametrize(("ahead", "allowed"), [(0, 2), (1, 4), (2, 6)])
async def test_no_batch_is_fetched_before_its_weights_serve(ahead: int, allowed: int) -> None:
    """The batch of step s is fetched when the weights of step s - max_batches_ahead serve."""
    harness = FetcherHarness([["a"]] * 20, ahead=ahead)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(harness.fetcher.run)
        await anyio.wait_all_tasks_blocked()
        assert len(harness.source.steps) == allowed
        harness.serve(1)
        await anyio.wait_all_tasks_blocked()
        assert len(harness.source.steps) == allowed + 2
        harness.replacements.put(1)
        await anyio.wait_all_tasks_blocked()
        assert harness.source.steps == [0] * allowed + [1] * 3
        tasks.cancel_scope.cancel()


async def test_a_fetched_batch_is_sent_completely() -> None:
    """The server has handed over the batch, so no group of it may be dropped."""
    harness = FetcherHarness([["a"] * 9, ["b"]], ahead=0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(harness.fetcher.run)
        await anyio.wait_all_tasks_blocked()
        assert harness.scored.depth == 9
        harness.serve(3)
        await anyio.wait_all_tasks_blocked()
        assert harness.scored.depth == 9, "it is four batches ahead"
        harness.serve(4)
        await anyio.wait_all_tasks_blocked()
        assert harness.scored.depth == 10
        tasks.cancel_scope.cancel()


async def test_fetching_stops_at_the_number_of_groups_of_the_run() -> None:
    """Replacements are added to this number. The fetcher waits for replacements until the learner closes the cell."""
    harness = FetcherHarness([["a"]] * 20, groups=3)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(harness.fetcher.run)
        await anyio.wait_all_tasks_blocked()
        assert len(harness.source.steps) == 3
        harness.replacements.put(2)
        await anyio.wait_all_tasks_blocked()
        assert len(harness.source.steps) == 5
        harness.replacements.close()
        assert numbers(await receive_all(harness.outcomes)) == [0, 1, 2, 3, 4]
    assert harness.source.closed == 1


@pytest.mark.parametrize("end", ["drained", "closed"])
@pytest.mark.parametrize("where", ["opening", "asking", "pausing", "held back"])
async def test_a_drained_or_completed_fetcher_ends_from_every_wait(where: str, end: str) -> None:
    """A fetcher in any wait ends when it is drained or when the replacements are closed."""
    harnesses: dict[str, Callable[[], FetcherHarness]] = {
        "opening": lambda: FetcherHarness(source=Source([], reachable=False)),
        "asking": FetcherHarness,
        "pausing": lambda: FetcherHarness([None] * 10_000, poll_seconds=60.0),
        "held back": lambda: FetcherHarness([["a", "a"], ["a"]], ahead=0),
    }
    harness = harnesses[where]()
    steps = harness.fetcher.drain if end == "drained" else harness.replacements.close
    outcomes = await fetched(harness, steps=steps)
    assert len(outcomes) == (2 if where == "held back" else 0)
    assert harness.source.closed == 1


async def test_a_fetcher_drained_before_its_start_reports_only_lost_groups() -> None:
    """The group accounting still balances."""
    harness = FetcherHarness([["a"]], lost={0: "a"}, first_group=1)
    harness.fetcher.drain()
    assert numbers(await run_and_receive(harness.fetcher.run, harness.outcomes)) == [0]
    assert harness.source.opened == []


@pytest.mark.parametrize("end", ["drained", "closed"])
async def test_fetched_groups_are_sent_after_a_drain(end: str) -> None:
    """Also if the outbox was full at the time of the drain."""
    harness = FetcherHarness([["a"] * 5, ["b"]], capacity=1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(harness.fetcher.run)
        await anyio.wait_all_tasks_blocked()
        assert harness.scored.depth == 1
        (harness.fetcher.drain if end == "drained" else harness.replacements.close)()
        await anyio.wait_all_tasks_blocked()
        assert numbers(await receive_all(harness.outcomes)) == [0, 1, 2, 3, 4]


async def test_a_long_wait_is_logged_with_its_reason() -> None:
    """One log event per expired patience interval."""
    harness = FetcherHarness([None, None, ["a"]], patience_seconds=1e-9)
    with capture_logs() as logs:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(harness.fetcher.run)
            await harness.outcomes.receive()
            tasks.cancel_scope.cancel()
    assert [entry["waiting_for"] for entry in logs] == ["Godot", "Godot"]


async def test_the_fetcher_is_ready_when_its_source_is_ready() -> None:
    """Environments that start afterwards find a registered trainer."""
    harness = FetcherHarness(source=Source([], reachable=False))
    with anyio.move_on_after(0.1) as scope:
        async with anyio.create_task_group() as tasks:
            await tasks.start(harness.fetcher.run)
    assert scope.cancelled_caught
    harness = FetcherHarness()
    async with anyio.create_task_group() as tasks:
        await tasks.start(harness.fetcher.run)
        assert harness.source.opened == [0]
        tasks.cancel_scope.cancel()


async def test_an_error_of_the_source_ends_the_fetcher() -> None:
    """The error is raised, and the fetcher closes all its ends."""
    harness = FetcherHarness(source=Source([], refusal=ProfileError("not a server")))
    with pytest.raises(ExceptionGroup) as caught:
        await harness.fetcher.run()
    assert caught.group_contains(ProfileError, match="not a server")
    with pytest.raises(EndOfStream):
        await harness.outcomes.receive()
    assert harness.source.closed == 1


async def test_a_cancelled_fetcher_closes_its_ends() -> None:
    """The source and the outbox are closed."""
    harness = FetcherHarness()
    await cancel_when_blocked(harness.fetcher.run)
    with pytest.raises(EndOfStream):
        await harness.outcomes.receive()
    assert harness.source.closed == 1


async def test_a_fetcher_without_a_reader_fails() -> None:
    """QueueClosed is raised. A group that could not be sent keeps its number."""
    harness = FetcherHarness([["a", "b"]])
    harness.outcomes.close()
    with pytest.raises(ExceptionGroup) as caught:
        await harness.fetcher.run()
    assert caught.group_contains(QueueClosed)
    assert (harness.fetcher.prompted_until, harness.fetcher.in_flight) == (1, {0: "a"})


async def test_the_number_of_remembered_environments_is_bounded() -> None:
    """Only the environments of the newest groups are kept."""
    harness = FetcherHarness([["a"] * (IN_FLIGHT_KEPT + 5)], groups=10**6, ahead=10**6)
    await fetched(harness, steps=harness.replacements.close)
    assert list(harness.fetcher.in_flight) == list(range(5, IN_FLIGHT_KEPT + 5))
    assert harness.fetcher.received == {"a": IN_FLIGHT_KEPT + 5}


async def test_groups_reach_the_learner_from_the_real_source() -> None:
    """With the real source and reader: a valid group arrives, and a malformed group in the same batch is discarded."""
    fake, reading = FakeApi(), ReaderHarness()
    registration = Registration(
        batch_size=4, max_token_len=64, checkpoint_dir="", save_checkpoint_interval=1, num_steps=1
    )
    api = AtroposApi("http://fake", registration=registration, reset=True, poll_seconds=0.05, transport=fake)
    harness = FetcherHarness(source=api, reader=reading.reader)
    fields = group((40,), (41,)) | {"env_id": 0}
    async with anyio.create_task_group() as tasks:
        await tasks.start(harness.fetcher.run)
        fake.state["queue"] += [fields, fields | {"scores": [1.0]}]
        good, bad = await harness.outcomes.receive(), await harness.outcomes.receive()
        assert isinstance(good, ScoredGroup)
        assert isinstance(bad, Discarded)
        assert (good.group.prompt.group_id, bad.prompt.group_id, bad.reason) == (0, 1, "invalid")
        assert harness.fetcher.received == {"environment 0": 2}
        harness.replacements.close()
