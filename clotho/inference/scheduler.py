"""Who waits, and who may enter the batch: first come, first served, within bounds on rows and on cache.

What the engine knows of a request and of each of its completions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from clotho.inference.cache_layout import PromptState
from clotho.inference.stop_strings import TextTracker
from protocols.errors import RequestError
from protocols.sampling import SampleEvent, SampleRequest

Listener = Callable[[SampleEvent], None]


@dataclass(eq=False, slots=True)
class Asked:
    """A request that was accepted. limit: tokens per completion, clamped to the context; open: completions to come."""

    request_id: int
    request: SampleRequest
    listener: Listener
    limit: int
    open: int

    @property
    def reserved(self) -> int:
        """The most tokens that a completion and its prompt can come to."""
        return len(self.request.prompt) + self.limit


@dataclass(eq=False, slots=True)
class Row:
    """One completion. `tokens`, `logprobs` and `versions` are filled when it leaves the batch.

    top_logprobs, supports: of each token sampled so far, where the request asks for them.
    """

    asked: Asked
    index: int
    serial: int
    text: TextTracker | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top_logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    supports: list[bytes] = field(default_factory=list)

    @property
    def attentive(self) -> bool:
        """Whether the host must look at every token of this row as it is sampled."""
        request = self.asked.request
        return self.text is not None or bool(request.sampling.stop_token_ids or request.sampling.top_logprobs)


@dataclass(eq=False, slots=True)
class Job:
    """Rows that wait for the same tokens to be computed: a group's prompt, or one interrupted row's whole past.

    tokens: all tokens but the last are computed into `state`; the last is the first input of every row.
    state_tokens: how many tokens `state` covers until then. admitted: how many of `rows` may join the batch now.
    """

    asked: Asked
    tokens: tuple[int, ...]
    rows: list[Row]
    admitted: int = 0
    computed: bool = False
    state: PromptState | None = None
    state_tokens: int = 0


MOST_WAITING_ROWS = 65_536
MOST_WAITING_REQUESTS = 4096
"""Requests beyond are refused with a RequestError whose param is `queue`."""


class Admission:
    """The waiting jobs in order, and those on their way into the batch.

    Rows enter only while rows x longest reserved length <= kv_cache_tokens, since every row's cache is as long as
    the longest; a length is reserved in full (prompt and most completion tokens) on entry, so a row that has begun
    always has memory to finish. The head of the line is never overtaken. Once the batch is full, rows are let in by
    waves, as soon as an eighth of max_num_seqs is free, because each entry costs a pass over the prompts.
    """

    def __init__(self, max_num_seqs: int, kv_cache_tokens: int) -> None:
        self.waiting: deque[Job] = deque()
        self.entering: list[Job] = []
        self._max_num_seqs = max_num_seqs
        self._kv_cache_tokens = kv_cache_tokens
        self._wave = max(1, max_num_seqs // 8)

    @property
    def rows(self) -> int:
        """Rows that are not in the batch yet."""
        return sum(len(job.rows) for job in self.pending)

    @property
    def pending(self) -> list[Job]:
        """All jobs with rows that are not in the batch yet, in order."""
        return [*self.entering, *self.waiting]

    def check(self, rows: int) -> None:
        """Raise RequestError if `rows` more would make the line too long."""
        if len(self.waiting) >= MOST_WAITING_REQUESTS or self.rows + rows > MOST_WAITING_ROWS:
            raise RequestError(f"{self.rows} completions wait already; try again later", param="queue")

    def admit(self, running: int, longest: int) -> list[Job]:
        """Let in the jobs whose rows fit beside `running` rows of up to `longest` tokens; set what they may take."""
        admitted = []
        for job in self.entering:
            running, longest = running + job.admitted, max(longest, job.asked.reserved)
        while self.waiting:
            job = self.waiting[0]
            length = max(longest, job.asked.reserved)
            room = min(self._max_num_seqs, self._kv_cache_tokens // length) - running
            if room < min(len(job.rows), self._wave) and (running or room < 1):
                break
            job.admitted = min(len(job.rows), room)
            self.entering.append(self.waiting.popleft())
            admitted.append(job)
            running, longest = running + job.admitted, length
        return admitted

    def entered(self, job: Job) -> None:
        """Take a job whose admitted rows are in the batch off the list; rows left over keep their place in line."""
        self.entering.remove(job)
        job.rows = job.rows[job.admitted :]
        job.admitted = 0
        if job.rows:
            self.waiting.appendleft(job)

    def forget(self, asked: Asked) -> None:
        """Drop all rows of a request that are not in the batch."""
        for job in self.pending:
            if job.asked is asked:
                job.rows, job.admitted = [], 0
        self.waiting = deque(job for job in self.waiting if job.rows)

    def restart(self) -> None:
        """Send the jobs that are entering back to the head of the line; what was computed of all jobs is void."""
        self.waiting.extendleft(reversed(self.entering))
        self.entering = []
        for job in self.waiting:
            job.admitted, job.computed, job.state, job.state_tokens = 0, False, None, 0
