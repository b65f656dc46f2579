"""The OpenAPI document of the HTTP API, computed from the endpoints and the structs of requests and responses.

The routes of the dashboard are not part of it: the page is their only client, and they change with it
(docs/dashboard-internals.md).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from clotho import __version__
from clotho.extension import provided
from clotho.serving.auth import KEY_HEADER
from clotho.serving.parts import Endpoint, ServerParts

REF = "#/components/schemas/{name}"
JSON, TEXT, EVENTS, BYTES = "application/json", "text/plain", "text/event-stream", "application/octet-stream"

ACCESS = {
    "own": "Concerns what belongs to the API key of the request; for an administrator, what belongs to any client.",
    "admin": "For administrators: API keys with `admin = true`, `server.api_key`, and every client of a server "
    "without keys. Others receive status 403.",
}
"""Descriptions of operations that are not the same for all clients."""


class Description:
    """The document of one server, computed at the first request."""

    def __init__(self, parts: ServerParts) -> None:
        """parts: of the running server."""
        self._content = encoded(parts.served)

    async def document(self, _: Request) -> Response:
        """Return the description of the API."""
        return Response(self._content, media_type="application/json")


def encoded(endpoints: Sequence[Endpoint]) -> bytes:
    """Return the document as JSON."""
    described = [one for one in endpoints if one.about]
    types = {provided(place) for one in described for place in (*one.requests, *one.responses, one.errors)}
    ordered = sorted(types, key=lambda kind: str(kind.__name__))
    paths: dict[str, dict[str, Any]] = {}
    for one in described:
        path = plain_path(one)
        paths.setdefault(path, {})[one.method.lower()] = _operation(path, one)
    _, components = msgspec.json.schema_components(ordered, ref_template=REF)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "Clotho", "version": __version__, "description": "HTTP API of a Clotho server."},
            "paths": paths,
            "components": {
                "schemas": {name: _with_description(schema) for name, schema in components.items()},
                "securitySchemes": {
                    "key": {"type": "http", "scheme": "bearer"},
                    "header": {"type": "apiKey", "in": "header", "name": KEY_HEADER},
                },
            },
            "security": [{}, {"key": []}, {"header": []}],
        }
    )


def plain_path(one: Endpoint) -> str:
    """Return the path of an endpoint as the document writes it."""
    return re.sub(r":\w+}", "}", one.path)


def _operation(path: str, one: Endpoint) -> dict[str, Any]:
    content = (
        {JSON: {"schema": _alternatives(one.responses)}} if one.responses else {TEXT: {"schema": {"type": "string"}}}
    )
    if one.streams:
        content[EVENTS] = {"schema": {"type": "string"}}
    found: dict[str, Any] = {
        "operationId": re.sub("[{}]", "", path).strip("/").replace("/", "_").replace(".", "_"),
        "summary": one.about,
        **({"description": ACCESS[one.access]} if one.access in ACCESS else {}),
        "parameters": [
            *({"name": name, "in": "query", "required": False, "schema": schema} for name, schema in one.query.items()),
            *(
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                for name in re.findall(r"\{(\w+)\}", path)
            ),
        ],
        "responses": {
            "200": {"description": "Success", "content": content},
            "default": {"description": "Error", "content": {JSON: {"schema": _alternatives((one.errors,))}}},
        },
    }
    if one.binary:
        found["requestBody"] = {"required": True, "content": {BYTES: {"schema": {"type": "string"}}}}
    if one.requests:
        found["requestBody"] = {"required": True, "content": {JSON: {"schema": _alternatives(one.requests)}}}
    return found


def _alternatives(places: tuple[str, ...]) -> dict[str, Any]:
    found = [{"$ref": REF.format(name=place.partition(":")[2])} for place in places]
    return found[0] if len(found) == 1 else {"anyOf": found}


def _with_description(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema whose description is plain text."""
    text = schema.get("description")
    return schema | {"description": inspect.cleandoc(text)} if isinstance(text, str) else schema
