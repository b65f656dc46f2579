"""Requests and rows of the engine, and the scheduler: fair between clients, within limits on rows and KV cache."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from time import perf_counter

from clotho.cpu.interface import PromptState
from clotho.inference.stop_strings import IncrementalDetokenizer
from clotho.models.adapter_store import LoadedAdapter
from clotho.runtime.fair_queue import Account, FairQueue
from protocols.constraints import ConstraintState
from protocols.errors import RequestError
from protocols.sampling import SampleEvent, SampleRequest, excludes_tokens

Listener = Callable[[SampleEvent], None]


@dataclass(eq=False, slots=True)
class ActiveRequest:
    """An accepted request.

    limit: maximum length of a completion, given the context. open: unfinished completions. adapter: the adapter that
    samples; None for the policy. submitted, admitted, started: time of submission, of the first admission, and of the
    entry of the first row into the batch, in seconds of `perf_counter`; 0 if that has not happened. account: of the
    client in the fair queue; None for rollouts.
    """

    request_id: int
    request: SampleRequest
    listener: Listener
    limit: int
    open: int
    adapter: LoadedAdapter | None = None
    submitted: float = field(default_factory=perf_counter)
    admitted: float = 0.0
    started: float = 0.0
    account: Account[PrefillJob] | None = None

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

    top_logprobs, supports: per token sampled so far, if the request needs them. constraint: has accepted every token
    sampled so far.
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
    """

    active: ActiveRequest
    tokens: tuple[int, ...]
    rows: list[Row]
    admitted: int = 0
    computed: bool = False
    state: PromptState | None = None
    state_tokens: int = 0


MAX_WAITING_ROWS = 65_536
MAX_WAITING_REQUESTS = 4096
"""Further requests of clients are refused with a RequestError whose param is `queue`. Rollouts do not count: their
generator bounds them (`rollouts.max_batches_ahead`)."""


CLIENT_ROWS = 8
"""Requests of clients may use this fraction of `max_num_seqs` more rows (1/8): rollouts often use all of them."""


def client_rows(max_num_seqs: int) -> int:
    """Return the number of rows beyond `max_num_seqs` that background requests cannot use."""
    return max_num_seqs // CLIENT_ROWS


