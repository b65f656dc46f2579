"""Behaviour of the API server of atroposlib that the trainer depends on, also checked for the fake."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from structlog.testing import capture_logs

from attachments.atropos.tests.api_servers import JSON, ApiServers, ApiServerUnderTest, Fake, Real, running
from attachments.atropos.tests.environment_groups import ReaderHarness, group
from attachments.atropos.tests.fake_api import FIELDS
from attachments.atropos.tests.polling import wait_until
from protocols.errors import ProfileError, RemoteError
from protocols.rollout import Discarded, ScoredGroup


@pytest.fixture(scope="module")
def servers() -> Iterator[ApiServers]:
    """The processes of the real server."""
    with ApiServers() as started:
        yield started


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.needs_extra("atroposlib"))])
async def server(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ApiServerUnderTest]:
    """The fake and the real server."""
    made = Fake() if request.param == "fake" else Real(request.getfixturevalue("servers"), tmp_path / "log")
    async with running(made) as server:
        yield server


def numbered(number: int) -> dict[str, Any]:
    """Return a group of two sequences whose first reward is `number`."""
    return group((40,), (41,)) | {"scores": [float(number), 0.5]}


def numbers(batch: list[msgspec.Raw] | None) -> list[float] | None:
    """Return the first reward of each group."""
    return None if batch is None else [msgspec.json.decode(raw)["scores"][0] for raw in batch]


async def test_environments_can_register_after_the_first_poll_of_the_trainer(server: ApiServerUnderTest) -> None:
    """The server takes the step of the trainer."""
    api = server.api()
    await api.open(step=3)
    assert await server.get("/info") == {"batch_size": 4, "max_token_len": 64}
    assert (await server.get("/status"))["current_step"] == 3
    assert (await server.join())["status"] == "wait for trainer to start"
    assert await api.batch(step=3) is None
    assert (await server.join())["status"] == "success"
    await api.close()


async def test_batches_are_exact_and_the_newest_is_first(server: ApiServerUnderTest) -> None:
    """The groups of a batch are in order; every group has all fields."""
    api = server.api()
    await api.open(step=0)
    await server.post(numbered(1))
    assert await api.batch(step=0) is None
    await server.post(numbered(2), numbered(3), numbered(4), numbered(5))
    batch = await api.batch(step=0)
    assert numbers(batch) == [3, 4]
    assert set(msgspec.json.decode((batch or [])[0])) == set(FIELDS)
    assert numbers(await api.batch(step=0)) == [1, 2]
    assert await api.batch(step=0) is None
    await api.close()


async def test_large_batches_are_compressed(server: ApiServerUnderTest) -> None:
    """The server compresses responses above 1000 bytes."""
    api = server.api()
    await api.open(step=0)
    talk = [[{"role": "user", "content": "again " * 2000}]] * 2
    await server.post(numbered(1) | {"messages": talk}, numbered(2) | {"messages": talk})
    assert numbers(await api.batch(step=0)) == [1, 2]
    await api.close()


async def test_a_registration_of_another_trainer_is_reset_or_an_error(server: ApiServerUnderTest) -> None:
    """A second registration has no effect on the server."""
    first = server.api(batch_size=8)
    await first.open(step=100)
    await server.post(numbered(1), numbered(2))
    kind = server.api(reset=False)
    with pytest.raises(ProfileError, match=r"batches of 8 sequences .* this run needs 4 .* atropos\.reset"):
        await kind.open(step=0)
    assert (await server.get("/info"))["batch_size"] == 8
    firm = server.api()
    await firm.open(step=0)
    assert await server.get("/info") == {"batch_size": 4, "max_token_len": 64}
    assert await firm.batch(step=0) is None
    for api in (first, kind, firm):
        await api.close()


async def test_a_matching_registration_is_kept_without_reset(server: ApiServerUnderTest) -> None:
    """The groups in the queue are delivered."""
    before = server.api()
    await before.open(step=0)
    await server.post(numbered(1), numbered(2))
    after = server.api(reset=False)
    await after.open(step=5)
    assert numbers(await after.batch(step=5)) == [1, 2]
    for api in (before, after):
        await api.close()


@pytest.mark.parametrize("reset", [True, False])
async def test_groups_before_the_first_registration_are_cleared(server: ApiServerUnderTest, reset: bool) -> None:
    """They make the registration ineffective, so the trainer resets the server and registers again."""
    await server.post(numbered(1), numbered(2))
    api = server.api(reset=reset)
    await api.open(step=0)
    assert await api.batch(step=0) is None
    await server.post(numbered(3), numbered(4))
    assert numbers(await api.batch(step=0)) == [3, 4]
    await api.close()


async def test_the_trainer_registers_again_with_a_restarted_server(server: ApiServerUnderTest) -> None:
    """With its current step; the start and the end of the outage are logged."""
    api = server.api(reset=False)
    await api.open(step=0)
    assert await api.batch(step=0) is None
    await server.stop()
    batches: list[Any] = []

    async def fetch() -> None:
        batches.append(await api.batch(step=7))

    with capture_logs() as logs:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fetch)
            await wait_until(lambda: bool(logs))
            await server.start()
    assert batches == [None]
    assert await server.get("/info") == {"batch_size": 4, "max_token_len": 64}
    assert (await server.get("/status"))["current_step"] == 7
    assert [entry["log_level"] for entry in logs] == ["warning", "info"]
    await api.close()


async def test_groups_between_a_restart_and_the_registration_are_cleared(server: ApiServerUnderTest) -> None:
    """Environments may send groups immediately after the restart."""
    api = server.api()
    await api.open(step=0)
    await server.stop()
    await server.start()
    await server.post(numbered(1), numbered(2))
    assert await api.batch(step=2) is None
    await server.post(numbered(3), numbered(4))
    assert numbers(await api.batch(step=2)) == [3, 4]
    await api.close()


async def test_the_trainer_registers_again_after_a_reset_by_someone_else(server: ApiServerUnderTest) -> None:
    """The server returns an error, or empty batches if groups have arrived since."""
    api = server.api()
    await api.open(step=0)
    await server.http.get("/reset_data")
    assert await api.batch(step=1) is None
    assert (await server.get("/info"))["batch_size"] == 4
    await server.http.get("/reset_data")
    await server.post(numbered(1), numbered(2))
    for _ in range(32):
        assert await api.batch(step=2) is None
    assert (await server.get("/info"))["batch_size"] == 4
    assert (await server.get("/status"))["current_step"] == 2
    await api.close()


async def test_two_trainers_of_one_server_do_not_replace_each_other_without_end(server: ApiServerUnderTest) -> None:
    """One of them ends, and names the server and the registration of the other, which then trains."""
    trainers = [server.api(batch_size=size) for size in (4, 6)]
    errors: dict[int, RemoteError] = {}

    async def train(number: int) -> None:
        try:
            await trainers[number].open(step=0)
            while len(errors) == 0:
                await trainers[number].batch(step=0)
        except RemoteError as error:
            errors[number] = error

    with anyio.fail_after(120):
        async with anyio.create_task_group() as tasks:
            for number in range(2):
                tasks.start_soon(train, number)
    [(lost, error)] = errors.items()
    assert server.url in str(error)
    assert f"batches of {(6, 4)[lost]} sequences" in str(error)
    await server.post(*[numbered(number) for number in range((4, 6)[1 - lost] // 2)])
    assert numbers(await trainers[1 - lost].batch(step=0)) == list(range((4, 6)[1 - lost] // 2))
    for api in trainers:
        await api.close()


async def test_a_malformed_group_does_not_affect_the_others(server: ApiServerUnderTest) -> None:
    """The server accepts malformed groups; the reader discards them."""
    api, harness = server.api(), ReaderHarness()
    await api.open(step=0)
    await server.post(numbered(1) | {"scores": [1.0]}, numbered(2))
    batch = await api.batch(step=0)
    assert batch
    one, other = [await harness.outcome(raw) for raw in batch]
    assert isinstance(one, Discarded)
    assert one.detail == "scores: 1 for 2 sequences"
    assert isinstance(other, ScoredGroup)
    await api.close()


async def test_the_reason_for_waiting_comes_from_the_state_of_the_server(server: ApiServerUnderTest) -> None:
    """No environment, no group, too few groups."""
    api = server.api()
    await api.open(step=0)
    assert await api.batch(step=0) is None
    assert await api.waiting_for() == "no environment is registered"
    await server.join()
    assert await api.waiting_for() == "no group is queued; 1 environment has registered"
    await server.http.post("/scored_data", json=numbered(1) | {"env_id": 0})
    reason = "1 group is queued, at most 2 of the 4 sequences of a batch; 1 environment has registered"
    assert await api.waiting_for() == reason
    await server.join(desired_name="two", min_batch_allocation=0.5)
    await server.http.post("/scored_data", json=numbered(2) | {"env_id": 0})
    assert await api.batch(step=0) is None
    reason = "2 groups are queued, none from environment 1, whose min_batch_allocation reserves a share"
    assert await api.waiting_for() == reason
    await api.close()


@pytest.mark.needs_extra("atroposlib")
async def test_a_batch_with_a_number_that_is_not_finite_is_lost(servers: ApiServers, tmp_path: Path) -> None:
    """The real server accepts the number and cannot send the batch; the next batch is delivered."""
    async with running(Real(servers, tmp_path / "log")) as server:
        api = server.api()
        await api.open(step=0)
        poison = msgspec.json.encode(numbered(1) | {"env_id": None}).replace(b"0.5", b"NaN")
        (await server.http.post("/scored_data", content=poison, headers=JSON)).raise_for_status()
        await server.post(numbered(2))
        with capture_logs() as logs:
            assert await api.batch(step=0) is None
        assert "not finite" in logs[0]["reason"]
        await server.post(numbered(3), numbered(4))
        assert numbers(await api.batch(step=0)) == [3, 4]
        await api.close()
