"""Requests and rows of the engine, and the scheduler: fair between clients, within limits on rows and KV cache."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import partial, reduce
from time import perf_counter
from typing import Literal

import numpy as np

from clotho.inference.kv_budget import MARGIN, OUTLIER, KVBudget, Load, Loads, Waiting
from clotho.inference.rows import PromptState, RouteArray, RowAdapter
from clotho.inference.stop_strings import IncrementalDetokenizer
from clotho.lanes.fair_queue import FairQueue
from protocols.constraints import ConstraintState
from protocols.errors import RequestError
from protocols.sampling import SampleEvent, SampleRequest, excludes_tokens

Listener = Callable[[SampleEvent], None]


@dataclass(eq=False, slots=True)
class ActiveRequest:
    """An accepted request.

    limit: maximum length of a completion, given the context. open: unfinished completions. adapter: the adapter that
    samples; None for the policy. submitted, admitted, started: time of submission, of the first admission, and of the
    entry of the first row into the batch, in seconds of `perf_counter`; 0 if that has not happened. refund: credits the
    client in the fair queue with tokens; None if it was not charged.
    """

    request_id: int
    request: SampleRequest
    listener: Listener
    limit: int
    open: int
    adapter: RowAdapter | None = None
    submitted: float = field(default_factory=perf_counter)
    admitted: float = 0.0
    started: float = 0.0
    refund: Callable[[int], None] | None = None

    @property
    def weights_version(self) -> int:
        """Version of the adapter, -1 for the base model, 0 for the policy."""
        return 0 if self.adapter is None else self.adapter.version or -1

    @property
    def needs_text(self) -> bool:
        """Whether the text of a completion is needed before its end, or with special tokens."""
        request = self.request
        return bool(request.stream or request.sampling.stop or request.special_tokens or request.include_stop)

    @property
    def deadline(self) -> float:
        """Time at which the request has waited for its admission, or been answered since then, for too long."""
        begin, limit = self.submitted, self.request.wait_seconds
        if self.admitted:
            begin, limit = self.admitted, self.request.answer_seconds
        return begin + limit if limit else math.inf

    @property
    def reserved(self) -> int:
        """Maximum number of tokens of the prompt and one completion."""
        return len(self.request.prompt) + self.limit


@dataclass(eq=False, slots=True)
class Row:
    """One completion. `tokens`, `logprobs` and `versions` are filled in when it leaves the batch.

    top_logprobs, supports: per token sampled so far, if the request needs them. routes: of prompt and tokens but the
    newest, filled in as `tokens` is, if the request needs them. constraint: has accepted every token sampled so far.
    """

    active: ActiveRequest
    index: int
    serial: int
    text: IncrementalDetokenizer | None = None
    constraint: ConstraintState | None = field(default=None, init=False)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top_logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    supports: list[bytes] = field(default_factory=list)
    routes: RouteArray = field(default_factory=lambda: np.zeros((0, 0, 0), dtype=np.uint8))

    def __post_init__(self) -> None:
        """Begin the constraint of the request."""
        constraint = self.active.request.constraint
        self.constraint = constraint.start() if constraint is not None else None

    @property
    def needs_processing(self) -> bool:
        """Whether every token must be processed one by one: for text, a constraint, stop tokens or alternatives."""
        sampling = self.active.request.sampling
        return bool(self.text or self.constraint or sampling.stop_token_ids or sampling.top_logprobs)

    @property
    def is_masked(self) -> bool:
        """Whether some tokens cannot be sampled at some steps, whatever their logits."""
        return self.constraint is not None or excludes_tokens(self.active.request.sampling)


@dataclass(eq=False, slots=True)
class PrefillJob:
    """Rows that need the KV cache of the same tokens: a group's prompt, or the tokens of one interrupted row.

    tokens: prefill computes all but the last into `state`; the last is the first input of every row.
    state_tokens: number of tokens that `state` covers so far. admitted: number of `rows` that may join the batch now.
    further: number of tokens beyond these that are reserved for a row of a client, if that is more than `MARGIN`.
    is_long: whether the rows join the batch of long rows.
    """

    active: ActiveRequest
    tokens: tuple[int, ...]
    rows: list[Row]
    admitted: int = 0
    computed: bool = False
    state: PromptState | None = None
    state_tokens: int = 0
    further: int = 0
    is_long: bool = False

    @property
    def awaits_first_token(self) -> bool:
        """Whether a client waits for the first token of the rows."""
        return not self.active.request.background and not any(row.tokens for row in self.rows)

    @property
    def reserved(self) -> int:
        """Number of tokens that are reserved for each row: all that a rollout can have, and what a client's needs."""
        if self.active.request.background:
            return self.active.reserved
        return min(self.active.reserved, len(self.tokens) + max(self.further, MARGIN))


