"""One rollout worker as the run sees it: an actor of Ray, its weights and its requests.

Ray is an optional package: functions import it when a run uses it.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import anyio
import msgspec
from anyio.to_thread import run_sync

from clotho.cluster.messages import Failed, Outcome, Refused, Turn
from clotho.remote.server import STATE_SECONDS, RemoteFailure, check_answer
from clotho.remote.weights import Weights
from clotho.storage.tensors import named_arrays, tensor_bytes
from protocols.errors import RequestError, visible
from protocols.remote import RolloutAnswer, RolloutCall, ServedPolicy
from protocols.sampling import SampleRequest

T = TypeVar("T")


class PublishedWeights:
    """Weights in Ray's object store: one object per version, which the workers fetch."""

    def __init__(self) -> None:
        self._version = -1
        self._reference: Any = None
        self._publishing = anyio.Lock()

    async def reference(self, weights: Weights) -> Any:
        """Return the reference of the object, a safetensors file; it is published once."""
        import ray

        async with self._publishing:
            if self._version != weights.ready.version:
                tensors = await run_sync(tensor_bytes, named_arrays(weights.parameters))
                self._reference = await run_sync(lambda: ray.put(tensors))
                self._version = weights.ready.version
            return self._reference


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
        self.name = name
        self._actor, self._weights, self._run_id = actor, weights, run_id
        self._timeout_seconds = timeout_seconds
        self._has_started = False
        self._turn: _OpenTurn | None = None

    async def served(self) -> ServedPolicy:
        """Return the policy that the worker samples from. Waits for as long as the worker loads its model."""
        if not self._has_started:
            await self._result(self._actor.__ray_ready__.remote(), seconds=None)
            self._has_started = True
        served: ServedPolicy = await self._call(self._actor.served.remote(), ServedPolicy, seconds=STATE_SECONDS)
        return served

    async def push(self, weights: Weights) -> ServedPolicy:
        """Have the worker fetch and serve weights, and return the policy that it samples from now."""
        ready, tensors = weights.ready, await self._weights.reference(weights)
        reply = self._actor.replace.remote(tensors, msgspec.msgpack.encode(ready), self._run_id)
        served: ServedPolicy = await self._call(reply, ServedPolicy, seconds=self._timeout_seconds)
        if (served.version, served.fingerprint) != (ready.version, ready.fingerprint):
            raise RemoteFailure(f"serves version {served.version} after version {ready.version} was published")
        return served

    async def sample(self, request: SampleRequest) -> RolloutAnswer:
        """Return one completion per seed. Raises RequestError if the worker refuses the request."""
        turn = self._turn or self._open_turn()
        position = len(turn.calls)
        turn.calls.append(RolloutCall.of(request))
        await turn.submitted.wait()
        reply = self._actor.outcome.remote(turn.reference, position)
        outcome: Outcome = await self._call(reply, Outcome, seconds=self._timeout_seconds)
        if isinstance(outcome, Refused):
            raise RequestError(visible(outcome.message, 500), param=visible(outcome.param, 100))
        if isinstance(outcome, Failed):
            raise RemoteFailure(visible(outcome.reason, 300))
        check_answer(outcome.answer, request)
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
        turn.reference = self._actor.submit.remote(msgspec.msgpack.encode(Turn(calls=tuple(turn.calls))))
        turn.submitted.set()

    async def _call(self, reply: Any, kind: Any, *, seconds: float) -> Any:
        content = await self._result(reply, seconds=seconds)
        try:
            return msgspec.msgpack.decode(content, type=kind)
        except (msgspec.MsgspecError, TypeError) as error:
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
