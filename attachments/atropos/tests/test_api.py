"""The trainer's registration and polling: outages, restarts, and the reason for missing batches."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from typing import Any

import anyio
import httpx
import msgspec
import pytest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from structlog.testing import capture_logs

from attachments.atropos import client
from attachments.atropos.api import (
    EMPTY_POLLS_PER_CHECK,
    MAX_LOST_REGISTRATIONS,
    REGISTRATION_ATTEMPTS,
    AtroposApi,
    explain_wait,
)
from attachments.atropos.client import EnvironmentStatus, Registration, Status
from attachments.atropos.tests.environment_groups import group
from attachments.atropos.tests.fake_api import FakeApi, endless, truncated
from attachments.atropos.tests.polling import wait_until
from protocols.errors import ProfileError, RemoteError

URL = "http://user:secret@atropos.example:8000/prefix"
SHOWN = "http://atropos.example:8000/prefix"


def trainer(fake: FakeApi, *, url: str = "http://atropos.example:8000", reset: bool = True) -> AtroposApi:
    """Return a trainer whose batches have two groups of two sequences."""
    registration = Registration(
        batch_size=4, max_token_len=64, checkpoint_dir="/kept", save_checkpoint_interval=5, num_steps=9
    )
    return AtroposApi(url, registration=registration, reset=reset, poll_seconds=0.05, transport=fake)


async def send_groups(fake: FakeApi, count: int) -> None:
    """Send groups as an environment."""
    async with httpx.AsyncClient(transport=fake, base_url="http://atropos.example:8000") as http:
        for number in range(count):
            await http.post("/scored_data", json=group((40,), (41,)) | {"scores": [number, 0.5], "env_id": None})


async def test_the_registration_has_all_eight_fields() -> None:
    """The server rejects null; the names for wandb are empty."""
    fake = FakeApi()
    await trainer(fake).open(step=6)
    assert fake.registered == [
        {
            "wandb_group": "", "wandb_project": "", "batch_size": 4, "max_token_len": 64, "checkpoint_dir": "/kept",
            "save_checkpoint_interval": 5, "starting_step": 6, "num_steps": 9,
        }
    ]  # fmt: skip


def refuse(fake: FakeApi) -> None:
    """The server refuses connections."""
    fake.away = httpx.ConnectError("refused")


def hang(fake: FakeApi) -> None:
    """The server does not respond in time."""
    fake.away = httpx.ReadTimeout("")


def respond(response: Callable[[], Response]) -> Callable[[FakeApi], None]:
    """The server returns another response three times."""

    def instead(fake: FakeApi) -> None:
        fake.instead["/batch"] = [response() for _ in range(3)]

    return instead


WHOLE = msgspec.json.encode({"batch": [group((40,), (41,))] * 50})


@pytest.mark.parametrize(
    "trouble",
    [
        refuse,
        hang,
        respond(lambda: PlainTextResponse("oops", status_code=500)),
        respond(lambda: PlainTextResponse("busy", status_code=503)),
        respond(lambda: PlainTextResponse("what?", status_code=404)),
        respond(lambda: Response(status_code=307, headers={"location": "http://elsewhere.example"})),
        respond(lambda: PlainTextResponse("<html>")),
        respond(lambda: JSONResponse({"batch": 5})),
        respond(lambda: JSONResponse({})),
        respond(lambda: Response(b'{"batch": ' + b"[" * 100_000)),
        respond(lambda: truncated(WHOLE, "identity")),
        respond(lambda: truncated(gzip.compress(WHOLE), "gzip")),
        respond(lambda: Response(WHOLE, headers={"content-encoding": "gzip"})),
        respond(lambda: Response(WHOLE, headers={"content-encoding": "br"})),
        respond(lambda: JSONResponse({"status": "error", "message": "Trainer not registered.", "batch": []})),
    ],
)
async def test_an_outage_is_logged_once_and_the_trainer_registers_again(trouble: Callable[[FakeApi], None]) -> None:
    """It registers with its current step and receives the next batch."""
    fake = FakeApi()
    api = trainer(fake)
    await api.open(step=0)
    await send_groups(fake, 2)
    trouble(fake)
    batches: list[Any] = []

    async def fetch() -> None:
        batches.append(await api.batch(step=5))

    with capture_logs() as logs:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fetch)
            await wait_until(lambda: len(fake.asked) >= 9 or bool(batches))
            fake.away = None
    assert [len(batch) for batch in batches] == [2]
    assert [entry["log_level"] for entry in logs] == ["warning", "info"]
    assert logs[0]["url"] == logs[1]["url"] == "http://atropos.example:8000"
    assert fake.registered[-1]["starting_step"] == 5


async def test_the_trainer_waits_for_a_server_that_starts_later() -> None:
    """The start of the outage and its end are logged."""
    fake = FakeApi()
    refuse(fake)
    api = trainer(fake)
    with capture_logs() as logs:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: api.open(step=0))
            await wait_until(lambda: len(fake.asked) >= 3)
            assert fake.registered == []
            fake.away = None
    assert len(fake.registered) == 1
    assert [entry["log_level"] for entry in logs] == ["warning", "info"]


@pytest.mark.parametrize("away", ["open", "batch"])
async def test_waiting_can_be_cancelled(away: str) -> None:
    """A run can end while its server is unavailable."""
    fake = FakeApi()
    api = trainer(fake)
    if away == "batch":
        await api.open(step=0)
    refuse(fake)
    with anyio.move_on_after(0.2) as scope:
        await (api.open(step=0) if away == "open" else api.batch(step=0))
    assert scope.cancelled_caught
    await api.close()


@pytest.mark.parametrize(
    "response",
    [
        lambda: PlainTextResponse("not found", status_code=404),
        lambda: PlainTextResponse("forbidden", status_code=403),
        lambda: Response(status_code=302, headers={"location": "/login"}),
        lambda: PlainTextResponse("<html>welcome</html>"),
        lambda: JSONResponse({"status": "ok"}),
    ],
)
async def test_another_http_server_is_an_error(response: Callable[[], Response]) -> None:
    """The error contains the address without credentials."""
    fake = FakeApi()
    fake.instead["/prefix/info"] = [response()]
    with pytest.raises(ProfileError) as caught:
        await trainer(fake, url=URL).open(step=0)
    assert f"atropos.url {SHOWN} is not an Atropos API server (" in str(caught.value)
    assert "run-api" in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["http://host:99999", "http://host:port", "http://@", "http://xn--a", "http://h:-1"])
def test_an_invalid_address_is_an_error(url: str) -> None:
    """The error is raised before any request."""
    with pytest.raises(ProfileError, match=r"atropos\.url is not a valid address"):
        trainer(FakeApi(), url=url)


async def test_a_server_with_a_registration_is_reset_once() -> None:
    """The reset is logged; a server without a registration is not reset."""
    fake = FakeApi()
    with capture_logs() as logs:
        await trainer(fake).open(step=0)
        assert "GET /reset_data" not in fake.asked
        await trainer(fake).open(step=0)
    assert fake.asked.count("GET /reset_data") == 1
    assert len(logs) == 1
    assert logs[0]["event"] == "atropos_server_reset"


async def test_a_server_that_never_shows_the_registration_ends_the_run() -> None:
    """After a bounded number of attempts, with the address of the server."""
    fake = FakeApi()
    fake.instead["/info"] = [JSONResponse({"batch_size": -1, "max_token_len": -1}) for _ in range(1000)]
    with anyio.fail_after(60), pytest.raises(RemoteError, match="has no registration") as caught:
        await trainer(fake).open(step=0)
    assert "http://atropos.example:8000" in str(caught.value)
    assert len(fake.registered) == MAX_LOST_REGISTRATIONS * REGISTRATION_ATTEMPTS


async def test_a_failed_request_does_not_reset_the_server() -> None:
    """The groups of the queue are still delivered."""
    fake = FakeApi()
    api = trainer(fake)
    await api.open(step=0)
    await send_groups(fake, 2)
    fake.instead["/batch"] = [PlainTextResponse("busy", status_code=503)]
    assert len(await api.batch(step=0) or []) == 2
    assert "GET /reset_data" not in fake.asked


async def test_a_batch_that_is_too_large_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is logged; the next batch is delivered."""
    monkeypatch.setattr(client, "MAX_BODY_BYTES", 10_000)
    fake = FakeApi()
    api = trainer(fake)
    await api.open(step=0)
    await send_groups(fake, 2)
    fake.instead["/batch"] = [
        endless(b" " * 1000, 11),
        Response(gzip.compress(b" " * 10_001), headers={"content-encoding": "gzip"}),
    ]
    with capture_logs() as logs:
        assert await api.batch(step=0) is None
        assert await api.batch(step=0) is None
    assert [entry["log_level"] for entry in logs] == ["error"] * 2
    assert len(await api.batch(step=0) or []) == 2