class Scheduler:
    """The waiting jobs in order, and the admitted jobs that are being prefilled.

    Rows are admitted while rows x longest reserved length <= kv_cache_tokens, because every row's cache is as long as
    the longest. The full length (prompt and maximum completion) is reserved on admission, so a row that has started can
    always finish. When the batch is full, rows are admitted in waves: as soon as an eighth of max_num_seqs is free,
    because each admission costs a prefill pass. The job that is next in order is never overtaken.

    Order between clients: a `FairQueue` of requests, whose cost is `SampleRequest.most_tokens`. When a request ends,
    the tokens that it did not use are refunded. A request that arrives while no request of a client waits is next, and
    its client is not charged.
    Order between clients and rollouts (background jobs): requests of clients are admitted before waiting rollouts.
    Beside rollouts, clients may use `client_rows` more rows than max_num_seqs, so that they need not wait until a
    rollout ends. While rollouts wait, no further request of a client is admitted once clients hold the rows that
    `rollout_share` leaves them, so that requests of clients cannot stop a training run.
    Jobs that were admitted before, in part or until an interruption, continue before other jobs of their kind.
    """

    def __init__(self, max_num_seqs: int, kv_cache_tokens: int, rollout_share: float = 0.5) -> None:
        """max_num_seqs: can be changed later; running rows above a lower value finish.

        rollout_share: share of the rows that waiting rollouts keep from clients.
        """
        self.entering: list[PrefillJob] = []
        self.max_num_seqs = max_num_seqs
        self._kv_cache_tokens, self._rollout_share = kv_cache_tokens, rollout_share
        self._first: deque[PrefillJob] = deque()
        self._clients = FairQueue[PrefillJob]()
        self._queued_rows = 0  # of the jobs in `_clients`
        self._rollouts: deque[PrefillJob] = deque()

    @property
    def waiting(self) -> list[PrefillJob]:
        """The jobs that are not admitted: those of clients, client by client, then rollouts."""
        return [*self._first, *(self._clients if self._clients.length else ()), *self._rollouts]

    @property
    def has_waiting(self) -> bool:
        """Whether a job is not in the batch yet."""
        return bool(self.entering or self._first or self._rollouts or self._clients.length)

    @property
    def waiting_clients(self) -> int:
        """Number of clients with requests that have not been admitted."""
        queued = self._clients if self._clients.length else ()
        return len({job.active.request.client for job in (*self._first, *queued)})

    def add(self, job: PrefillJob) -> None:
        """Add a new job to the queue."""
        request = job.active.request
        if request.background:
            self._rollouts.append(job)
        elif not self._first and not self._clients.length:
            self._first.append(job)
        else:
            job.active.account = self._clients.put(request.client, job, request.most_tokens)
            self._queued_rows += len(job.rows)

    def requeue(self, jobs: Sequence[PrefillJob]) -> None:
        """Return admitted jobs to the head of the queue, in their order."""
        for job in reversed(jobs):
            (self._rollouts if job.active.request.background else self._first).appendleft(job)

    def refund(self, active: ActiveRequest, tokens: int) -> None:
        """Credit the client of an admitted request with tokens that the request did not use."""
        if active.account is not None and active.admitted:
            self._clients.refund(active.account, tokens)

    @property
    def rows(self) -> int:
        """Number of rows that are not in the batch yet."""
        return sum(len(job.rows) for job in self.pending)

    @property
    def client_waits(self) -> bool:
        """Whether a row of a client is not in the batch yet."""
        waits = self._first or self._clients.length
        return bool(waits) or any(not job.active.request.background for job in self.entering)

    @property
    def pending(self) -> list[PrefillJob]:
        """All jobs with rows that are not in the batch yet, in order."""
        return [*self.entering, *self.waiting]

    def check(self, rows: int) -> None:
        """Raise RequestError if `rows` more rows of a client exceed the limit on waiting rows or requests."""
        jobs = [*self._first, *(job for job in self.entering if not job.active.request.background)]
        waiting = self._queued_rows + sum(len(job.rows) for job in jobs)
        if self._clients.length + len(jobs) >= MAX_WAITING_REQUESTS or waiting + rows > MAX_WAITING_ROWS:
            raise RequestError(f"{waiting} completions are waiting; try again later", param="queue")

    def admit(self, running: int, longest: int, background: int = 0) -> list[PrefillJob]:
        """Admit jobs whose rows fit beside `running` rows of at most `longest` tokens; set their `admitted`.

        background: how many of the running rows belong to background requests.
        """
        admitted, wave = [], max(1, self.max_num_seqs // 8)
        for job in self.entering:
            running, longest = running + job.admitted, max(longest, job.active.reserved)
            background += job.admitted if job.active.request.background else 0
        while (following := self._next(running - background)) is not None:
            job = following
            length = max(longest, job.active.reserved)
            more = 0 if job.active.request.background else min(background, client_rows(self.max_num_seqs))
            room = min(self.max_num_seqs + more, self._kv_cache_tokens // length) - running
            if room < min(len(job.rows), wave) and (running or room < 1):
                break
            self._take(job)
            job.admitted = min(len(job.rows), room)
            job.active.admitted = job.active.admitted or perf_counter()
            self.entering.append(job)
            admitted.append(job)
            running, longest = running + job.admitted, length
            background += job.admitted if job.active.request.background else 0
        return admitted

    def _next(self, held: int) -> PrefillJob | None:
        """Return the job that is next in order. held: number of rows that clients hold."""
        client = self._first[0] if self._first else self._clients.peek() if self._clients.length else None
        most = max(1, self.max_num_seqs - int(self.max_num_seqs * self._rollout_share))
        if self._rollouts and (client is None or (held >= most and not client.active.admitted)):
            return self._rollouts[0]
        return client

    def _take(self, job: PrefillJob) -> None:
        """Remove the job that `_next` returned."""
        if job.active.request.background:
            self._rollouts.popleft()
        elif self._first:
            self._first.popleft()
        else:
            self._queued_rows -= len(self._clients.take().rows)

    def entered(self, job: PrefillJob) -> None:
        """Remove a job whose admitted rows are in the batch; its other rows return to the head of the queue."""
        self.entering.remove(job)
        job.active.started = job.active.started or perf_counter()
        job.rows = job.rows[job.admitted :]
        job.admitted = 0
        if job.rows:
            self.requeue([job])

    def forget(self, ended: Set[ActiveRequest]) -> list[Row]:
        """Drop and return all rows of some requests that are not in the batch, in one pass over the waiting jobs."""
        dropped: list[Row] = []
        for job in self.pending:
            if job.active in ended:
                dropped += job.rows
                job.rows, job.admitted = [], 0
        self._rollouts = deque(job for job in self._rollouts if job.rows)
        self._first = deque(job for job in self._first if job.rows)
        if self._clients.length:
            self._clients.remove(lambda job: not job.rows)
            self._queued_rows = sum(len(job.rows) for job in self._clients)
        return dropped

    def clear(self) -> None:
        """Drop all jobs."""
        self.entering.clear()
        self._first.clear()
        self._rollouts.clear()
        self._clients.clear()
        self._queued_rows = 0

    def restart(self, jobs: Sequence[PrefillJob]) -> None:
        """Return the admitted ones of `jobs` to the head of the queue, and discard the prefilled states of `jobs`."""
        concerned = {id(job) for job in jobs}
        self.requeue([job for job in self.entering if id(job) in concerned])
        self.entering = [job for job in self.entering if id(job) not in concerned]
        for job in jobs:
            job.admitted, job.computed, job.state, job.state_tokens = 0, False, None, 0
