"""A server without an attachment serves everything else, and refuses by name what the attachment would serve."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from attachments.adapters.tests.adapter_server import serving_adapters
from attachments.openapi.document import plain_path
from attachments.sessions.tests.session_server import session_server
from clotho.serving.errors import ATTACHMENTS
from clotho.settings.server import AdaptersSection
from protocols.constraints import Grammar
from protocols.errors import ProfileError, RequestError
from tests.absent import without
from tests.serving.running_server import serving
from tests.small_models import byte_tokenizer

HELLO = {"role": "user", "content": "hi"}
CHAT: dict[str, Any] = {"messages": [HELLO], "max_tokens": 2}
FUNCTION = {"type": "function", "function": {"name": "f"}}
CALL = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}
CONSTRAINTS: dict[str, Any] = {
    "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a"},
    "guided_choice": ["a"],
}
CHAT_FIELDS: list[tuple[str, Any]] = [
    *CONSTRAINTS.items(), ("tools", [FUNCTION]), ("tool_choice", "required"), ("reasoning_effort", "none"),
    ("separate_reasoning", False), ("messages", [HELLO, CALL]), ("messages", [{"role": "tool", "content": "1"}]),
]  # fmt: skip
REFUSED = [
    *(("/v1/chat/completions", name, {**CHAT, name: value}) for name, value in CHAT_FIELDS),
    *(("/v1/completions", name, {"prompt": "x", name: value}) for name, value in CONSTRAINTS.items()),
    *(("/generate", name, {"prompt": "x", name: value}) for name, value in CONSTRAINTS.items()),
    ("/generate", "regex", {"text": "x", "sampling_params": {"regex": "a"}}),
    ("/v1/responses", "tools", {"input": "x", "tools": [{"type": "function", "name": "f"}]}),
    ("/v1/responses", "text", {"input": "x", "text": {"format": {"type": "json_object"}}}),
]


async def test_the_paths_of_attachments_are_known_whether_or_not_they_are_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table of the refusal has those that the attachments add to servers whose engine has adapters, or sessions."""
    async with serving_adapters(str(tmp_path), AdaptersSection()) as (served, _):
        found = [plain_path(one) for one in served.server.parts.endpoints]
    async with session_server(monkeypatch) as at:
        others = {plain_path(one) for one in at.served.server.parts.endpoints}.difference(found)
    assert sorted([*found, *others]) == sorted(path for paths in ATTACHMENTS.values() for path in paths)


SERVING = ("adapters", "dialects", "keys", "remote", "sessions", "tools")
"""Attachments that add to a server."""


@pytest.mark.parametrize("name", SERVING)
async def test_the_routes_of_the_library_answer_without_an_attachment(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The routes of the attachment respond with status 404, which names it, and openapi.json does not list them."""
    without(monkeypatch, name)
    async with serving(api_key="secret") as served:
        served.http.headers["authorization"] = "Bearer secret"
        for route, body in (("/v1/completions", {"prompt": "hi", "max_tokens": 2}), ("/v1/chat/completions", CHAT)):
            for stream in (False, True):
                assert (await served.post(route, **body, stream=stream)).status_code == 200
        for route in ("/v1/models", "/v1/models/policy", "/health", "/metrics", "/version"):
            assert (await served.http.get(route)).status_code == 200
        described = await served.http.get("/openapi.json")
        document = described.json()
        assert (
            set(re.findall(r'"#/components/schemas/([^"]+)"', described.text))
            == document["components"]["schemas"].keys()
        )
        for route in ATTACHMENTS.get(name, ()):
            assert route not in document["paths"]
            answer = await served.post(route)
            assert (answer.status_code, f"'{name}'" in answer.json()["error"]["message"]) == (404, True)


async def test_a_server_without_all_of_them_describes_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a valid document."""
    without(monkeypatch, *SERVING)
    async with serving() as served:
        document = (await served.http.get("/openapi.json")).json()
    assert list(OpenAPIV31SpecValidator(document).iter_errors()) == []


@pytest.mark.parametrize(("route", "param", "body"), REFUSED)
async def test_without_tools_their_fields_are_refused(
    route: str, param: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Status 400 with the field and the attachment, at every endpoint that has the field."""
    without(monkeypatch, "tools")
    async with serving() as served:
        answer = await served.post(route, **body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], "'tools'" in error["message"]) == (400, param, True)
        assert served.engine.requests == []


def test_without_tools_no_grammar_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal names the field and the attachment."""
    without(monkeypatch, "tools")
    tokenizer = byte_tokenizer()
    with pytest.raises(RequestError, match="guided_regex: needs the attachment 'tools'"):
        tokenizer.compile_grammar(Grammar(kind="regex", text="a", param="guided_regex"), tokenizer.vocab_size)


async def test_without_adapters_an_adapter_of_the_operator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """`serve --adapter` ends with this error."""
    without(monkeypatch, "adapters")
    async with serving() as served:
        with pytest.raises(ProfileError, match="needs the attachment 'adapters'"):
            await served.server.parts.load_chosen("a", Path("a"), Path.read_bytes)
