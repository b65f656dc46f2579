"""What `adapters` adds to the library: rows with other weights than the policy's, and routes that load adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clotho.extension import Extension

if TYPE_CHECKING:
    import mlx.nn as nn

    from clotho.inference.parts import EngineParts
    from clotho.serving.parts import ServerParts
    from clotho.settings.server import AdaptersSection


class Adapters(Extension):
    """Adapters of rows, and the routes that load them."""

    def engine(self, parts: EngineParts) -> None:
        """Give rows the weights of their adapters."""
        from attachments.adapters.adapter_weights import provide

        provide(parts)

    def adapter_bytes(self, model: nn.Module, limits: AdaptersSection, itemsize: int) -> int:
        """Return the memory of the adapters that the limits permit."""
        from attachments.adapters.adapter_rows import adapter_bytes

        return adapter_bytes(model, limits, itemsize)

    def server(self, parts: ServerParts) -> None:
        """Serve the loaded adapters, and add the routes that load and unload them."""
        access = parts.offered.engine
        if access is None:
            return
        from attachments.adapters.adapter_weights import EngineAdapters
        from attachments.adapters.adapters import AdapterRegistry
        from attachments.adapters.routes_adapters import AdapterRoutes

        if (adapters := EngineAdapters.of(access.engine)) is not None:
            registry = AdapterRegistry.of_server(parts.offered, access.submit, adapters, adapters.store)
            parts.sources.append(registry)
            parts.endpoints += AdapterRoutes(registry).endpoints()


EXTENSION = Adapters()
