"""Routes that load and unload adapters: those of vLLM (`/v1/load_lora_adapter`) and of Atropos (`/lora/load`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from clotho.serving.adapters import AdapterRegistry
from clotho.serving.bodies import json_object
from clotho.serving.errors import ApiError, invalid_field, overloaded
from clotho.serving.openai_requests import validation_error
from protocols.adapter import AdapterInfo
from protocols.errors import AdapterRefusal, AdapterRequestError

Body = TypeVar("Body", bound=Struct)

STATUS: dict[AdapterRefusal, int] = {"missing": 404, "unknown": 404, "exists": 400, "invalid": 400, "disabled": 403}
"""HTTP status of a refusal; a server without space answers 503."""


class LoadAdapter(Struct, frozen=True, kw_only=True):
    """The body of /v1/load_lora_adapter. load_inplace: replace an adapter of the same name by a new version."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadAdapter(Struct, frozen=True, kw_only=True):
    """The body of /v1/unload_lora_adapter."""

    lora_name: str


class LoadByPath(Struct, frozen=True, kw_only=True):
    """The body of Atropos's /lora/load. adapter_name: by default the last component of the path."""

    adapter_path: str
    adapter_name: str | None = None


class UnloadByName(Struct, frozen=True, kw_only=True):
    """The body of Atropos's /lora/unload. adapter_name: by default the adapter that /lora/load loaded last."""

    adapter_name: str | None = None


class LoadedByPath(Struct, frozen=True, kw_only=True):
    """The response of /lora/load. adapter_id: version of the adapter. load_count: number of loads so far."""

    status: str
    adapter_path: str
    adapter_name: str
    adapter_id: int
    load_count: int
    adapter_config: dict[str, Any]


class AdapterStatus(Struct, frozen=True, kw_only=True):
    """The response of /lora/status and /lora/unload. active_adapter: loaded last by /lora/load; null without one."""

    status: str
    active_adapter: str | None
    load_count: int
    adapters: tuple[AdapterInfo, ...]


class AdapterRoutes:
    """The routes of one server. Every load validates the whole adapter before anything changes."""

    def __init__(self, registry: AdapterRegistry) -> None:
        self._registry = registry
        self._active: str | None = None

    async def load(self, body: bytes) -> str:
        """Serve POST /v1/load_lora_adapter; return the text of the response. Raises ApiError."""
        fields = _decoded(body, LoadAdapter)
        await self._load(fields.lora_name, fields.lora_path, replace=fields.load_inplace)
        return f"Success: LoRA adapter '{fields.lora_name}' added successfully."

    async def unload(self, body: bytes) -> str:
        """Serve POST /v1/unload_lora_adapter; return the text of the response. Raises ApiError."""
        fields = _decoded(body, UnloadAdapter)
        await self._unload(fields.lora_name)
        return f"Success: LoRA adapter '{fields.lora_name}' removed successfully."

    async def load_by_path(self, body: bytes) -> LoadedByPath:
        """Serve POST /lora/load, which replaces an adapter of the same name. Raises ApiError."""
        fields = _decoded(body, LoadByPath)
        name = fields.adapter_name or Path(fields.adapter_path).name
        if not name:
            raise invalid_field("adapter_path", "names no directory")
        info = await self._load(name, fields.adapter_path, replace=True)
        self._active = name
        return LoadedByPath(
            status="ok",
            adapter_path=fields.adapter_path,
            adapter_name=name,
            adapter_id=info.version,
            load_count=self._registry.loads,
            adapter_config={"r": info.rank, "target_modules": list(info.targets)},
        )

    async def unload_by_name(self, body: bytes) -> AdapterStatus:
        """Serve POST /lora/unload. Raises ApiError."""
        fields = _decoded(body or b"{}", UnloadByName)
        name = fields.adapter_name or self._active
        if name is not None:
            await self._unload(name)
        return self.status()

    def status(self) -> AdapterStatus:
        """Serve GET /lora/status."""
        loaded = self._registry.loaded
        active = self._active if self._active in loaded else None
        adapters = tuple(loaded[name] for name in sorted(loaded))
        return AdapterStatus(status="ok", active_adapter=active, load_count=self._registry.loads, adapters=adapters)

    async def _load(self, name: str, path: str, *, replace: bool) -> AdapterInfo:
        try:
            return await self._registry.load_path(name, path, replace=replace)
        except AdapterRequestError as error:
            raise _refusal(error) from error

    async def _unload(self, name: str) -> None:
        try:
            await self._registry.unload(name)
        except AdapterRequestError as error:
            raise _refusal(error) from error


def _decoded(body: bytes, kind: type[Body]) -> Body:
    """Decode a body; unknown fields are ignored, as in vLLM. Raises ApiError that names the invalid field."""
    try:
        return msgspec.convert(json_object(body), kind)
    except msgspec.ValidationError as error:
        raise validation_error(error) from error


def _refusal(error: AdapterRequestError) -> ApiError:
    if error.reason == "full":
        return overloaded(str(error))
    return ApiError(STATUS[error.reason], str(error), code=f"adapter_{error.reason}")
