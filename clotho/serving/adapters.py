"""Adapters that clients load: paths inside one directory, one load at a time, and the list of what is loaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import anyio
import structlog

from clotho.runtime.compute_thread import finish
from clotho.runtime.daemon_threads import DaemonThreads, NoThreadError, OvertimeError
from clotho.runtime.sampling_client import Submit
from protocols.adapter import AdapterInfo
from protocols.errors import AdapterRequestError, visible

log = structlog.get_logger(actor="server")

READ_SECONDS = 120.0
"""Time in which the files of an adapter must be read."""


class AdapterEngine(Protocol):
    """The part of `DecodeEngine` that manages adapters, in the compute thread only."""

    def load_adapter(self, name: str, contents: Any, /, *, replace: bool = False, keep: bool = False) -> AdapterInfo:
        """Load an adapter under a name. Raises AdapterRequestError."""
        ...

    def unload_adapter(self, name: str, /) -> AdapterInfo:
        """Forget a name. Raises AdapterRequestError."""
        ...

    def loaded_adapters(self) -> tuple[AdapterInfo, ...]:
        """Describe the loaded adapters."""
        ...


class AdapterRegistry:
    """Loads and unloads adapters for clients. All methods belong to the event loop.

    loaded: the loaded adapters by name, as of the last change. loads: number of successful loads.
    """

    def __init__(
        self,
        submit: Submit,
        engine: AdapterEngine,
        read: Callable[[Path], Any],
        *,
        root: str,
        reserved: frozenset[str] = frozenset(),
    ) -> None:
        """read: reads and validates an adapter directory, in any thread. reserved: names of other models.

        root: directory of the adapters; if it is empty, clients can load no adapter.
        """
        self.loaded: dict[str, AdapterInfo] = {}
        self.loads = 0
        self._submit, self._engine, self._read = submit, engine, read
        self._root, self._reserved = root, reserved
        self._reader = DaemonThreads("adapter", 1, wait_seconds=READ_SECONDS, work_seconds=READ_SECONDS)
        self._lock = anyio.Lock()

    async def load_path(self, name: str, given: str, *, replace: bool) -> AdapterInfo:
        """Load the adapter at a path that a client gave. Raises AdapterRequestError."""
        return await self.load(name, resolve_inside(self._root, given), replace=replace)

    async def load(self, name: str, directory: Path, *, replace: bool = False, keep: bool = False) -> AdapterInfo:
        """Load an adapter from a directory that the operator chose. keep: never evict it. Raises AdapterRequestError.

        replace: load a new version if the name is taken. The files are read outside the compute thread.
        """
        if name in self._reserved:
            raise AdapterRequestError(f"{name} is the name of another model; choose another name", reason="invalid")
        async with self._lock:
            if name in self.loaded and not replace:
                raise AdapterRequestError(f"the adapter {name} is already loaded; set load_inplace", reason="exists")
            try:
                contents = await self._reader.run(partial(self._read, directory))
            except (NoThreadError, OvertimeError):
                message = f"{directory} could not be read in {READ_SECONDS:g} seconds"
                raise AdapterRequestError(message, reason="invalid") from None
            load = partial(self._engine.load_adapter, name, contents, replace=replace, keep=keep)
            info = await finish(self._submit(load))
            self.loads += 1
            await self._refresh()
        log.info("adapter_loaded", name=name, version=info.version, rank=info.rank, fingerprint=info.fingerprint)
        return info

    async def unload(self, name: str) -> AdapterInfo:
        """Forget a name; requests in progress finish. Raises AdapterRequestError for an unknown name."""
        async with self._lock:
            info = await finish(self._submit(partial(self._engine.unload_adapter, name)))
            await self._refresh()
        log.info("adapter_unloaded", name=name, version=info.version)
        return info

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
