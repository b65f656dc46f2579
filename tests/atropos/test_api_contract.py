"""What the trainer relies on, of the API server of atroposlib and of the fake that other tests use in its place."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from structlog.testing import capture_logs

from protocols.errors import ProfileError
from protocols.rollout import Discarded, ScoredGroup
from tests.atropos.api_servers import JSON, ApiServerUnderTest, api_server
from tests.atropos.environment_groups import ReaderHarness, group
from tests.atropos.fake_api import FIELDS
from tests.atropos.polling import wait_until


@pytest.fixture(params=["fake", "real"])
async def server(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ApiServerUnderTest]:
    """Each of the two."""
    async with api_server(request.param, tmp_path) as server:
        yield server


def numbered(number: int) -> dict[str, Any]:
    """A group of two that is known by its first reward."""
    return group((40,), (41,)) | {"scores": [float(number), 0.5]}


def numbers(batch: list[msgspec.Raw] | None) -> list[float] | None:
    """The first rewards of the groups of a batch."""
    return None if batch is None else [msgspec.json.decode(raw)["scores"][0] for raw in batch]


async def test_a_trainer_registers_and_waits(server: ApiServerUnderTest) -> None:
    """Its own step is the server's; environments may register once it has asked for a batch."""
    api = server.api()
    await api.open(step=3)
    assert await server.get("/info") == {"batch_size": 4, "max_token_len": 64}
    assert (await server.get("/status"))["current_step"] == 3
    assert (await server.join())["status"] == "wait for trainer to start"
    assert await api.batch(step=3) is None
    assert (await server.join())["status"] == "success"
    await api.close()


async def test_batches_come_whole_and_the_latest_first(server: ApiServerUnderTest) -> None:
    """Groups of a batch are in order, batches are not; every group has every field."""
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


async def test_large_batches_are_packed_and_unpacked(server: ApiServerUnderTest) -> None:
    """Beyond 1000 bytes the server packs what it sends."""
    api = server.api()
    await api.open(step=0)
    talk = [[{"role": "user", "content": "again " * 2000}]] * 2
    await server.post(numbered(1) | {"messages": talk}, numbered(2) | {"messages": talk})
    assert numbers(await api.batch(step=0)) == [1, 2]
    await api.close()


async def test_another_trainer_was_there(server: ApiServerUnderTest) -> None:
    """A second registration changes nothing: the server is cleared, or the run refused."""
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


async def test_going_on_with_what_fits(server: ApiServerUnderTest) -> None:
    """Without reset, what environments sent for the trainer before is learned from."""
    before = server.api()
    await before.open(step=0)
    await server.post(numbered(1), numbered(2))
    after = server.api(reset=False)
    await after.open(step=5)
    assert numbers(await after.batch(step=5)) == [1, 2]
    for api in (before, after):
        await api.close()


@pytest.mark.parametrize("reset", [True, False])
async def test_groups_that_came_before_any_trainer(server: ApiServerUnderTest, reset: bool) -> None:
    """They keep a registration from counting, for ever: they are cleared, and the trainer registers again."""
    await server.post(numbered(1), numbered(2))
    api = server.api(reset=reset)
    await api.open(step=0)
    assert await api.batch(step=0) is None
    await server.post(numbered(3), numbered(4))
    assert numbers(await api.batch(step=0)) == [3, 4]
    await api.close()


async def test_a_server_that_is_started_again(server: ApiServerUnderTest) -> None:
    """It is waited for, and registered with at the trainer's own step; that is told once, and once when it is over."""
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


async def test_a_server_that_forgot_and_got_groups_before_it_was_asked(server: ApiServerUnderTest) -> None:
    """Environments that did not notice its new start send on at once."""
    api = server.api()
    await api.open(step=0)
    await server.stop()
    await server.start()
    await server.post(numbered(1), numbered(2))
    assert await api.batch(step=2) is None
    await server.post(numbered(3), numbered(4))
    assert numbers(await api.batch(step=2)) == [3, 4]
    await api.close()


async def test_somebody_clears_the_server_while_the_run_goes_on(server: ApiServerUnderTest) -> None:
    """Then it fails, or has nothing for ever if groups came at once: either way it is registered with again."""
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


async def test_a_malformed_group_harms_no_other(server: ApiServerUnderTest) -> None:
    """The server passes on whatever has lists of numbers in it; the reader tells one from the other."""
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


async def test_it_says_for_whom_the_server_waits(server: ApiServerUnderTest) -> None:
    """NullSampleLog, nothing, too little."""
    api = server.api()
    await api.open(step=0)
    assert await api.batch(step=0) is None
    assert await api.waiting_for() == "no environment is registered"
    await server.join()
    assert await api.waiting_for() == "no group is queued; 1 environment has registered"
    await server.http.post("/scored_data", json=numbered(1) | {"env_id": 0})
    said = "1 group is queued, at most 2 of the 4 sequences of a batch; 1 environment has registered"
    assert await api.waiting_for() == said
    await server.join(desired_name="two", min_batch_allocation=0.5)
    await server.http.post("/scored_data", json=numbered(2) | {"env_id": 0})
    assert await api.batch(step=0) is None
    said = "2 groups are queued; environment 1 has none (min_batch_allocation waits for it)"
    assert await api.waiting_for() == said
    await api.close()


async def test_numbers_that_json_does_not_have(tmp_path: Path) -> None:
    """The real server takes them, cannot send them, and loses the batch: the next one comes."""
    async with api_server("real", tmp_path) as server:
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
