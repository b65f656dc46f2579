"""A batch with its outputs: decode steps, and rows that leave it; and how often long rows take a step.

Rows do not depend on the composition of a batch, so the engine can decode its rows in two batches, one step after the
other. The long rows of clients (`clotho.inference.kv_budget`) have one of their own, with less of the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Set
from time import perf_counter

import numpy as np
import structlog

from clotho.inference.batch import Batch, Step
from clotho.inference.interface import MAX_HOLDERS
from clotho.inference.outputs import EventSender, OutputProcessor
from clotho.inference.scheduler import ActiveRequest, PrefillJob, Row
from clotho.inference.speculative_batch import SpeculativeBatch
from clotho.runtime.arbiter import LONG_SHARE

log = structlog.get_logger(__name__)


class LongTurns:
    """Decides which steps of the engine decode the long rows too: all of them while nothing else is to be done."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._next = 0.0

    def decode(self, short: Decoding, long: Decoding, version: int, *, entering: bool) -> int:
        """Decode one token of the short rows, and of the long rows if it is their turn; return the number of tokens.

        entering: whether prompts of short rows are being prefilled. Beside short rows, a step of long rows is not
        overlapped with others, so that its time is known.
        """
        others = entering or short.is_busy
        sampled = short.step(version)
        began = self._clock() if long.is_busy else -math.inf
        if began >= self._next or (long.is_busy and not others):
            sampled += long.step(version, waits=others)
            ended = self._clock()
            self._next = ended + (ended - began) * (1.0 / LONG_SHARE - 1.0)
        return sampled


class Decoding:
    """A batch whose tokens go to the listeners of its requests.

    steps, preempted: numbers of decode steps, and of rows that left the batch and will continue.
    """

    def __init__(self, batch: Batch, sender: EventSender) -> None:
        self.batch = batch
        self.steps = self.preempted = self.tokens = 0
        self._sender = sender
        self._outputs = OutputProcessor(batch, sender)

    @property
    def running(self) -> int:
        """Number of rows in the batch."""
        return self.batch.table.running

    @property
    def is_busy(self) -> bool:
        """Whether a row runs, or the tokens of a step have not been read."""
        return bool(self.running or self.batch.inflight)

    def longest_requests(self) -> tuple[str, ...]:
        """Return the identifiers of the requests with the longest rows; of a request without one, its number."""
        rows, positions_B = self.batch.table.rows, self.batch.table.positions
        running = [rows[slot] for slot in np.argsort(-positions_B, kind="stable").tolist()]
        names = (row.active.request.request_id or str(row.active.request_id) for row in running if row is not None)
        return tuple(dict.fromkeys(names))[:MAX_HOLDERS]

    def step(self, version: int, *, waits: bool = False) -> int:
        """Start to sample one token for every row, and report the tokens that are known; return their number.

        version: of the policy. waits: wait for the tokens of this step. An exception fails the rows, never the engine.
        """
        batch, began = self.batch, perf_counter()
        sampled = 0
        try:
            batch.compact()
            if batch.inflight is not None and (waits or batch.needs_tokens):
                sampled = self.read_inflight()
            previous, step = batch.inflight, batch.launch(version)
            batch.inflight = step
            self._outputs.fail_unprepared()
            self.steps += step is not None
            if previous is not None:
                sampled += self._process(previous)
            if step is not None and (waits or step.known):
                sampled += self.read_inflight()
            if isinstance(batch, SpeculativeBatch):
                batch.observe(perf_counter() - began, sampled)
        except Exception as error:
            log.exception("decode_step_failed")
            self._fail(f"a decode step failed: {error}")
        self.drop_if_empty()
        return sampled

    def read_inflight(self) -> int:
        """Wait for the step whose tokens have not been read, and report them; return their number."""
        step, self.batch.inflight = self.batch.inflight, None
        return self._process(step) if step is not None else 0

    def _process(self, step: Step) -> int:
        outputs = map(self.batch.read, (step, *step.more))  # one after the other: rows that end have no more tokens
        tokens = [self._outputs.process(output) for output in outputs if output is not None]
        if tokens:
            self._sender.timings.step(self, tokens[0], sum(tokens), more=self.running > 0)
        self.tokens += sum(tokens)
        return sum(tokens)

    def _fail(self, reason: str) -> None:
        for slot in np.flatnonzero(self.batch.table.live):
            self._sender.fail(self.batch.leave(int(slot)).active, reason)
        self.batch.drop()

    def drop_if_empty(self) -> None:
        """Free the buffers if no row runs and all tokens have been read."""
        if self.batch.slots and self.batch.inflight is None and not self.running:
            self.batch.drop()

    def withdraw(self, ended: Set[ActiveRequest], *, clear: bool) -> list[Row]:
        """Remove the rows of some requests, with the tokens they have sampled. clear: zero their KV caches."""
        slots = [slot for slot, row in enumerate(self.batch.table.rows) if row and row.active in ended]
        rows = [self.batch.leave(slot) for slot in slots]
        for slot in slots if clear else ():
            self.batch.clear(slot)
        return rows

    def interrupt(self, concerns: Callable[[ActiveRequest], bool]) -> list[PrefillJob]:
        """Remove the rows of the requests that `concerns` names; return them as jobs that continue their tokens."""
        self.read_inflight()
        slots = [slot for slot, row in enumerate(self.batch.table.rows) if row is not None and concerns(row.active)]
        jobs = [self.take_out(slot) for slot in slots]
        if not self.running:
            self.batch.drop()
        return jobs

    def take_out(self, slot: int, *, with_state: bool = False) -> PrefillJob:
        """Remove a row whose tokens have been read; return it as a job that continues its tokens.

        with_state: with its KV cache. Otherwise it will be computed again; therefore, as many tokens as the row has are
        reserved for it when it continues.
        """
        state = self.batch.state(slot) if with_state else None
        row = self.batch.leave(slot)
        job = PrefillJob(row.active, (*row.active.request.prompt, *row.tokens), [row])
        if with_state:
            job.computed, job.state, job.state_tokens = True, state, len(job.tokens) - 1
        else:
            self.preempted += 1
            job.further = len(job.tokens)
        return job
