"""The decode engine: continuous batching over the models of mlx-lm.

On the CPU, supported transformers decode in NumPy (`clotho.cpu`). The engine knows nothing of threads, queues or HTTP:
one thread creates it, submits requests to it, and calls `tick()` while `has_work` is true.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import structlog
from msgspec import Struct

from clotho.config.schema import EngineSection
from clotho.cpu.interface import PrefilledPrompt, PromptState
from clotho.cpu.kv_cache import HostKVCache
from clotho.cpu.supported import make_host_decoder
from clotho.inference.batch import Batch, StepOutput
from clotho.inference.cache_layout import CacheLayout, RowCaches, evaluation_mode
from clotho.inference.kv_cache import BatchKVCache, probe_batching
from clotho.inference.outputs import EventSender, OutputProcessor
from clotho.inference.prefill import Prefill
from clotho.inference.sampling import validate
from clotho.inference.scheduler import ActiveRequest, Listener, PrefillJob, Row, Scheduler
from clotho.inference.stop_strings import IncrementalDetokenizer
from clotho.models.tokenizer import ChatTokenizer
from protocols.sampling import SampleRequest

log = structlog.get_logger(__name__)


class EngineStats(Struct, frozen=True, kw_only=True):
    """Current gauges, and counters since the engine was created.

    running_rows, waiting_rows: completions that are decoded, and completions that wait.
    cache_tokens: tokens that the KV cache of running rows holds memory for. prefix_cache_tokens: tokens in the prefix
    cache. tokens_sampled: tokens reported, without wasted samples. prefill_tokens: prompt tokens computed, with
    padding.
    prefix_hits, prefix_misses: prompts found and not found in the prefix cache. decode_steps: number of decode steps.
    finished: completions by finish reason. failed: requests that failed. listener_errors: requests that were closed
    because their listener raised.
    """

    running_rows: int
    waiting_rows: int
    cache_tokens: int
    prefix_cache_tokens: int
    tokens_sampled: int
    prefill_tokens: int
    prefix_hits: int
    prefix_misses: int
    decode_steps: int
    finished: dict[str, int]
    failed: int
    listener_errors: int


class ServedModel(Protocol):
    """What the engine samples from: a model, its tokenizer, and the served policy version."""

    @property
    def model(self) -> nn.Module:
        """The model as mlx-lm builds it. Its parameters may be swapped between steps."""
        ...

    @property
    def tokenizer(self) -> ChatTokenizer:
        """Converts tokens to text, and names the tokens that end a completion."""
        ...

    @property
    def version(self) -> int:
        """The served policy version."""
        ...

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        ...

    @property
    def context_length(self) -> int:
        """Maximum number of tokens of prompt and completion."""
        ...


class DecodeEngine:
    """Samples completions for many requests at once, one token for every running row per step.

    A completion is a function of (weights, prompt, sampling, seed): other rows do not change it, up to the rounding of
    matrix products whose shape depends on the batch. The same requests in the same order form the same batches.
    admission_paused: while True, no waiting row enters the batch; running rows finish.
    """

    def __init__(self, source: ServedModel, settings: EngineSection) -> None:
        """Read the KV cache layout of the model, and put the model into evaluation mode.

        Call this in the thread that owns MLX. Raises ModelError if the model's rows cannot share a batch.
        """
        source.model.eval()
        self.admission_paused = False
        self._source = source
        self._settings = settings
        self._layout = layout = CacheLayout(source.model)
        probe_batching(layout)
        self._make_caches = _cache_factory(layout)
        self._batch = Batch(self._make_caches, source.tokenizer.eos_ids, source.vocab_size)
        self._scheduler = Scheduler(settings.max_num_seqs, settings.kv_cache_tokens)
        self._prefill = Prefill(layout, settings)
        self._sender = EventSender(source.tokenizer)
        self._outputs = OutputProcessor(self._batch, self._sender)
        self._aborted: list[int] = []
        self._requests = self._rows = self._tokens_sampled = self._decode_steps = 0

    def submit(self, request: SampleRequest, listener: Listener) -> int:
        """Accept a request and return its id. Later steps call `listener`, which must return at once.

        Every completion ends with one CompletionDone, or the request with one SampleFailed.
        Raises RequestError, which names the field, for an invalid request, or if too many rows are waiting.
        """
        source = self._source
        cache_tokens = self._settings.kv_cache_tokens
        limit = validate(
            request, vocabulary=source.vocab_size, context=source.context_length, cache_tokens=cache_tokens
        )
        self._scheduler.check(len(request.seeds))
        self._requests += 1
        active = ActiveRequest(self._requests, request, listener, limit, open=len(request.seeds))
        rows = [self._row(active, index) for index in range(len(request.seeds))]
        self._sender.requests[active.request_id] = active
        self._scheduler.add(PrefillJob(active, request.prompt, rows))
        return active.request_id

    def _row(self, active: ActiveRequest, index: int) -> Row:
        self._rows += 1
        request = active.request
        needs_text = request.stream or request.sampling.stop
        text = IncrementalDetokenizer(self._source.tokenizer, request.sampling.stop) if needs_text else None
        return Row(active, index, serial=self._rows, text=text)

    def abort(self, request_id: int) -> None:
        """End a request at the next step: unfinished completions are reported with finish_reason `abort`.

        The id of an unknown or finished request is ignored, because a request may finish while it is aborted.
        """
        if request_id in self._sender.requests:
            self._aborted.append(request_id)

    @property
    def running(self) -> int:
        """Number of rows in the batch."""
        return self._batch.table.running

    @property
    def has_work(self) -> bool:
        """Whether the next step has anything to do."""
        busy = self.running or self._batch.inflight or self._aborted or self._sender.closed
        return bool(busy or (not self.admission_paused and (self._scheduler.waiting or self._scheduler.entering)))

    def tick(self) -> int:
        """Remove ended rows, prefill at most one chunk, and decode one token per running row.

        Returns the number of tokens reported. An exception fails the requests concerned, never the engine.
        """
        self._remove_ended()
        if not self.admission_paused:
            self._fill()
        return self._decode()

    def _remove_ended(self) -> None:
        """Free the rows of requests that were aborted, or closed because they failed."""
        aborted, self._aborted = self._aborted, []
        for request_id in aborted:
            active = self._sender.requests.get(request_id)
            if active is not None:
                for row in self._withdraw(active, clear=False):
                    self._sender.done(row, "abort")
        closed, self._sender.closed = self._sender.closed, []
        for active in closed:
            self._withdraw(active, clear=True)

    def _withdraw(self, active: ActiveRequest, *, clear: bool) -> list[Row]:
        """Remove all rows of a request from the batch and the queue; return them in order of their index."""
        withdrawn = [row for job in self._scheduler.pending if job.active is active for row in job.rows]
        self._scheduler.forget(active)
        for slot, row in enumerate(self._batch.table.rows):
            if row is not None and row.active is active:
                withdrawn.append(self._batch.leave(slot))
                if clear:
                    self._batch.clear(slot)
        return sorted(withdrawn, key=lambda row: row.index)

    def _fill(self) -> None:
        table = self._batch.table
        background = sum(row is not None and row.active.request.background for row in table.rows)
        admitted = self._scheduler.admit(table.running, table.longest_reserved, background)
        self._prefill.add(admitted, self._source.version)
        ready = self._prefill.advance(self._source.version, idle=not table.running, fail=self._sender.fail)
        self._join(ready)

    def _join(self, ready: list[PrefillJob]) -> None:
        """Let prefilled prompts join the batch. A prompt that cannot join fails alone.

        If making room fails, the running rows return to the queue, because their KV caches can be incomplete, and the
        prompts join the empty batch one after the other.
        """
        jobs = [job for job in ready if job.admitted]
        if jobs:
            try:
                self._join_together(jobs)
            except Exception:
                log.exception("join_failed")
                self._scheduler.requeue(self._interrupt())
                for job in jobs:
                    self._join_alone(job)
        for job in ready:
            self._scheduler.entered(job)

    def _join_together(self, jobs: list[PrefillJob]) -> None:
        for job, error in self._batch.join(jobs):
            log.error("prompt_cannot_join", request_id=job.active.request_id, exc_info=error)
            self._refuse(job, error)

    def _join_alone(self, job: PrefillJob) -> None:
        try:
            self._join_together([job])
        except Exception as error:
            self._scheduler.requeue(self._interrupt())
            self._refuse(job, error)

    def _refuse(self, job: PrefillJob, error: Exception) -> None:
        job.rows, job.admitted = [], 0
        self._sender.fail(job.active, f"the prompt could not join the batch: {error}")

    def _decode(self) -> int:
        batch = self._batch
        sampled = 0
        try:
            batch.compact()
            previous, step = batch.inflight, batch.launch(self._source.version)
            batch.inflight = step
            self._decode_steps += step is not None
            if previous is not None:
                sampled = self._process(batch.read(previous))
            if step is not None and step.known:
                batch.inflight = None
                sampled += self._process(batch.read(step))
        except Exception as error:
            log.exception("decode_step_failed")
            self._fail_running(f"a decode step failed: {error}")
        if batch.slots and batch.inflight is None and not self.running:
            batch.drop()
        return sampled

    def _process(self, output: StepOutput | None) -> int:
        sampled = self._outputs.process(output) if output is not None else 0
        self._tokens_sampled += sampled
        return sampled

    def fail_all(self, reason: str) -> None:
        """Fail every request and free all rows. For an engine whose `tick` raised: its next tick starts afresh."""
        for active in list(self._sender.requests.values()):
            self._sender.fail(active, reason)
        self._sender.closed.clear()
        self._aborted.clear()
        self._scheduler.clear()
        self._prefill.restart()
        self._prefill.forget_prefixes()
        self._batch.drop()

    def _fail_running(self, reason: str) -> None:
        for slot in np.flatnonzero(self._batch.table.live):
            self._sender.fail(self._batch.leave(int(slot)).active, reason)
        self._batch.drop()

    def teacher_forced_logits(self, prompt: Sequence[int], tokens: Sequence[int], *, rows: int) -> Iterator[mx.array]:
        """Yield the logits before each of `tokens`, (rows, V), evaluated, from decode steps of `rows` equal rows.

        Uses a batch of its own; running rows are not affected.
        """
        *before, last = prompt
        caches = self._make_caches(rows)
        positions_B, all_B = np.full(rows, len(before), dtype=np.int32), np.ones(rows, dtype=np.bool_)
        prefilled = PrefilledPrompt(rows=rows, tokens=len(before), state=_prefilled_state(self._layout, before))
        caches.make_room(positions_B, ~all_B, [prefilled])
        caches.enter(range(rows), prefilled)
        for token in (last, *tokens[:-1]):
            logits_B_V = mx.array(caches.logits(np.full(rows, token, dtype=np.int32), positions_B, all_B))
            mx.eval(logits_B_V, *caches.arrays)
            yield logits_B_V
            positions_B = positions_B + 1

    def weights_changed(self, kv_policy: Literal["keep", "recompute", "drain"]) -> None:
        """Handle a weight swap that just happened. The prefix cache is emptied.

        keep: KV caches stay as the old weights computed them. recompute: running rows return to the head of the queue
        and continue after their KV caches are recomputed. drain: the caller let running rows finish under
        `admission_paused`; prompts prefilled for rows that have not started are discarded.
        """
        self._prefill.forget_prefixes()
        if kv_policy == "keep":
            return
        interrupted = self._interrupt() if kv_policy == "recompute" else []
        self._prefill.restart()
        self._scheduler.restart()
        self._scheduler.requeue(interrupted)

    def _interrupt(self) -> list[PrefillJob]:
        """Remove every running row from the batch, with the tokens it has sampled."""
        batch = self._batch
        if batch.inflight is not None:
            step, batch.inflight = batch.inflight, None
            self._process(batch.read(step))
        rows = [batch.leave(int(slot)) for slot in np.flatnonzero(batch.table.live)]
        batch.drop()
        return [PrefillJob(row.active, (*row.active.request.prompt, *row.tokens), [row]) for row in rows]

    def stats(self) -> EngineStats:
        """Return gauges and counters."""
        return EngineStats(
            running_rows=self.running,
            waiting_rows=self._scheduler.rows,
            cache_tokens=self._batch.cache_tokens,
            prefix_cache_tokens=self._prefill.prefixes.tokens,
            tokens_sampled=self._tokens_sampled,
            prefill_tokens=self._prefill.computed_tokens,
            prefix_hits=self._prefill.hits,
            prefix_misses=self._prefill.misses,
            decode_steps=self._decode_steps,
            finished=dict(self._sender.finished),
            failed=self._sender.failed,
            listener_errors=self._sender.listener_errors,
        )


def _cache_factory(layout: CacheLayout) -> Callable[[int], RowCaches]:
    decoder = make_host_decoder(layout.model)
    return (lambda rows: BatchKVCache(layout, rows)) if decoder is None else (lambda rows: HostKVCache(decoder, rows))


def _prefilled_state(layout: CacheLayout, tokens: Sequence[int]) -> PromptState | None:
    if not tokens:
        return None
    cache = layout.fresh()
    with evaluation_mode(layout.model):
        layout.model(mx.array([list(tokens)]), cache=cache)
    state = layout.extract(cache, 0, len(tokens))
    mx.eval(state)
    return state
