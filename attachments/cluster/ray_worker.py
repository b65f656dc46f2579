"""One rollout worker as the run sees it: an actor of Ray, its weights in the object store, and its requests.

Ray is an optional package: functions import it when a run uses it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import anyio
import msgspec
from anyio.to_thread import run_sync

from attachments.cluster.messages import Outcome, Published, RequestFailed, RequestRefused, Turn
from attachments.remote.messages import RolloutAnswer, RolloutCall, ServedPolicy
from attachments.remote.server import STATE_SECONDS, RemoteFailure, Traffic
from attachments.remote.weight_patch import make_patch
from attachments.remote.weights import Weights
from clotho.storage.tensors import as_stored, named_arrays, tensor_bytes
from protocols.errors import RequestError, visible
from protocols.sampling import SampleRequest

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


T = TypeVar("T")


class _OpenTurn:
    """Requests that are submitted together. reference: Ray's reference of the number of the turn, once submitted."""

    def __init__(self) -> None:
        self.calls: list[RolloutCall] = []
        self.submitted = asyncio.Event()
        self.reference: Any = None


class RayWorker:
    """A rollout worker. Every method but `close` raises RemoteFailure if the worker fails.

    Requests of one turn of the event loop are submitted in one message. Ray starts a worker again whose process has
    ended, on a machine with a free device; until then, calls fail or wait.
    """

    restarts = False

    def __init__(
        self, name: str, actor: Any, *, weights: PublishedWeights, run_id: str, timeout_seconds: float
    ) -> None:
        """actor: handle of a `RolloutWorker`. run_id: names this run to the worker. timeout_seconds: for one group."""
        self.name, self.traffic = name, Traffic()
        self._actor, self._weights, self._run_id = actor, weights, run_id
        self._timeout_seconds = timeout_seconds
        self._has_started = False
        self._held, self._needs_whole = "", False
        self._turn: _OpenTurn | None = None

    async def served(self) -> ServedPolicy:
        """Return the policy that the worker samples from. Waits for as long as the worker loads its model."""
        if not self._has_started:
            await self._result(self._actor.__ray_ready__.remote(), seconds=None)
            self._has_started = True
        served: ServedPolicy = await self._call(self._actor.served.remote(), ServedPolicy, seconds=STATE_SECONDS)
        self._held = served.fingerprint
        return served

    async def push(self, weights: Weights) -> ServedPolicy:
        """Have the worker fetch and serve weights, and return the policy that it samples from now.

        After patches that the worker could not apply, the next push has the whole weights.
        """
        ready = weights.ready
        published = await self._weights.publication(weights, held="" if self._needs_whole else self._held)
        self._needs_whole = published.patched
        self.traffic.sent += published.size
        description = Published(ready=ready, run_id=self._run_id, patched=published.patched)
        reply = self._actor.replace.remote(msgspec.msgpack.encode(description), *published.references)
        served: ServedPolicy = await self._call(reply, ServedPolicy, seconds=self._timeout_seconds)
        if (served.version, served.fingerprint) != (ready.version, ready.fingerprint):
            raise RemoteFailure(f"serves version {served.version} after version {ready.version} was published")
        self._held, self._needs_whole = served.fingerprint, False
        return served

    async def sample(self, request: SampleRequest) -> RolloutAnswer:
        """Return one completion per seed. Raises RequestError if the worker refuses the request."""
        turn = self._turn or self._open_turn()
        position = len(turn.calls)
        turn.calls.append(RolloutCall.of(request))
        await turn.submitted.wait()
        reply = self._actor.outcome.remote(turn.reference, position)
        outcome: Outcome = await self._call(reply, Outcome, seconds=self._timeout_seconds)
        if isinstance(outcome, RequestRefused):
            raise RequestError(visible(outcome.message, 500), param=visible(outcome.param, 100))
        if isinstance(outcome, RequestFailed):
            raise RemoteFailure(visible(outcome.reason, 300))
        return outcome.answer

    async def close(self) -> None:
        """End the worker."""
        import ray

        await run_sync(ray.kill, self._actor)

    def _open_turn(self) -> _OpenTurn:
        """Open a turn, which is submitted when all tasks that are ready now have run."""
        self._turn = turn = _OpenTurn()
        asyncio.get_running_loop().call_soon(self._submit, turn)
        return turn

    def _submit(self, turn: _OpenTurn) -> None:
        self._turn = None
        content = msgspec.msgpack.encode(Turn(calls=tuple(turn.calls)))
        self.traffic.sent += len(content)
        turn.reference = self._actor.submit.remote(content)
        turn.submitted.set()

    async def _call(self, reply: Any, kind: Any, *, seconds: float) -> Any:
        content = await self._result(reply, seconds=seconds)
        try:
            self.traffic.received += len(content)
            return msgspec.msgpack.decode(content, type=kind)
        except (ValueError, TypeError) as error:
            raise RemoteFailure(f"not a valid reply: {visible(str(error), 200)}") from error

    async def _result(self, reply: Any, *, seconds: float | None) -> Any:
        """Wait for a reply. If the caller leaves or the time is over, the call is cancelled."""
        import ray
        from ray.exceptions import RayError, RayTaskError

        try:
            async with asyncio.timeout(seconds):
                return await asyncio.wrap_future(reply.future())
        except TimeoutError:
            ray.cancel(reply, force=False)
            raise RemoteFailure(f"does not answer within {seconds:g} seconds") from None
        except asyncio.CancelledError:
            ray.cancel(reply, force=False)
            raise
        except RayTaskError as error:
            cause = error.cause or error
            raise RemoteFailure(f"{type(cause).__name__}: {visible(str(cause), 300)}") from error
        except RayError as error:
            self._has_started = False
            raise RemoteFailure(f"{type(error).__name__}: {visible(str(error), 300)}") from error
