"""Computing prompts: several at once where their lengths allow, a chunk per tick so that decoding goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np
import structlog

from clotho.config.schema import EngineSection
from clotho.inference.cache_layout import CacheLayout, PromptState, serving
from clotho.inference.prefix_cache import PrefixCache
from clotho.inference.scheduler import Asked, Job

log = structlog.get_logger(__name__)

SIMILAR = 32
"""Prompts are padded to a common length if they differ by no more tokens than this, or a quarter.

Of prefixes that were found, no more tokens than this are given up so that prompts can start together.
"""


class PrefillBatch:
    """Prompts being computed together: all but the last token of each.

    jobs: of similar (padded) or equal length. They go on from as many tokens as all of them have computed already.
    """

    def __init__(self, layout: CacheLayout, jobs: Sequence[Job], *, version: int) -> None:
        self.jobs = list(jobs)
        self.version = version
        self.pure = True  # no weights were swapped meanwhile
        self._layout = layout
        self._done = min(job.state_tokens for job in jobs)
        self._length = max(len(job.tokens) - 1 for job in jobs)
        self._cache = layout.restore(_common_start(layout, jobs), self._done) if self._done else layout.fresh()
        token_B_T = np.zeros((len(jobs), self._length), dtype=np.int32)
        for b, job in enumerate(jobs):
            token_B_T[b, : len(job.tokens) - 1] = job.tokens[:-1]
        self._token_B_T = token_B_T

    @property
    def remaining(self) -> int:
        """Tokens still to be computed, padding included."""
        return (self._length - self._done) * len(self.jobs)

    def advance(self, budget: int) -> int:
        """Start computing the next chunk of at most `budget` tokens (at least one per prompt); return how many."""
        count = min(max(1, budget // len(self.jobs)), self._length - self._done)
        if count <= 0:
            return 0
        chunk = mx.array(self._token_B_T[:, self._done : self._done + count])
        with serving(self._layout.model):
            self._layout.model(chunk, cache=self._cache)
        mx.async_eval([c.state for c in self._cache])
        self._done += count
        return count * len(self.jobs)

    def finish(self) -> None:
        """Wait for the computation and hand each job its state. Raises what the computation raised."""
        mx.eval([c.state for c in self._cache])
        for row, job in enumerate(self.jobs):
            tokens = len(job.tokens) - 1
            job.state = self._layout.extract(self._cache, row, tokens) if tokens else None
            job.computed, job.state_tokens = True, tokens
        mx.eval([job.state for job in self.jobs])


def _common_start(layout: CacheLayout, jobs: Sequence[Job]) -> PromptState:
    """What is computed of every job, side by side in one state."""
    done = min(job.state_tokens for job in jobs)
    states = [
        job.state if job.state_tokens == done or job.state is None else layout.trimmed(job.state, done) for job in jobs
    ]
    by_leaf = zip(*(state for state in states if state is not None), strict=True)
    return tuple(tuple(mx.concatenate(list(rows)) for rows in zip(*leaf, strict=True)) for leaf in by_leaf)


def select(waiting: deque[Job], layout: CacheLayout, budget: int) -> list[Job]:
    """Take from `waiting` the first job and all that can be computed with it, within `budget` padded tokens."""
    chosen = [waiting.popleft()]
    for job in list(waiting):
        if _fit([*chosen, job], layout.right_padding_limit, budget):
            chosen.append(job)
            waiting.remove(job)
    return chosen


def _fit(jobs: Sequence[Job], limit: int | None, budget: int) -> bool:
    """Say whether these can be computed together. limit: the longest prompt that may be padded; None: any may."""
    lengths, starts = [len(job.tokens) for job in jobs], [job.state_tokens for job in jobs]
    longest, shortest, start = max(lengths), min(lengths), min(starts)
    if (longest - start) * len(jobs) > budget or longest - shortest > max(SIMILAR, longest // 4):
        return False
    if max(starts) - start > (SIMILAR if limit is None else 0):
        return False
    return longest == shortest or limit is None or longest - 1 <= limit


class Prefill:
    """Jobs on their way into the batch: those to be computed, the batch of them in progress, and the prefix cache."""

    def __init__(self, layout: CacheLayout, settings: EngineSection) -> None:
        self.prefixes = PrefixCache(layout, settings.prefix_cache_tokens)
        self.computed_tokens = self.hits = self.misses = 0
        self._layout = layout
        self._chunk = settings.prefill_chunk
        self._todo: deque[Job] = deque()
        self._ready: list[Job] = []
        self._batch: PrefillBatch | None = None

    def add(self, jobs: Sequence[Job], version: int) -> None:
        """Take over admitted jobs; those that need no computation, or find it in the prefix cache, are ready."""
        for job in jobs:
            if job.asked.request.reuse_prefix and not job.computed:
                self._look_up(job, version)
            job.computed = job.computed or len(job.tokens) == 1
            (self._ready if job.computed else self._todo).append(job)

    def _look_up(self, job: Job, version: int) -> None:
        hit = self.prefixes.find(version, job.tokens[:-1])
        if hit is None:
            self.misses += 1
            return
        self.hits += 1
        job.state, job.state_tokens = hit.state, hit.tokens
        job.computed = hit.tokens == len(job.tokens) - 1

    def advance(self, version: int, *, idle: bool, fail: Callable[[Asked, str], None]) -> list[Job]:
        """Start computing at most one chunk; return the jobs that are ready to join.

        What was started is waited for only in the next call, or at once if `idle`: nothing else could run meanwhile.
        What the computation raises fails the requests concerned: their jobs return without rows.
        """
        self._collect(fail)
        if self._batch is None and self._todo:
            jobs = select(self._todo, self._layout, self._chunk)
            self._run(lambda: self._begin(jobs, version), jobs, fail)
        if self._batch is not None:
            batch = self._batch
            self._run(lambda: self._advance(batch), batch.jobs, fail)
        if idle and not self._ready:
            self._collect(fail)
        ready, self._ready = self._ready, []
        return ready

    def _begin(self, jobs: list[Job], version: int) -> None:
        self._batch = PrefillBatch(self._layout, jobs, version=version)

    def _advance(self, batch: PrefillBatch) -> None:
        self.computed_tokens += batch.advance(self._chunk)

    def _collect(self, fail: Callable[[Asked, str], None]) -> None:
        """Hand over the batch in progress if all of it has been started."""
        batch = self._batch
        if batch is None or batch.remaining:
            return
        self._run(lambda: self._finish(batch), batch.jobs, fail)

    def _finish(self, batch: PrefillBatch) -> None:
        batch.finish()
        self._batch = None
        for job in batch.jobs:
            if job.asked.request.reuse_prefix and job.state is not None and batch.pure:
                self.prefixes.keep(batch.version, job.tokens[:-1], job.state)
        self._ready.extend(batch.jobs)

    def _run(self, step: Callable[[], None], jobs: list[Job], fail: Callable[[Asked, str], None]) -> None:
        try:
            step()
        except Exception as error:
            log.exception("prompts could not be computed", requests=[job.asked.request_id for job in jobs])
            self._batch = None
            for job in jobs:
                job.rows, job.admitted = [], 0
                fail(job.asked, f"the prompt could not be computed: {error}")
            self._ready.extend(jobs)

    def forget_prefixes(self) -> None:
        """Empty the prefix cache; what is in progress will not enter it."""
        self.prefixes.clear()
        if self._batch is not None:
            self._batch.pure = False

    def restart(self) -> None:
        """Drop all jobs; they are about to be admitted anew."""
        self._todo.clear()
        self._ready.clear()
        self._batch = None
