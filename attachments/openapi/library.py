"""What `openapi` adds to the library: the route of the document that describes all others."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clotho.serving.parts import ServerParts


def server(parts: ServerParts) -> None:
    """Add the route."""
    from clotho.serving.parts import Endpoint, Handlers

    described = Handlers("attachments.openapi.document:Description", parts)
    parts.endpoints.append(Endpoint("GET", "/openapi.json", described.method("document")))
