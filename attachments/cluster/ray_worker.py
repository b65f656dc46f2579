"""One rollout worker as the run sees it: an actor of Ray, its weights and its requests.

Ray is an optional package: functions import it when a run uses it.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import msgspec
from anyio.to_thread import run_sync

from attachments.cluster.messages import Outcome, Published, RequestFailed, RequestRefused, Turn
from attachments.cluster.published_weights import PublishedWeights
from attachments.remote.messages import RolloutAnswer, RolloutCall, ServedPolicy
from attachments.remote.server import STATE_SECONDS, RemoteFailure, Traffic
from attachments.remote.weights import Weights
from protocols.errors import RequestError, visible
from protocols.sampling import SampleRequest

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
