"""Prefill: the KV caches of prompts, several at once if their lengths allow, one chunk per step of the engine.

Long prompts of clients take turns. Beside a learner, a chunk is evaluated in turns of bounded length, and prompts of
clients before those of rollouts.

The prefix cache keeps KV caches of prompts for requests with the same beginning: LRU, never across policy versions.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import structlog

from clotho.inference.cache_layout import CacheLayout, Computing, RowCaches, evaluation_mode, pass_context
from clotho.inference.rows import PromptState
from clotho.inference.scheduler import ActiveRequest, PrefillJob
from clotho.models.turns import TurnBudget
from clotho.settings.engine import EngineSection

log = structlog.get_logger(__name__)

MAX_PADDING = 32
"""Prompts are padded to a common length if they differ by at most this many tokens, or a quarter of the length.

To start prompts together, at most this many tokens of a prefix cache hit are discarded.
"""

WeightsKey = tuple[int, int]
"""Identifies the weights that computed a KV cache: (POLICY_KIND, policy version), or (ADAPTER_KIND, version of an
adapter); the base model is version 0 of the adapters."""

POLICY_KIND, ADAPTER_KIND = ALL_KINDS = (0, 1)


def weights_key(active: ActiveRequest, version: int) -> WeightsKey:
    """Return the key of the weights of a request. version: policy version."""
    return (POLICY_KIND, version) if active.adapter is None else (ADAPTER_KIND, active.adapter.version)


class PrefillBatch:
    """Prompts that are prefilled together: all but the last token of each.

    jobs: of similar (padded) or equal length. They continue from the number of tokens that every job has computed.
    keys: the weights of every job. swapped: kinds of weights that changed since the start. on_host: whether chunks are
    computed when `advance` returns, and states are copies.
    """

    on_host = False

    def __init__(
        self,
        layout: CacheLayout,
        jobs: Sequence[PrefillJob],
        turns: TurnBudget | None,
        version: int,
        *,
        computing: Computing,
    ) -> None:
        self.jobs = list(jobs)
        self.keys = [weights_key(job.active, version) for job in jobs]
        self.swapped: set[int] = set()
        self._computing, self._turns = computing, turns
        self._layout = layout
        self._done = min(job.state_tokens for job in jobs)
        self._length = max(len(job.tokens) - 1 for job in jobs)
        self._token_B_T = np.zeros((len(jobs), self._length), dtype=np.int32)
        for b, job in enumerate(jobs):
            self._token_B_T[b, : len(job.tokens) - 1] = job.tokens[:-1]
        self._parts: Generator[None, None, None] | None = None
        self._restore()

    def _restore(self) -> None:
        """Begin with what all jobs have computed."""
        layout, done = self._layout, self._done
        if not done:
            self._cache = layout.fresh()
            return
        states = [layout.trimmed(job.state, done) for job in self.jobs if job.state is not None]
        by_leaf = zip(*states, strict=True)
        common = tuple(tuple(mx.concatenate(list(rows)) for rows in zip(*leaf, strict=True)) for leaf in by_leaf)
        self._cache = layout.restore(common, done)

    @property
    def remaining(self) -> int:
        """Number of tokens of which no chunk has been started, padding included."""
        return (self._length - self._done) * len(self.jobs)

    @property
    def background(self) -> bool:
        """Whether no client waits for these prompts."""
        return all(job.active.request.background for job in self.jobs)

    @property
    def is_interrupted(self) -> bool:
        """Whether the evaluation of a chunk continues in the next turn."""
        return self._parts is not None

    def advance(self, budget: int) -> int:
        """Start the next chunk of at most `budget` tokens (at least one per prompt); return its size.

        With a limit on turns, a chunk is evaluated for the rest of the turn. If that was not enough, the next call
        continues with the chunk and returns 0.
        """
        count = 0
        if self._parts is None:
            count = min(self._most(budget), self._length - self._done)
            if count <= 0:
                return 0
            self._start(count)
        if self._parts is not None and next(self._parts, self) is self:
            self._parts = None
        return count * len(self.jobs)

    def _most(self, budget: int) -> int:
        """Return how many tokens of each prompt the next chunk has at most."""
        return max(1, budget // len(self.jobs))

    def weights_changed(self, kinds: Collection[int]) -> None:
        """Record a swap of these kinds of weights. A chunk in progress keeps the weights of its graph."""
        self.swapped |= set(kinds)

    def _start(self, count: int) -> None:
        chunk = mx.array(self._token_B_T[:, self._done : self._done + count])
        adapters = [job.active.adapter for job in self.jobs]
        model, turns = self._layout.model, self._turns
        self._done += count
        with pass_context(self._computing, adapters), evaluation_mode(model):
            if turns is None:
                self._layout.compute(chunk, self._cache)
                mx.async_eval([c.state for c in self._cache])
                return
            turns.begin()
            with turns.recorded(model, gradients=False) as stages:
                self._layout.compute(chunk, self._cache)
        blocks = [stage._replace(kind="prefill") for stage in stages.take()[:-1]]  # nothing reads the last output
        self._parts = turns.parts(blocks, [c.state for c in self._cache])

    def finish(self) -> None:
        """Wait for the evaluation and set the state of each job. Raises what the evaluation raised."""
        mx.eval([c.state for c in self._cache])
        for row, job in enumerate(self.jobs):
            tokens = len(job.tokens) - 1
            job.state = self._layout.extract(self._cache, row, tokens) if tokens else None
            job.computed, job.state_tokens = True, tokens
        mx.eval([job.state for job in self.jobs])


class RowDecoder(NamedTuple):
    """Decodes the rows of one model, and prefills prompts of clients, instead of the model itself.

    computing: selects the adapter of every row, None for the policy, inside the context. caches: makes KV caches for a
    number of rows. prefill: begins prompts; its last argument is the policy version.
    """

    computing: Computing
    caches: Callable[[int], RowCaches]
    prefill: Callable[[CacheLayout, Sequence[PrefillJob], TurnBudget | None, int], PrefillBatch]


def select(waiting: deque[PrefillJob], layout: CacheLayout, budget: int) -> list[PrefillJob]:
    """Remove from `waiting` the first job and all of its kind that fit with it into `budget` padded tokens."""
    chosen = [waiting.popleft()]
    for job in list(waiting):
        if job.active.request.background != chosen[0].active.request.background:
            break
        if _can_prefill_together([*chosen, job], layout.right_padding_limit, budget):
            chosen.append(job)
            waiting.remove(job)
    return chosen


def _can_prefill_together(jobs: Sequence[PrefillJob], limit: int | None, budget: int) -> bool:
    """Whether the jobs can be prefilled together. limit: maximum length of a padded prompt; None = any."""
    lengths, starts = [len(job.tokens) for job in jobs], [job.state_tokens for job in jobs]
    longest, shortest, start = max(lengths), min(lengths), min(starts)
    if (longest - start) * len(jobs) > budget or longest - shortest > max(MAX_PADDING, longest // 4):
        return False
    if max(starts) - start > (MAX_PADDING if limit is None else 0):
        return False
    return longest == shortest or limit is None or longest - 1 <= limit


class Prefill:
    """Jobs before they join the batch: those that wait for prefill, those in progress, and the prefix cache.

    Prompts of clients come before background requests. Batches of clients take turns of one chunk: every second chunk
    begins a batch of waiting prompts, if there are any, and the others continue the batches in progress in turn. With b
    such batches, a waiting prompt begins within two chunks per batch of waiting prompts before it, and a batch in
    progress continues every 2 b chunks.

    is_interrupted: the latest turn ended within the evaluation of a chunk.
    """

    def __init__(
        self,
        layout: CacheLayout,
        settings: EngineSection,
        computing: Computing,
        fail: Callable[[ActiveRequest, str], None],
        turns: TurnBudget | None = None,
        decoder: RowDecoder | None = None,
    ) -> None:
        """computing: selects the adapters of the rows of a forward pass. fail: receives requests that fail, and why.

        turns: limits turns; None: no limit. decoder: prefills prompts of clients, and decodes; None: the model does.
        """
        self._fail = fail
        self._computing, self._turns, self._decoder = computing, turns, decoder
        self.prefixes = PrefixCache(layout, settings.prefix_cache_tokens)
        self.computed_tokens = self.hits = self.misses = 0
        self.is_interrupted = False
        self._layout = layout
        self._chunk = settings.prefill_chunk
        self._waiting: deque[PrefillJob] = deque()
        self._ready: list[PrefillJob] = []
        self._batches: list[PrefillBatch] = []
        """Those of clients in the order of their turns, then at most one of background requests."""
        self._begins_next = True

    def add(self, jobs: Sequence[PrefillJob], version: int) -> None:
        """Add admitted jobs. Jobs that need no prefill, or that the prefix cache covers, are ready at once."""
        for job in jobs:
            if job.active.request.reuse_prefix and not job.computed:
                self._look_up(job, version)
            job.computed = job.computed or len(job.tokens) == 1
            if job.computed:
                self._ready.append(job)
            else:
                self._insert(job)

    def _insert(self, job: PrefillJob) -> None:
        """Insert a job before all background jobs, or behind all jobs if it is a background job itself."""
        at = len(self._waiting)
        if not job.active.request.background:
            at = next((i for i, other in enumerate(self._waiting) if other.active.request.background), at)
        self._waiting.insert(at, job)

    def _look_up(self, job: PrefillJob, version: int) -> None:
        hit = self.prefixes.find(weights_key(job.active, version), job.tokens[:-1])
        if hit is None:
            self.misses += 1
            return
        self.hits += 1
        state, tokens = hit
        trims = self._decoder is None  # a decoder reads the tokens that it needs, without a graph
        job.state, job.state_tokens = self._layout.trimmed(state, tokens) if trims else state, tokens
        job.computed = tokens == len(job.tokens) - 1

    @property
    def client_is_interrupted(self) -> bool:
        """Whether the evaluation of a chunk of clients continues in the next turn."""
        return bool(self._batches) and not self._batches[0].background and self._batches[0].is_interrupted

    def hold(self, jobs: Sequence[PrefillJob]) -> None:
        """Take back jobs that are ready and cannot join yet."""
        self._ready = [*jobs, *self._ready]

    def advance(self, version: int, *, idle: bool, clients_only: bool = False) -> list[PrefillJob]:
        """Start or continue at most one chunk; return the jobs that are ready to join. clients_only: none of rollouts.

        The next call waits for a started chunk. This call does if `idle`, because nothing else can run meanwhile, and
        for prompts of clients beside a learner, whose turn would come before the next call, or with `clients_only`; no
        call waits for a chunk of a decoder. An exception fails the requests concerned, and their jobs are returned
        without rows.
        """
        self._collect()
        batch = self._next_batch(version, clients_only=clients_only)
        if batch is not None:
            self._run(self._advance, batch)
            self._end_turn(batch)
        self.is_interrupted = batch is not None and batch.is_interrupted
        is_awaited = clients_only or self._turns is not None
        awaited = batch is not None and not batch.background and (is_awaited or batch.on_host)
        if awaited or (idle and not self._ready):
            self._collect()
        ready, self._ready = self._ready, []
        return ready

    def _next_batch(self, version: int, *, clients_only: bool) -> PrefillBatch | None:
        """Return the batch to work on."""
        first = self._batches[0] if self._batches else None
        client_waits = bool(self._waiting) and not self._waiting[0].active.request.background
        has_turn = first is None or first.background or (self._begins_next and not first.is_interrupted)
        if (client_waits and has_turn) or (self._waiting and first is None and not clients_only):
            jobs = select(self._waiting, self._layout, self._chunk)
            self._begin(jobs, version)
        first = self._batches[0] if self._batches else None
        return None if first is None or (clients_only and first.background) else first

    def _end_turn(self, batch: PrefillBatch) -> None:
        """If a chunk of clients is complete, let their other batches have the next turns."""
        if batch.background or batch.is_interrupted:
            return
        self._begins_next = not self._begins_next
        if batch in self._batches:
            self._batches.remove(batch)
            self._batches.insert(sum(not one.background for one in self._batches), batch)

    def _begin(self, jobs: list[PrefillJob], version: int) -> None:
        try:
            if self._decoder is not None and not jobs[0].active.request.background:
                batch = self._decoder.prefill(self._layout, jobs, self._turns, version)
            else:
                batch = PrefillBatch(self._layout, jobs, self._turns, version, computing=self._computing)
        except Exception as error:
            self._failed(jobs, error)
        else:
            self._batches.insert(0, batch)

    def _advance(self, batch: PrefillBatch) -> None:
        self.computed_tokens += batch.advance(self._chunk)

    def _collect(self) -> None:
        """Finish the batches all of whose chunks have been started, unless a chunk continues."""
        for batch in list(self._batches):
            if not batch.remaining and not batch.is_interrupted:
                self._run(self._finish, batch)

    def _finish(self, batch: PrefillBatch) -> None:
        batch.finish()
        self._batches.remove(batch)
        for job, key in zip(batch.jobs, batch.keys, strict=True):
            if job.active.request.reuse_prefix and job.state is not None and key[0] not in batch.swapped:
                self.prefixes.store(key, job.tokens[:-1], job.state, is_copy=batch.on_host)
        self._ready.extend(batch.jobs)

    def _run(self, step: Callable[[PrefillBatch], None], batch: PrefillBatch) -> None:
        try:
            step(batch)
        except Exception as error:
            if batch in self._batches:
                self._batches.remove(batch)
            self._failed(batch.jobs, error)

    def _failed(self, jobs: Sequence[PrefillJob], error: Exception) -> None:
        log.error("prefill_failed", requests=[job.active.request_id for job in jobs], exc_info=error)
        for job in jobs:
            job.rows, job.admitted = [], 0
            self._fail(job.active, f"prefill failed: {error}")
        self._ready.extend(jobs)

    def forget_prefixes(self, kinds: Collection[int]) -> None:
        """Remove prefixes of these kinds of weights. Their prompts in progress will not be stored."""
        self.prefixes.remove(lambda key: key[0] in kinds)
        for batch in self._batches:
            batch.weights_changed(kinds)

    def restart_all(self) -> None:
        """Drop all jobs, which will be admitted again."""
        self._waiting.clear()
        self._ready.clear()
        self._batches.clear()

    def restart(self, jobs: Sequence[PrefillJob]) -> None:
        """Drop `jobs`, which will be admitted again; other jobs of their batches start again."""
        concerned = {id(job) for job in jobs}
        self._ready = [job for job in self._ready if id(job) not in concerned]
        others = [job for job in self._waiting if id(job) not in concerned]
        for batch in reversed(self._batches):
            if any(id(job) in concerned for job in batch.jobs):
                others = [*(job for job in batch.jobs if id(job) not in concerned), *others]
                self._batches.remove(batch)
        self._waiting = deque(others)


MAX_ENTRIES = 256

Key = tuple[WeightsKey, tuple[int, ...]]
"""Weights and tokens of a prompt."""


class PrefixCache:
    """Holds at most `capacity` tokens and at most `MAX_ENTRIES` prompts; capacity 0 disables it."""

    def __init__(self, layout: CacheLayout, capacity: int) -> None:
        self.tokens = 0
        self._layout = layout
        self._capacity = capacity
        self._entries: OrderedDict[Key, PromptState] = OrderedDict()
        self._sorted: list[Key] = []

    def find(self, weights: WeightsKey, tokens: tuple[int, ...]) -> tuple[PromptState, int] | None:
        """Return the state that covers most of `tokens`, of an entry or of a common prefix with one, and how many."""
        found = [(common_prefix(key[1], tokens), key) for key in self._candidates(weights, tokens)]
        common, key = max(found, default=(0, (weights, ())))
        if not common:
            return None
        self._entries.move_to_end(key)
        return self._entries[key], common

    def _candidates(self, weights: WeightsKey, tokens: tuple[int, ...]) -> Iterator[Key]:
        """Return the entries that may cover most of `tokens`: its neighbours in lexicographic order.

        If states cannot be truncated, only an entry that is a prefix of `tokens` counts; it precedes `tokens`.
        """
        if self._layout.right_padding_limit is None:
            at = bisect_left(self._sorted, (weights, tokens))
            yield from (key for key in self._sorted[max(0, at - 1) : at + 1] if key[0] == weights)
            return
        while (at := bisect_right(self._sorted, (weights, tokens))) and self._sorted[at - 1][0] == weights:
            entry = self._sorted[at - 1][1]
            common = common_prefix(entry, tokens)
            if common == len(entry):
                yield weights, entry
                return
            tokens = tokens[:common]

    def store(self, weights: WeightsKey, tokens: tuple[int, ...], state: PromptState, *, is_copy: bool = False) -> None:
        """Store a copy of the state after `tokens`. is_copy: it is one, and no view of a larger array."""
        key = (weights, tokens)
        if not tokens or len(tokens) > self._capacity or key in self._entries:
            return
        if not is_copy:
            state = tuple(tuple(mx.contiguous(array) for array in arrays) for arrays in state)
            mx.eval(state)
        self._entries[key] = state
        insort(self._sorted, key)
        self.tokens += len(tokens)
        while self.tokens > self._capacity or len(self._entries) > MAX_ENTRIES:
            oldest, _ = self._entries.popitem(last=False)
            self._sorted.remove(oldest)
            self.tokens -= len(oldest[1])

    def remove(self, concerns: Callable[[WeightsKey], bool]) -> None:
        """Remove all entries of the weights that `concerns` names."""
        for key in [key for key in self._entries if concerns(key[0])]:
            del self._entries[key]
            self.tokens -= len(key[1])
        self._sorted = sorted(self._entries)


def common_prefix(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Return the length of the common prefix of `a` and `b`."""
    shortest = min(len(a), len(b))
    if a[:shortest] == b[:shortest]:
        return shortest
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
