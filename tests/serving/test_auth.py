"""API keys, and protection against requests from other web sites."""

from __future__ import annotations

import pytest

from clotho.serving.auth import Clients
from clotho.settings.server import HttpServer
from tests.serving.running_server import serving

ROUTES = [
    ("GET", "/metrics"), ("GET", "/v1/models"), ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"),
    ("POST", "/generate"), ("POST", "/v1/generate/"), ("GET", "/nowhere"), ("GET", "/health/"),
]  # fmt: skip
KEYS = [
    None, "", "Bearer", "Bearer wrong", "secret", "Basic secret", "Bearer secret2", "Bearer " + "x" * 8000,
    "Bearer wrong:secret", "Bearer :secret", "Bearer secret2:label", "Bearer secret:a:b", "secret:label",
    "Bearer s\xe9",
]  # fmt: skip


async def test_every_path_except_health_requires_the_key() -> None:
    """A missing, empty, wrong or long key causes status 401, also for unknown paths."""
    async with serving(api_key="secret") as served:
        for method, path in ROUTES:
            for key in KEYS:
                headers = {} if key is None else {b"authorization": key.encode("latin-1")}
                answer = await served.http.request(method, path, headers=headers)
                assert answer.status_code == 401, (path, key)
                assert answer.json()["error"]["code"] == "invalid_api_key"
        assert (await served.http.get("/health")).status_code == 200
        assert served.engine.requests == []


async def test_requests_with_the_key_succeed() -> None:
    """OpenAI's client sends the key as a bearer token; any label may follow it."""
    async with serving(api_key="secret") as served:
        for key in ("secret", "secret:environment", "secret:", "secret:not a label"):
            client = served.openai.with_options(api_key=key)
            assert (await client.completions.create(model="policy", prompt="x", max_tokens=1)).choices


async def test_a_key_may_be_in_the_header_of_clients_of_anthropic() -> None:
    """A label may follow it; a bearer token has precedence."""
    async with serving(api_key="secret") as served:
        for headers, status in (
            ({"x-api-key": "secret"}, 200),
            ({"x-api-key": "secret:label"}, 200),
            ({"x-api-key": "wrong"}, 401),
            ({"x-api-key": "secret", "authorization": "Bearer wrong"}, 401),
        ):
            assert (await served.http.get("/v1/models", headers=headers)).status_code == status


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("127.0.0.1", "127.0.0.1/label"), ("::1", "::1/label"), ("::ffff:127.0.0.1", "127.0.0.1/label"),
        ("192.0.2.7", "192.0.2.7"), ("::ffff:192.0.2.7", "192.0.2.7"), ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("unix", "unix"), (None, ""),
    ],
)  # fmt: skip
def test_a_client_without_a_key_of_its_own_is_an_address(address: str | None, name: str) -> None:
    """With IPv6, a network of 64 bits. A label distinguishes clients of this machine only, because it can be chosen."""
    for settings, key in ((HttpServer(), "any"), (HttpServer(api_key="secret"), "secret")):
        headers = [(b"authorization", f"Bearer {key}:label".encode())]
        scope = {"type": "http", "headers": headers, "client": address and (address, 5000)}
        client = Clients(settings).find(scope)
        assert client is not None
        assert (client.name, client.label, client.quota) == (name, "label", None)


@pytest.mark.parametrize("host", ["evil.com", "evil.com:8000", "localhost.evil.com", "", "127.0.0.1.evil.com", "[::1"])
async def test_a_foreign_host_header_is_rejected(host: str) -> None:
    """DNS rebinding: a foreign name that resolves to the loopback address."""
    async with serving() as served:
        answer = await served.http.get("/v1/models", headers={"host": host})
        assert answer.status_code == 400


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:1", "[::1]:8000", "LOCALHOST"])
async def test_loopback_host_headers_are_accepted(host: str) -> None:
    """With any port, in any case."""
    async with serving() as served:
        assert (await served.http.get("/v1/models", headers={"host": host})).status_code == 200


async def test_a_foreign_origin_header_is_rejected() -> None:
    """No response contains CORS headers."""
    async with serving() as served:
        for origin in ("http://evil.com", "https://localhost.evil.com", "null", "http://[x"):
            answer = await served.http.post(
                "/v1/completions", content=b'{"prompt":"x"}', headers={"origin": origin, "content-type": "text/plain"}
            )
            assert answer.status_code == 400
        answer = await served.http.get("/v1/models", headers={"origin": "http://localhost:3000"})
        assert answer.status_code == 200
        assert not [name for name in answer.headers if name.startswith("access-control")]
        assert served.engine.requests == []
