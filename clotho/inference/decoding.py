"""Batches with their outputs: decode steps, rows that leave, and which rows are decoded next.

Rows do not depend on the composition of a batch. The engine therefore groups them by what they may cost the others, and
each group has steps of its own:

* **Short rows**: rollouts, and rows of clients. They have all the time that the other groups leave.
* **Long rows** of clients (`clotho.inference.kv_budget`) have `LONG_SHARE` of the time, in which their tokens are also
  streamed.
* **First tokens** of clients have `FIRST_SHARE` of the time beside steps that take long, and come before everything.

A step that takes long is computed in parts of `LONGEST_PART`. Between two parts, whoever has the decode thread can do
other work, and clients that have arrived get their prompts prefilled and their first tokens. Weights are read once per
step whatever the number of parts, and results are the same bit for bit.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Sequence, Set
from statistics import median
from time import perf_counter

import numpy as np
import structlog

from clotho.inference.batch import Batch, Step
from clotho.inference.outputs import EventSender, OutputProcessor
from clotho.inference.scheduler import ActiveRequest, PrefillJob, Row
from clotho.lanes.arbiter import LONG_SHARE

log = structlog.get_logger(__name__)

LONGEST_PART = 0.05
"""Seconds after which a long step can be interrupted: the longest wait of a client that arrives, but for one block."""

LONG_STEP = 2 * LONGEST_PART
"""Seconds from which a step is long. Shorter ones are not divided, and clients' first tokens have no step of their own.
"""

RECENT_STEPS = 3
"""A step is expected to be long if most of the last so many steps of about as many rows were: one can be an accident.
"""

FIRST_SHARE = 0.05
"""Largest fraction of the time for first tokens of clients in steps of their own."""

FIRST_CREDIT = 1.0
"""Seconds of such steps that may follow each other before `FIRST_SHARE` limits them."""

FIRST_ROWS = 8
"""A step of first tokens has at most this fraction of the rows of the step that it precedes (1/8), but one row."""

VISIT_SHARE = 0.5
"""Largest fraction of the time of a divided step for chunks of prompts of clients; one chunk can begin in any case."""

STREAMED_TOKEN = 1e-4
"""Seconds that the event loop takes for a streamed token, during which it holds the interpreter: 0.09 ms were measured.
"""

MAX_HOLDERS = 4
"""Number of requests that `EngineStats.cache_holders` names at most."""


class Allowance:
    """Limits one kind of work to a share of the time. credit: seconds of it that may follow each other before that."""

    def __init__(self, share: float, *, credit: float = 0.0) -> None:
        self._share, self._credit = share, credit
        self._next = -math.inf

    def allows(self, now: float) -> bool:
        """Whether the work may begin."""
        return now >= self._next - self._credit / self._share

    def spend(self, began: float, ended: float) -> None:
        """Record work between two times."""
        self._next = max(self._next, began) + (ended - began) / self._share


class Turns:
    """Decides which running rows take a step: long rows as often as they may, and always if nothing else is to do."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._long = Allowance(LONG_SHARE)

    def decode(self, short: Decoding, long: Decoding, version: int, *, entering: bool) -> int:
        """Decode one token of the short rows, and of the long rows if it is their turn, or a part of such a step.

        Returns the number of tokens. A step that has begun is completed before another one begins.
        entering: whether prompts of short rows are being prefilled. Beside short rows, a step of long rows is not
        overlapped with others, so that its time is known.
        """
        others = entering or short.is_busy
        sampled = 0
        if not long.in_progress:
            sampled += short.step(version)
            if short.in_progress:
                return sampled
        began = self._clock() if long.is_busy else -math.inf
        if long.in_progress or (long.is_busy and (self._long.allows(began) or not others)):
            streamed = long.streaming
            sampled += long.step(version, waits=others)
            if others:
                self._long.spend(began, self._clock() + STREAMED_TOKEN * streamed)
        return sampled