MAX_WAITING_ROWS = 65_536
MAX_WAITING_REQUESTS = 4096
"""Further requests of clients are refused with a RequestError whose param is `queue`. Rollouts do not count: their
generator bounds them (`rollouts.max_batches_ahead`)."""

CLIENT_ROWS = 8
"""Requests of clients may use this fraction of `max_num_seqs` more rows (1/8): rollouts often use all of them."""


def client_rows(max_num_seqs: int) -> int:
    """Return the number of rows beyond `max_num_seqs` that background requests cannot use."""
    return max_num_seqs // CLIENT_ROWS


class ClientLine:
    """Waiting jobs of clients that join the same batch.

    Order: jobs that were admitted before, in part or until an interruption; then a `FairQueue` of requests, whose cost
    is `SampleRequest.most_tokens`. A request that arrives while none waits is next, and its client is not charged.
    """

    def __init__(self) -> None:
        self._first: deque[PrefillJob] = deque()
        self._queue = FairQueue[PrefillJob]()
        self._queued_rows = 0  # of the jobs in `_queue`

    def __len__(self) -> int:
        return len(self._first) + self._queue.length

    def __iter__(self) -> Iterator[PrefillJob]:
        """Yield the jobs, client by client."""
        yield from self._first
        yield from self._queue

    @property
    def rows(self) -> int:
        """Number of waiting rows."""
        return self._queued_rows + sum(len(job.rows) for job in self._first)

    @property
    def head(self) -> PrefillJob | None:
        """The job that is next; None if none waits."""
        return self._first[0] if self._first else self._queue.peek() if self._queue.length else None

    def add(self, job: PrefillJob) -> None:
        """Add a new job."""
        if not len(self):
            self._first.append(job)
            return
        account = self._queue.put(job.active.request.client, job, job.active.request.most_tokens)
        job.active.refund = partial(self._queue.refund, account)
        self._queued_rows += len(job.rows)

    def take(self) -> PrefillJob:
        """Remove and return the head."""
        if self._first:
            return self._first.popleft()
        taken = self._queue.take()
        self._queued_rows -= len(taken.rows)
        return taken

    def put_first(self, job: PrefillJob) -> None:
        """Return an admitted job to the head."""
        self._first.appendleft(job)

    def put_behind(self, job: PrefillJob) -> None:
        """Let an interrupted job wait behind those that wait to continue."""
        self._first.append(job)

    def remove_empty(self) -> None:
        """Remove the jobs without rows."""
        self._first = deque(job for job in self._first if job.rows)
        if self._queue.length:
            self._queue.remove(lambda job: not job.rows)
            self._queued_rows = sum(len(job.rows) for job in self._queue)

    def clear(self) -> None:
        """Drop all jobs."""
        self._first.clear()
        self._queue.clear()
        self._queued_rows = 0


