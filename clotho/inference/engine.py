"""The decode engine: continuous batching over the models of mlx-lm.

A backend can decode models that it supports without MLX (`clotho.backend`). The engine knows nothing of threads, queues
or HTTP: one thread creates it, submits requests to it, and calls `tick()` while `has_work` is true.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from concurrent.futures import Future
from itertools import chain
from time import perf_counter
from typing import Literal, NamedTuple, Protocol

import mlx.core as mx
import mlx.nn as nn
import structlog
from msgspec import Struct

from clotho.inference.batch import Batch
from clotho.inference.batching_probe import probe_batching
from clotho.inference.cache_layout import CacheLayout
from clotho.inference.decoding import VISIT_SHARE, Allowance, Decoding, FirstTokens, Turns
from clotho.inference.kv_budget import KVBudget, Loads, short_tokens
from clotho.inference.outputs import EventSender
from clotho.inference.parts import EngineParts
from clotho.inference.prefill import ALL_KINDS, POLICY_KIND, Prefill, RowDecoder
from clotho.inference.rows import RowAdapter
from clotho.inference.sampling import validate
from clotho.inference.scheduler import ActiveRequest, Listener, PrefillJob, Row, Scheduler
from clotho.inference.stop_strings import IncrementalDetokenizer
from clotho.models.lora import AdaptedModule
from clotho.models.machine import free_buffers
from clotho.models.tokenizer import ChatTokenizer
from clotho.models.turns import TurnBudget
from clotho.settings.engine import EngineSection, KvPolicy
from clotho.settings.server import AdaptersSection
from protocols.compute import Distribution, SpeculationCounts
from protocols.sampling import SampleRequest

log = structlog.get_logger(__name__)

LIMIT_CHECK_SECONDS = 0.05
"""Time between two checks for requests that have exceeded a limit on their time."""


class EngineStats(Struct, frozen=True, kw_only=True):
    """Current gauges, and counters since the engine was created.

    running_rows, waiting_rows: completions that are decoded, and completions that wait. waiting_clients: clients with
    requests that wait for admission. rows_limit: how many completions are decoded at once at most.
    cache_tokens: tokens that the KV cache of running rows holds memory for. cache_holders: while a row waits because
    the KV cache has no room for it, the requests of clients whose rows are long, the longest first.
    prefix_cache_tokens: tokens in the prefix cache. tokens_sampled: tokens reported, without wasted samples.
    prefill_tokens: prompt tokens computed, with padding.
    prefix_hits, prefix_misses: prompts found and not found in the prefix cache. decode_steps: number of decode steps.
    finished: completions by finish reason. failed: requests that failed. listener_errors: requests that were closed
    because their listener raised. preempted: rows that left the batch and will continue. timed_out: requests that
    exceeded a limit on their time, by limit: `queue` or `answer`. timings: distributions of durations and of the tokens
    of a step. speculation: drafts and their accepted tokens.
    """

    running_rows: int
    waiting_rows: int
    waiting_clients: int
    rows_limit: int
    cache_tokens: int
    cache_holders: tuple[str, ...]
    prefix_cache_tokens: int
    tokens_sampled: int
    prefill_tokens: int
    prefix_hits: int
    prefix_misses: int
    decode_steps: int
    finished: dict[str, int]
    failed: int
    listener_errors: int
    preempted: int
    timed_out: dict[str, int]
    timings: dict[str, Distribution]
    speculation: SpeculationCounts


class ServedModel(Protocol):
    """What the engine samples from.

    model: as mlx-lm builds it; its parameters may be swapped between steps. tokenizer: converts tokens to text, and
    names the tokens that end a completion. adapted: the modules of `model` that hold the policy's own adapter.
    keeps_base: whether training leaves the base weights as they are. version: of the served policy. vocab_size: width
    of the logits. context_length: maximum number of tokens of prompt and completion.
    """

    model: nn.Module
    tokenizer: ChatTokenizer
    adapted: tuple[AdaptedModule, ...]
    keeps_base: bool
    version: int
    vocab_size: int
    context_length: int


class _Swap(NamedTuple):
    """A change of the policy's weights that waits for its rows."""

    publish: Callable[[], float]
    kv_policy: KvPolicy
    future: Future[float]


