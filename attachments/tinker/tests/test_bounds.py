"""What the server keeps for a program that trains and samples for days: everything has a bound."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from attachments.tinker import samplers, sessions
from attachments.tinker.bodies import Answer, CreateSession
from attachments.tinker.tests.tinker_server import Client, Live, tinker_server
from clotho.serving import auth
from tests import saved_models

ANYBODY = auth.Client(name="", is_admin=True, arrived=0.0)
PROMPT = [3, 9, 12, 7]
KEPT = 3


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model."""
    directory = tmp_path_factory.mktemp("bounds")
    saved_models.save(directory / "model", dtype=mx.float32)
    return directory


@pytest.fixture(scope="module")
def live(place: Path) -> Iterator[Live]:
    """A server of all tests of the module, which keeps few sampling sessions, and one adapter in memory."""
    flags = ("--server.tinker.max-sampling-sessions", str(KEPT), "--server.tinker.max-samplers", "1")
    with tinker_server(place / "model", place / "saved", *flags) as live:
        yield live


def sample(client: Client, sampler: str) -> int:
    """Return the status of a request to sample."""
    call = {"prompt": {"chunks": [{"tokens": PROMPT}]}, "sampling_params": {"max_tokens": 1}}
    return client.respond("asample", sampling_session_id=sampler, **call).status_code


def test_a_session_keeps_the_sampling_sessions_that_were_used_last(live: Live, place: Path) -> None:
    """A program that samples from new weights after every step needs the newest only; the disk has no others either."""
    client = live.client()
    model_id = client.model(str(place / "model"))
    reference, *made = [client.sampler(model_id) for _ in range(KEPT)]
    for _ in range(KEPT):
        assert sample(client, reference) == 200
        made.append(client.sampler(model_id))
    assert [sample(client, one) for one in (reference, *made)] == [200, *[404] * KEPT, 200, 200]
    kept = live.service.samplers
    assert (len(kept._samplers), len(kept._adapters)) == (KEPT, KEPT)
    assert len(live.service.sessions.open("")[-1].samplers) == KEPT
    on_disk = list(live.service.store.scratch(client.session).iterdir())
    assert 0 < len(on_disk) <= KEPT
    client.post(f"sessions/{client.session}/finish")


def test_an_adapter_stays_while_a_sampling_session_has_it(live: Live, place: Path) -> None:
    """Those in flight share one adapter, and those of one checkpoint."""
    client = live.client()
    model_id = client.model(str(place / "model"))
    path = client.result("save_weights_for_sampler", model_id=model_id, path="shared")["path"]
    made = []
    for number in range(KEPT + 1):
        call = {"session_id": client.session, "sampling_session_seq_id": 50 + number, "model_path": path}
        made.append(client.post("create_sampling_session", **call)["sampling_session_id"])
    client.sample(made[-1], PROMPT, max_tokens=1)
    (adapter,) = live.service.samplers._adapters.values()
    assert adapter.weights is not None
    in_flight = [client.sampler(model_id, kind="inflight") for _ in range(KEPT + 1)]
    client.sample(in_flight[-1], PROMPT, max_tokens=1)
    (adapter,) = live.service.samplers._adapters.values()
    assert adapter.in_flight
    assert path in [one["tinker_path"] for one in client.get("checkpoints")["checkpoints"]]
    client.post(f"sessions/{client.session}/finish")


def test_the_versions_of_an_adapter_in_flight_are_the_newest(
    live: Live, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than the completions under way have tokens of."""
    monkeypatch.setattr(samplers, "KEPT_VERSIONS", 2)
    client = live.client()
    model_id = client.model(str(place / "model"))
    for _ in range(4):
        client.sampler(model_id, kind="inflight")
    (adapter,) = live.service.samplers._adapters.values()
    assert len(adapter.versions) == 2
    client.post(f"sessions/{client.session}/finish")


def test_results_that_were_read_are_kept_up_to_a_number_and_a_size(
    live: Live, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they were written, because the objects of a long completion are many times larger; the newest one always."""
    monkeypatch.setattr(sessions, "KEPT_RESULTS", 4)
    client = live.client()
    sampler = client.sampler(client.model(str(place / "model")))
    kept = live.service.sessions.open("")[-1]
    for _ in range(6):
        client.sample(sampler, PROMPT, max_tokens=4)
    assert (len(kept.read), len(kept.unread), len(kept.unfinished)) == (4, 0, 0)
    assert all(isinstance(content, bytes) for content, _ in kept.read.values())
    size = max(len(content) for content, _ in kept.read.values())
    monkeypatch.setattr(sessions, "KEPT_BYTES", 2 * size)
    client.sample(sampler, PROMPT, max_tokens=4)
    assert 1 <= len(kept.read) <= 3
    monkeypatch.setattr(sessions, "KEPT_BYTES", 0)
    client.sample(sampler, PROMPT, max_tokens=4)
    assert len(kept.read) == 1
    client.post(f"sessions/{client.session}/finish")


def test_an_adapter_that_its_session_does_not_survive_leaves_the_engine(live: Live, place: Path) -> None:
    """Also if the session ends while the engine takes it."""
    for _ in range(6):
        client = live.client()
        model_id = client.model(str(place / "model"))
        for number in range(3):
            client.post("save_weights_for_sampler", model_id=model_id, sampling_session_seq_id=70 + number)
        client.post(f"sessions/{client.session}/finish")
    access = live.service.access
    assert access.compute.decode.submit(lambda: access.engine.row_weights.versions).result() == frozenset()


@pytest.mark.parametrize("turns", range(6))
def test_a_result_that_comes_at_the_end_of_a_poll_is_not_lost(turns: int) -> None:
    """In whatever turn of the event loop; the client asks again if it got nothing."""

    async def poll() -> None:
        open_ones = sessions.TinkerSessions(
            heartbeat_seconds=60.0, max_pending=8, on_end=lambda _: None, explain=lambda _, __: ""
        )
        session, computed = open_ones.create(ANYBODY, CreateSession()), asyncio.Event()

        async def work() -> Answer:
            await computed.wait()
            return {}

        name = open_ones.promise(session, ("model", None), work)["request_id"]

        def asked(seconds: float) -> Coroutine[Any, Any, sessions.Written | None]:
            return open_ones.result(name, ANYBODY, seconds, lambda _: (b"{}", ""))

        first = asyncio.create_task(asked(0.0))
        for _ in range(turns):
            await asyncio.sleep(0.0)
        computed.set()
        assert await first in (None, (b"{}", ""))
        assert await asked(60.0) == (b"{}", "")
        open_ones.end(session, "a test ends it")

    asyncio.run(poll())
