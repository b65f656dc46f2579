"""Adapters that clients load: paths inside one directory, one load at a time, and the list of what is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import structlog

from attachments.adapters.adapter_store import AdapterInfo
from clotho.lanes.compute_thread import finish
from clotho.lanes.daemon_threads import DaemonThreads, NoThreadError, OvertimeError
from clotho.lanes.sampling_client import Submit
from clotho.serving.services import ServedModel, ServerContext
from protocols.errors import AdapterRequestError, visible
from protocols.step import WeightsReady

if TYPE_CHECKING:
    from attachments.adapters.adapter_weights import EngineAdapters

log = structlog.get_logger(actor="server")

READ_SECONDS = 120.0
"""Time in which the files of an adapter must be read."""

UNLOADED_NAMES = 256
"""Names of unloaded adapters that stay reserved for each of their owners, the newest ones."""


class AdapterRegistry:
    """Loads and unloads adapters for clients. All methods belong to the event loop.

    A name belongs to the client that loaded it, also after it has been unloaded: requests that still name the adapter
    never reach the weights of another client. The owner is the name of an API key; administrators, the operator's flags
    and clients without keys are one owner, the empty name, which may change everything. Adapters that are given as
    flags are never unloaded.

    loaded: the loaded adapters by name, as of the last change. loads: number of successful loads.
    """

    def __init__(self, offered: ServerContext, submit: Submit, engine: EngineAdapters) -> None:
        """submit: runs a call in the decode thread, to which the adapters of the engine belong."""
        self.loaded: dict[str, AdapterInfo] = {}
        self.loads = 0
        self._submit, self._engine = submit, engine
        self._reserved = frozenset(name for one in offered.models() for name in (one.id, *one.aliases))
        self._root, self._base = offered.settings.adapters.root, offered.base_model
        self._reader = DaemonThreads("adapter", 1, wait_seconds=READ_SECONDS, work_seconds=READ_SECONDS)
        self._lock = anyio.Lock()
        self._owners: dict[str, str] = {}  # of each name, in the order of the last loads
        self._kept: set[str] = set()

    def models(self) -> Sequence[ServedModel]:
        """Return the loaded adapters as models that requests can name."""
        return [
            ServedModel(
                id=info.name,
                parent=self._base,
                root=info.path,
                weights=partial(WeightsReady, version=info.version, step=0, fingerprint=info.fingerprint),
                source=info.name,
            )
            for info in self.loaded.values()
        ]

    async def load_chosen(self, name: str, path: Path, read: Callable[[Path], Any]) -> None:
        """Load an adapter that the operator names, and keep it. Raises AdapterRequestError."""
        await self.load(name, path, keep=True, read=read)

    async def load_path(self, name: str, given: str, *, replace: bool, owner: str = "") -> AdapterInfo:
        """Load the adapter at a path that a client gave. Raises AdapterRequestError."""
        return await self.load(name, resolve_inside(self._root, given), replace=replace, owner=owner)

    async def load(
        self,
        name: str,
        path: Path,
        *,
        replace: bool = False,
        keep: bool = False,
        owner: str = "",
        read: Callable[[Path], Any] | None = None,
    ) -> AdapterInfo:
        """Load an adapter from a path that the operator chose. Raises AdapterRequestError.

        replace: load a new version if the name is taken. keep: never evict or unload it. read: reads the path in the
        compute thread, instead of the reader for clients, which works outside it. A load evicts adapters of its owner
        only.
        """
        if name in self._reserved:
            raise AdapterRequestError(f"{name} is the name of another model; choose another name", reason="invalid")
        async with self._lock:
            self._require_owner(name, owner)
            if name in self.loaded and not replace:
                raise AdapterRequestError(f"the adapter {name} is already loaded; set load_inplace", reason="exists")
            try:
                if read is not None:
                    contents = await finish(self._submit(partial(read, path)))
                else:
                    contents = await self._reader.run(partial(self._engine.store.read, path))
            except (NoThreadError, OvertimeError):
                message = f"{path} could not be read in {READ_SECONDS:g} seconds"
                raise AdapterRequestError(message, reason="invalid") from None
            others = {one for one, holder in self._owners.items() if owner not in ("", holder)}
            protected = self._kept | others
            load = partial(self._engine.load_adapter, name, contents, replace=replace, protected=protected)
            info = await finish(self._submit(load))
            self.loads += 1
            await self._refresh()
            self._claim(name, owner, keep=keep)
        log.info("adapter_loaded", name=name, version=info.version, rank=info.rank, fingerprint=info.fingerprint)
        return info

    async def unload(self, name: str, owner: str = "") -> AdapterInfo:
        """Forget an adapter; requests in progress finish. Raises AdapterRequestError, also for an unknown name."""
        async with self._lock:
            self._require_owner(name, owner)
            if name in self._kept:
                raise AdapterRequestError(
                    f"the adapter {name} was given as a flag and stays loaded", reason="forbidden"
                )
            info = await finish(self._submit(partial(self._engine.unload_adapter, name)))
            await self._refresh()
        log.info("adapter_unloaded", name=name, version=info.version)
        return info

    def _require_owner(self, name: str, owner: str) -> None:
        if owner and self._owners.get(name, owner) != owner:
            message = f"the name {name} belongs to another API key; choose another name"
            raise AdapterRequestError(message, reason="forbidden")

    def _claim(self, name: str, owner: str, *, keep: bool) -> None:
        self._owners.pop(name, None)
        self._owners[name] = owner
        if keep:
            self._kept.add(name)
        unloaded = [one for one, holder in self._owners.items() if holder == owner and one not in self.loaded]
        for one in unloaded[:-UNLOADED_NAMES]:
            del self._owners[one]

    async def _refresh(self) -> None:
        found = await finish(self._submit(self._engine.loaded_adapters))
        self.loaded = {info.name: info for info in found}


def resolve_inside(root: str, given: str) -> Path:
    """Return the directory that a client named, relative to `root` or as an absolute path inside it.

    Raises AdapterRequestError without a root, for a path outside it, for a link below it, and for a missing directory.
    """
    if not root:
        raise AdapterRequestError("this server loads no adapters: server.adapters.root is not set", reason="disabled")
    named = Path(root).expanduser().absolute()
    shown = visible(given, 200)
    outside = AdapterRequestError(f"{shown!r} is not a directory below server.adapters.root", reason="invalid")
    try:
        base, path = named.resolve(strict=True), Path(given)
        if path.is_absolute():
            path = path.relative_to(named if path.is_relative_to(named) else base)
        if not path.parts or ".." in path.parts:
            raise outside
        directory = base / path
        if directory.resolve() != directory:
            raise outside
        if not directory.is_dir():
            raise AdapterRequestError(f"the directory {shown!r} does not exist", reason="missing")
    except AdapterRequestError:
        raise
    except (OSError, ValueError, RuntimeError) as error:  # ValueError: outside the root, or a NUL in the path
        raise outside from error
    return directory