class DecodeEngine:
    """Samples completions for many requests at once, one token for every running row per step.

    A completion is a function of (weights, prompt, sampling, seed): other rows do not change it, up to the rounding of
    matrix products whose shape depends on the batch. The same requests in the same order form the same batches.
    Short rows, long rows of clients, and first tokens of clients have steps of their own (`clotho.inference.decoding`).
    Rows of one step may use the policy, the base model and different adapters. A request keeps the version of its
    adapter until it ends, also if the name is loaded again or unloaded; with `engine.kv_policy = "recompute"`, a reload
    moves running rows to the new version.
    admission_paused: while True, no waiting row enters the batch; running rows finish.
    held: what clients hold: nothing, the admission of waiting rows, or everything: running rows stand still too.
    has_row_decoder: whether the backend decodes the rows; otherwise the model does, with MLX.
    rounded_by: the setting that rounds keys and values in the KV cache of running rows; empty: none.
    layout, make_caches, computing: how rows are decoded, for decode steps beside those of the engine.
    """

    def __init__(
        self,
        source: ServedModel,
        settings: EngineSection,
        adapters: AdaptersSection | None = None,
        *,
        turns: TurnBudget | None = None,
    ) -> None:
        """Read the KV cache layout of the model, and put the model into evaluation mode.

        adapters: limits of the adapters that requests can name; None: all requests must use the policy. turns: limits
        prefill. Call this in the thread that owns MLX. Raises ModelError if the model's rows cannot share a batch.
        """
        source.model.eval()
        self.admission_paused = False
        self.held: Literal["nothing", "admission", "everything"] = "nothing"
        self._source = source
        self._settings = settings
        self.layout = layout = CacheLayout(source.model)
        probe_batching(layout)
        parts = EngineParts(
            model=source.model,
            settings=settings,
            adapted=source.adapted,
            keeps_base=source.keeps_base,
            adapters=adapters,
        ).extended()
        self.row_weights, self._batches = parts.rows, parts.batches
        self.rounded_by = parts.kv_format.setting
        decoder = parts.decoder(layout)
        self.has_row_decoder = decoder is not None
        self.computing = self.row_weights.computing if decoder is None else decoder.computing
        short = short_tokens(source.model, layout)
        tokens, share = settings.kv_cache_tokens, settings.rollout_share
        self._budget = KVBudget(tokens, share, settings.max_num_seqs, short=short)
        self._scheduler = Scheduler(settings.max_num_seqs, self._budget, share)
        self._sender = EventSender(source.tokenizer, self._scheduler.refund)
        self._prefill = Prefill(layout, settings, self.row_weights.computing, self._sender.fail, turns, decoder)
        self._sender.completed = self._batches.finished
        *batches, first = self._make_batches(decoder)
        self._short, self._long = self._decodings = [Decoding(batch, self._sender) for batch in batches]
        self._first = FirstTokens(first, self._sender)
        self._begun: list[PrefillJob] = []
        self._turns, self._visits = Turns(), Allowance(VISIT_SHARE)
        self._swap: _Swap | None = None
        self._aborted: set[int] = set()
        self._limits_checked = 0.0
        self._timed_out: Counter[str] = Counter()
        self._requests = self._rows = 0

    def _make_batches(self, decoder: RowDecoder | None) -> tuple[Batch, Batch, Batch]:
        """Return empty batches for short rows, long rows and first tokens. decoder: decodes in the model's place."""
        layout, settings = self.layout, self._settings
        common = self._source.tokenizer.eos_ids, self._source.vocab_size, self.computing
        self.make_caches = make_caches = self._batches.caches(layout, decoder, settings.kv_cache_tokens)
        return *self._batches.pair(make_caches, *common), Batch(make_caches, *common)

    def submit(self, request: SampleRequest, listener: Listener) -> int:
        """Accept a request and return its id. Later steps call `listener`, which must return at once.

        Every completion ends with one CompletionDone, or the request with one SampleFailed.
        Raises RequestError, which names the field, for an invalid request, or if too many rows of clients are waiting.
        """
        source = self._source
        tokens = self._settings.kv_cache_tokens if request.background else self._budget.largest
        limit = validate(request, vocabulary=source.vocab_size, context=source.context_length, cache_tokens=tokens)
        if not request.background:
            self._scheduler.check(len(request.seeds))
        adapter = self.row_weights.admit(request.weights)
        self._requests += 1
        active = ActiveRequest(self._requests, request, listener, limit, open=len(request.seeds), adapter=adapter)
        rows = [self._row(active, index) for index in range(len(request.seeds))]
        self._sender.requests[active.request_id] = active
        self._scheduler.add(PrefillJob(active, request.prompt, rows))
        return active.request_id

    def _row(self, active: ActiveRequest, index: int) -> Row:
        self._rows += 1
        text = IncrementalDetokenizer.of(self._source.tokenizer, active.request) if active.needs_text else None
        return Row(active, index, serial=self._rows, text=text)

    def abort(self, request_id: int) -> None:
        """End a request at the next step, with finish_reason `abort`; ignored if it is unknown or has finished."""
        if request_id in self._sender.requests:
            self._aborted.add(request_id)

    def abort_clients(self, request_ids: Collection[str] | None, client: str = "") -> int:
        """Abort requests by their `request_id`; None: all requests that are not `background`. Returns their number.

        client: only requests of this client; empty: of all. A request is counted once, also if it has not ended yet.
        """
        found = [number for number in self._sender.found(request_ids, client) if number not in self._aborted]
        self._aborted.update(found)
        return len(found)

    def release_caches(self) -> None:
        """Empty the prefix cache, and return unused memory to the system. Running rows keep their KV caches."""
        self._prefill.forget_prefixes(ALL_KINDS)
        if not self.running:
            for decoding in self._decodings:
                decoding.drop()
        free_buffers()

    def limit_rows(self, rows: int) -> None:
        """Decode at most `rows` sequences at once, and at most `engine.max_num_seqs`. Running rows above it finish."""
        self._scheduler.max_num_seqs = max(1, min(rows, self._settings.max_num_seqs))

    @property
    def running(self) -> int:
        """Number of rows in the batch."""
        return self._short.running + self._long.running

    @property
    def policy_rows(self) -> int:
        """Number of rows in the batch that a weight swap of the policy concerns."""
        rows = chain.from_iterable(decoding.batch.table.rows for decoding in self._decodings)
        begun = chain.from_iterable(job.rows for job in self._begun)
        return sum(row is not None and self._uses_policy(row.active) for row in (*rows, *begun))

    @property
    def has_work(self) -> bool:
        """Whether the next step has anything to do."""
        ended = self._aborted or self._sender.closed
        if self.held == "everything":
            return bool(ended)
        busy = ended or self._swap is not None or self._begun or any(one.is_busy for one in self._decodings)
        return bool(busy or (self._admits and self._scheduler.has_waiting))

    @property
    def is_urgent(self) -> bool:
        """Whether a client waits for the first token of a completion."""
        tables = [decoding.batch.table for decoding in self._decodings]
        return self._admits and (
            self._scheduler.client_waits or any((table.client & (table.sampled == 0)).any() for table in tables)
        )

    @property
    def long_only(self) -> bool:
        """Whether nothing but long rows of clients is decoded."""
        short = self._short.is_busy or self._scheduler.client_waits or self._scheduler.entering
        return self._long.is_busy and not short

    @property
    def _admits(self) -> bool:
        return not self.admission_paused and self.held == "nothing"

    def tick(self) -> int:
        """Remove ended rows, prefill at most one chunk, and decode one token per running row.

        Returns the number of tokens reported. A step that takes long is computed in several calls; clients that arrive
        meanwhile get their first tokens in between. If a chunk takes several turns, rollouts are decoded in the last
        one, so that batches do not depend on durations. An exception fails the requests concerned, never the engine.
        """
        if self._in_progress and self.held != "everything":
            visited = self._visit()
            return self._decode() if visited is None else visited
        self._remove_ended()
        if self.held == "everything":
            return 0
        self._swap_if_drained()
        loads = self._make_room()
        begun, self._begun = self._begun, []
        self._join(begun)
        if self._admits:
            if first := self._fill(loads):
                return first
            clients = any(one.batch.table.client.any() for one in self._decodings)
            awaited = self._prefill.client_is_interrupted and any(one.is_slow() for one in self._decodings)
            if awaited or (self._prefill.is_interrupted and not clients):
                return 0
        return self._decode()

    @property
    def _in_progress(self) -> bool:
        """Whether a step has begun and is not complete: until then, only rows of first tokens are decoded beside it."""
        return any(decoding.in_progress for decoding in self._decodings)

    def _decode(self) -> int:
        entering = any(not job.is_long for job in self._scheduler.entering)
        return self._turns.decode(self._short, self._long, self._source.version, entering=entering)

    def _visit(self) -> int | None:
        """Serve clients within a step in progress; return the number of tokens, None if nothing was computed."""
        scheduler, began = self._scheduler, perf_counter()
        if not self._admits or not (scheduler.client_waits or scheduler.has_waiting_clients):
            return None
        if not (self._prefill.client_is_interrupted or self._visits.allows(began)):
            return None
        computed, tokens = self._prefill.computed_tokens, self._first.tokens
        self._prefill.add(scheduler.admit(self._loads(), clients_only=True), self._source.version)
        continued = self._prefill.client_is_interrupted
        ready = self._prefill.advance(self._source.version, idle=False, clients_only=True)
        self._visits.spend(began, perf_counter())
        self._prefill.hold(self._sample_first(ready))
        tokens = self._first.tokens - tokens
        return tokens if tokens or continued or self._prefill.computed_tokens > computed else None

    def _sample_first(self, ready: Sequence[PrefillJob]) -> list[PrefillJob]:
        """Sample first tokens of clients in a step of their own; return the other jobs. The rows join afterwards."""
        chosen = self._first.chosen(ready, beside=self.running)
        if not chosen:
            return list(ready)
        long = {job.active for job in chosen if job.is_long}
        self._join_batch(self._first, chosen)
        begun = self._first.sample(self._source.version)
        for job in chosen:
            self._scheduler.entered(job)
        for job in begun:
            self._scheduler.continues(job, is_long=job.active in long)
        self._begun += begun
        return [job for job in ready if job not in chosen]

    def _remove_ended(self) -> None:
        """Free the rows of requests that were aborted, exceeded a limit on their time, or were closed by a failure."""
        aborted, self._aborted = self._aborted, set()
        requests = self._sender.requests
        self._end({requests[number] for number in aborted if number in requests}, "abort")
        self._end_overdue()
        closed, self._sender.closed = self._sender.closed, []
        self._withdraw(set(closed), clear=True)

    def _end(self, ended: Set[ActiveRequest], reason: Literal["abort", "length"]) -> None:
        """Finish all open completions of some requests."""
        for row in self._withdraw(ended, clear=False):
            self._sender.done(row, reason)

    def _end_overdue(self) -> None:
        """Refuse requests that waited too long for admission, and end those that have been answered for too long."""
        now = perf_counter()
        if now < self._limits_checked + LIMIT_CHECK_SECONDS:
            return
        self._limits_checked = now
        overdue = [active for active in self._sender.requests.values() if active.deadline <= now]
        self._timed_out.update("answer" if active.admitted else "queue" for active in overdue)
        for active in overdue:
            if not active.admitted:
                waited = f"waited {active.request.wait_seconds:.0f} seconds for admission"
                self._sender.fail(active, f"the request {waited}; try again later", param="queue")
        self._end({active for active in overdue if active.admitted}, "length")

    def _withdraw(self, ended: Set[ActiveRequest], *, clear: bool) -> list[Row]:
        """Remove all rows of some requests from the batch and the queue; return them in order."""
        if not ended:
            return []
        running = chain.from_iterable(decoding.withdraw(ended, clear=clear) for decoding in self._decodings)
        return sorted([*self._scheduler.forget(ended), *running], key=lambda row: row.serial)

    def _loads(self) -> Loads:
        """Return what short rows and long rows reserve."""
        short, long = self._short.batch.table, self._long.batch.table
        return Loads(short.load(movable="clients"), long.load(movable="outgrown"))

    def _make_room(self) -> Loads:
        """Move rows that have become long, requeue rows without columns; return what the others reserve."""
        loads, moved = self._loads(), list[PrefillJob]()
        while (crowded := self._scheduler.row_must_leave(loads)) is not None:
            decoding = self._long if crowded == "long" else self._short
            table = decoding.batch.table
            if decoding.batch.inflight is not None:
                decoding.read_inflight()  # the row can end
            elif crowded == "long":
                self._scheduler.postpone(decoding.take_out(table.newest_outgrown()))
            else:
                slot = table.longest_of_clients()
                if self._scheduler.has_room_for_long(int(table.reserved[slot]), loads):
                    moved.append(decoding.take_out(slot, with_state=True))
                    self._scheduler.continues(moved[-1], is_long=True)
                else:
                    self._scheduler.postpone(decoding.take_out(slot))
            loads = self._loads()
        if moved:
            self._join(moved)
            loads = self._loads()
        for decoding, limit in zip(self._decodings, self._budget.limits(loads), strict=True):
            decoding.batch.limit_cache(limit)
        return loads

    def _fill(self, loads: Loads) -> int:
        """Prefill a chunk, and let the rows join that are ready; return the number of first tokens sampled instead.

        Listeners hear of first tokens when the call of `tick` ends, which rows that join would delay.
        """
        admitted = self._scheduler.admit(loads)
        self._prefill.add(admitted, self._source.version)
        ready = self._prefill.advance(self._source.version, idle=not self.running)
        joining = sum(job.admitted for job in ready if not job.is_long)
        if self._long.is_slow() or self._short.is_slow(joining=joining):
            first = self._first.tokens
            ready = self._sample_first(ready)
            if self._first.tokens > first:
                self._prefill.hold(ready)
                return self._first.tokens - first
        self._join(ready)
        return 0

    def _join(self, ready: list[PrefillJob]) -> None:
        """Let prefilled prompts join. One that cannot fails alone; without room, running rows return to the queue."""
        for decoding in self._decodings:
            self._join_batch(decoding, [job for job in ready if job.is_long == (decoding is self._long)])
        for job in ready:
            self._scheduler.entered(job)

    def _join_batch(self, decoding: Decoding, jobs: Sequence[PrefillJob]) -> None:
        jobs = [job for job in jobs if job.admitted]
        if not jobs:
            return
        try:
            failed = decoding.batch.join(jobs)
        except Exception as error:
            log.exception("join_failed")
            was_running = decoding.running > 0
            self._scheduler.requeue(decoding.interrupt(lambda _: True))
            if was_running or len(jobs) > 1:
                for job in jobs:
                    self._join_batch(decoding, [job])
                return
            failed = [(jobs[0], error)]
        for job, reason in failed:
            log.error("prompt_cannot_join", request_id=job.active.request_id, exc_info=reason)
            job.rows, job.admitted = [], 0
            self._sender.fail(job.active, f"the prompt could not join the batch: {reason}")

    def fail_all(self, reason: str) -> None:
        """Fail every request and free all rows. For an engine whose `tick` raised: its next tick starts afresh."""
        for active in list(self._sender.requests.values()):
            self._sender.fail(active, reason)
        self._sender.closed.clear()
        self._aborted.clear()
        self._scheduler.clear()
        self._prefill.restart_all()
        self._prefill.forget_prefixes(ALL_KINDS)
        self._begun.clear()
        for decoding in (*self._decodings, self._first):
            decoding.drop()

    def swap(self, publish: Callable[[], float], kv_policy: KvPolicy) -> Future[float]:
        """Change the weights of the policy with `publish`, between two steps; then `weights_changed`.

        drain: `policy_rows` finish first, and no waiting row is admitted meanwhile. The future gets the result of
        `publish`, or its exception, and then nothing has changed. Cancelling it ends the wait.
        """
        future: Future[float] = Future()
        if self._swap is not None:
            self._swap.future.cancel()
        self._swap = _Swap(publish, kv_policy, future)
        self.admission_paused = kv_policy == "drain"
        self._swap_if_drained()
        return future

    def _swap_if_drained(self) -> None:
        swap = self._swap
        if swap is None or (swap.kv_policy == "drain" and self.policy_rows and not swap.future.cancelled()):
            return
        if self.held == "everything":
            for decoding in self._decodings:
                decoding.complete()
        elif self._in_progress:
            return
        self._swap, self.admission_paused = None, False
        if not swap.future.set_running_or_notify_cancel():
            return
        try:
            seconds = swap.publish()
            self.weights_changed(swap.kv_policy)
        except Exception as error:
            swap.future.set_exception(error)
        else:
            swap.future.set_result(seconds)

    def weights_changed(self, kv_policy: KvPolicy) -> None:
        """Handle a weight swap of the policy that just happened. Its prefixes leave the prefix cache.

        keep: KV caches stay as the old weights computed them. recompute: running rows return to the head of the queue
        and continue after their KV caches are recomputed. drain: prompts prefilled for rows that have not started are
        discarded. Rows of adapters and of the base model are not affected, unless the policy trains the base weights.
        """
        self._prefill.forget_prefixes((POLICY_KIND,) if self.row_weights.keeps_base else ALL_KINDS)
        if kv_policy != "keep":
            self._restart(self._uses_policy, interrupt=kv_policy == "recompute")

    def _uses_policy(self, active: ActiveRequest) -> bool:
        return active.adapter is None or not self.row_weights.keeps_base

    def _restart(self, concerns: Callable[[ActiveRequest], bool], *, interrupt: bool) -> None:
        """Discard prefilled prompts of requests that `concerns` names. interrupt: also KV caches of running rows."""
        interrupted = [job for one in self._decodings if interrupt for job in one.interrupt(concerns)]
        jobs = [job for job in self._scheduler.pending if concerns(job.active)]
        self._begun = [job for job in self._begun if not concerns(job.active)]
        self._prefill.restart(jobs)
        self._scheduler.restart(jobs)
        self._scheduler.requeue(interrupted)

    def adapters_in_use(self) -> list[RowAdapter]:
        """Return the adapters of all unfinished requests."""
        return [active.adapter for active in self._sender.requests.values() if active.adapter is not None]

    def adapter_replaced(self, old: RowAdapter, new: RowAdapter) -> None:
        """Handle a new version of an adapter. With `engine.kv_policy = "recompute"`, its requests continue with it."""
        if self._settings.kv_policy == "recompute":
            self._continue_with(old, new)

    def provide_adapter(
        self, name: str, arrays: Mapping[str, mx.array], scales: Mapping[str, float], fingerprint: str
    ) -> RowAdapter:
        """Let requests name an adapter, as `RowWeights.provide`.

        Requests of an earlier adapter of this name continue with the new one from the next token on; their KV caches
        stay (`keep`) or are computed again (`recompute`). Raises RequestError.
        """
        old, new = self.row_weights.provide(name, arrays, scales, fingerprint)
        if old is not None:
            self._continue_with(old, new)
        self.release_adapters(self.row_weights.versions)
        return new

    def _continue_with(self, old: RowAdapter, new: RowAdapter) -> None:
        """Let the requests of an adapter continue with another one from the next token on."""
        for decoding in self._decodings:
            decoding.complete()
        for active in filter(lambda one: one.adapter is old, self._sender.requests.values()):
            active.adapter = new
        for decoding in self._decodings:
            decoding.batch.table.adapters_changed()
        self._restart(lambda active: active.adapter is new, interrupt=self._settings.kv_policy == "recompute")

    def withdraw_adapter(self, name: str) -> None:
        """Forget a provided adapter; its requests finish."""
        self.row_weights.withdraw(name)
        self.release_adapters(self.row_weights.versions)

    def release_adapters(self, loaded: Set[int]) -> None:
        """Free what belongs to adapters that are neither in use nor in `loaded`, which are versions."""
        kept = {*loaded, *(one.version for one in self.adapters_in_use())}
        self.row_weights.keep(kept)
        self._prefill.prefixes.remove(lambda key: key[0] != POLICY_KIND and key[1] not in {0, *kept})

    def stats(self) -> EngineStats:
        """Return gauges and counters."""
        return EngineStats(
            running_rows=self.running,
            waiting_rows=self._scheduler.rows,
            waiting_clients=self._scheduler.waiting_clients,
            rows_limit=self._scheduler.max_num_seqs,
            cache_tokens=sum(decoding.batch.cache_tokens for decoding in self._decodings),
            cache_holders=self._long.longest_requests() if self._scheduler.waits_for_cache else (),
            prefix_cache_tokens=self._prefill.prefixes.tokens,
            tokens_sampled=sum(decoding.tokens for decoding in (*self._decodings, self._first)),
            prefill_tokens=self._prefill.computed_tokens,
            prefix_hits=self._prefill.hits,
            prefix_misses=self._prefill.misses,
            decode_steps=sum(decoding.steps for decoding in (*self._decodings, self._first)),
            finished=dict(self._sender.finished),
            failed=self._sender.failed,
            listener_errors=self._sender.listener_errors,
            preempted=sum(decoding.preempted for decoding in self._decodings),
            timed_out=dict(self._timed_out),
            timings=self._sender.timings.distributions(),
            speculation=self._batches.counts,
        )
