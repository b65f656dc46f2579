"""Atropos fetcher -> learner: receives groups from environments, in place of prompter, generator and scorer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import anyio
import structlog
from anyio.abc import TaskStatus
from anyio.lowlevel import checkpoint

from protocols.batches import GroupSupply
from protocols.prompt import placeholder_prompt
from protocols.queues import EndOfStream, Outbox
from protocols.rollout import Discarded, GroupOutcome
from protocols.step import WeightsReady
from training_run.supervision.latest import Latest, wait_until
from training_run.supervision.supervisor import Backoff

T = TypeVar("T")
IN_FLIGHT_KEPT = 8192

log = structlog.get_logger(actor="atropos_fetcher")


class AtroposFetcher:
    """Fetches batches of groups from a source, numbers and validates them; returns when no more are needed.

    The staleness bound is the generator's: after `fetched` groups, the next batch is fetched when

        fetched < (step + max_batches_ahead + 1) * batch_size + replacements
        fetched < groups + replacements

    The last batch may exceed the bound by the size of one batch of the source. Closing `replacements` ends the actor;
    groups that it has fetched by then are still sent. Groups that were in flight before a resume are lost, because
    environments do not send them again; the actor reports these first, as `lost`.

    prompted_until: number of groups received since the run began, which is the next group id.
    received: number of groups from each environment since the run began.
    in_flight: environment of each of the last `IN_FLIGHT_KEPT` groups.
    """

    name = "atropos_fetcher"

    def __init__(
        self,
        *,
        outbox: Outbox[GroupOutcome],
        supply: GroupSupply[Any],
        weights: Latest[WeightsReady],
        replacements: Latest[int],
        first_group: int,
        received: Mapping[str, int],
        lost: Mapping[int, str],
        ended: int,
        groups: int,
        batch_size: int,
        max_batches_ahead: int,
    ) -> None:
        """lost: groups that were in flight before a resume, with their environment.

        ended: number of groups that had ended at the start. groups: number of groups in all batches of the run.
        """
        self._outbox, self._supply = outbox, supply
        self._weights, self._replacements = weights, replacements
        self._lost, self._fetched, self._groups = dict(lost), ended, groups
        self._batch_size, self._max_batches_ahead = batch_size, max_batches_ahead
        self._running = True
        self._current_wait: anyio.CancelScope | None = None
        self.prompted_until = first_group
        self.received = dict(received)
        self.in_flight = dict(lost)

    @property
    def sent_until(self) -> int:
        """Every group with a smaller id has ended, or was sent since the last start."""
        return self.prompted_until

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Fetch until no more groups are needed. Ready when the source is, so that environments find a trainer."""
        source = self._supply.source
        try:
            async with self._outbox, anyio.create_task_group() as tasks:
                tasks.start_soon(self._drain_when_closed)
                await self._report_lost()
                await self._unless_draining(lambda: source.open(step=self._weights.value.step))
                task_status.started()
                while groups := await self._unless_draining(self._next_batch):
                    for group in groups:
                        await self._emit(group)
                tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await source.close()

    def drain(self) -> None:
        """Fetch no further batch. Fetched groups are still sent and trained on."""
        self._running = False
        if self._current_wait is not None:
            self._current_wait.cancel()

    async def _report_lost(self) -> None:
        while self._lost:
            number, source = next(iter(self._lost.items()))
            prompt = placeholder_prompt(number, source)
            detail = "received before the run was resumed, and not trained on"
            self._fetched += 1
            del self._lost[number]
            await self._outbox.send(Discarded(prompt=prompt, reason="lost", detail=detail))

    async def _drain_when_closed(self) -> None:
        with suppress(EndOfStream):
            await self._replacements.wait_until(lambda _: False)
        self.drain()

    async def _unless_draining(self, work: Callable[[], Awaitable[T]]) -> T | None:
        """The result of the work; None after `drain`, which cancels the work."""
        await checkpoint()
        if self._running:
            with anyio.CancelScope() as self._current_wait:
                return await work()
        return None

    async def _next_batch(self) -> Sequence[Any]:
        """Wait until the staleness bound permits a batch, and fetch it. Empty if no more groups are needed."""
        try:
            await wait_until(self._is_due, self._weights, self._replacements)
        except EndOfStream:
            return []
        backoff, since = Backoff(max_seconds=self._supply.poll_seconds), anyio.current_time()
        while True:
            groups = await self._supply.source.batch(step=self._weights.value.step)
            if groups:
                return groups
            if anyio.current_time() - since >= self._supply.patience_seconds:
                log.warning("no_group_received", waiting_for=await self._supply.source.waiting_for())
                since = anyio.current_time()
            await anyio.sleep(backoff.next_seconds())

    def _is_due(self) -> bool:
        ahead = self._weights.value.step + self._max_batches_ahead + 1
        return self._fetched - self._replacements.value < min(ahead * self._batch_size, self._groups)

    async def _emit(self, group: Any) -> None:
        number = self.prompted_until
        outcome = await self._supply.reader.read(group, group_id=number, version=self._weights.value.version)
        source = outcome.prompt.source
        self._fetched += 1
        self.prompted_until += 1
        self.received[source] = self.received.get(source, 0) + 1
        self.in_flight[number] = source
        if len(self.in_flight) > IN_FLIGHT_KEPT:
            del self.in_flight[next(iter(self.in_flight))]
        await self._outbox.send(outcome)
