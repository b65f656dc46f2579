"""Routes that load and unload adapters: those of vLLM (`/v1/load_lora_adapter`) and of Atropos (`/lora/load`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from attachments.adapters.adapter_store import AdapterInfo
from attachments.adapters.adapters import AdapterRegistry
from clotho.serving.auth import client_of
from clotho.serving.bodies import json_object
from clotho.serving.errors import ApiError, invalid_field, overloaded
from clotho.serving.openai_requests import converted
from protocols.errors import AdapterRefusal, AdapterRequestError

STATUS: dict[AdapterRefusal, int] = {
    "missing": 404, "unknown": 404, "exists": 400, "invalid": 400, "disabled": 403, "forbidden": 403,
}  # fmt: skip
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
    """The routes of one server. Every load validates the whole adapter before anything changes.

    A client changes its own adapters only, as `AdapterRegistry` defines them.
    """

    def __init__(self, registry: AdapterRegistry) -> None:
        self._registry = registry
        self._active: dict[str, str] = {}  # owner -> the adapter that /lora/load loaded last

    async def load(self, http: Request) -> Response:
        """Serve POST /v1/load_lora_adapter, which responds with text. Raises ApiError."""
        fields = converted(json_object(await http.body()), LoadAdapter)
        await self._load(fields.lora_name, fields.lora_path, _owner(http), replace=fields.load_inplace)
        return PlainTextResponse(f"Success: LoRA adapter '{fields.lora_name}' added successfully.")

    async def unload(self, http: Request) -> Response:
        """Serve POST /v1/unload_lora_adapter, which responds with text. Raises ApiError."""
        fields = converted(json_object(await http.body()), UnloadAdapter)
        await self._unload(fields.lora_name, _owner(http))
        return PlainTextResponse(f"Success: LoRA adapter '{fields.lora_name}' removed successfully.")

    async def load_by_path(self, http: Request) -> Response:
        """Serve POST /lora/load, which replaces an adapter of the same name. Raises ApiError."""
        fields, owner = converted(json_object(await http.body()), LoadByPath), _owner(http)
        name = fields.adapter_name or Path(fields.adapter_path).name
        if not name:
            raise invalid_field("adapter_path", "names no directory")
        info = await self._load(name, fields.adapter_path, owner, replace=True)
        self._active[owner] = name
        return _json(
            LoadedByPath(
                status="ok",
                adapter_path=fields.adapter_path,
                adapter_name=name,
                adapter_id=info.version,
                load_count=self._registry.loads,
                adapter_config={"r": info.rank, "target_modules": list(info.targets)},
            )
        )

    async def unload_by_name(self, http: Request) -> Response:
        """Serve POST /lora/unload. Raises ApiError."""
        fields, owner = converted(json_object(await http.body() or b"{}"), UnloadByName), _owner(http)
        name = fields.adapter_name or self._active.get(owner)
        if name is not None:
            await self._unload(name, owner)
        return await self.status(http)

    async def status(self, http: Request) -> Response:
        """Serve GET /lora/status."""
        loaded, active = self._registry.loaded, self._active.get(_owner(http))
        return _json(
            AdapterStatus(
                status="ok",
                active_adapter=active if active in loaded else None,
                load_count=self._registry.loads,
                adapters=tuple(loaded[name] for name in sorted(loaded)),
            )
        )

    async def _load(self, name: str, path: str, owner: str, *, replace: bool) -> AdapterInfo:
        try:
            return await self._registry.load_path(name, path, replace=replace, owner=owner)
        except AdapterRequestError as error:
            raise _refusal(error) from error

    async def _unload(self, name: str, owner: str) -> None:
        try:
            await self._registry.unload(name, owner)
        except AdapterRequestError as error:
            raise _refusal(error) from error


def _owner(http: Request) -> str:
    return client_of(http.scope).owner


def _json(body: Struct) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


def _refusal(error: AdapterRequestError) -> ApiError:
    if error.reason == "full":
        return overloaded(str(error))
    return ApiError(STATUS[error.reason], str(error), code=f"adapter_{error.reason}")
