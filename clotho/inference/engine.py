"""The decode engine: continuous batching over mlx-lm's models.

On the CPU backend plain transformers take their steps on the host (`clotho.inference.host`).

It knows nothing of threads, queues or HTTP: one thread makes it, submits to it and calls `tick()` while `has_work`.

What the engine has done and is doing.
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
from clotho.cpu.kv_cache import HostCache
from clotho.cpu.supported import host_decoder
from clotho.inference.batch import Batch, Reading
from clotho.inference.cache_layout import CacheLayout, RowCaches
from clotho.inference.kv_cache import BatchCache
from clotho.inference.outputs import Delivery, Reader
from clotho.inference.prefill import Prefill
from clotho.inference.probe import forced_logits, probe_batching
from clotho.inference.sampling_params import validate
from clotho.inference.scheduler import Admission, Asked, Job, Listener, Row
from clotho.inference.stop_strings import TextTracker
from clotho.models.tokenizer import ChatTokenizer
from protocols.sampling import SampleRequest


class EngineStats(Struct, frozen=True, kw_only=True):
    """Gauges of now, and counts since the engine was made.

    running_rows, waiting_rows: completions being decoded, and those that are not yet.
    cache_tokens: tokens for which the running rows' caches have memory; prefix_cache_tokens: kept prompts.
    tokens_sampled: reported, so without wasted draws. prefill_tokens: prompt tokens computed, padding not counted.
    ticks: turns with a decode step. finished: completions by finish reason. failed: requests that failed.
    listener_errors: requests given up because their listener raised.
    """

    running_rows: int
    waiting_rows: int
    cache_tokens: int
    prefix_cache_tokens: int
    tokens_sampled: int
    prefill_tokens: int
    prefix_hits: int
    prefix_misses: int
    ticks: int
    finished: dict[str, int]
    failed: int
    listener_errors: int


log = structlog.get_logger(__name__)


class Source(Protocol):
    """What the engine samples from: a model, its tokenizer, and the version of the weights that serve."""

    @property
    def model(self) -> nn.Module:
        """The model as mlx-lm builds it; its parameters may be swapped between ticks."""
        ...

    @property
    def tokenizer(self) -> ChatTokenizer:
        """Text from tokens, and which tokens end a completion."""
        ...

    @property
    def version(self) -> int:
        """Version of the weights that serve now."""
        ...

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        ...

    @property
    def context_length(self) -> int:
        """Tokens that prompt and completion may come to."""
        ...


class DecodeEngine:
    """Completions for many client_labels at once, one token for every running row per tick.

    A completion is a function of (weights, prompt, sampling, seed): neighbours do not change it, up to the rounding
    of products whose shape the batch decides. The same submissions in the same order make the same batches.
    admission_paused: while set, no waiting row enters the batch; those inside finish.
    """

    def __init__(self, source: Source, settings: EngineSection) -> None:
        """Read the model's cache layout, and put the model into evaluation mode.

        To be called in the thread that owns MLX. Raises ModelError if its rows cannot share a batch.
        """
        source.model.eval()
        self.admission_paused = False
        self._source = source
        self._settings = settings
        self._layout = layout = CacheLayout(source.model)
        probe_batching(layout)
        self._make_caches = _maker_of_caches(layout)
        self._batch = Batch(self._make_caches, source.tokenizer.eos_ids, source.vocab_size)
        self._admission = Admission(settings.max_num_seqs, settings.kv_cache_tokens)
        self._prefill = Prefill(layout, settings)
        self._delivery = Delivery(source.tokenizer)
        self._reader = Reader(self._batch, self._delivery)
        self._aborted: list[int] = []
        self._requests = self._rows = self._ticks = self._drawn = 0

    def submit(self, request: SampleRequest, listener: Listener) -> int:
        """Accept a request and return its id; `listener` is called during later ticks and must return at once.

        Every completion ends in one CompletionDone, or the request in one SampleFailed.
        Raises RequestError, naming the field, for what cannot be sampled, or when too many rows wait.
        """
        source = self._source
        cache_tokens = self._settings.kv_cache_tokens
        limit = validate(
            request, vocabulary=source.vocab_size, context=source.context_length, cache_tokens=cache_tokens
        )
        self._admission.check(len(request.seeds))
        self._requests += 1
        asked = Asked(self._requests, request, listener, limit, open=len(request.seeds))
        rows = [self._row(asked, index) for index in range(len(request.seeds))]
        self._delivery.requests[asked.request_id] = asked
        self._admission.waiting.append(Job(asked, request.prompt, rows))
        return asked.request_id

    def _row(self, asked: Asked, index: int) -> Row:
        self._rows += 1
        request = asked.request
        told = request.stream or request.sampling.stop
        text = TextTracker(self._source.tokenizer, request.sampling.stop) if told else None
        return Row(asked, index, serial=self._rows, text=text)

    def abort(self, request_id: int) -> None:
        """End a request at the next tick: what is unfinished is reported with finish_reason `abort`.

        An id that is unknown, or whose request has ended, is ignored: an end may cross an abort on its way.
        """
        if request_id in self._delivery.requests:
            self._aborted.append(request_id)

    @property
    def running(self) -> int:
        """Rows in the batch."""
        return self._batch.ledger.running

    @property
    def has_work(self) -> bool:
        """Whether a tick would do anything."""
        busy = self.running or self._batch.inflight or self._aborted or self._delivery.closed
        return bool(busy or (not self.admission_paused and (self._admission.waiting or self._admission.entering)))

    def tick(self) -> int:
        """Free what has ended, compute at most one chunk of waiting prompts, draw one token per running row.

        Returns how many tokens were reported. What fails fails the requests concerned, never the engine.
        """
        self._sweep()
        if not self.admission_paused:
            self._fill()
        return self._decode()

    def _sweep(self) -> None:
        """Free the rows of requests that were aborted, or closed because they failed."""
        aborted, self._aborted = self._aborted, []
        for request_id in aborted:
            asked = self._delivery.requests.get(request_id)
            if asked is not None:
                for row in self._withdraw(asked, clear=False):
                    self._delivery.done(row, "abort")
        closed, self._delivery.closed = self._delivery.closed, []
        for asked in closed:
            self._withdraw(asked, clear=True)

    def _withdraw(self, asked: Asked, *, clear: bool) -> list[Row]:
        """Take all rows of a request out of the batch and the line, in order of their index."""
        withdrawn = [row for job in self._admission.pending if job.asked is asked for row in job.rows]
        self._admission.forget(asked)
        for slot, row in enumerate(self._batch.ledger.rows):
            if row is not None and row.asked is asked:
                withdrawn.append(self._batch.leave(slot))
                if clear:
                    self._batch.clear(slot)
        return sorted(withdrawn, key=lambda row: row.index)

    def _fill(self) -> None:
        ledger = self._batch.ledger
        admitted = self._admission.admit(ledger.running, ledger.longest_reserved)
        self._prefill.add(admitted, self._source.version)
        ready = self._prefill.advance(self._source.version, idle=not ledger.running, fail=self._delivery.fail)
        try:
            self._join(ready)
        except Exception as error:
            log.exception("computed prompts could not join the batch")
            for job in ready:
                self._delivery.fail(job.asked, f"the prompt could not join the batch: {error}")

    def _join(self, ready: list[Job]) -> None:
        wanted = [job for job in ready if job.admitted]
        if wanted:
            self._batch.join(wanted)
        for job in ready:
            self._admission.entered(job)

    def _decode(self) -> int:
        batch = self._batch
        sampled = 0
        try:
            batch.compact()
            previous, step = batch.inflight, batch.launch(self._source.version)
            batch.inflight = step
            self._ticks += step is not None
            if previous is not None:
                sampled = self._read(batch.read(previous))
            if step is not None and step.known:
                batch.inflight = None
                sampled += self._read(batch.read(step))
        except Exception as error:
            log.exception("a decode step failed")
            self._fail_running(f"a decode step failed: {error}")
        if batch.slots and batch.inflight is None and not self.running:
            batch.drop()
        return sampled

    def _read(self, reading: Reading | None) -> int:
        sampled = self._reader.report(reading) if reading is not None else 0
        self._drawn += sampled
        return sampled

    def _fail_running(self, reason: str) -> None:
        for slot in np.flatnonzero(self._batch.ledger.live):
            self._delivery.fail(self._batch.leave(int(slot)).asked, reason)
        self._batch.drop()

    def forced_logits(self, prompt: Sequence[int], tokens: Sequence[int], *, rows: int) -> Iterator[mx.array]:
        """Compute the logits before each of `tokens`, (rows, V), as rows would that drew them; disturbs no other."""
        return forced_logits(self._layout, self._make_caches, prompt, tokens, rows=rows)

    def weights_changed(self, kv_policy: Literal["keep", "recompute", "drain"]) -> None:
        """Take note that the weights were just swapped; the prefix cache is emptied.

        keep: caches stay as the old weights computed them. recompute: running rows go back to the head of the line
        and continue once their caches are computed anew. drain: the caller let running rows finish under
        `admission_paused`; prompts computed for rows that have not begun are void.
        """
        self._prefill.forget_prefixes()
        if kv_policy == "keep":
            return
        interrupted = self._interrupt() if kv_policy == "recompute" else []
        self._prefill.restart()
        self._admission.restart()
        self._admission.waiting.extendleft(reversed(interrupted))

    def _interrupt(self) -> list[Job]:
        """Take every running row out of the batch, with what it has sampled."""
        batch = self._batch
        if batch.inflight is not None:
            step, batch.inflight = batch.inflight, None
            self._read(batch.read(step))
        rows = [batch.leave(int(slot)) for slot in np.flatnonzero(batch.ledger.live)]
        batch.drop()
        return [Job(row.asked, (*row.asked.request.prompt, *row.tokens), [row]) for row in rows]

    def stats(self) -> EngineStats:
        """Return gauges and counts."""
        return EngineStats(
            running_rows=self.running,
            waiting_rows=self._admission.rows,
            cache_tokens=self._batch.cache_tokens,
            prefix_cache_tokens=self._prefill.prefixes.tokens,
            tokens_sampled=self._drawn,
            prefill_tokens=self._prefill.computed_tokens,
            prefix_hits=self._prefill.hits,
            prefix_misses=self._prefill.misses,
            ticks=self._ticks,
            finished=dict(self._delivery.finished),
            failed=self._delivery.failed,
            listener_errors=self._delivery.listener_errors,
        )


def _maker_of_caches(layout: CacheLayout) -> Callable[[int], RowCaches]:
    decoder = host_decoder(layout)
    return (lambda rows: BatchCache(layout, rows)) if decoder is None else (lambda rows: HostCache(decoder, rows))
