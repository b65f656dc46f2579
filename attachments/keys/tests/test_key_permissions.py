"""What a key may do: control routes are for administrators, and a client changes only what belongs to it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from attachments.adapters.tests.adapter_server import Served, write_root
from clotho.lanes.compute_thread import finish
from clotho.serving.parts import Endpoint
from clotho.settings.server import AdaptersSection

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
KEYS = {"alice": "key-of-alice", "bob": "key-of-bob-0", "root": "key-of-root-0", "ops": "key-of-ops-00"}
ADMINS = ("root", "ops")
LONG = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "model": "models/base"}


class Shared:
    """A server that several keys share; `given` is an adapter of its flags. clients: by key."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.clients: dict[str, httpx.AsyncClient] = {}

    def endpoints(self) -> list[Endpoint]:
        """Return those of the attachments; the library itself has none for administrators."""
        return self.served.server.parts.endpoints

    async def load(self, key: str, name: str, path: str = "a", *, replace: bool = False) -> int:
        """Load an adapter and return the status."""
        body = {"lora_name": name, "lora_path": path, "load_inplace": replace}
        return (await self.clients[key].post(LOAD, json=body)).status_code

    async def unload(self, key: str, name: str) -> int:
        """Unload an adapter and return the status."""
        return (await self.clients[key].post(UNLOAD, json={"lora_name": name})).status_code

    async def rows(self) -> int:
        """Return the number of requests in the engine."""
        stats = await finish(self.served.compute.decode.submit(self.served.engine.stats))
        return stats.running_rows + stats.waiting_rows


@pytest.fixture
async def shared(tmp_path: Path) -> AsyncIterator[Shared]:
    """Serve adapters to the keys of `KEYS`."""
    lines = [f'[{name}]\nkey = "{key}"\nadmin = {str(name in ADMINS).lower()}\n' for name, key in KEYS.items()]
    keys = tmp_path / "keys.toml"
    keys.touch(0o600)
    keys.write_text("".join(lines))
    root = write_root(tmp_path)
    served = Served(str(root), AdaptersSection(max_loaded=3), api_keys_file=str(keys), allow_pause=True)
    shared = Shared(served)
    try:
        await served.registry.load("given", root / "a", keep=True)
        async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
            url = await tasks.start(served.server.run)
            for name, key in KEYS.items():
                client = httpx.AsyncClient(base_url=url, timeout=60, headers={"authorization": f"Bearer {key}"})
                shared.clients[name] = await stack.enter_async_context(client)
            yield shared
            tasks.cancel_scope.cancel()
    finally:
        served.compute.stop()


async def test_only_administrators_control_the_server(shared: Shared) -> None:
    """Other keys receive status 403, also with a label behind the key. /openapi.json names the routes."""
    endpoints = [one for one in shared.endpoints() if one.access == "admin"]
    assert {one.path for one in endpoints} >= {"/pause", "/v1/policy/weights"}
    for one in endpoints:
        for key in ("alice", "bob"):
            for secret in (KEYS[key], f"{KEYS[key]}:root"):
                headers = {"authorization": f"Bearer {secret}"}
                answer = await shared.clients[key].request(one.method, one.path, headers=headers)
                assert (answer.status_code, answer.json()["error"]["code"]) == (403, "admin_required")
        answer = await shared.clients["root"].request(one.method, one.path, json={})
        assert answer.status_code == 200 or answer.json()["error"]["code"] is None  # this server accepts no weights


