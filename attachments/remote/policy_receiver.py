"""The served policy of this process as a remote training run sees it."""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

import anyio
from anyio.to_thread import run_sync

from attachments.remote.messages import MAX_LISTED_VERSIONS, ServedPolicy
from attachments.remote.weight_patch import apply_patches
from clotho.lanes.compute_thread import finish
from clotho.models.parameters import Arrays, Parameters, fingerprint, flat, layout, nested
from clotho.sampler import ReplaceablePolicy
from clotho.storage.adapters import tensor_problems
from clotho.storage.tensors import as_array, as_stored, named_arrays, parse_tensors
from protocols.errors import CheckpointError, disk_errors_as, visible
from protocols.step import WeightsReady
from training_run.serving import swap_weights

FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}\.safetensors")
"""Names of files that a training run shares by path; a name never leads out of the directory."""

HEADER_BYTES = 1_048_576
"""Size of a safetensors header and of padding, in addition to the weights."""


class SwappingReceiver:
    """Serves the weights that a training run of another process sends.

    Weights are checked completely before anything changes: names, shapes, types, finite values and fingerprint. They
    are swapped in between two decode steps. max_bytes: maximum size of the weights.
    """

    def __init__(self, served: ReplaceablePolicy, *, root: str = "") -> None:
        """root: directory of weights that are shared by path; empty: none."""
        self._root = Path(root).expanduser() if root else None
        self._policy, self._engine, self._compute = served.policy, served.engine, served.compute
        self._weights, self._kv_policy = served.weights, served.kv_policy
        parameters = self._policy.trainable()
        self._layout = layout(parameters)
        self.max_bytes = sum(array.nbytes for array in flat(parameters).values()) + HEADER_BYTES
        ready = self._weights.value
        self._fingerprints = {ready.version: ready.fingerprint}
        self._run_id, self._instance = "", secrets.token_hex(8)
        self._swapping = anyio.Lock()

    def served(self) -> ServedPolicy:
        """Return the policy that the engine samples from."""
        weights = self._weights.value
        return ServedPolicy(
            version=weights.version,
            step=weights.step,
            fingerprint=weights.fingerprint,
            run_id=self._run_id,
            layout=self._layout,
            vocab_size=self._policy.vocab_size,
            context_length=self._policy.context_length,
            instance=self._instance,
        )

    def fingerprint(self, version: int) -> str:
        """Return the fingerprint of a policy version; empty if the version is not known any more."""
        return self._fingerprints.get(version, "")

    async def read(self, name: str) -> bytes:
        """Return the content of a file in the directory of shared weights. Raises CheckpointError."""
        if self._root is None:
            raise CheckpointError("this server reads no files; start it with --server.weights-root DIRECTORY")
        if not FILE_NAME.fullmatch(name):
            raise CheckpointError(f"{visible(name, 80)!r} is not the name of a .safetensors file")
        return await run_sync(_read, self._root / name, self.max_bytes)

    async def receive(self, tensors: bytes, ready: WeightsReady, *, run_id: str) -> ServedPolicy:
        """Serve the weights in the bytes of a safetensors file.

        Raises CheckpointError, and changes nothing, if the weights are not those of this policy or are damaged.
        """
        async with self._swapping:
            return await self._serve(lambda: parse_tensors(tensors), ready, run_id)

    async def receive_patches(self, patches: Sequence[bytes], ready: WeightsReady, *, run_id: str) -> ServedPolicy:
        """Serve the weights that patches make of the served weights. Raises CheckpointError as `receive` does."""
        async with self._swapping:
            served = {name: as_stored(array) for name, array in named_arrays(self._policy.trainable()).items()}
            base = self._weights.value.fingerprint
            patched = await run_sync(lambda: apply_patches(patches, served, base_fingerprint=base))
            return await self._serve(lambda: {name: as_array(one) for name, one in patched.items()}, ready, run_id)

    async def _serve(self, arrays: Callable[[], Arrays], ready: WeightsReady, run_id: str) -> ServedPolicy:
        """Serve the weights that `arrays` returns in a compute thread beside that of the engine."""
        known = dict(self._fingerprints)
        self._remember(ready)  # a request may end before this coroutine learns of the swap
        try:
            parameters = await finish(self._compute.learner.submit(lambda: self._verified(arrays, ready)))
            decode = self._compute.decode
            await swap_weights(decode, self._policy, self._engine, self._kv_policy, parameters, ready)
        except BaseException:
            self._fingerprints = known
            raise
        self._run_id = run_id
        self._weights.put(ready)
        return self.served()

    def _remember(self, ready: WeightsReady) -> None:
        self._fingerprints.pop(ready.version, None)
        self._fingerprints[ready.version] = ready.fingerprint
        while len(self._fingerprints) > MAX_LISTED_VERSIONS:
            del self._fingerprints[next(iter(self._fingerprints))]

    def _verified(self, arrays: Callable[[], Arrays], ready: WeightsReady) -> Parameters:
        named = arrays()
        if problems := tensor_problems(named, named_arrays(self._policy.trainable())):
            raise CheckpointError("; ".join(problems[:3]))
        parameters = nested(named)
        if (found := fingerprint(parameters)) != ready.fingerprint:
            raise CheckpointError(f"their fingerprint is {found}, not {ready.fingerprint}")
        return parameters


def _read(path: Path, max_bytes: int) -> bytes:
    with (
        disk_errors_as(CheckpointError, f"{path.name} cannot be read"),
        open(path, "rb", opener=lambda name, _: os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as file,
    ):
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise CheckpointError(f"{path.name} is not a file")
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise CheckpointError(f"{path.name} is larger than {max_bytes} bytes")
    return content
