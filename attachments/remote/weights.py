"""The weights of a run for inference servers that can replace their weights: over HTTP, or by path.

Both ways have the content of one safetensors file, which is encoded once for all servers. The server verifies names,
shapes, types and the fingerprint of what it reads.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import anyio
from anyio.to_thread import run_sync
from msgspec import Struct

from attachments.remote.messages import FILE_HEADER
from clotho.storage.atomic_files import make_directory
from clotho.storage.tensors import named_arrays, tensor_bytes
from protocols.errors import RemoteError
from protocols.step import WeightsReady


class Weights(Struct, frozen=True, kw_only=True, eq=False):
    """Weights that servers should serve. parameters: tree of evaluated arrays."""

    ready: WeightsReady
    parameters: object


class Delivery(Protocol):
    """How weights reach a server."""

    async def body(self, weights: Weights) -> tuple[bytes, dict[str, str]]:
        """Return the body and the headers of the request that replaces the weights of a server."""
        ...


class OverHttp:
    """The request contains the weights."""

    def __init__(self) -> None:
        self._version, self._tensors = -1, b""
        self._encoding = anyio.Lock()

    async def body(self, weights: Weights) -> tuple[bytes, dict[str, str]]:
        """Return the bytes of the safetensors file."""
        async with self._encoding:
            if self._version != weights.ready.version:
                self._tensors = await run_sync(tensor_bytes, named_arrays(weights.parameters))
                self._version = weights.ready.version
            return self._tensors, {"content-type": "application/octet-stream"}


class SharedDirectory:
    """The request names a file in a directory that the run and its servers see.

    The file of a version replaces the file of the version before. A server that has not read the older file by then
    gets the newer one with its next request.
    """

    def __init__(self, directory: Path, run_id: str) -> None:
        """run_id: part of the names, so that two runs can share a directory."""
        self._directory, self._run_id = directory, run_id
        self._version, self._name = -1, ""
        self._writing = anyio.Lock()

    async def body(self, weights: Weights) -> tuple[bytes, dict[str, str]]:
        """Write the file, unless it is there, and return its name. Raises RemoteError if the disk refuses."""
        async with self._writing:
            if self._version != weights.ready.version:
                try:
                    await run_sync(self._write, weights)
                except OSError as error:
                    reason = error.strerror or error
                    raise RemoteError(f"generator.weights.directory: {self._directory}: {reason}") from error
            return b"", {FILE_HEADER: self._name}

    def _write(self, weights: Weights) -> None:
        make_directory(self._directory)
        name = f"{self._run_id[:32]}-{weights.ready.version}.safetensors"
        unfinished = self._directory / f".{name}.unfinished"
        unfinished.write_bytes(tensor_bytes(named_arrays(weights.parameters)))
        os.replace(unfinished, self._directory / name)
        before, self._version, self._name = self._name, weights.ready.version, name
        if before and before != name:
            with suppress(OSError):
                (self._directory / before).unlink()
