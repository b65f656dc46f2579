"""The routes of vLLM and Atropos that load adapters: statuses, texts, and what a refusal changes."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from attachments.adapters.tests.adapter_models import adapters_of
from attachments.adapters.tests.adapter_server import Served, serving_adapters, write_root
from clotho.settings.server import AdaptersSection

Server = tuple[Served, httpx.AsyncClient]
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    """Serve two adapters at most."""
    async with serving_adapters(str(write_root(tmp_path)), AdaptersSection(max_loaded=2)) as running:
        yield running


async def sample(http: httpx.AsyncClient, model: str, **fields: Any) -> dict[str, Any]:
    """Return the response of a completion."""
    body = {"model": model, "prompt": "two and", "max_tokens": 6, "temperature": 0, "return_token_ids": True, **fields}
    response = await http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


async def test_a_client_of_vllm_loads_uses_and_unloads_an_adapter(server: Server) -> None:
    """Bodies and texts of the responses are those of vLLM."""
    _, http = server
    loaded = await http.post(LOAD, json={"lora_name": "math", "lora_path": "a"})
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'math' added successfully.")
    cards = {card["id"]: card for card in (await http.get("/v1/models")).json()["data"]}
    assert cards["math"]["parent"] == "models/base"
    assert (await sample(http, "math"))["choices"] != (await sample(http, "models/base"))["choices"]
    unloaded = await http.post(UNLOAD, json={"lora_name": "math"})
    assert (unloaded.status_code, unloaded.text) == (200, "Success: LoRA adapter 'math' removed successfully.")
    gone = await http.post("/v1/completions", json={"model": "math", "prompt": "x", "max_tokens": 1})
    assert (gone.status_code, gone.json()["error"]["param"]) == (404, "model")


async def test_load_inplace_replaces_an_adapter(server: Server) -> None:
    """Without it, a name that is taken is refused."""
    _, http = server
    await http.post(LOAD, json={"lora_name": "math", "lora_path": "a"})
    before = await sample(http, "math")
    taken = await http.post(LOAD, json={"lora_name": "math", "lora_path": "nested/b"})
    assert (taken.status_code, taken.json()["error"]["code"]) == (400, "adapter_exists")
    assert (await sample(http, "math"))["choices"] == before["choices"]
    replaced = await http.post(LOAD, json={"lora_name": "math", "lora_path": "nested/b", "load_inplace": True})
    assert replaced.status_code == 200
    after = await sample(http, "math")
    assert after["choices"] != before["choices"]
    assert after["weights_version"] > before["weights_version"]


REFUSED: dict[str, tuple[str, dict[str, Any], int]] = {
    "missing": (LOAD, {"lora_name": "x", "lora_path": "absent"}, 404),
    "outside": (LOAD, {"lora_name": "x", "lora_path": "../outside"}, 400),
    "absolute": (LOAD, {"lora_name": "x", "lora_path": "/etc"}, 400),
    "no adapter": (LOAD, {"lora_name": "x", "lora_path": "nested"}, 404),
    "strange name": (LOAD, {"lora_name": "../x", "lora_path": "a"}, 400),
    "name of the model": (LOAD, {"lora_name": "policy", "lora_path": "a"}, 400),
    "no name": (LOAD, {"lora_path": "a"}, 400),
    "number": (LOAD, {"lora_name": 5, "lora_path": "a"}, 400),
    "list": (LOAD, {"lora_name": "x", "lora_path": ["a"]}, 400),
    "unknown": (UNLOAD, {"lora_name": "x"}, 404),
    "atropos missing": ("/lora/load", {"adapter_path": "absent"}, 404),
    "atropos root": ("/lora/load", {"adapter_path": "/"}, 400),
    "atropos unknown": ("/lora/unload", {"adapter_name": "x"}, 404),
}


async def test_a_refused_request_changes_nothing(server: Server) -> None:
    """The body of the response is an error object, and the next request succeeds."""
    served, http = server
    found = {}
    for case, (route, body, _) in REFUSED.items():
        response = await http.post(route, json=body)
        found[case] = response.status_code
        assert response.json()["error"]["message"], case
        assert served.registry.loaded == {}, case
    assert found == {case: status for case, (_, _, status) in REFUSED.items()}
    assert (await http.post(LOAD, json={"lora_name": "math", "lora_path": "a"})).status_code == 200


async def test_a_damaged_adapter_is_refused_while_the_loaded_one_serves(server: Server, tmp_path: Path) -> None:
    """The file is validated before anything changes."""
    _, http = server
    await http.post(LOAD, json={"lora_name": "math", "lora_path": "a"})
    before = await sample(http, "math")
    os.truncate(tmp_path / "root" / "nested" / "b" / "adapters.safetensors", 99)
    response = await http.post(LOAD, json={"lora_name": "math", "lora_path": "nested/b", "load_inplace": True})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "adapter_invalid")
    assert (await sample(http, "math"))["choices"] == before["choices"]


async def test_a_server_without_a_root_refuses_to_load(tmp_path: Path) -> None:
    """With status 403; the status route answers."""
    async with serving_adapters("", AdaptersSection()) as (_, http):
        response = await http.post(LOAD, json={"lora_name": "x", "lora_path": str(write_root(tmp_path) / "a")})
        assert (response.status_code, response.json()["error"]["code"]) == (403, "adapter_disabled")
        assert (await http.get("/lora/status")).json()["adapters"] == []


async def test_a_trainer_of_atropos_loads_adapters_by_path(server: Server) -> None:
    """A second load replaces an adapter of the same name; unloading without a name unloads the last one."""
    _, http = server
    first = (await http.post("/lora/load", json={"adapter_path": "nested/b"})).json()
    assert (first["status"], first["adapter_name"], first["load_count"]) == ("ok", "b", 1)
    assert first["adapter_config"]["r"] == 8
    second = (await http.post("/lora/load", json={"adapter_path": "a", "adapter_name": "b"})).json()
    assert second["adapter_id"] > first["adapter_id"]
    status = (await http.get("/lora/status")).json()
    assert status["active_adapter"] == "b"
    assert [(one["name"], one["rank"]) for one in status["adapters"]] == [("b", 4)]
    unloaded = await http.post("/lora/unload", json={})
    assert unloaded.json()["active_adapter"] is None
    assert unloaded.json()["adapters"] == []


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"echo": True, "logprobs": 1}], ids=str)
async def test_an_adapter_that_is_unloaded_before_the_engine_is_asked_is_unknown(
    server: Server, fields: dict[str, Any]
) -> None:
    """Status 404, as if the request had come after it: the server validated the name before."""
    served, http = server
    await http.post(LOAD, json={"lora_name": "math", "lora_path": "a"})
    served.compute.decode.submit(lambda: adapters_of(served.engine).unload_adapter("math")).result()
    answer = await http.post("/v1/completions", json={"model": "math", "prompt": "two", "max_tokens": 2, **fields})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert answer.json()["error"]["param"] == "model"
