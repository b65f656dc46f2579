"""Samples rollouts on remote inference servers, and keeps the weights of the servers current.

A group is sampled by one server. A server gets groups only while it serves weights that are new enough, and at most its
share of the rows in flight: groups wait for servers that are getting new weights. If a server fails, answers with wrong
data or is not heard from, its groups are requested again from other servers; it gets groups again when it has the
newest weights and has passed a probe.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Protocol

import anyio
import structlog
from anyio.abc import TaskGroup
from msgspec import structs

from attachments.remote.answer_checks import Decode, ServerComparison, check_answer
from attachments.remote.messages import MAX_LISTED_VERSIONS, RolloutAnswer, ServedPolicy
from attachments.remote.place import InferenceServer, Place, RemoteGauges, freest
from attachments.remote.server import RemoteFailure
from attachments.remote.weights import Weights
from clotho.lanes.sampling_client import Refusal
from protocols.errors import GenerationError, RemoteError, RequestError
from protocols.queues import Inbox
from protocols.sampling import Completion, PromptLogprobs, SampleRequest, Sampling, derive
from protocols.step import PolicyUpdated, WeightsReady
from training_run.supervision.latest import Latest

log = structlog.get_logger(actor="remote_sampler")

HEARTBEAT_SECONDS = 1.0
"""Pause between two questions about the state of a server."""

LONGEST_PAUSE_SECONDS = 1.5
"""Longest pause between two attempts to reach a failed server. The pause doubles from `HEARTBEAT_SECONDS` / 2.