async def test_every_other_route_is_for_all_keys(shared: Shared) -> None:
    """No route controls the server and is described as one for all."""
    for one in shared.endpoints():
        if one.access == "admin":
            continue
        answer = await shared.clients["alice"].request(one.method, one.path, json={})
        assert "admin_required" not in answer.text
        assert answer.status_code != 500


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/abort_request", {"abort_all": True}),
        ("/abort_request", {"rid": "x"}),
        ("/abort_requests", {"request_ids": ["x"]}),
    ],
)
async def test_a_key_aborts_its_own_requests_only(shared: Shared, route: str, body: dict[str, Any]) -> None:
    """Also if requests of several keys have the same name. An administrator aborts those of all keys."""
    ended: dict[str, str] = {}
    alice, bob, root = (shared.clients[key] for key in ("alice", "bob", "root"))

    async def request(key: str) -> None:
        answer = await shared.clients[key].post("/v1/completions", json={**LONG, "request_id": "x"})
        ended[key] = answer.json()["choices"][0]["finish_reason"]

    await root.post("/pause", params={"mode": "keep"})
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(request, "alice")
        tasks.start_soon(request, "bob")
        with anyio.fail_after(60):
            while await shared.rows() < 2:
                await anyio.lowlevel.checkpoint()
        assert (await bob.post(route, json=body)).json()["aborted"] == 1
        assert (await bob.post(route, json=body)).json()["aborted"] == 0
        with anyio.fail_after(60):
            while "bob" not in ended:
                await anyio.lowlevel.checkpoint()
        assert ended == {"bob": "abort"}
        assert (await alice.get("/v1/models")).status_code == 200
        assert (await root.post(route, json=body)).json()["aborted"] == 1
    assert ended == {"bob": "abort", "alice": "abort"}


async def test_a_key_changes_its_own_adapters_only(shared: Shared) -> None:
    """Other keys use them. The owner and administrators replace and unload them."""
    assert await shared.load("alice", "math") == 200
    assert await shared.load("bob", "math", replace=True) == 403
    assert await shared.unload("bob", "math") == 403
    answer = await shared.clients["bob"].post("/v1/completions", json={**LONG, "model": "math", "max_tokens": 1})
    assert answer.status_code == 200
    assert await shared.load("alice", "math", "nested/b", replace=True) == 200
    assert await shared.unload("alice", "math") == 200
    assert await shared.load("alice", "math") == 200
    assert await shared.unload("root", "math") == 200


async def test_a_name_stays_with_its_owner_after_it_was_unloaded(shared: Shared) -> None:
    """Requests that still name the adapter are 404, and never reach the weights of another key."""
    assert await shared.load("alice", "math") == 200
    assert await shared.unload("alice", "math") == 200
    assert await shared.load("bob", "math") == 403
    answer = await shared.clients["bob"].post("/v1/completions", json={**LONG, "model": "math"})
    assert answer.status_code == 404
    assert await shared.load("alice", "math") == 200


async def test_adapters_of_the_flags_are_never_unloaded(shared: Shared) -> None:
    """Other keys do not replace them either; an administrator does."""
    assert await shared.unload("bob", "given") == 403
    assert await shared.unload("root", "given") == 403
    assert await shared.load("bob", "given", replace=True) == 403
    assert await shared.load("root", "given", "nested/b", replace=True) == 200
    assert await shared.unload("root", "given") == 403


async def test_a_load_evicts_no_adapter_of_another_key(shared: Shared) -> None:
    """Three adapters fit. Without one of its own to evict, the load is refused with status 503."""
    assert await shared.load("alice", "first") == 200
    assert await shared.load("bob", "second") == 200
    assert await shared.load("bob", "third") == 200
    assert sorted(shared.served.registry.loaded) == ["first", "given", "third"]
    assert await shared.load("ops", "fourth") == 200  # an administrator evicts the least recently used one
    assert sorted(shared.served.registry.loaded) == ["fourth", "given", "third"]
    assert await shared.load("alice", "fifth") == 503


async def test_the_default_of_unloading_by_name_is_the_clients_own_adapter(shared: Shared) -> None:
    """Atropos's route without a name concerns what the same client has loaded last."""
    alice, bob = shared.clients["alice"], shared.clients["bob"]
    await alice.post("/lora/load", json={"adapter_path": "a", "adapter_name": "math"})
    assert (await bob.post("/lora/unload", json={})).json()["active_adapter"] is None
    assert "math" in shared.served.registry.loaded
    assert (await alice.post("/lora/unload", json={})).status_code == 200
    assert "math" not in shared.served.registry.loaded


async def test_health_says_that_the_engine_is_paused(shared: Shared) -> None:
    """With status 200, because the server works as a client requested."""
    root = shared.clients["root"]
    for route, status in (("/pause", "paused"), ("/resume", "ok"), ("/sleep", "paused"), ("/wake_up", "ok")):
        await root.post(route)
        answer = await root.get("/health")
        assert (answer.status_code, answer.json()["status"]) == (200, status)