class Decoding:
    """A batch whose tokens go to the listeners of its requests. preempted: rows that left and will continue."""

    _continues = True
    """Whether another step of the same rows follows a step."""

    def __init__(self, batch: Batch, sender: EventSender, clock: Callable[[], float] = perf_counter) -> None:
        self.batch = batch
        self.steps = self.preempted = self.tokens = 0
        self._sender, self._clock = sender, clock
        self._outputs = OutputProcessor(batch, sender)
        self._parts: Generator[None, None, Step | None] | None = None
        self._seconds = 0.0  # of the step in progress
        self._recent = defaultdict[int, deque[float]](lambda: deque(maxlen=RECENT_STEPS))  # by logarithm of the rows

    @property
    def running(self) -> int:
        """Number of rows in the batch."""
        return self.batch.table.running

    @property
    def is_busy(self) -> bool:
        """Whether a row runs, or the tokens of a step have not been read."""
        return bool(self.running or self.batch.inflight)

    @property
    def streaming(self) -> int:
        """Number of rows whose tokens are streamed."""
        return sum(row is not None and row.active.request.stream for row in self.batch.table.rows)

    def longest_requests(self) -> tuple[str, ...]:
        """Return the identifiers of the requests with the longest rows; of a request without one, its number."""
        rows, positions_B = self.batch.table.rows, self.batch.table.positions
        running = [rows[slot] for slot in np.argsort(-positions_B, kind="stable").tolist()]
        names = (row.active.request.request_id or str(row.active.request_id) for row in running if row is not None)
        return tuple(dict.fromkeys(names))[:MAX_HOLDERS]

    @property
    def in_progress(self) -> bool:
        """Whether a step has begun and is not complete: its rows cannot change."""
        return self._parts is not None

    def is_slow(self, *, joining: int = 0) -> bool:
        """Whether a step takes long, by the steps so far. joining: number of rows that join before it."""
        recent = self._recent[(self.running + joining).bit_length()]
        return len(recent) == RECENT_STEPS and median(recent) >= LONG_STEP

    def step(self, version: int, *, waits: bool = False) -> int:
        """Start to sample one token for every row, and report the tokens that are known; return their number.

        A step that takes long is computed in parts: then, this begins or continues one. An exception fails the rows,
        never the engine.

        version: of the policy, if a step begins. waits: wait for the tokens of this step.
        """
        began, sampled, rows = self._clock(), 0, self.running
        divided = self.is_slow()
        try:
            if self._parts is None:
                sampled += self._begin(version, divided=divided, waits=waits)
            is_complete, step = self._advance(began + LONGEST_PART if divided else math.inf)
            if is_complete:
                sampled += self._end(step, waits=waits)
            self._seconds += self._clock() - began
            if is_complete:
                self._recent[rows.bit_length()].append(self._seconds)
        except Exception as error:
            log.exception("decode_step_failed")
            self._fail(f"a decode step failed: {error}")
        self.drop_if_empty()
        return sampled

    def complete(self) -> None:
        """Compute the rest of the step in progress."""
        while self._parts is not None:
            self.step(0)

    def _begin(self, version: int, *, divided: bool, waits: bool) -> int:
        """Prepare a step; return the number of tokens of the last one that are reported before it."""
        batch, sampled = self.batch, 0
        batch.compact()
        awaited = divided and bool(batch.table.client.any())  # batches of rollouts do not depend on durations
        if batch.inflight is not None and (waits or awaited or batch.needs_tokens):
            sampled = self.read_inflight()
        self._parts, self._seconds = batch.launch(version, divided=divided), 0.0
        return sampled

    def _advance(self, until: float) -> tuple[bool, Step | None]:
        """Compute parts of the step until a time; return whether it is complete, and the step then."""
        assert self._parts is not None
        try:
            next(self._parts)
            while self._clock() < until:
                next(self._parts)
        except StopIteration as end:
            self._parts = None
            return True, end.value
        return False, None

    def _end(self, step: Step | None, *, waits: bool) -> int:
        """Report the tokens that are known at the end of a step; return their number."""
        batch, sampled = self.batch, 0
        previous, batch.inflight = batch.inflight, step
        self._outputs.fail_unprepared()
        self.steps += step is not None
        if previous is not None:
            sampled += self._process(previous)
        if step is not None and (waits or step.known):
            sampled += self.read_inflight()
        return sampled

    def read_inflight(self) -> int:
        """Wait for the step whose tokens have not been read, and report them; return their number."""
        step, self.batch.inflight = self.batch.inflight, None
        return self._process(step) if step is not None else 0

    def _process(self, step: Step) -> int:
        # One after the other: rows that end have no more tokens.
        outputs = (part.read(self.batch.table.serial) for part in (step, *step.more))
        tokens = [self._outputs.process(output) for output in outputs if output is not None]
        if tokens:
            self._sender.timings.step(self, tokens[0], sum(tokens), more=self._continues and self.running > 0)
        self.tokens += sum(tokens)
        return sum(tokens)

    def _fail(self, reason: str) -> None:
        for slot in np.flatnonzero(self.batch.table.live):
            self._sender.fail(self.batch.leave(int(slot)).active, reason)
        self.drop()

    def drop(self) -> None:
        """Free the buffers. All rows have left, or leave without a word."""
        self._parts = None
        self.batch.drop()

    def drop_if_empty(self) -> None:
        """Free the buffers if no row runs and all tokens have been read."""
        if self.batch.slots and self.batch.inflight is None and not self.running:
            self.batch.drop()

    def withdraw(self, ended: Set[ActiveRequest], *, clear: bool) -> list[Row]:
        """Remove the rows of some requests, with the tokens they have sampled. clear: zero their KV caches."""
        self.complete()
        slots = [slot for slot, row in enumerate(self.batch.table.rows) if row and row.active in ended]
        for slot in () if clear else slots:
            self.batch.record_routes(slot)
        rows = [self.batch.leave(slot) for slot in slots]
        for slot in slots if clear else ():
            self.batch.clear(slot)
        self.drop_if_empty()
        return rows

    def interrupt(self, concerns: Callable[[ActiveRequest], bool]) -> list[PrefillJob]:
        """Remove the rows of the requests that `concerns` names; return them as jobs that continue their tokens."""
        self.complete()
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
        self.batch.record_routes(slot)
        row = self.batch.leave(slot)
        job = PrefillJob(row.active, (*row.active.request.prompt, *row.tokens), [row])
        if with_state:
            job.computed, job.state, job.state_tokens = True, state, len(job.tokens) - 1
        else:
            self.preempted += 1
            job.further = len(job.tokens)
        self.drop_if_empty()
        return job


