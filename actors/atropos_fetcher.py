"""Atropos fetcher: in the place of prompter, generator and scorer, where groups come from environments."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from typing import TypeVar

import anyio
import structlog
from anyio.abc import TaskStatus
from anyio.lowlevel import checkpoint
from msgspec import Raw

from clotho.atropos.reader import placeholder_prompt
from clotho.atropos.source import Backoff, GroupSource, Reader
from clotho.config.schema import AtroposSection
from clotho.runtime.latest import Latest, wait_until
from protocols.queues import EndOfStream, Outbox
from protocols.rollout import Discarded, GroupOutcome
from protocols.step import WeightsReady

T = TypeVar("T")
REMEMBERED = 8192

log = structlog.get_logger(actor="atropos_fetcher")


class AtroposFetcher:
    """The first box. Takes batches of groups from a source, numbers and reads them; ends when no more are needed.

    The distribution of lag is the generator's: with `asked` groups before it, a batch is taken when

        asked < (step + max_batches_ahead + 1) * batch_size + refills    and    asked < groups + refills

    and never more than one batch of the source beyond. The run ends it by closing `refills`: what it has taken by then
    it still sends, for no group that has a number may vanish. Groups that an earlier life of the run had taken and not
    learned from are gone, for environments do not send them again: they are told of first, as `lost`.

    prompted_until: the next number; all below have been given. received: groups so far from each environment, over all
    lives of the run. under_way: from where each of the latest `REMEMBERED` numbers came.
    """

    name = "atropos_fetcher"

    def __init__(
        self,
        *,
        outbox: Outbox[GroupOutcome],
        source: GroupSource,
        reader: Reader,
        weights: Latest[WeightsReady],
        refills: Latest[int],
        first_group: int,
        received: Mapping[str, int],
        lost: Mapping[int, str],
        ended: int,
        groups: int,
        batch_size: int,
        max_batches_ahead: int,
        settings: AtroposSection,
    ) -> None:
        """lost: number -> environment. ended: groups that had ended when this life of the run began.

        groups, batch_size: how many count towards the run, and towards a batch.
        """
        self._outbox, self._source, self._reader = outbox, source, reader
        self._weights, self._refills = weights, refills
        self._lost, self._asked, self._groups = dict(lost), ended, groups
        self._batch_size, self._batches_ahead = batch_size, max_batches_ahead
        self._settings = settings
        self._wanted = True
        self._patience: anyio.CancelScope | None = None
        self.prompted_until = first_group
        self.received = dict(received)
        self.under_way = dict(lost)

    @property
    def reached(self) -> int:
        """All groups below have ended, or were sent in this life of the run."""
        return self.prompted_until

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Fetch until no more is needed. Ready when the source is: environments that start then find a trainer."""
        async with self._outbox, aclosing(_Closing(self._source)), anyio.create_task_group() as tasks:
            tasks.start_soon(self._until_closed)
            await self._tell_lost()
            await self._while_wanted(lambda: self._source.open(step=self._weights.value.step))
            task_status.started()
            while groups := await self._while_wanted(self._batch):
                for raw in groups:
                    await self._emit(raw)
            tasks.cancel_scope.cancel()

    def drain(self) -> None:
        """Take no further batch. What has been taken is still sent and learned from."""
        self._wanted = False
        if self._patience is not None:
            self._patience.cancel()

    async def _tell_lost(self) -> None:
        while self._lost:
            number, source = next(iter(self._lost.items()))
            prompt = placeholder_prompt(number, source)
            detail = "an earlier life of the run had received it, and ended before it was learned from"
            self._asked += 1
            del self._lost[number]
            await self._outbox.send(Discarded(prompt=prompt, reason="lost", detail=detail))

    async def _until_closed(self) -> None:
        with suppress(EndOfStream):
            await self._refills.wait_until(lambda _: False)
        self.drain()

    async def _while_wanted(self, work: Callable[[], Awaitable[T]]) -> T | None:
        """What comes of some work; None if no group is wanted any more: then it is given up, or not begun."""
        await checkpoint()
        if self._wanted:
            with anyio.CancelScope() as self._patience:
                return await work()
        return None

    async def _batch(self) -> list[Raw]:
        """The next batch, as soon as it is due and there; empty if it never will be."""
        try:
            await wait_until(self._is_due, self._weights, self._refills)
        except EndOfStream:
            return []
        backoff, since = Backoff(max_seconds=self._settings.poll_seconds), anyio.current_time()
        while True:
            groups = await self._source.batch(step=self._weights.value.step)
            if groups:
                return groups
            if anyio.current_time() - since >= self._settings.patience_seconds:
                log.warning("no group has come", waiting_for=await self._source.waiting_for())
                since = anyio.current_time()
            await anyio.sleep(backoff.next_seconds())

    def _is_due(self) -> bool:
        ahead = self._weights.value.step + self._batches_ahead + 1
        return self._asked - self._refills.value < min(ahead * self._batch_size, self._groups)

    async def _emit(self, raw: Raw) -> None:
        number = self.prompted_until
        outcome = await self._reader.read(raw, group_id=number, version=self._weights.value.version)
        source = (outcome.prompt if isinstance(outcome, Discarded) else outcome.group.prompt).source
        self._asked += 1
        self.prompted_until += 1
        self.received[source] = self.received.get(source, 0) + 1
        self.under_way[number] = source
        if len(self.under_way) > REMEMBERED:
            del self.under_way[next(iter(self.under_way))]
        await self._outbox.send(outcome)


class _Closing:
    """A source under the name by which `aclosing` calls."""

    def __init__(self, source: GroupSource) -> None:
        self._source = source

    async def aclose(self) -> None:
        with anyio.CancelScope(shield=True):
            await self._source.close()
