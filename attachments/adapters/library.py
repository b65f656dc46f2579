"""What `adapters` adds to the library: rows with other weights than the policy's, and routes that load adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    import mlx.nn as nn

    from attachments.adapters.adapters import AdapterRegistry
    from clotho.inference.parts import EngineParts
    from clotho.serving.parts import Endpoint, ServerParts
    from clotho.settings.server import AdaptersSection


def engine(parts: EngineParts) -> None:
    """Let requests of an engine name adapters, if it has limits for them."""
    if parts.adapters is None:
        return
    from attachments.adapters.adapter_store import AdapterStore
    from attachments.adapters.adapter_weights import AdapterWeights

    store = AdapterStore(parts.model, parts.adapters, adapted=parts.adapted, base_is_served=parts.keeps_base)
    parts.rows = AdapterWeights(store, parts.model, parts.adapted)


def adapter_bytes(model: nn.Module, limits: AdaptersSection, itemsize: int) -> int:
    """Return the memory of the adapters that the limits permit."""
    from attachments.adapters.adapter_rows import adapter_bytes

    return adapter_bytes(model, limits, itemsize)


def server(parts: ServerParts) -> None:
    """Serve the loaded adapters, and add the routes that load and unload them."""
    access = parts.offered.engine
    if access is None:
        return
    from attachments.adapters.adapter_weights import EngineAdapters
    from attachments.adapters.adapters import AdapterRegistry

    if (adapters := EngineAdapters.of(access.engine)) is not None:
        registry = AdapterRegistry(parts.offered, access.submit, adapters)
        parts.sources.append(registry)
        parts.endpoints += _endpoints(registry)


def _endpoints(registry: AdapterRegistry) -> Iterator[Endpoint]:
    """Return the routes that load and unload adapters."""
    from clotho.serving.parts import Endpoint, Handlers

    place = "attachments.adapters.routes_adapters"
    routes = Handlers(f"{place}:AdapterRoutes", registry)

    def post(path: str, method: str, about: str, request: str, *responses: str) -> Endpoint:
        kinds = tuple(f"{place}:{response}" for response in responses)
        return Endpoint("POST", path, routes.method(method), about, (f"{place}:{request}",), kinds, access="own")

    yield post("/v1/load_lora_adapter", "load", "Load an adapter (vLLM)", "LoadAdapter")
    yield post("/v1/unload_lora_adapter", "unload", "Unload an adapter (vLLM)", "UnloadAdapter")
    yield post("/lora/load", "load_by_path", "Load an adapter (Atropos)", "LoadByPath", "LoadedByPath")
    yield post("/lora/unload", "unload_by_name", "Unload an adapter (Atropos)", "UnloadByName", "AdapterStatus")
    status = (f"{place}:AdapterStatus",)
    yield Endpoint("GET", "/lora/status", routes.method("status"), "The loaded adapters (Atropos)", responses=status)