class FirstTokens(Decoding):
    """The rows of clients that are sampled once before they join the short rows or the long rows."""

    _continues = False

    def __init__(self, batch: Batch, sender: EventSender) -> None:
        super().__init__(batch, sender)
        self._allowance = Allowance(FIRST_SHARE, credit=FIRST_CREDIT)
        batch.limit_cache(0)  # no columns for tokens that are sampled elsewhere

    def chosen(self, ready: Sequence[PrefillJob], beside: int) -> list[PrefillJob]:
        """Return which jobs may have a step of their own. beside: number of rows of the step that they precede."""
        if not self._allowance.allows(self._clock()):
            return []
        room, chosen = max(1, beside // FIRST_ROWS), list[PrefillJob]()
        for job in ready:
            if job.awaits_first_token and 0 < job.admitted <= room:
                chosen.append(job)
                room -= job.admitted
        return chosen

    def sample(self, version: int) -> list[PrefillJob]:
        """Sample one token for each row; return the rows that go on, as jobs with their KV caches."""
        began = self._clock()
        self.step(version, waits=True)
        self.complete()
        self._allowance.spend(began, self._clock())
        slots = [slot for slot, row in enumerate(self.batch.table.rows) if row is not None]
        jobs = [self.take_out(slot, with_state=True) for slot in slots]
        self.drop()
        return jobs