async def test_the_registration_is_checked_after_many_empty_polls() -> None:
    """Once per EMPTY_POLLS_PER_CHECK polls."""
    fake = FakeApi()
    api = trainer(fake)
    await api.open(step=0)
    before = fake.asked.count("GET /info")
    for _ in range(3 * EMPTY_POLLS_PER_CHECK):
        assert await api.batch(step=0) is None
    assert fake.asked.count("GET /info") - before == 3


async def test_the_reason_for_waiting_never_raises() -> None:
    """An unavailable server is part of the reason."""
    fake = FakeApi()
    api = trainer(fake)
    refuse(fake)
    assert await api.waiting_for() == "the state of the server is unknown: GET /status: refused"


def environment(own: int = 0, largest: int = 1, unallocated: float = 1.0) -> EnvironmentStatus:
    """Return the state of one environment."""
    return EnvironmentStatus(self_queue_size=own, max_group_size=largest, unallocated_fraction=unallocated)


@pytest.mark.parametrize(
    ("queued", "environments", "expected"),
    [
        (0, [], "no environment is registered"),
        (3, [], "no environment is registered; 3 groups are queued"),
        (0, [environment(), environment()], "no group is queued; 2 environments have registered"),
        (
            3,
            [environment(3, 8)],
            "3 groups are queued, at most 24 of the 128 sequences of a batch; 1 environment has registered",
        ),
        (
            40,
            [environment(3, 8)],
            "40 groups are queued, whose sizes do not add up to 128 sequences yet (each size must divide the largest); "
            "1 environment has registered",
        ),
        (
            12,
            [environment(12, 8, 0.5), environment(0, 8, 0.5)],
            "12 groups are queued, none from environment 1, whose min_batch_allocation reserves a share",
        ),
        (
            50,
            [environment(50, 6)],
            "groups of 6 sequences cannot fill a batch of 128: set learner.batch_size x sampling.group_size to a "
            "multiple of 6, or change the group_size of the environment",
        ),
        (0, [environment()] * 16, "no group is queued; at least 16 environments have registered"),
    ],
)
def test_the_most_likely_reason_is_returned(queued: int, environments: list[EnvironmentStatus], expected: str) -> None:
    """With the remedy if it is known."""
    assert explain_wait(Status(queue_size=queued), environments, 128) == expected