With the time for a connection (`CONNECT_SECONDS`), a server that comes back is found in less than 4 seconds.
"""

PROBE_TOKENS, PROBE_SECONDS = 32, 30.0
"""Number of tokens whose log-probabilities a probe compares, and time between two probes of a server in use."""

MAX_PROBE_NATS = 0.1
"""Largest mean difference of log-probabilities between a server and the learner."""

SUSPICION_SECONDS = 3.0
"""Shortest time between two probes of a server in use whose log-probabilities differ from those of an update."""

JOIN_SECONDS = 2.0
"""Pause between two questions for servers that have joined."""

Recompute = Callable[[tuple[int, ...], float], Awaitable[PromptLogprobs]]
"""Returns the log-probabilities of tokens under the served policy of this process, at a temperature."""


class ServerSource(Protocol):
    """Finds servers that join while the run samples."""

    async def joined(self) -> Sequence[InferenceServer]:
        """Return the servers that have joined since the last call."""
        ...

    async def close(self) -> None:
        """End the search."""
        ...


class RemoteSampler:
    """The sampler of the generator if rollouts are sampled on remote servers; also a supervised child that runs.

    retries: number of groups that were requested again. fingerprints: of the newest versions of the run.
    """

    name = "remote_sampler"

    def __init__(
        self,
        servers: Sequence[InferenceServer],
        *,
        updates: Inbox[PolicyUpdated],
        weights: Latest[WeightsReady],
        start: Weights,
        layout: str,
        vocab_size: int,
        decode: Decode,
        run_id: str,
        sync_interval: int,
        probe_prompt: tuple[int, ...],
        recompute: Recompute,
        sampling: Sampling,
        patience_seconds: float,
        source: ServerSource | None = None,
    ) -> None:
        """weights: served by this process. start: the weights at the start. layout, vocab_size: as in `ServedPolicy`.

        decode: returns the text of tokens in the tokenizer of the run.
        sync_interval: weights are sent after every so many versions. probe_prompt: tokens of the probe.
        patience_seconds: the run fails if no server can be used for this time. source: of servers that join later.
        """
        self._places = [Place(server, 1.0) for server in servers]
        self._source = source
        self._updates, self._weights = updates, weights
        self._layout, self._vocab_size, self._decode, self._run_id = layout, vocab_size, decode, run_id
        self._sync_interval, self._patience_seconds = sync_interval, patience_seconds
        self._probe_prompt, self._recompute = probe_prompt, recompute
        self._probe_sampling = Sampling(
            temperature=sampling.temperature, logit_bias=sampling.logit_bias, max_tokens=PROBE_TOKENS, ignore_eos=True
        )
        self._short_sampling = structs.replace(sampling, max_tokens=1)
        self._target = Latest[Weights]("remote_weights")
        self._target.put(start)
        self.fingerprints = {start.ready.version: start.ready.fingerprint}
        self._comparison = ServerComparison()
        self._changed = Latest[int]("remote_servers")
        self._changed.put(0)
        self.retries = self._waiting_rows = 0

    def gauges(self) -> RemoteGauges:
        """Return the metrics of all servers."""
        return RemoteGauges(
            tokens_sampled=sum(place.tokens for place in self._places),
            requested_again=self.retries,
            servers=tuple(place.gauge(self._weights.value.version) for place in self._places),
        )

    async def run(self) -> None:
        """Keep the servers current until the learner has ended.

        Raises RemoteError if no server can be used for `patience_seconds`.
        """
        try:
            async with self._updates, anyio.create_task_group() as tasks:
                for place in self._places:
                    tasks.start_soon(self._keep_current, place)
                if self._source is not None:
                    tasks.start_soon(self._admit, self._source, tasks)
                tasks.start_soon(self._watch)
                async for update in self._updates:
                    self._announce(update)
                tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                for place in self._places:
                    await place.server.close()
                if self._source is not None:
                    await self._source.close()

    def _announce(self, update: PolicyUpdated) -> None:
        report = update.report
        self._suspect(self._comparison.differences(report))
        self.fingerprints[report.version] = report.fingerprint
        while len(self.fingerprints) > MAX_LISTED_VERSIONS:
            del self.fingerprints[min(self.fingerprints)]
        sent = self._target.value.ready
        if report.version >= sent.version + self._sync_interval or (
            report.rolled_back and report.version > sent.version
        ):
            ready = WeightsReady(version=report.version, step=report.step, fingerprint=report.fingerprint)
            self._target.put(Weights(ready=ready, parameters=update.parameters))

    def _suspect(self, differences: Mapping[str, float]) -> None:
        """Have servers probed whose log-probabilities differ from those of an update. differences: nats, by name."""
        latest = anyio.current_time() - SUSPICION_SECONDS
        for place in self._places:
            nats = differences.get(place.server.name, 0.0)
            if nats > MAX_PROBE_NATS and -math.inf < place.probed_at <= latest:
                log.warning("remote_server_suspected", server=place.server.name, nats_per_token=round(nats, 3))
                place.probed_at = -math.inf

    def join(self, server: InferenceServer, *, share: float = 1.0) -> Place:
        """Add a server before the sampler runs. share: relative part of the rows that it gets."""
        self._places.append(place := Place(server, share))
        return place

    async def _admit(self, source: ServerSource, tasks: TaskGroup) -> None:
        """Add servers as they join."""
        while True:
            for server in await source.joined():
                tasks.start_soon(self._keep_current, self.join(server))
            await anyio.sleep(JOIN_SECONDS)

    async def _watch(self) -> None:
        """Raise RemoteError once no server could be used for the permitted time."""
        while True:
            with anyio.move_on_after(self._patience_seconds) as waiting:
                await self._changed.wait_until(lambda _: any(place.in_use for place in self._places))
            if waiting.cancelled_caught:
                names = ", ".join(place.server.name for place in self._places)
                raise RemoteError(
                    f"no remote inference server could be used for {self._patience_seconds:g} seconds ({names}): start "
                    "one, and continue the run with --resume"
                )
            await self._changed.wait_until(lambda _: not any(place.in_use for place in self._places))

    async def _keep_current(self, place: Place) -> None:
        """Send the newest weights to a server, and ask for its state in between."""
        while True:
            revision = self._target.revision
            try:
                await self._update(place)
                place.failures = 0
            except RemoteFailure as failure:
                self._fail(place, failure)
                await anyio.sleep(min(HEARTBEAT_SECONDS * 2.0 ** min(place.failures - 2, 8), LONGEST_PAUSE_SECONDS))
            else:
                with anyio.move_on_after(HEARTBEAT_SECONDS):
                    await self._target.changed(revision)

    async def _update(self, place: Place) -> None:
        served, target = await place.server.served(), self._target.value
        place.answered(served.instance)
        self._require_compatible(served, place)
        if (served.version, served.fingerprint) != (target.ready.version, target.ready.fingerprint):
            served = await self._push(place)
        place.owned = True
        if anyio.current_time() >= place.probed_at + PROBE_SECONDS and await self._probe(place):
            place.probed_at = anyio.current_time()
        if place.version is None:
            log.info("remote_server_ready", server=place.server.name, version=served.version)
        if place.version != served.version:
            place.version = served.version
            self._wake()

    def _require_compatible(self, served: ServedPolicy, place: Place) -> None:
        if place.owned and served.run_id not in ("", self._run_id):
            raise RemoteFailure("serves the weights of another run")
        if served.layout != self._layout:
            raise RemoteFailure("has other trainable parameters: start it with the same model and [policy] settings")

    async def _push(self, place: Place) -> ServedPolicy:
        """Give a server the newest weights; before a restart, its groups in flight are completed."""
        if place.server.restarts:
            place.version, place.probed_at = None, -math.inf
            await self._changed.wait_until(lambda _: not place.rows)
        began = anyio.current_time()
        pushing = asyncio.ensure_future(place.server.push(self._target.value))
        try:
            while not (await asyncio.wait({pushing}, timeout=HEARTBEAT_SECONDS))[0]:
                if not place.server.restarts:
                    await place.server.served()  # a server that has stopped fails before the time for large weights
            served = pushing.result()
        finally:
            pushing.cancel()
        place.pushed(anyio.current_time() - began)
        return served

    async def _probe(self, place: Place) -> bool:
        """Compare log-probabilities of a server with those of this process.

        Return False if the weights of this process or of the server changed meanwhile, so that nothing was compared.
        The probe includes a request with the sampling parameters of the run, which the server might refuse.
        """
        seeds = (derive(0, "probe", self._target.value.ready.version),)
        request = SampleRequest(prompt=self._probe_prompt, sampling=self._probe_sampling, seeds=seeds)
        try:
            await self._answer(place, structs.replace(request, sampling=self._short_sampling, record_support=True))
            answer = await self._answer(place, request)
        except RequestError as error:
            raise RemoteFailure(f"refuses the probe: {error}") from error
        completion = answer.completions[0]
        version = completion.versions[0]
        await self._weights.wait_until(lambda weights: weights.version >= version)
        scored = await self._recompute((*self._probe_prompt, *completion.tokens), self._probe_sampling.temperature)
        if scored.version != version or completion.versions[-1] != version:
            return False
        ours = scored.logprobs[-len(completion.tokens) :]
        difference = sum(abs(a - b) for a, b in zip(completion.logprobs, ours, strict=True)) / len(ours)
        if not difference <= MAX_PROBE_NATS:
            raise RemoteFailure(f"computes other log-probabilities: {difference:.3g} nats per token from the learner's")
        return True

    async def _answer(self, place: Place, request: SampleRequest) -> RolloutAnswer:
        """Return the completions of a server, checked, with versions of this run."""
        answer = await place.server.sample(request)
        check_answer(answer, request, vocab_size=self._vocab_size, decode=self._decode)
        for version, fingerprint in answer.fingerprints.items():
            if self.fingerprints.get(version) != fingerprint:
                raise RemoteFailure(f"sampled with weights that are not version {version} of this run")
        return answer

    def _fail(self, place: Place, failure: RemoteFailure) -> None:
        """Take a server out of use until it has answered again."""
        place.failures += 1
        place.all_failures += 1
        if place.version is not None or place.failures == 1:
            log.warning("remote_server_failed", server=place.server.name, reason=str(failure))
        place.close()
        self._wake()

    def _wake(self) -> None:
        self._changed.put(self._changed.value + 1)

    async def groups(
        self, requests: Sequence[SampleRequest]
    ) -> AsyncGenerator[tuple[int, list[Completion] | Refusal], None]:
        """Yield (position, completions) for each request when its last completion is finished.

        A request that a server refuses yields its error once instead; the other requests continue.
        """
        done: asyncio.Queue[tuple[int, list[Completion] | Refusal | BaseException]] = asyncio.Queue()

        async def one(position: int, request: SampleRequest) -> None:
            try:
                done.put_nowait((position, await self.complete(request)))
            except BaseException as error:
                done.put_nowait((position, error))
                raise

        tasks = [asyncio.create_task(one(position, request)) for position, request in enumerate(requests)]
        try:
            for _ in requests:
                position, outcome = await done.get()
                if isinstance(outcome, BaseException) and not isinstance(outcome, RequestError | GenerationError):
                    raise outcome
                yield position, outcome
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def complete(self, request: SampleRequest) -> list[Completion]:
        """Return one completion per seed, from whichever server finishes first with valid data.

        Raises RequestError if a server refuses the request.
        """
        while True:
            place, oldest = await self._free_place(len(request.seeds))
            place.rows += len(request.seeds)
            place.groups += 1
            try:
                with anyio.CancelScope() as scope:
                    place.calls.add(scope)
                    try:
                        return await self._sample(place, request, oldest)
                    finally:
                        place.calls.discard(scope)
            except RequestError as refusal:
                log.warning("remote_server_refused_group", server=place.server.name, reason=str(refusal))
                raise
            except RemoteFailure as failure:
                self._fail(place, failure)
            finally:
                place.rows -= len(request.seeds)
                self._wake()
            self.retries += 1
            log.warning("group_requested_again", server=place.server.name)

    async def _sample(self, place: Place, request: SampleRequest, oldest: int) -> list[Completion]:
        answer = await self._answer(place, structs.replace(request, stream=False))
        for completion in answer.completions:
            if min(completion.versions) < oldest:
                raise RemoteFailure(f"sampled with version {min(completion.versions)}, which is older than {oldest}")
        self._comparison.sampled(request, place.server.name)
        place.tokens += sum(len(completion.tokens) for completion in answer.completions)
        return list(answer.completions)

    async def _free_place(self, rows: int) -> tuple[Place, int]:
        """Wait for a server with new enough weights and room for rows; return it and the oldest version."""
        self._waiting_rows += rows
        try:
            while True:
                revision = self._changed.revision
                oldest = self._weights.value.version - self._sync_interval + 1
                if place := freest(self._places, oldest=oldest, waiting=self._waiting_rows):
                    return place, oldest
                await self._changed.changed(revision)
        finally:
            self._waiting_rows -= rows
