"""The decode engine of a rollout worker, in the process of the worker."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import aclosing

import structlog

from attachments.cluster.messages import (
    EngineWorkerSettings,
    Outcome,
    Published,
    RequestFailed,
    RequestRefused,
    Sampled,
    Turn,
)
from attachments.remote.messages import RolloutAnswer, ServedPolicy
from attachments.remote.policy_receiver import SwappingReceiver
from clotho.lanes.compute_thread import Compute
from clotho.lanes.sampling_client import Refusal
from clotho.models.loading import find_model
from clotho.models.machine import compute_slots
from clotho.models.parameters import Parameters
from clotho.models.policy import Policy, load_policy
from clotho.sampler import OwnThreads, ReplaceablePolicy, Sampler
from protocols.errors import RequestError
from protocols.sampling import Completion
from protocols.step import WeightsReady
from training_run.memory.estimate import serving_memory
from training_run.memory.report import limit_memory
from training_run.supervision.latest import Latest

log = structlog.get_logger(actor="rollout_worker")

MAX_TURNS = 1024
"""Number of turns whose outcomes are kept. A run asks for each outcome at once, so that older turns have no reader."""

ENGINE_FAILED = 70
"""Exit status of a worker whose engine has failed. Ray starts the worker again."""


class _Turn:
    """The outcomes of the requests of a turn. unread: positions whose outcome the run has not taken."""

    def __init__(self, requests: int) -> None:
        loop = asyncio.get_running_loop()
        self.outcomes: list[asyncio.Future[Outcome]] = [loop.create_future() for _ in range(requests)]
        self.unread = set(range(requests))
        self.sampling: asyncio.Task[None] | None = None


class RolloutEngine:
    """A policy with its decode engine. A failure of the engine ends the process."""

    def __init__(self, settings: EngineWorkerSettings) -> None:
        """Load the model, in the decode thread. Raises ModelError."""
        self._compute = Compute(decode_share=settings.engine.decode_share, slots=compute_slots())
        self._compute.start()
        try:
            policy = self._compute.decode.submit(lambda: _load(settings)).result()
            sampler = Sampler(policy, threads=OwnThreads(compute=self._compute, settings=settings.engine))
        except BaseException:
            self._compute.stop()
            raise
        sampler.failure.add_done_callback(_end_process)
        self._policy = policy
        weights = Latest[WeightsReady]("weights")
        weights.put(sampler.served)
        self._receiver = SwappingReceiver(
            ReplaceablePolicy(
                policy=policy,
                engine=sampler.engine,
                compute=self._compute,
                weights=weights,
                kv_policy=settings.engine.kv_policy,
            )
        )
        self._client = sampler.client
        self._turns: dict[int, _Turn] = {}
        self._submitted = 0

    def close(self) -> None:
        """End the decode threads."""
        self._compute.stop()

    def parameters(self) -> Parameters:
        """Return the trainable parameters that the engine serves."""
        return self._policy.trainable()

    def served(self) -> ServedPolicy:
        """Return the policy that the engine samples from."""
        return self._receiver.served()

    async def replace(self, published: Published, contents: Sequence[bytes]) -> ServedPolicy:
        """Serve published weights. Raises CheckpointError, and changes nothing, if they are not those of the policy."""
        ready, run_id = published.ready, published.run_id
        if published.patched:
            return await self._receiver.receive_patches(contents, ready, run_id=run_id)
        return await self._receiver.receive(contents[0], ready, run_id=run_id)

    def submit(self, turn: Turn) -> int:
        """Submit the requests of a turn at once; return the number of the turn."""
        self._submitted += 1
        number, opened = self._submitted, _Turn(len(turn.calls))
        self._turns[number] = opened
        opened.sampling = asyncio.get_running_loop().create_task(self._sample(opened.outcomes, turn))
        while len(self._turns) > MAX_TURNS:
            self._withdraw(next(iter(self._turns)))
        return number

    async def outcome(self, turn: int, position: int) -> Outcome:
        """Wait for the outcome of a request, which is given once.

        If the readers of all open requests of a turn are cancelled, the turn is withdrawn.
        """
        found = self._turns.get(turn)
        if found is None or position not in found.unread:
            return RequestFailed(reason=f"turn {turn} is not known")
        try:
            return await found.outcomes[position]
        finally:
            found.unread.discard(position)
            if not found.unread:
                self._withdraw(turn)

    async def _sample(self, outcomes: Sequence[asyncio.Future[Outcome]], turn: Turn) -> None:
        """Set the outcome of every request. An unexpected error fails the requests that have no outcome."""
        try:
            async with aclosing(self._client.groups([call.request() for call in turn.calls])) as groups:
                async for position, found in groups:
                    if not outcomes[position].done():
                        outcomes[position].set_result(self._outcome(found))
        except Exception as error:
            log.exception("turn_failed")
            for one in outcomes:
                if not one.done():
                    one.set_result(RequestFailed(reason=f"{type(error).__name__}: {error}"))

    def _outcome(self, found: list[Completion] | Refusal) -> Outcome:
        if isinstance(found, RequestError):
            return RequestRefused(message=str(found), param=found.param or "")
        if isinstance(found, Exception):
            return RequestFailed(reason=str(found))
        versions = sorted({version for completion in found for version in completion.versions})
        fingerprints = {version: self._receiver.fingerprint(version) for version in versions}
        return Sampled(answer=RolloutAnswer(completions=tuple(found), fingerprints=fingerprints))

    def _withdraw(self, number: int) -> None:
        turn = self._turns.pop(number, None)
        if turn is not None and turn.sampling is not None:
            turn.sampling.cancel()


def _load(settings: EngineWorkerSettings) -> Policy:
    find_model(settings.model.path)
    limit_memory(serving_memory(settings.model, settings.engine, settings.sampling, None), settings.memory)
    return load_policy(settings.model, settings.policy, seed=settings.seed, keep_reference=False)


def _end_process(failure: Future[None]) -> None:
    if not failure.cancelled() and failure.exception() is not None:
        os._exit(ENGINE_FAILED)
