"""The weights of a run in the object store of a cluster: one object per version, or patches between versions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import anyio
from anyio.to_thread import run_sync

from attachments.remote.weight_patch import make_patch
from attachments.remote.weights import Weights
from clotho.storage.tensors import as_stored, named_arrays, tensor_bytes

MAX_PATCHES = 8
"""Number of patches that are kept, for workers that are some versions behind."""


class Publication(NamedTuple):
    """What a worker fetches. references: of a safetensors file, or of patches, the oldest first. size: in bytes."""

    patched: bool
    references: tuple[Any, ...]
    size: int


class _Patch(NamedTuple):
    """A patch in the object store. base: fingerprint of the weights that it belongs to."""

    base: str
    reference: Any
    size: int


class PublishedWeights:
    """Puts each version into the object store once, when the first worker needs it.

    With patches, a version that workers need is compared with the one that they needed before, in a thread. A worker
    gets all patches since the weights that it has, or the whole file if it has other weights, or if the patches
    together are not smaller.
    """

    def __init__(self, put: Callable[[bytes], Any], *, start: Weights | None = None) -> None:
        """put: puts an object into the store, and returns its reference; blocks.

        start: the weights at the start; None means that no patches are made and no older weights are kept.
        """
        self._put, self._has_patches = put, start is not None
        self._newest = start
        self._version = -1
        self._whole = Publication(False, (), 0)
        self._patches = deque[_Patch](maxlen=MAX_PATCHES)
        self._publishing = anyio.Lock()

    async def publication(self, weights: Weights, *, held: str) -> Publication:
        """Return what a worker needs in order to serve `weights`. held: fingerprint of the weights that it has."""
        async with self._publishing:
            if self._has_patches:
                await self._compare(weights)
                patches = self._patches_since(held, weights)
                size = sum(array.nbytes for array in named_arrays(weights.parameters).values())
                if patches and sum(patch.size for patch in patches) < size:
                    references = tuple(patch.reference for patch in patches)
                    return Publication(True, references, sum(patch.size for patch in patches))
            if self._version != weights.ready.version:
                tensors = await run_sync(tensor_bytes, named_arrays(weights.parameters))
                reference = await run_sync(self._put, tensors)
                self._whole = Publication(False, (reference,), len(tensors))
                self._version = weights.ready.version
            return self._whole

    async def _compare(self, weights: Weights) -> None:
        """Make the patch of a new version."""
        before = self._newest
        assert before is not None
        if weights.ready.version <= before.ready.version:
            return
        content = await run_sync(_patch, before, weights)
        reference = None if content is None else await run_sync(self._put, content)
        if content is None:
            self._patches.clear()
        else:
            self._patches.append(_Patch(before.ready.fingerprint, reference, len(content)))
        self._newest = weights

    def _patches_since(self, held: str, weights: Weights) -> list[_Patch]:
        """Return the patches that lead from the held weights to the newest ones; empty if there are none."""
        if self._newest is None or weights.ready.version != self._newest.ready.version:
            return []
        found: list[_Patch] = []
        for patch in reversed(self._patches):
            found.insert(0, patch)
            if patch.base == held:
                return found
        return []


def _patch(before: Weights, after: Weights) -> bytes | None:
    stored = [
        {name: as_stored(array) for name, array in named_arrays(weights.parameters).items()}
        for weights in (before, after)
    ]
    return make_patch(*stored, base_fingerprint=before.ready.fingerprint, fingerprint=after.ready.fingerprint)
