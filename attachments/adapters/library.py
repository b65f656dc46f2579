"""What `adapters` adds to the library: routes that load adapters, and models beside the policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clotho.extension import Extension

if TYPE_CHECKING:
    from clotho.serving.parts import ServerParts


class _Adapters(Extension):
    def server(self, parts: ServerParts) -> None:
        access = parts.offered.engine
        if access is None:
            return
        from attachments.adapters.adapters import AdapterEngine, AdapterRegistry
        from attachments.adapters.routes_adapters import AdapterRoutes

        if isinstance(access.engine, AdapterEngine) and (store := access.engine.adapters) is not None:
            registry = AdapterRegistry.of_server(parts.offered, access.submit, access.engine, store)
            parts.sources.append(registry)
            parts.endpoints += AdapterRoutes(registry).endpoints()


EXTENSION = _Adapters()
