"""Who waits, and who may enter the batch: first come, first served, within bounds on rows and on cache."""

from __future__ import annotations

from collections import deque

from clotho.inference.rows import Asked, Job
from protocols.errors import RequestError

MOST_WAITING_ROWS = 65_536
MOST_WAITING_REQUESTS = 4096
"""Requests beyond are refused with a RequestError whose param is `queue`."""


class Admission:
    """The waiting jobs in order, and those on their way into the batch.

    Rows enter only while rows x longest reserved length <= max_cache_tokens, since every row's cache is as long as
    the longest; a length is reserved in full (prompt and most completion tokens) on entry, so a row that has begun
    always has memory to finish. The head of the line is never overtaken. Once the batch is full, rows are let in by
    waves, as soon as an eighth of max_rows is free, because each entry costs a pass over the prompts.
    """

    def __init__(self, max_rows: int, max_cache_tokens: int) -> None:
        self.waiting: deque[Job] = deque()
        self.entering: list[Job] = []
        self._max_rows = max_rows
        self._max_cache_tokens = max_cache_tokens
        self._wave = max(1, max_rows // 8)

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
            room = min(self._max_rows, self._max_cache_tokens // length) - running
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
