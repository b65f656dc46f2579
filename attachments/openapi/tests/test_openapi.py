"""GET /openapi.json: a valid OpenAPI document that describes every route."""

from __future__ import annotations

from typing import Any

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator
from starlette.routing import Route

from clotho import __version__
from clotho.serving.app import build_app
from clotho.serving.limits import ConcurrencyLimit
from tests.serving.running_server import Served, serving

STRICT = ("ChatRequest", "CompletionRequest", "CreateResponse", "CreateMessage")


async def document(served: Served) -> dict[str, Any]:
    """Return the document."""
    found: dict[str, Any] = (await served.http.get("/openapi.json")).json()
    return found


async def test_the_document_is_valid() -> None:
    """Checked by openapi-spec-validator; every reference resolves."""
    async with serving() as served:
        found = await document(served)
        assert list(OpenAPIV31SpecValidator(found).iter_errors()) == []
        assert found["info"]["version"] == __version__
        assert (await served.http.get("/version")).json() == {"version": __version__}


async def test_the_document_describes_every_route() -> None:
    """With its method; a path that differs by a trailing slash is described once."""
    async with serving() as served:
        app = build_app(served.server.parts, ConcurrencyLimit(1))
        routes = {
            (route.path.rstrip("/").replace(":path}", "}"), method.lower())
            for route in app.routes
            if isinstance(route, Route)
            for method in (route.methods or ())
            if method != "HEAD"
        }
        found = await document(served)
        described = {(path, method) for path, methods in found["paths"].items() for method in methods}
        assert described == routes - {("/openapi.json", "get")}


@pytest.mark.parametrize("name", [*STRICT, "TokensRequest", "VllmRequest"])
async def test_a_request_is_described_by_the_struct_that_decodes_it(name: str) -> None:
    """The fields of the schema are those of the struct; OpenAI's and Anthropic's refuse unknown fields."""
    async with serving() as served:
        schema = (await document(served))["components"]["schemas"][name]
        assert "temperature" in schema["properties"] or name == "TokensRequest"
        assert (schema.get("additionalProperties") is False) == (name in STRICT)