class Scheduler:
    """The waiting jobs in order, and the admitted jobs that are being prefilled.

    waits_for_cache: whether a job waits because the KV cache has no room for it.

    Short rows and long rows are decoded in two batches, whose KV caches `KVBudget` limits: rows x longest reserved
    length of both is at most kv_cache_tokens. A rollout is always short, and its full length (prompt and maximum
    completion) is reserved on admission, so a rollout that has started can always finish. For a row of a client, what
    it has is reserved, and a margin. A row that becomes long joins the long rows; if these need more than their part of
    the KV cache, the row that was submitted last returns to the queue, keeps its tokens, and reserves twice as many
    when it continues. Every admission of a row therefore either completes it or doubles it, and every row ends.

    Each of the two batches has at most max_num_seqs rows: if long rows took those of rollouts, which have full batches,
    rollouts would join a few at a time, and their prompts would take twice as long.
    When a batch is full, rows are admitted in waves: as soon as an eighth of max_num_seqs is free, because each
    admission costs a prefill pass. The job that is next in order is not overtaken by jobs of the same batch.

    Order between clients: a `ClientLine` for each batch, in turn. When a request ends, the tokens that it did not use
    are refunded.
    Order between clients and rollouts (background jobs): requests of clients are admitted before waiting rollouts.
    Beside rollouts, clients may use `client_rows` more short rows than max_num_seqs, so that they need not wait until
    a rollout ends. While rollouts wait, no further request of a client is admitted once clients hold the rows, or the
    part of the KV cache, that `rollout_share` leaves them. Long rows hold no more than this part, and are decoded less
    often (`clotho.inference.decoding`): requests of clients cannot stop a training run.
    Jobs that were admitted before, in part or until an interruption, continue before other jobs of their kind.
    """

    def __init__(self, max_num_seqs: int, budget: KVBudget, rollout_share: float = 0.5) -> None:
        """rollout_share: of the rows that waiting rollouts keep. max_num_seqs: can change; running rows finish."""
        self.entering: list[PrefillJob] = []
        self.max_num_seqs = max_num_seqs
        self._budget, self._rollout_share = budget, rollout_share
        self._blocked, self._long_was_last = 0, False
        self.waits_for_cache = False
        self._short, self._long = self._lines = ClientLine(), ClientLine()
        self._rollouts: deque[PrefillJob] = deque()

    @property
    def waiting(self) -> list[PrefillJob]:
        """The jobs that are not admitted: those of clients, client by client, then rollouts."""
        return [*self._short, *self._long, *self._rollouts]

    @property
    def has_waiting(self) -> bool:
        """Whether a job is not in the batch yet."""
        return bool(self.entering or self._rollouts or self.has_waiting_clients)

    @property
    def has_waiting_clients(self) -> bool:
        """Whether a job of a client is not admitted."""
        return any(map(len, self._lines))

    @property
    def waiting_clients(self) -> int:
        """Number of clients with requests that have not been admitted."""
        return len({job.active.request.client for job in (*self._short, *self._long)})

    def add(self, job: PrefillJob) -> None:
        """Add a new job to the queue."""
        if job.active.request.background:
            self._budget.short = max(self._budget.short, job.reserved)
            self._rollouts.append(job)
            return
        job.is_long = job.reserved > self._budget.short
        self._lines[job.is_long].add(job)

    def requeue(self, jobs: Sequence[PrefillJob]) -> None:
        """Return admitted jobs to the head of the queue, in their order."""
        for job in reversed(jobs):
            if job.active.request.background:
                self._rollouts.appendleft(job)
            else:
                job.is_long = job.is_long or job.reserved > self._budget.short
                self._lines[job.is_long].put_first(job)

    def refund(self, active: ActiveRequest, tokens: int) -> None:
        """Credit the client of an admitted request with tokens that the request did not use."""
        if active.refund is not None and active.admitted:
            active.refund(tokens)

    @property
    def rows(self) -> int:
        """Number of rows that are not in the batch yet."""
        return sum(len(job.rows) for job in self.pending)

    @property
    def client_waits(self) -> bool:
        """Whether a client waits for its first token, other than for a place among the long rows."""
        return len(self._short) > 0 or any(job.awaits_first_token for job in self.entering)

    @property
    def pending(self) -> list[PrefillJob]:
        """All jobs with rows that are not in the batch yet, in order."""
        return [*self.entering, *self.waiting]

    def check(self, rows: int) -> None:
        """Raise RequestError if `rows` more rows of a client exceed the limit on waiting rows or requests."""
        entering = [job for job in self.entering if not job.active.request.background]
        jobs = len(entering) + sum(map(len, self._lines))
        waiting = sum(len(job.rows) for job in entering) + sum(line.rows for line in self._lines)
        if jobs >= MAX_WAITING_REQUESTS or waiting + rows > MAX_WAITING_ROWS:
            raise RequestError(f"{waiting} completions are waiting; try again later", param="queue")

    def admit(self, loads: Loads, *, clients_only: bool = False) -> list[PrefillJob]:
        """Admit jobs whose rows fit beside the running rows; set their `admitted`. clients_only: no rollouts."""
        loads, admitted, wave = self._with_entering(loads), list[PrefillJob](), max(1, self.max_num_seqs // 8)
        blocked, self._blocked, self.waits_for_cache = set[bool](), 0, False
        while (job := self._next(loads, blocked)) is not None and not (clients_only and job.active.request.background):
            free = self._free_rows(job, loads)
            fitting = self._budget.room(job.reserved, loads, self._first_waiting(), is_long=job.is_long)
            room, load = min(free, fitting), loads.of(is_long=job.is_long)
            if room < min(len(job.rows), wave) and (load.rows or room < 1):
                lacks_cache = free >= min(len(job.rows), wave)
                if lacks_cache and self._becomes_long(job, load):
                    continue
                blocked.add(job.is_long)
                self.waits_for_cache |= lacks_cache
                if lacks_cache and not job.is_long:
                    self._blocked = job.reserved
                continue
            self._take(job)
            job.admitted = min(len(job.rows), room)
            job.active.admitted = job.active.admitted or perf_counter()
            self.entering.append(job)
            admitted.append(job)
            loads = _with_job(loads, job)
        return admitted

    def _with_entering(self, loads: Loads) -> Loads:
        """Return the loads with the rows that have been admitted and are not in their batch yet."""
        return reduce(_with_job, self.entering, loads)

    def _free_rows(self, job: PrefillJob, loads: Loads) -> int:
        """Return how many rows of a job the limit on the rows of its batch allows."""
        if job.is_long:
            return self.max_num_seqs - loads.long.rows
        more = 0 if job.active.request.background else min(loads.short.background, client_rows(self.max_num_seqs))
        return self.max_num_seqs + more - loads.short.rows

    def _first_waiting(self) -> Waiting:
        """Return what the first waiting jobs reserve."""
        short, long = self._short.head or (self._rollouts[0] if self._rollouts else None), self._long.head
        return Waiting(short.reserved if short else 0, long.reserved if long else 0)

    def _becomes_long(self, job: PrefillJob, short: Load) -> bool:
        """Let the head of the short requests wait for a place among long rows, if short rows are much shorter."""
        if job.is_long or job.active.request.background or not short.rows or job.reserved <= OUTLIER * short.longest:
            return False
        self.postpone(self._short.take())
        return True

    def _next(self, loads: Loads, blocked: Set[bool]) -> PrefillJob | None:
        """Return the job that is next in order, of those that join a batch with room."""
        heads = [line.head for line in self._lines]
        open_heads = [head for head in heads if head is not None and head.is_long not in blocked]
        client = min(open_heads, key=lambda job: job.is_long is self._long_was_last, default=None)
        held = sum(load.rows - load.background for load in loads)
        most = max(1, self.max_num_seqs - int(self.max_num_seqs * self._rollout_share))
        full = held >= most or loads.of_clients >= self._budget.clients
        if self._rollouts and (client is None or (full and not client.active.admitted)):
            return self._rollouts[0] if False not in blocked else None
        return client

    def _take(self, job: PrefillJob) -> None:
        """Remove the job that `_next` returned."""
        self._budget.admitted(is_long=job.is_long)
        if job.active.request.background:
            self._rollouts.popleft()
        else:
            self._lines[job.is_long].take()
            self._long_was_last = job.is_long

    def entered(self, job: PrefillJob) -> None:
        """Remove a job whose admitted rows are in the batch; its other rows return to the head of the queue."""
        self.entering.remove(job)
        job.active.started = job.active.started or perf_counter()
        job.rows = job.rows[job.admitted :]
        job.admitted = 0
        if job.rows:
            self.requeue([job])

    def row_must_leave(self, loads: Loads) -> Literal["short", "long"] | None:
        """Return the batch of which a row of a client must leave, because it is too long or needs too many columns."""
        if not loads.short.movable and not loads.long.movable:
            return None
        loads = self._with_entering(loads)
        if self._budget.short_must_leave(loads, self._blocked):
            return "short"
        return "long" if self._budget.long_must_leave(loads, self._first_waiting()) else None

    def has_room_for_long(self, reserved: int, loads: Loads) -> bool:
        """Whether a row can join the long rows at once: none waits, and there is room for it and `reserved` tokens."""
        loads, waiting = self._with_entering(loads), self._first_waiting()
        has_place = not len(self._long) and loads.long.rows < self.max_num_seqs
        return has_place and self._budget.room(reserved, loads, waiting, is_long=True) >= 1

    def continues(self, job: PrefillJob, *, is_long: bool) -> None:
        """Let a row that has left a batch join the short rows, or the long rows, at once."""
        job.is_long, job.admitted = is_long, 1
        self.entering.append(job)

    def postpone(self, job: PrefillJob) -> None:
        """Let a job wait for a place among the long rows, behind those that wait to continue."""
        job.is_long = True
        self._long.put_behind(job)

    def forget(self, ended: Set[ActiveRequest]) -> list[Row]:
        """Drop and return all rows of some requests that are not in the batch, in one pass over the waiting jobs."""
        dropped: list[Row] = []
        for job in self.pending:
            if job.active in ended:
                dropped += job.rows
                job.rows, job.admitted = [], 0
        self._rollouts = deque(job for job in self._rollouts if job.rows)
        for line in self._lines:
            line.remove_empty()
        return dropped

    def clear(self) -> None:
        """Drop all jobs."""
        self.entering.clear()
        self._rollouts.clear()
        for line in self._lines:
            line.clear()

    def restart(self, jobs: Sequence[PrefillJob]) -> None:
        """Return the admitted ones of `jobs` to the head of the queue, and discard the prefilled states of `jobs`."""
        concerned = {id(job) for job in jobs}
        self.requeue([job for job in self.entering if id(job) in concerned])
        self.entering = [job for job in self.entering if id(job) not in concerned]
        for job in jobs:
            job.admitted, job.computed, job.state, job.state_tokens = 0, False, None, 0


def _with_job(loads: Loads, job: PrefillJob) -> Loads:
    """Return the loads with the admitted rows of a job."""
    background = job.active.request.background
    return loads.plus(job.admitted, job.reserved, job.active.reserved, is_long=job.is_long, background=background)
